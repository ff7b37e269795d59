"""A live sandbox, at the caller's end, for every backend: processes, files and connections over one link.

`LiveSandbox` is shared by all backends. Each backend supplies an `InitLink` and says how programs are started there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cloche.core.enforcement import Enforcement, NetworkMode
from cloche.core.errors import (
    ClocheError,
    InvalidRequest,
    OutcomeUnknown,
    StartFailed,
)
from cloche.core.events import Sink
from cloche.core.limits import Limits
from cloche.core.processes import ListeningPort, ProcessInfo, ProcessKey, ProcessRequest
from cloche.core.protocols import OpenConnection
from cloche.core.result import Result
from cloche.egress.windows import Decide, SharedNetwork
from cloche.init import wire

from .init_link import InitLink, Operation, OperationFailed
from .live_control import LiveControl
from .live_files import FILE_S, LiveFiles
from .live_process import START_S, LiveProcess, command_result, describe_request, number_of, process_info
from .live_streams import ByteStream

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

log = logging.getLogger("cloche.live")
ACCOUNT_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL")  # each user has its own
ADMIN_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # on PATH for every requested user


class Tunnel:
    """Carry a connection to a server inside, over the link."""

    def __init__(self, channel: Operation):
        self._channel = channel
        self.incoming = ByteStream(channel, 1)
        channel.on_data = lambda _, data: self.incoming.put(bytes(data))
        channel.on_end = lambda _: self.incoming.put_end()
        channel.closed.add_done_callback(lambda _: self.incoming.put_end())

    async def read(self, most: int = 1 << 16) -> bytes:
        """Return the next bytes; empty at the end."""
        return await self.incoming.read(most)

    async def write(self, data: bytes) -> bool:
        """Send all of `data` at the server's pace; return False if the server is gone."""
        return await self._channel.send(0, data)

    def end(self) -> None:
        """Shut down the sending direction."""
        self._channel.end(0)

    def close(self) -> None:
        self._channel.close()

    async def wait_closed(self) -> None:
        """Wait until either side has closed it."""
        await asyncio.wait([self._channel.closed])


def check_port(port: int) -> None:
    """Raise InvalidRequest unless `port` is a port number."""
    if not 0 < port < 1 << 16:
        raise InvalidRequest(f"port: {port!r} is not valid; give one from 1 to 65535")


def connection_error(error: OperationFailed, port: int) -> OSError:
    """Return the error that a socket would have raised."""
    code = error.details.get("errno")
    return OSError(code if isinstance(code, int) else 0, f"port {port} of the sandbox: {error}")


