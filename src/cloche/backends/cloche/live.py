"""A live sandbox at a service, with the interface of a local one: see core.protocols.OpenLiveSandbox."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.enforcement import Level, NetworkMode
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, NodeLost
from cloche.core.events import Sink
from cloche.core.functions import OffersFunctions
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.network import NetworkRules
from cloche.core.policy import Policy
from cloche.core.processes import MOST_TAG, ListeningPort, ProcessInfo, ProcessKey, ProcessRequest
from cloche.core.remote import RemoteAccount
from cloche.core.request import Request
from cloche.core.result import Result, Status

from ..garbage_collection import owner
from ..live import check_port
from ..remote.claims import claimed_controls, claimed_enforcement
from ..remote.failures import Failure, RemoteUnavailable, remote_error
from .connections import ask, begin, outcome
from .fields import fits_call, limits_of, run_fields
from .files import RemoteFiles, incoming
from .host_calls import served, tool_fields
from .process import START_S, RemoteControl, RemoteProcess, not_there
from .questions import Answering
from .results import ResultReader, read_records
from .sandbox import GRACE_S, RunEvents, counted_sandbox, run_outcome
from .session import OPEN_S, RemoteSession
from .wire import IN, OUT, Call

LABEL = "cloche-owner"
END_S = 60.0
HOLD_AGAIN_S = 2.0
NUMBER = 1e18
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
log = logging.getLogger("cloche.live")


@asynccontextmanager
async def opened(
    account: RemoteAccount, options: Mapping[str, Any], policy: Policy, limits: Limits
) -> AsyncIterator[RemoteSandbox]:
    """Open a sandbox for the body, and end it afterwards. Raises BackendUnavailable, InvalidRequest, PolicyDenied."""
    fields = {**options, "labels": {LABEL: owner()}, "lifetime": account.lifetime_s}
    if account.lease_s:
        fields["lease"] = account.lease_s
    async with counted_sandbox(account, account.lifetime_s) as note:
        facts = await ask(
            account, "sandbox.open", fields, timeout_s=OPEN_S,
            where=f"A sandbox may be there with the label {LABEL}={owner()}; it ends after its lifetime.",
        )  # fmt: skip
        sandbox_id = facts.get("id")
        if not isinstance(sandbox_id, str) or not _ID.fullmatch(sandbox_id):
            raise remote_error(account.provider, Failure.BAD_ANSWER, detail="this is no sandbox", account=account)
        note(sandbox_id)
        sandbox = RemoteSandbox(account, sandbox_id, policy, limits_of(_object(facts.get("limits")), limits))
        holding = asyncio.ensure_future(_hold(account, sandbox_id)) if account.lease_s else None
        if holding is not None:
            holding.add_done_callback(sandbox.link.note_end)
        try:
            yield sandbox
        finally:
            if holding is not None:
                holding.cancel()
                await finish(asyncio.wait([holding]))
            await finish(sandbox.close())


async def _hold(account: RemoteAccount, sandbox_id: str) -> None:
    """Hold a sandbox by a call that goes on; after a lost connection begin another one before the lease is over."""
    while True:
        try:
            call = await begin(account, "sandbox.hold", {"sandbox": sandbox_id})
            try:
                await outcome(call, account, "a sandbox was held", timeout_s=None)
            except asyncio.CancelledError:
                call.cancel()
                raise
            return
        except NodeLost:
            return
        except RemoteUnavailable as error:
            if error.failure is Failure.NOT_FOUND:
                return
            log.debug("sandbox %s is not held for a moment: %s", sandbox_id, error)
        except (ClocheError, OSError) as error:
            log.debug("sandbox %s is not held for a moment: %s", sandbox_id, error)
        await asyncio.sleep(min(HOLD_AGAIN_S, account.lease_s / 8))


class SandboxLink:
    """Tell that a sandbox has ended, as the connection to one of this host does."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note_end(self, holding: asyncio.Future[None]) -> None:
        """Note the end of the call that holds the sandbox."""
        if not holding.cancelled() and not self.lost.done():
            self.lost.set_result("it has ended")


