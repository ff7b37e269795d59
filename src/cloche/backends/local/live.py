"""A live sandbox of the local backend: one jail for all its processes, held by one helper.

The helper's supervisor and pid 1 are `jail/resident.py`. This module describes, starts and ends the jail, and turns
programs into its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from cloche.core.enforcement import Enforcement
from cloche.core.errors import (
    BackendUnavailable,
    InternalError,
    InvalidRequest,
    SandboxFileError,
    SandboxFileTooLarge,
    StartFailed,
)
from cloche.core.events import Sink, discard
from cloche.core.limits import MIB, Limits, format_size
from cloche.core.loops import finish, until_readable
from cloche.core.policy import Policy
from cloche.core.protocols import Keeping, OpenConnection
from cloche.core.request import Request
from cloche.core.result import KillCause, Result
from cloche.core.suppressed import suppress_logged
from cloche.jail.messages import Run, Spec
from cloche.jail.setup.plan import root_steps
from cloche.jail.setup.privileges import amounts as ucounts
from cloche.jail.user_namespaces import Claim, claim_outside_id

from .. import layout
from ..enforcement import with_users
from ..file_operations import Content
from ..host import Host
from ..init_link import OPEN_S, InitLink, OperationFailed
from ..live import LiveSandbox, check_port, connection_error
from ..live_files import FILE_MODE
from ..live_runs import LiveRun, argv_of, run_to_end, streams_of, with_files
from ..network import join_shared_network, network_rules, network_variables
from ..results import run_notes
from ..toolchain import other_languages, python_toolchain
from . import environment, home_folder
from .call_pipes import QuietSocket
from .font_cache import seems_to_draw
from .helper_link import HelperConnection
from .networks import files_of, open_live_network
from .plan import (
    FOR_EVER_S,
    LocalProgram,
    build_program,
    build_session_program,
    build_spec,
    choose_guest_paths,
    filter_for,
    guest_environment,
    show_folder,
    show_toolchain,
    unfilled_layers,
    with_layers,
    with_toolchains,
)
from .prefork import pool_for, preload_settings
from .sandbox import LocalOpenSandbox
from .socket_tunnel import SocketTunnel
from .users import check_range, claim_block

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules
    from cloche.egress.client import KeptNetwork

    from ..live_session import LiveSession
    from ..secrets import GuestSecrets
    from .session import LocalSession

log = logging.getLogger("cloche.jail")
ACCOUNT = "sandbox"  # the ordinary account, unless the policy names one; its home is below /home
ROOT, SANDBOX = 0, 1000
# Writable folders, which share one limit: their permission bits, and their owner if there are several users.
WRITABLE = (
    ("workspace", 0o755, SANDBOX), ("tmp", 0o1777, ROOT), ("home", 0o755, ROOT),
    ("root", 0o700, ROOT), ("var", 0o755, ROOT), ("var/tmp", 0o1777, ROOT), ("opt", 0o755, ROOT), ("srv", 0o755, ROOT),
    ("run", 0o755, ROOT),
)  # fmt: skip
ETC = ("etc", 0o755, ROOT)  # only with several users: a writer of /etc decides who the users are
# Only with several users and a named account, whose programs expect them; they belong to it.
OWN_FOLDERS = tuple((name, 0o755, SANDBOX) for name in ("app", "code", "data", "project"))
MOST_MARKS = 2048  # UTS namespaces, one for each started process
MOST_COPIED_BYTES, UNPACK_S = 256 * MIB, 300.0  # of the workspace copied for a session that can be cloned
UNPACKS = """
import os, sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    archive.extraction_filter = lambda member, path: member
    archive.extractall("/workspace")