class LiveSandbox(LiveFiles):
    """Share the behaviour of all live sandboxes; `link` is the connection to the sandbox's init."""

    backend = ""  # its name

    def __init__(
        self,
        limits: Limits,
        enforcement: Enforcement | None = None,
        *,
        has_users: bool = False,
        account: str | None = None,
    ):
        super().__init__()
        self.file_timeout_s = min(FILE_S, limits.timeout_s)
        self.limits, self.enforcement, self._has_users = limits, enforcement or Enforcement(), has_users
        self._account = account  # the name that the policy gives its ordinary account
        self.link: InitLink | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False
        self._leftover: list[str] = []  # programs of runs that have ended
        self.is_kept = False  # by a keeper: closing only disconnects
        self.network: SharedNetwork | None = None
        self._decide: Decide | None = None
        # The total before the current pause, and when that began (0.0: not paused).
        self._paused_s, self._paused_at = 0.0, 0.0

    @property
    def network_rules(self) -> NetworkRules:
        """Return the rules now in force for its network; see core.protocols.SupportsNetwork."""
        return self.network.rules if self.network is not None else self._rules_to_begin_with()

    def _rules_to_begin_with(self) -> NetworkRules:
        from cloche.core.network import NetworkRules  # imported only if there are rules

        return NetworkRules()

    def decide_network(self, decide: Decide) -> None:
        """Let `decide` answer for hosts that no rule names; see core.protocols.SupportsNetwork."""
        self._decide = decide
        self._offer_to_decide()

    def _offer_to_decide(self) -> None:
        if self.network is not None and self._decide is not None:
            self.network.decide_by(self._decide)

    async def change_network(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Add rules for its network; see core.protocols.SupportsNetwork."""
        await self._change_rules(lambda network: network.change(allow=allow, deny=deny))

    async def replace_network(
        self, *, mode: NetworkMode, allow: Sequence[str] = (), deny: Sequence[str] = (),
        headers: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:  # fmt: skip
        """Replace the rules for its network; see core.protocols.SupportsNetwork."""
        await self._change_rules(
            lambda network: network.replace(mode=mode, allow=allow, deny=deny, headers=headers or {})
        )

    async def _change_rules(self, change: Callable[[SharedNetwork], Awaitable[None]]) -> None:
        await self.connected()
        if self.network is None:
            raise InvalidRequest("this sandbox has no network with changeable rules")
        try:
            await change(self.network)
        except OSError as error:
            raise OutcomeUnknown("the egress process of this sandbox is gone; open another sandbox") from error

    async def network_traffic(self) -> Sequence[Mapping[str, Any]]:
        """Return the traffic carried and refused; see core.protocols.SupportsNetwork."""
        if self.network is None:
            return ()
        traffic = await self.network.traffic()
        if traffic.is_lost:
            raise OutcomeUnknown(
                "the egress process of this sandbox is gone, so the record of the network's traffic is lost"
            )
        return traffic.rows

    def own_paused_s(self) -> float:
        """Return the seconds that it was paused in all from here."""
        return self._paused_s + (monotonic() - self._paused_at if self._paused_at else 0.0)

    async def paused_s(self) -> float:
        """Return the seconds that it was paused in all, as its keeper (no guest) reports them or as measured here."""
        if not self.is_kept:
            return self.own_paused_s()
        with contextlib.suppress(ClocheError):
            return number_of((await self.ask("info")).get("paused_s"))
        return 0.0

    async def life_events(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield what its keeper says of its time and pauses, now and after changes, until the connection ends.

        Of changes that were made while nobody asked, only the last one is kept.
        """
        channel = (await self.connected()).open("watch")
        channel.keeps_last = True
        with contextlib.suppress(OperationFailed, OutcomeUnknown):
            while True:
                yield await channel.event()

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return a command's whole environment."""
        raise NotImplementedError

    def take_leftover(self) -> list[str]:
        """Return the program files of ended runs, for the next process to remove."""
        leftover, self._leftover = self._leftover, []
        return leftover

    async def connected(self) -> InitLink:
        """Return the link to its init, starting the sandbox if necessary."""
        if self.link is not None:
            return self.link
        async with self._opening:
            if self._is_closed:
                raise InvalidRequest("this sandbox is closed; open another one")
            if self.link is None:
                link = await self._start()
                try:
                    await self._fill(link)
                finally:
                    self.link = link
            return self.link

    async def _start(self) -> InitLink:
        raise NotImplementedError

    async def ask(self, op: str, **arguments: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON
        """Do an operation that answers with at most one event; see core.protocols.OpenLiveSandbox."""
        try:
            answer = await (await self.connected()).ask(op, **arguments)
        except OperationFailed as error:
            if error.kind == "unknown":
                raise InvalidRequest(f"{op} needs a sandbox with a name: {error}") from error
            raise InvalidRequest(f"{op}: {error}") from error
        if op == "pause" and not self._paused_at:
            self._paused_at = monotonic()
        elif op == "resume":
            self._paused_s, self._paused_at = self.own_paused_s(), 0.0
        return answer

    async def start_process(self, request: ProcessRequest, sink: Sink | None = None) -> LiveProcess:
        """Start a process; see core.protocols.SupportsProcesses."""
        user = request.user if request.user != self._account else None
        if user is not None and not self._has_users:
            raise InvalidRequest(
                f"user: {user!r} is not available in a sandbox with one user; open it with users=True, on a "
                "host with a range of ids"
            )
        link = await self.connected()
        env = self.environment(request.env)
        env = env if user is None else for_other_user(env, request.env)
        cwd = request.cwd if user is not None or request.cwd is None else at_home(request.cwd, env)
        if request.terminal is not None:
            env.setdefault("TERM", "xterm-256color")
        channel = link.open(
            "start", waits=True, argv=list(request.argv), env=env, cwd=cwd, user=user,
            timeout_s=request.timeout_s, streams=[] if request.terminal else [0, 1, 2][not request.has_input :],
            terminal=list(request.terminal) if request.terminal else None, is_kept=request.kept,
            remove=self.take_leftover(), tag=request.tag, alone=request.alone, listed=describe_request(request),
        )  # fmt: skip
        return await self.begun(self._process(channel, sink, request.timeout_s))

    def _process(self, channel: Operation, sink: Sink | None, timeout_s: float | None = None) -> LiveProcess:
        process = LiveProcess(channel, self.limits, sink, timeout_s=timeout_s, make_result=self._result)
        process.network = self.network
        return process

    def _notes(self) -> Mapping[str, Any]:
        return {}

    def _result(self, process: LiveProcess, ended: Mapping[str, Any]) -> Result:
        notes = {**self._notes(), "backend": self.backend, "process": process.id}
        return command_result(
            process.verdict(ended), ended, kept=process.kept, limits=self.limits, enforcement=self.enforcement,
            notes={**notes, **process.traffic.notes(is_shared=True)},
        )  # fmt: skip

    async def begun(self, process: LiveProcess) -> LiveProcess:
        """Wait until a process has started, and return it; close its channel if it does not start."""
        process.paused_s = self.paused_s
        if not self.is_kept:
            process.paused_before_s = await self.paused_s()
        try:
            await process.begin()
        except BaseException:
            process._channel.close()
            raise
        return process

    async def attach_process(self, key: ProcessKey, sink: Sink | None = None) -> LiveProcess:
        """Return a process, running or recently ended. Raises InvalidRequest."""
        link = await self.connected()
        try:
            return await self.begun(self._process(link.open("attach", **key), sink))
        except StartFailed as error:
            raise InvalidRequest(f"process: {error}") from error

    async def control_process(self, key: ProcessKey) -> LiveControl:
        """Return a running process without its output. Raises InvalidRequest."""
        channel = (await self.connected()).open("control", **key)
        process = LiveControl(channel)
        try:
            async with asyncio.timeout(START_S):
                await process.begin()
        except OperationFailed as error:
            raise InvalidRequest(f"process: {error}") from error
        except TimeoutError as error:
            raise OutcomeUnknown("the sandbox did not answer") from error
        except BaseException:
            channel.close()
            raise
        return process

    async def read_output(self, name: str) -> tuple[bytes, bytes]:
        """Return the kept output of a process; see core.protocols.OpenLiveSandbox."""
        channel = (await self.connected()).open("output", id=name)
        output = {wire.STDOUT: b"", wire.STDERR: b""}

        def take(stream: int, data: memoryview) -> None:
            if stream in output:
                output[stream] = (output[stream] + bytes(data))[: wire.MOST_DATA]

        channel.on_data = take
        try:
            await asyncio.shield(channel.closed)
        except OperationFailed as error:
            raise InvalidRequest(f"process: {error}") from error
        finally:
            channel.close()
        return output[wire.STDOUT], output[wire.STDERR]

    async def list_processes(self) -> Sequence[ProcessInfo]:
        """Return the running and the recently ended processes."""
        answer = await (await self.connected()).ask("processes")
        rows = answer.get("processes")
        return [process_info(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def list_ports(self) -> Sequence[ListeningPort]:
        """Return the ports that processes inside listen on."""
        answer = await (await self.connected()).ask("ports")
        rows = answer.get("ports")
        return [
            ListeningPort(port=row["port"], address=str(row.get("address", "")))
            for row in (rows if isinstance(rows, list) else [])
            if isinstance(row, dict) and isinstance(row.get("port"), int) and 0 < row["port"] < 1 << 16
        ]

    async def connect(self, port: int) -> OpenConnection:
        """Return a connection to a server inside. Raises ConnectionRefusedError, as a socket would."""
        check_port(port)
        channel = (await self.connected()).open("connect", port=port)
        tunnel = Tunnel(channel)
        try:
            await channel.event()
        except OperationFailed as error:
            raise connection_error(error, port) from error
        except BaseException:
            channel.close()
            raise
        return tunnel


def for_other_user(env: Mapping[str, str], requested: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the environment of a requested user, but for the variables of its account."""
    own = {name: value for name, value in env.items() if name not in ACCOUNT_VARIABLES or name in requested}
    shared = [path for path in env["PATH"].split(":") if not path.startswith(f"{env['HOME']}/")]
    return own if "PATH" in requested else {**own, "PATH": ":".join((*shared, *ADMIN_FOLDERS))}


def at_home(folder: str, env: Mapping[str, str]) -> str:
    """Return a folder with `~` replaced by the home folder."""
    is_below = folder == "~" or folder.startswith("~/")
    return env.get("HOME", "/") + folder[1:] if is_below else folder