class RemoteSandbox(OffersFunctions, RemoteFiles):
    """A live sandbox, operated by calls of the wire."""

    def __init__(self, account: RemoteAccount, sandbox_id: str, policy: Policy, limits: Limits):
        super().__init__(account, sandbox_id)
        self.limits = limits
        self._rules = policy.network_rules()
        self._reader = ResultReader(account, limits)
        self._is_over = False
        self.has_ended = False  # as the service has said
        self.link = SandboxLink()
        self.enforcement = claimed_enforcement(Level.JAIL, claimed_controls(account.host))
        self._answering: Answering | None = None

    # What runs.

    async def run(self, request: Request) -> Result:
        """Run code or a command."""
        return await self._run(request, None)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run, with events; see core.protocols.SupportsStreaming."""
        return await self._run(request, sink)

    async def _run(self, request: Request, sink: Sink | None) -> Result:
        timeout_s = min(request.timeout_s or self.limits.timeout_s, self.account.lifetime_s)
        files = request.files
        if not fits_call(request):
            await self.write_files(files)
            files = ()
        fields = {"sandbox": self.id, **run_fields(request, files)}
        if request.collect:
            fields["collect"] = list(request.collect)
        events, functions = RunEvents(sink), self.functions
        fields |= await tool_fields(functions, self.account)
        call = await begin(self.account, "run", fields, on_event=events.take)
        async with served(call, functions) as notes:
            answer = await run_outcome(
                call, self.account, "code ran", timeout_s=timeout_s + GRACE_S, where=self.where, is_held=self.is_paused
            )
        return events.note(await self.result_of(answer), notes())

    async def result_of(self, answer: Mapping[str, Any]) -> Result:
        """Return a result with the current content of its files. Raises BackendUnavailable."""
        try:
            records = read_records(answer.get("files", []))
        except (KeyError, TypeError, ValueError) as error:
            raise self._reader.wrong() from error
        if not records:
            return self._reader.read(answer, sandbox=self.id)
        unchanged, save = await self.fetched(records, self.limits.disk_bytes)
        result = self._reader.read(answer, sandbox=self.id, files=unchanged, save=save)
        if len(unchanged) < len(records):
            result.meta["files_partial"] = "access"
        return result

    async def start_process(self, request: ProcessRequest, sink: Sink | None = None) -> RemoteProcess:
        """Start a process; see core.protocols.SupportsProcesses."""
        fields: dict[str, Any] = {"sandbox": self.id, "argv": list(request.argv)}
        if request.env:
            fields["env"] = dict(request.env)
        if request.terminal is not None:
            fields["terminal"] = list(request.terminal)
        if request.kept:
            fields["keep"] = True
        optional_fields = {
            "cwd": request.cwd, "user": request.user, "timeout": request.timeout_s, "tag": request.tag or None,
            "alone": request.alone or None,
        }  # fmt: skip
        fields |= {name: value for name, value in optional_fields.items() if value is not None}
        process = RemoteProcess(
            self, self.limits, sink, timeout_s=request.timeout_s, has_terminal=request.terminal is not None,
            cwd=request.cwd,
        )  # fmt: skip
        await process.begin("process.start", fields)
        if not request.has_input:
            process.close_stdin()
        return process

    async def attach_process(self, key: ProcessKey, sink: Sink | None = None) -> RemoteProcess:
        """Return a process."""
        process = RemoteProcess(self, self.limits, sink)
        try:
            await process.begin("process.follow", {"sandbox": self.id, "process": await self._id_of(key)})
        except RemoteUnavailable as error:
            if error.failure is Failure.NOT_FOUND:
                raise not_there(error) from error
            raise
        return process

    async def control_process(self, key: ProcessKey) -> RemoteControl:
        """Return a running process without its output."""
        rows = {row.id: row for row in await self.list_processes() if row.status is None}
        row = rows.get(await self._id_of(key))
        if row is None:
            raise InvalidRequest(f"process: there is none with {key}")
        return RemoteControl(self, row.id, row.pid)

    async def _id_of(self, key: ProcessKey) -> str:
        ((name, value),) = key.items()
        if name == "id":
            return str(value)
        rows = [row for row in await self.list_processes() if getattr(row, name) == value]
        rows.sort(key=lambda row: (row.status is None, -row.age))
        if not rows:
            raise InvalidRequest(f"process: there is none with {name} {value!r}")
        return rows[-1].id

    async def list_processes(self) -> Sequence[ProcessInfo]:
        """Return the running and the recently ended processes."""
        rows = (await self.ask_inside("process.list")).get("items")
        return [_process(row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def read_output(self, name: str) -> tuple[bytes, bytes]:
        """Return the kept output of a process: (stdout, stderr)."""
        try:
            answer = await self.ask_inside("process.logs", {"process": name})
        except RemoteUnavailable as error:
            if error.failure is Failure.NOT_FOUND:
                raise not_there(error) from error
            raise
        return _bytes(answer.get("stdoutBase64")), _bytes(answer.get("stderrBase64"))

    # Sessions.

    async def open_session(self, language: str, env: Mapping[str, str]) -> RemoteSession:
        """Start an interpreter; see core.protocols.SupportsSessions."""
        return await self._session(language, env, is_apart=False)

    async def open_session_apart(self, language: str, env: Mapping[str, str]) -> RemoteSession:
        """Start an interpreter with checkpoints and forks; see core.protocols.SupportsSessionsApart."""
        return await self._session(language, env, is_apart=True)

    async def _session(self, language: str, env: Mapping[str, str], *, is_apart: bool) -> RemoteSession:
        fields = {"language": language, "env": dict(env), "checkpoints": is_apart}
        fields |= await tool_fields(self.functions, self.account)
        facts = await self.ask_inside("session.open", fields, timeout_s=OPEN_S)
        session = RemoteSession(self, facts, self.result_of, is_apart=is_apart)
        if self.functions is not None:
            await session.serve(self.functions)
        return session

    # Ports.

    async def connect(self, port: int) -> RemoteConnection:
        """Return a connection to a server inside. Raises ConnectionRefusedError, like a socket."""
        check_port(port)
        connection = RemoteConnection()
        call = await begin(self.account, "port.connect", {"sandbox": self.id, "port": port}, on_event=connection.hear)
        connection.follow(call)
        try:
            await asyncio.wait([connection.opened], timeout=START_S)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not connection.is_open:
            await outcome(call, self.account, "a port was connected", timeout_s=0.0, where=self.where())
        return connection

    async def list_ports(self) -> Sequence[ListeningPort]:
        """Return the listening ports inside."""
        rows = (await self.ask_inside("port.list")).get("items")
        return [
            ListeningPort(port=row["port"], address=str(row.get("address"))[:256])
            for row in (rows if isinstance(rows, list) else [])
            if isinstance(row, dict) and type(row.get("port")) is int and 0 < row["port"] < 1 << 16
        ]

    # Network.

    @property
    def network_rules(self) -> NetworkRules:
        """Return the network rules, as far as they were set from here."""
        return self._rules

    async def change_network(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Allow and deny further hosts. Raises InvalidRequest, BackendUnavailable."""
        for verb, further in (("network.deny", deny), ("network.allow", allow)):
            if further:
                await self.ask_inside(verb, {"rules": list(further)})
        self._rules = self._rules.with_further(allow=allow, deny=deny)

    async def replace_network(
        self, *, mode: NetworkMode, allow: Sequence[str] = (), deny: Sequence[str] = (),
        headers: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:  # fmt: skip
        """Replace the rules. Raises InvalidRequest, BackendUnavailable."""
        await self.ask_inside(
            "network.replace", {"mode": mode, "allow": list(allow), "deny": list(deny), "headers": headers or {}}
        )
        self._rules = self._rules.replaced(mode=mode, allow=allow, deny=deny, headers=headers)

    def decide_network(self, decide: Callable[[str, int], Awaitable[bool | None]]) -> None:
        """Let `decide` answer for hosts that no rule names; see core.protocols.SupportsNetwork."""
        if self._answering is None:
            self._answering = Answering(self, decide)
        else:
            self._answering.decide = decide

    async def network_traffic(self) -> Sequence[Mapping[str, Any]]:
        """Return carried and refused traffic. Raises BackendUnavailable if the service does not report it."""
        rows = (await self.ask_inside("network.look")).get("traffic")
        if not isinstance(rows, list):
            raise BackendUnavailable(
                "backend 'cloche': this service does not report the network traffic of a sandbox.",
                remedy="See network_refused of each result.",
            )
        return [{_snake(name): value for name, value in row.items()} for row in rows if isinstance(row, dict)]

    # The sandbox itself.

    async def ask(self, op: str, **order: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON
        """Pause or resume the sandbox, describe it, or tell the time of its files."""
        if op in ("pause", "resume"):
            without = {"memory": False} if order.get("memory") is False else {}
            return await self.ask_inside(f"sandbox.{op}", without)
        if op == "clock":
            return await self.ask_inside("sandbox.clock")
        if op == "info":
            answer = await self.ask_inside("sandbox.look")
            facts = {
                "age_s": answer.get("ageSeconds"),
                "left_s": answer.get("secondsLeft"),
                "clients": answer.get("clients"),
            }
            return {**facts, "is_paused": answer.get("state") == "paused"}
        raise InvalidRequest(f"{op}: at a service this is decided when the sandbox is opened")

    async def kill(self) -> None:
        """End the sandbox for all clients, and wait until everything of it is removed."""
        self._is_over = True
        await self.ask_inside("sandbox.end", timeout_s=END_S)
        self.has_ended = True

    async def close(self) -> None:
        """End the sandbox, unless `kill` did. If that fails, it ends after its lifetime."""
        if self._answering is not None:
            await self._answering.close()
        await self.settle(END_S)
        if self._is_over:
            return
        try:
            await self.kill()
        except NodeLost as error:  # it has ended with the lease, or with the node
            log.debug("sandbox %s has ended: %s", self.id, error)
        except (ClocheError, OSError) as error:
            if not (isinstance(error, RemoteUnavailable) and error.failure is Failure.NOT_FOUND):
                log.warning("sandbox %s at %s could not be ended: %s", self.id, self.account.host, error)


class RemoteConnection:
    """A connection to a server inside; see core.protocols.OpenConnection."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_open = False

    def hear(self, name: str, _: Mapping[str, Any]) -> None:
        """Handle an event."""
        if name == "connected":
            self.is_open = True
            if not self.opened.done():
                self.opened.set_result(None)

    def follow(self, call: Call) -> None:
        """Set the call that carries the connection."""
        self._call, self._stream, self._has_ended = call, incoming(call, OUT), False
        call.closed.add_done_callback(self._note_over)

    def _note_over(self, _: object) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    async def read(self, most: int = 1 << 16) -> bytes:
        """Return the next bytes; b"" at the end."""
        return await self._stream.read(most)

    async def write(self, data: bytes) -> bool:
        """Send all of `data`; returns False if the server has closed the connection."""
        return not self._has_ended and await self._call.send(IN, data)

    def end(self) -> None:
        """Close the sending direction."""
        if not self._has_ended:
            self._has_ended = True
            self._call.end(IN)

    def close(self) -> None:
        """Close the connection."""
        self._has_ended = True
        self._call.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await asyncio.wait([self._call.closed])


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _bytes(encoded: object) -> bytes:
    try:
        return base64.b64decode(encoded) if isinstance(encoded, str) else b""
    except binascii.Error:
        return b""


def _process(row: Mapping[str, Any]) -> ProcessInfo:
    status, code, age, pid = row.get("status"), row.get("exitCode"), row.get("age"), row.get("pid")
    return ProcessInfo(
        id=str(row.get("id"))[:256],
        pid=pid if type(pid) is int else 0,
        command=str(row.get("command", ""))[:4096],
        age=float(age) if isinstance(age, int | float) and abs(age) < NUMBER else 0.0,
        exit_code=code if type(code) is int else None,
        status=Status(status) if status in set(Status) else None,
        tag=str(row.get("tag", ""))[:MOST_TAG],
    )


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", name)