os.unlink(__file__)
"""
SHARES = (
    "this session shares its sandbox with others, so it has no checkpoints and no forks; open one with "
    "checkpoints=True, which gets a copy of the files and a separate process namespace"
)


class LocalLiveSandbox(LiveSandbox):
    """Hold one jail open with all its processes; see core.protocols.OpenLiveSandbox."""

    backend = "local"

    def __init__(
        self,
        *,
        policy: Policy,
        limits: Limits,
        enforcement: Enforcement,
        host: Host,
        keeping: Keeping | None = None,
    ):
        if policy.users:
            check_range(host)
        self._enforcement_apart = enforcement
        enforcement = with_users(enforcement, host) if policy.users else enforcement
        super().__init__(limits, enforcement, has_users=policy.users, account=policy.account)
        self._policy, self._host = policy, host
        own_home = ("home/" + (policy.account or ACCOUNT), 0o755, SANDBOX)
        self._home = f"/{own_home[0]}" if policy.home is None else policy.home.at
        self._paths = choose_guest_paths(enforcement.level)
        self._pool = pool_for(policy, host) if policy.warm else None
        rows = (
            *(WRITABLE if policy.host_folder is None else WRITABLE[1:]),
            own_home,
            *((ETC,) if policy.users else ()),
            *(OWN_FOLDERS if policy.users and policy.account is not None else ()),
        )
        self._rows = [row for row in rows if policy.user != "nobody" or row[0] in ("workspace", "tmp")]
        self._has_environment = environment.has_environment(policy)
        self._rows += [(name, 0o755, SANDBOX) for name in environment.folders() if self._has_environment]
        self._rows = [row for row in self._rows if f"/{row[0]}" != self._home or policy.home is None]
        self.writable = tuple(f"/{name}" for name, *_ in self._rows)
        if policy.host_folder is not None:
            self.writable += (policy.host_folder.at,)
            self.writable += () if policy.host_folder.git is None else (policy.host_folder.git.at,)
        self.writable += () if policy.home is None else (policy.home.at,)
        self._has_home = self._home in self.writable
        self._connection: HelperConnection | None = None
        self._claim: Claim | None = None
        self._end: asyncio.Task[dict[str, Any]] | None = None
        self._handed_out: dict[int, asyncio.Future[int]] = {}  # sockets, by the channel that requested each
        self._numbers = itertools.count(1)
        self._apart: list[LocalOpenSandbox] = []  # of sessions that can be cloned
        self._has_fonts = False  # written, or found not to be needed
        self.start = "cold"
        self._keeping = keeping
        self._is_owner = False
        self._secrets: GuestSecrets | None = None

    # Start, hand-over and end.

    def _own_mounts(self) -> list[str]:
        """Return the mounts whose files belong to this sandbox alone, read-only views of folders included."""
        folder = self._policy.host_folder
        return [*self.writable, *(view.at for view in (folder.read_only if folder is not None else ())), "/dev/shm"]

    def saved_folders(self) -> tuple[str, ...]:
        """Return the folders that belong to a snapshot: without views of folders of the host."""
        return tuple(f"/{name}" for name, *_ in self._rows if name != "run")

    def _greeting(self) -> dict[str, str]:
        """Return the greeting that init sends to each client."""
        return {}

    def _note_greeting(self, greeting: Mapping[str, Any]) -> None:
        """Record facts from init's greeting; a level without such facts has none."""

    async def _start(self) -> InitLink:
        await asyncio.to_thread(other_languages)  # runs programs to learn their roots
        spec = self._spec()
        run = Run(python={}, env={}, timeout_s=FOR_EVER_S, is_session=True)
        show_toolchain(run, spec, environment.shown(self._policy), self._host, self._policy)
        if self._policy.host_folder is not None:
            show_folder(run, spec, self._policy.host_folder, self._host)
        if self._policy.home is not None:
            home_folder.show(run, spec, self._policy.home, self._host)
        if self._keeping is not None:
            await self._keeping.begin()
            if self._pool is not None:
                self._pool.start_if_repeated()
        slot = self._pool.fork() if self._pool is not None else None
        self.start = "warm" if slot is not None else "cold"
        namespace = self._host.namespace if spec.is_shown else -1
        connection = HelperConnection(spec, sys.executable, slot, self._claim.held if self._claim else -1, namespace)
        ours, theirs = socket.socketpair()
        ours = QuietSocket(ours)
        link: InitLink | None = None
        own: KeptNetwork | None = None
        try:
            is_kept = self._keeping is not None
            self.network, own, self._secrets = await open_live_network(self._policy, spec, is_kept=is_kept)
            self._offer_to_decide()
            served = own or self.network
            jail_end = served.network.jail_end if served is not None else -1
            await connection.start()
            order = {"own_mounts": self._own_mounts(), "root_steps": root_steps(), "greeting": self._greeting()}
            if slot is None:  # a template has preloaded modules already
                env = {**guest_environment(self._paths, {}, python_toolchain().env), **self.environment({})}
                order["preload"] = preload_settings((), env["HOME"], env)
            connection.send_resident(run, order, theirs.fileno(), jail_end)
            theirs.close()
            self._end = asyncio.get_running_loop().create_task(connection.attend(self._take))
            if self._keeping is not None:
                return await self._hand_over(connection, ours, self._keeping, self._end, own)
            _, link = await asyncio.get_running_loop().create_connection(InitLink, sock=ours)
            await self._await_greeting(link)
        except BaseException:
            theirs.close()
            if link is not None:
                link.close("it was not opened")
            ours.close()
            if self._keeping is not None:
                self._keeping.abandon()
            await finish(self._end_connection(connection))
            self._close_network()
            if own is not None and not self.is_kept:
                await asyncio.to_thread(own.end)
            raise
        self._connection = connection
        if self._pool is not None and slot is None:
            self._pool.start()
        return link

    async def _have_secrets(self) -> None:
        """Start the sandbox if it has secrets: only then is it known what its environment has for them."""
        if self._policy.secrets is not None:
            await self.connected()

    async def _fill(self, link: InitLink) -> None:
        """Write the files with placeholders into the home folder."""
        home = self.environment({})["HOME"]
        for path, data in files_of(self._secrets).items():
            await self.write_first(link, f"{home}/{path}", data, FILE_MODE)

    async def _hand_over(
        self,
        connection: HelperConnection,
        ours: socket.socket,
        keeping: Keeping,
        end: asyncio.Task[dict[str, Any]],
        own: KeptNetwork | None,
    ) -> InitLink:
        """Give everything that keeps the sandbox to a keeper, once pid 1 serves, and reconnect as its client."""
        ours.setblocking(False)
        greeted = asyncio.get_running_loop().create_task(until_readable(ours.fileno()))
        await asyncio.wait((end, greeted), return_when=asyncio.FIRST_COMPLETED, timeout=6 * OPEN_S)
        is_there = greeted.done() and bool(ours.recv(1, socket.MSG_PEEK))
        greeted.cancel()
        if not is_there:
            await _raise_failure(end)
        end.cancel()
        await asyncio.wait((end,))
        self._end = None
        with connection.release() as helper, ours, environment.hold_layers(self._policy.layers) as layers:
            held = {"helper": helper.fileno(), **({"claim": self._claim.held} if self._claim else {}), **layers}
            held |= own.held if own is not None else {}
            client = await keeping.take(ours, held, connection.groups, self.described())
        if own is not None:
            own.release()
        if self._claim is not None:
            self._claim.forget()
            self._claim = None
        return await self.join(client, keeping.join_network, is_owner=keeping.ends_with_caller)

    def described(self) -> dict[str, Any]:
        """Return the facts that later clients need, as plain data."""
        return {
            "enforcement": self.enforcement.as_dict(),
            "environment": self.environment({}),
            "environment_until": unfilled_layers(self._policy.layers),
        }

    async def join(
        self,
        client: socket.socket,
        join_network: Callable[[], socket.socket],
        *,
        is_owner: bool = False,
        check_greeting: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> InitLink:
        """Become a client of the sandbox by a connection to its keeper. Only its owner's `close` ends the sandbox.

        `join_network` blocks, and returns a link to the process that serves its network.
        """
        self.is_kept, self._is_owner = True, is_owner
        # Random start: other clients run programs in it, too.
        self._numbers = itertools.count(int.from_bytes(os.urandom(4)) + 1)
        client = QuietSocket(client)
        client.setblocking(False)
        _, self.link = await asyncio.get_running_loop().create_connection(InitLink, sock=client)
        await asyncio.wait((self.link.greeting,), timeout=OPEN_S)
        if not self.link.greeting.done():
            self.link.close("its keeper does not answer")
        greeting = await self.link.greeting
        if check_greeting is not None:
            try:
                check_greeting(greeting)
            except BaseException:
                self.link.close("another keeper has answered")
                raise
        self._note_greeting(greeting)
        if self._policy.secrets is not None and self._secrets is None:
            from ..secrets import held_by_others

            self._secrets = held_by_others(self._policy.secrets)
        if network_rules(self._policy) is not None:
            self.network = await join_shared_network(self._policy, join_network)
            self._offer_to_decide()
        return self.link

    @property
    def is_lost(self) -> bool:
        """Tell whether it, or the process that serves its network, has ended."""
        is_mute = self.network is not None and self.network.is_lost
        return self.link is None or self.link.lost.done() or is_mute

    async def adopt(self, order: Mapping[str, Any]) -> None:
        """Have its keeper keep it under a name and for times; see `cloche.keeper.attach.Adoptable`."""
        await self.ask("adopt", **order)
        self._is_owner = order["keep_s"] is None

    async def kill(self) -> None:
        """End the sandbox for all its clients, and wait until nothing of it is left."""
        link = self.link
        if self.is_kept and link is not None and not link.lost.done():
            link.open("end")
            await asyncio.wait((link.lost,), timeout=2 * OPEN_S)
        await self.close()

    async def _await_greeting(self, link: InitLink) -> None:
        """Wait until pid 1 serves. Raises StartFailed with the step that failed."""
        if self._end is None:
            raise InternalError("a sandbox that was not started was waited for")
        await asyncio.wait((self._end, link.greeting), return_when=asyncio.FIRST_COMPLETED, timeout=6 * OPEN_S)
        if link.greeting.done() and link.greeting.exception() is None:
            return
        await _raise_failure(self._end)

    def _spec(self) -> Spec:
        spec = build_spec(self.enforcement.level, self._policy, self.limits, self._host, self._paths)
        if self._policy.users:
            self._claim = claim_block(spec, self._host)
        elif spec.outside is not None:
            self._claim = claim_outside_id(*spec.outside, spec.ids[2])
            spec.outside = (self._claim.outside_id, 1)
        owners = {ROOT: ROOT, SANDBOX: spec.inside_id} if spec.users else {}
        shown = (*environment.shown(self._policy), *self._policy.toolchains)
        folders = [
            (name, environment.mode_of(name, mode, shown), owners.get(owner, spec.inside_id))
            for name, mode, owner in self._rows
        ]
        upper = ("upper", self.limits.disk_bytes, self.limits.inodes, folders)
        home_path = self.environment({}).get("HOME", "/workspace")
        spec.mounts = [
            upper,
            *(row for row in spec.mounts if row[:2] != ("tmpfs", "tmp") and not _is_account(row)),
            *layout.account_rows(self._policy, home_path),
            *(environment.rows(self._home) if self._has_environment else ()),
            ("terminals",),
            ("device", "tty"),
            *home_folder.rows(self._policy.home, self._host),
            *environment.why_rows(self._policy.why),
            *environment.sudo_rows(self._policy, self.environment({})),
        ]
        if self._policy.host_folder is not None and spec.cgroup is not None:
            amounts = spec.cgroup["amounts"]
            more = amounts["memory_bytes"] + self._policy.host_folder.disk_bytes
            spec.cgroup = {**spec.cgroup, "amounts": {**amounts, "memory_bytes": more}}
        spec.ucounts = {**ucounts(is_forkable=False), "uts_namespaces": MOST_MARKS}
        if spec.seccomp is not None:
            kind = {"resident": True, "users": self._policy.users}
            spec.seccomp = filter_for(confined=False, counted=bool(self._host.cgroup_version), **kind)
        if spec.landlock is not None:
            devices = [(f"/dev/{name}", "device") for name in (*layout.DEVICES, "pts", "tty")]
            spec.landlock = [("/", "read"), *((path, "write") for path in ("/dev/shm", *self.writable)), *devices]
        return spec

    async def close(self) -> None:
        """Kill and remove everything; disconnect from a sandbox that is kept for others."""
        if self._is_owner and not self._is_closed:
            self._is_owner = False
            await finish(self.kill())
        self._is_closed = True
        async with self._opening, contextlib.AsyncExitStack() as stack:
            for apart in self._apart:
                stack.push_async_callback(apart.close)
            link, connection = self.link, self._connection
            if link is not None:
                link.close("the sandbox was closed")
            if connection is not None:
                self._connection = None
                await finish(self._end_connection(connection))
            self._close_network()
            if self._claim is not None:
                self._claim.forget()
                self._claim = None

    def _rules_to_begin_with(self) -> NetworkRules:
        return network_rules(self._policy) or super()._rules_to_begin_with()

    def _close_network(self) -> None:
        network, self.network = self.network, None
        if network is not None:
            network.close()

    async def _end_connection(self, connection: HelperConnection) -> None:
        connection.kill(KillCause.CANCELLED)
        if self._end is not None:
            with suppress_logged(log, "how a sandbox ended that was closed", Exception):
                await asyncio.wait_for(asyncio.shield(self._end), OPEN_S)
            self._end.cancel()
        await connection.close()

    def _network_variables(self) -> Mapping[str, str]:
        return network_variables(self._policy)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return a command's whole environment."""
        variables = {**self._network_variables(), **guest_environment(self._paths, {}, {})}
        variables |= self._home_variables(variables["PATH"])
        variables = layout.with_startup(with_toolchains(variables, self._policy, env) | dict(env), self._paths.startup)
        variables = environment.with_own_first(
            with_layers(variables, self._policy.layers), self._home, self._has_environment
        )
        return variables if self._secrets is None else {**variables, **self._secrets.variables}

    def _home_variables(self, path: str) -> dict[str, str]:
        policy = self._policy
        search_path = environment.search_path(
            self._home, path, self._has_environment, policy.why, has_sudo=policy.users
        )
        return {"HOME": self._home, "PATH": search_path, **self._account_variables()} if self._has_home else {}

    def _account_variables(self) -> dict[str, str]:
        name = self._policy.account
        return {"USER": name, "LOGNAME": name, "SHELL": layout.login_shell()} if name is not None else {}

    async def connect(self, port: int) -> OpenConnection:
        """Return a connection to a server inside. Raises OSError, as a socket would."""
        if self.is_kept:  # the helper's sockets go to the keeper
            return await super().connect(port)
        check_port(port)
        channel = (await self.connected()).open("connect", port=port, hands_out=True)
        handed_out = self._handed_out[channel.number] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.shield(channel.closed)
            return SocketTunnel(await asyncio.wait_for(handed_out, OPEN_S))
        except OperationFailed as error:
            raise connection_error(error, port) from error
        finally:
            channel.close()
            self._handed_out.pop(channel.number, None)

    def _take(self, tag: str, body: dict[str, Any], fds: list[int]) -> None:
        """Receive a socket that pid 1 has made; other messages of the helper are ignored."""
        waiting = self._handed_out.get(body.get("channel", 0)) if tag == "handed out" else None
        if waiting is not None and not waiting.done() and fds:
            waiting.set_result(fds.pop())
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    # Runs.

    async def run(self, request: Request) -> Result:
        """Run code or a command, concurrently with all other processes, and return its result."""
        return await self.run_streaming(request, discard)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run as `run` does, passing `Started` and `OutputChunk` events to `sink` as they happen."""
        timeout_s = request.timeout_s or self.limits.timeout_s
        await self._have_secrets()
        arguments = (request, self._paths, timeout_s, next(self._numbers), self._policy.layers)
        # Other languages search for their programs, which blocks.
        is_at_hand = request.code is None or request.language == "python"
        build = partial(build_program, *arguments, calls=self.functions is not None)
        program = build() if is_at_hand else await asyncio.to_thread(build)
        environment.show(program.run.python, self._home, self._has_environment)
        argv = (argument.encode("utf-8", "surrogateescape") for argument in request.argv)
        await self._give_fonts(*(data for *_, data in program.run.files), *argv)

        async def notes(wall_s: float) -> Mapping[str, Any]:
            engine = program.toolchain.engine if program.toolchain else None
            runtime = program.runtime() if program.has_value else await asyncio.to_thread(program.runtime)
            return {**run_notes(engine, runtime, self.limits, self.enforcement, wall_s), "start": self.start}

        run = LiveRun(order=await self._order(program, request, timeout_s), inputs=program.inputs, notes=notes)
        try:
            return await run_to_end(self, request, run, sink, timeout_s=timeout_s)
        finally:
            if request.code is not None and request.source_path is None:
                self._leftover.append(f"{self._paths.workspace}/{program.run.files[-1][0]}")

    async def write_path(self, path: str, data: Content, **more: Any) -> str:  # noqa: ANN401 - as there
        """Write a file; see `LiveFiles.write_path`."""
        written = await super().write_path(path, data, **more)
        if isinstance(data, bytes):
            await self._give_fonts(data)
        return written

    async def note_cell(self, code: str) -> None:
        """Prepare the font list if the next cell seems to draw."""
        await self._give_fonts(code.encode("utf-8", "surrogatepass"))

    async def _give_fonts(self, *datas: bytes) -> None:
        """Write matplotlib's list of fonts, once a program or written file seems to draw."""
        if self._has_fonts or not any(map(seems_to_draw, datas)):
            return
        self._has_fonts = True
        fonts = await self._alone().font_file(self.environment({}))
        if fonts is not None:
            path, text = fonts
            await self.write_path(path, text.encode())

    async def _order(self, program: LocalProgram, request: Request, timeout_s: float) -> dict[str, Any]:
        """Return the arguments of `start` for a program; large files are written first."""
        run = program.run
        order: dict[str, Any] = {
            "env": self._at_home(run.env, request.env),
            "timeout_s": timeout_s,
            "remove": self.take_leftover(),
            "folders": run.folders,
            "streams": streams_of(request, has_report=run.python is not None, calls=self.functions is not None),
        }
        order |= {"python": _as_json(run.python)} if run.python is not None else {"argv": argv_of(run.commands)}
        files = [(f"{self._paths.workspace}/{path}", mode, data) for path, mode, data in run.files]
        return await with_files(
            self, order, [*files, *((path, 0o644, text.encode()) for path, text in run.generated.items())]
        )

    def _at_home(self, env: Mapping[str, str], requested: Mapping[str, str]) -> dict[str, str]:
        """Return a program's variables with this sandbox's home folder; variables of the request take precedence."""
        # These extend the request's own values.
        extended = ("PATH", "PYTHONPATH") if self._policy.layers else ("PYTHONPATH",)
        requested = {name: value for name, value in requested.items() if name not in extended}
        home = self._home_variables(env["PATH"])
        home |= requested if home else {}
        env = environment.with_own_first(env, self._home, self._has_environment)
        secrets = self._secrets.variables if self._secrets is not None else {}
        return with_toolchains({**self._network_variables(), **env, **home, **secrets}, self._policy, requested)

    # Sessions.

    async def open_session(self, language: str, env: Mapping[str, str]) -> LiveSession:
        """Start an interpreter that shares everything with this sandbox; see core.protocols.SupportsSessions."""
        from ..live_session import LiveProgram, open_live_session

        await self._have_secrets()
        program = build_session_program(language, env, self._paths, self._policy.layers, calls=self.has_functions)
        run = program.run
        environment.show(run.python, self._home, self._has_environment)
        link = await self.connected()
        for path, text in run.generated.items():
            await self.write_path(path, text.encode())
        order: dict[str, Any] = {"env": self._at_home(run.env, env), "cwd": self._paths.workspace}
        if run.python is not None:
            # The interpreter has none, and is never cloned.
            order["python"] = {**_as_json(run.python), "capabilities": []}
        else:
            (order["argv"],) = run.commands
        started = LiveProgram(
            language=program.language.name, order=order, new_codec=program.new_codec, interrupt=program.interrupt,
            why_no_forks=program.why_no_forks() or SHARES,
        )  # fmt: skip
        return await open_live_session(
            self, link, started, self.limits,
            enforcement=self.enforcement, notes={"backend": self.backend, "start": self.start}, network=self.network,
        )  # fmt: skip

    async def open_session_apart(self, language: str, env: Mapping[str, str]) -> LocalSession:
        """Start an interpreter that can be cloned, with one user; see core.protocols.SupportsSessionsApart."""
        program = build_session_program(language, env, self._paths, self._policy.layers, calls=self.has_functions)
        if why := program.why_no_forks():
            raise BackendUnavailable(why)
        if self._is_closed:
            raise InvalidRequest("this sandbox is closed; open another one")
        apart = self._alone()
        self._apart = [*(sandbox for sandbox in self._apart if not sandbox.is_closed), apart]
        try:
            await self._copy_files_to(apart)
            return await apart.open_session(language, env)
        except BaseException:
            await finish(apart.close())
            raise

    def _alone(self) -> LocalOpenSandbox:
        """Return a separate sandbox with the same rules, whose runs take turns."""
        policy = self._policy.with_changes(users=False)
        apart = LocalOpenSandbox(
            policy=policy, limits=self.limits, enforcement=self._enforcement_apart, host=self._host
        )
        apart.offer_functions(self.functions)
        return apart

    async def _copy_files_to(self, apart: LocalOpenSandbox) -> None:
        """Copy the workspace into a separate sandbox; a guest of that sandbox unpacks it."""
        if self.link is None or not await self.list_path("."):
            return
        archive = bytearray()

        def take(data: bytes) -> None:
            if len(archive) <= MOST_COPIED_BYTES:
                archive.extend(data)

        await self.pack_path(".", take)
        if len(archive) > MOST_COPIED_BYTES:
            size = format_size(MOST_COPIED_BYTES)
            raise SandboxFileTooLarge(
                f"/workspace: more than {size}, too much to copy for a session with checkpoints; move files that "
                "it does not need out of /workspace",
                path="/workspace",
            )
        result = await apart.run(Request(code=UNPACKS, stdin=bytes(archive), timeout_s=UNPACK_S))
        if not result.ok:
            text = result.stderr.strip()[-400:]
            raise SandboxFileError(f"/workspace: it could not be copied: {text or result.status}", path="/workspace")


async def _raise_failure(end: asyncio.Task[dict[str, Any]]) -> NoReturn:
    await asyncio.wait((end,), timeout=OPEN_S)
    if end.done():
        end.result()  # raises the helper's error
    raise StartFailed("the first process of the sandbox does not answer", step="init")


def _as_json(python: Mapping[str, Any]) -> dict[str, Any]:
    """Return the interpreter's settings with text in place of bytes."""
    settings = dict(python)
    if isinstance(settings.get("source"), bytes):
        settings["source"] = settings["source"].decode("utf-8", "surrogateescape")
    return settings


def _is_account(row: layout.Row) -> bool:
    return row[1:2] in (("etc/passwd",), ("etc/group",))
