"""One open sandbox of the local backend: a workspace that is kept, and a fresh process for each run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloche import hostfs
from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import InvalidRequest, OutcomeUnknown, SandboxFileRefused, StartFailed
from cloche.core.events import PlanStep, Sink, Started, discard
from cloche.core.functions import OffersFunctions
from cloche.core.limits import Limits
from cloche.core.loops import become_task, finish
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.request import InputFile, Request
from cloche.core.result import KillCause, Result, decide
from cloche.core.suppressed import suppress_logged
from cloche.egress.client import Traffic
from cloche.jail.messages import Building, Run, Spec
from cloche.jail.user_namespaces import Claim, claim_outside_id

from ..host import Host, forget_host, with_limit
from ..network import authority_variables, variables_without_namespace
from ..results import make_result, run_notes
from ..saved_files import Changes
from ..toolchain import python_toolchain
from . import font_cache, run_report
from .helper_link import HelperConnection
from .networks import RunNetwork, add_files, files_of, open_session_network
from .plan import (
    LocalProgram,
    build_program,
    build_spec,
    choose_guest_paths,
    make_forkable,
    show_toolchain,
    with_toolchains,
)
from .prefork import COLD, KEPT_BYTES, WarmJail, choose_second_start, choose_start, pool_for, warm_jail
from .run_report import observed, timed_steps, usage
from .streams import Pipes, started_first
from .workspace import Workspace

if TYPE_CHECKING:
    from cloche.forkserver.slot import Slot

    from ..secrets import GuestSecrets
    from ..subordinate_ids import Show
    from .plan import LocalSessionProgram
    from .session import LocalSession

log = logging.getLogger("cloche.jail")
PIECE_BYTES = 1 << 18
FEW_ENTRIES = 200  # entries that are removed before the next run arrives
BEGIN_S = 0.15  # during a first run longer than this, the pool is started


class LocalOpenSandbox(OffersFunctions):
    """Run requests one at a time; see core.protocols.OpenSandbox."""

    def __init__(self, *, policy: Policy, limits: Limits, enforcement: Enforcement, host: Host):
        self._policy, self._limits, self._enforcement, self._host = policy, limits, enforcement, host
        self._pool = pool_for(policy, host) if policy.warm and enforcement.level is Level.JAIL else None
        self._slot: Slot | None = None
        self._start = COLD
        self._guest_paths = choose_guest_paths(enforcement.level)
        self._spec = build_spec(enforcement.level, policy, limits, host, self._guest_paths)
        self._connection: HelperConnection | None = None
        folder = "" if enforcement.level is Level.JAIL else self._guest_paths.workspace
        self.workspace = Workspace(limits, folder, self._showing())
        self.workspace.has_owner = True
        self._turn = asyncio.Lock()
        self._is_closed = self._is_last = self._is_over = False
        self._draws = False  # whether a program or file here seemed to draw
        self._gives_fonts = enforcement.level is Level.JAIL and "/tmp" in policy.writable_paths
        self._claim: Claim | None = None
        self._sessions: list[LocalSession] = []
        self._network = RunNetwork(policy)
        self._chosen: tuple[HelperConnection, WarmJail] | None = None  # for the run that is about to be sent
        self._in_files: GuestSecrets | None = None  # whose placeholders are in the files of the workspace

    def expect_single_run(self) -> None:
        """Announce that the next run is the last one: the helper then clears up while the result is assembled."""
        self._is_last = True
        # With a single id and without Landlock's scopes, a guest could signal guests that wait for other runs.
        is_apart = self._spec.scope_abi > 0 or self._spec.outside is not None
        if self._policy.warm and self._enforcement.level is Level.CONFINED and is_apart:
            self._pool = pool_for(self._policy, self._host)

    async def run(self, request: Request) -> Result:
        """Run code or a command and return its result."""
        return await self.run_streaming(request, discard)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run as `run` does, passing `Started` and `OutputChunk` events to `sink` as they happen."""
        timeout_s = request.timeout_s or self._limits.timeout_s
        layers, calls = self._policy.layers, self.functions is not None
        program = build_program(request, self._guest_paths, timeout_s, layers=layers, calls=calls)
        argv = (argument.encode("utf-8", "surrogateescape") for argument in request.argv)  # arguments need not be UTF-8
        self._note_drawing(*(data for *_, data in program.run.files), *argv)
        if self._draws:
            await self._give_fonts(program.run)
        async with self._turn:
            run_report.begin_run(self)
            try:
                return await self._run(request, program, sink)
            finally:
                run_report.end_run(self)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file of the workspace. Raises the SandboxFile errors."""
        async with self._turn:
            await self._have_workspace()
            return await self.workspace.read(path, max_bytes=max_bytes)

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of all regular files below `path`, relative to the workspace."""
        async with self._turn:
            await self._have_workspace()
            return await self.workspace.paths(path, halted=self._halted)

    async def changes_stream(
        self,
        root: str,  # noqa: ARG002 - there is one folder
        *,
        since: int | None,
        max_bytes: int,
        max_entries: int,
        skip: Sequence[str] = (),
        note_answer: Callable[[Mapping[str, Any]], None],
    ) -> AsyncIterator[bytes]:
        """Yield frames of the workspace's content; `root` is ignored. See core.changes.SupportsChanges."""
        import tempfile

        from cloche.init.names import pack_text

        order: dict[str, Any] = {"since": since, "most": max_bytes, "entries": max_entries}
        order["skip"] = [pack_text(path) for path in skip]
        with tempfile.TemporaryFile(dir=hostfs.temporary_folder()) as file:
            async with self._turn:
                await self._have_workspace()
                answer = await self.workspace.changes(order, file.fileno(), halted=self._halted)
            file.seek(0)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
        note_answer(answer)

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace, with its folders. Raises the SandboxFile errors."""
        await self.write_files([InputFile(path=path, data=data)])

    async def write_files(self, files: Sequence[InputFile]) -> None:
        self._note_drawing(*(file.data for file in files))
        async with self._turn:
            await self._write(files)

    async def open_session(self, language: str, env: Mapping[str, str]) -> LocalSession:
        """Start an interpreter in this workspace; see core.protocols.SupportsSessions."""
        from .plan import build_session_program
        from .session import LocalSession, LocalTransport

        program = build_session_program(language, env, self._guest_paths, self._policy.layers, calls=self.has_functions)
        async with self._turn:
            if self._is_closed:
                raise InvalidRequest("this sandbox is closed; open another one")
            if self._spec.level != "jail":  # below jail, this sandbox's own helper makes and removes the folder
                await self._have_workspace()
            transport = LocalTransport(self, program, self._limits)
            session = LocalSession(
                transport, program, self._limits, enforcement=self._enforcement, can_fork=self._can_fork
            )
            self.hold(session)
            try:
                await self._start_session(session, program, env)
            except BaseException as error:
                if isinstance(error, StartFailed):
                    forget_host()
                self._sessions.remove(session)
                await finish(session.close())
                raise
            return session

    async def _start_session(self, session: LocalSession, program: LocalSessionProgram, env: Mapping[str, str]) -> None:
        """Start the session's own helper, with this sandbox's identity and workspace."""
        self._claim_id()
        spec = build_spec(self._enforcement.level, self._policy, self._limits, self._host, self._guest_paths)
        spec.outside, spec.shares_folder = self._spec.outside, True
        if self._can_fork and program.is_forkable:
            make_forkable(spec, self._host)
        show_toolchain(program.run, spec, program.paths(), self._host, self._policy)
        session.network, secrets = await open_session_network(self._policy, spec)
        session.owns_network = True
        program.run.env = {**self._network_variables(), **program.run.env}
        program.run.env = with_toolchains(program.run.env, self._policy, env)
        if secrets is not None:
            program.run.env |= secrets.variables
            add_files(program.run, secrets)
            self._in_files = secrets
        self.workspace.clear_for(program.run)
        slot = self._pool.fork() if self._pool is not None else None
        session.start = choose_start(slot, None).name
        if slot is None:
            self._begin_soon()
        connection = self._new_connection(spec, slot)
        jail_end = session.network.network.jail_end if session.network is not None else -1

        workspace = self.workspace

        def attend(on_message: Callable[[str, Mapping[str, Any]], None]) -> Coroutine[Any, Any, dict[str, Any]]:
            def take(tag: str, body: dict[str, Any], fds: list[int]) -> None:
                if tag == "ready" or fds:
                    workspace.take(fds)
                on_message(tag, body)

            return connection.attend(take)

        def send(streams: list[int]) -> None:
            fd = workspace.fd if spec.level == "jail" else -1
            connection.send_run(program.run, streams, workspace=fd, network=jail_end)

        try:
            await connection.start()
            await session.open(connection, spec, send, attend)
        except BaseException:
            try:
                await finish(session.close())  # first: the workspace may still be in transit
            finally:
                await finish(connection.close())
            raise

    def move_to(self, workspace: Workspace) -> None:
        """Switch to the workspace of the interpreter in which a session continues."""
        before, self.workspace = self.workspace, workspace
        before.has_owner = False
        workspace.has_owner = True
        if self._slot is not None:
            self._slot.invalidate()  # its waiting guest is in the previous files
        before.drop_unless_needed()

    def hold(self, session: LocalSession) -> None:
        """Register a session, to be closed with this sandbox at the latest."""
        self._sessions = [*(open_session for open_session in self._sessions if not open_session.is_closed), session]

    @property
    def _can_fork(self) -> bool:
        """Tell whether sessions can be cloned: that needs namespaces, and a /tmp that a clone may write to."""
        return self._enforcement.level is Level.JAIL and "/tmp" in self._policy.writable_paths

    @contextlib.asynccontextmanager
    async def alone(self, session: LocalSession) -> AsyncIterator[None]:
        """Block runs while a session is cloned, since the clone continues in another workspace.

        Raises InvalidRequest if another session works in the same files.
        """
        async with self._turn:
            if any(other_session is not session and not other_session.has_ended for other_session in self._sessions):
                raise InvalidRequest(
                    "another session is open in this sandbox, with the same files; close it, or use two sandboxes"
                )
            yield

    def copy_for_fork(self, workspace: Workspace) -> LocalOpenSandbox:
        """Return the sandbox of a fork: same rules and identity, separate workspace."""
        fork = LocalOpenSandbox(
            policy=self._policy, limits=self._limits, enforcement=self._enforcement, host=self._host
        )
        fork.move_to(workspace)
        fork._claim = self._claim.share() if self._claim is not None else None
        fork.offer_functions(self.functions)
        return fork

    async def changes(self, timeout_s: float) -> Changes:
        """Return the changes of a cell that had `timeout_s`; none if the workspace is gone."""
        async with self._turn:
            return await self._look(files_of(self._in_files), timeout_s) if self.workspace.fd >= 0 else Changes()

    async def _look(self, inputs: Mapping[str, bytes], timeout_s: float) -> Changes:
        """Return the changes in the workspace. Raises OutcomeUnknown, because the program has run."""
        try:
            return await self.workspace.collected(
                inputs, timeout_s=timeout_s, halted=self._halted, is_last=self._is_last
            )
        except OSError as error:
            raise OutcomeUnknown(with_limit(f"the program's files cannot be listed: {error}", error.errno)) from error

    @contextlib.asynccontextmanager
    async def _halted(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for session in [live_session for live_session in self._sessions if not live_session.has_ended]:
                await stack.enter_async_context(session.halted())
            yield

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def close(self) -> None:
        """Kill and remove everything."""
        self._is_closed = True
        if not self._sessions:
            await self._close_own()
            return
        async with contextlib.AsyncExitStack() as stack:  # the stack continues with the others if one is interrupted
            stack.push_async_callback(self._close_own)
            for session in reversed(self._sessions):
                stack.push_async_callback(session.close)

    async def _close_own(self) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._is_over and self._slot is None:
                connection.detach()
            elif connection is not None and not self._can_go_back():
                self._is_over = False
                await finish(connection.close())
        finally:
            if connection is not None or self._slot is not None:
                self._release()
            self.workspace.drop()
            self._network.close()
            if self._claim is not None:
                self._claim.forget()
                self._claim = None

    def _can_rest(self, ended: Mapping[str, Any]) -> bool:
        """Tell whether the slot's helper can quickly empty the folder of the last run."""
        return self._slot is not None and ended.get("entries", 0) <= FEW_ENTRIES

    def _can_go_back(self) -> bool:
        return self._is_over and self._slot is not None and self._slot.kept_bytes <= KEPT_BYTES

    def _begin_soon(self) -> None:
        """Start the pool during a longer run; a short run should not share the processors with the pool's start."""
        if self._pool is not None:
            asyncio.get_running_loop().call_later(BEGIN_S, self._pool.start)

    def _release(self) -> None:
        """Return the slot to the pool, or write it off; start the pool if it has not started yet."""
        slot, self._slot = self._slot, None
        if self._pool is None:
            return
        if slot is None:
            self._pool.start_soon()
        elif self._is_over:
            self._network.give_back(slot)
            slot.drop_folder()
            self._pool.give_back(slot)
        else:
            self._pool.write_off(slot)

    async def _write(self, files: Sequence[InputFile]) -> None:
        run = Run(files=[(file.path, file.mode, file.data) for file in files], timeout_s=self._limits.timeout_s)
        if self._spec.level == "jail":  # the same as for Python's runs, so that both can use the same waiting jail
            show_toolchain(run, self._spec, python_toolchain().binds, self._host, self._policy)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            await self._attend(run, (null, null, null, null), discard)
        finally:
            os.close(null)
        await self._look({}, self._limits.timeout_s)

    async def _have_workspace(self) -> None:
        if self.workspace.fd < 0:
            await self._write(())

    def _note_drawing(self, *datas: bytes) -> None:
        self._draws = self._draws or any(map(font_cache.seems_to_draw, datas))

    async def _give_fonts(self, run: Run) -> None:
        fonts = await self.font_file(run.env)
        if fonts is not None:
            path, text = fonts
            folder = os.path.dirname(path)
            run.folders = [*run.folders, os.path.dirname(folder), folder]
            run.generated = {**run.generated, path: text}

    async def font_file(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return path and text of matplotlib's list of fonts; None without one, or if matplotlib looks elsewhere."""
        cache, limits = f"{self._guest_paths.tmp}/.cache", self._limits
        if not self._gives_fonts or env.get("XDG_CACHE_HOME") != cache or "MPLCONFIGDIR" in env:
            return None
        await become_task()
        fonts = await font_cache.find_fonts(python_toolchain().binds, self._make_fonts)
        room = min(limits.disk_bytes, limits.tmp_bytes, limits.inodes * 4096) // font_cache.LEAST_ROOM
        return (f"{cache}/matplotlib/{fonts.name}", fonts.text) if fonts and len(fonts.text) <= room else None

    async def _make_fonts(self) -> bytes:
        """Have matplotlib make its list, alone in a separate sandbox."""
        policy = replace(self._policy, warm=False, secrets=None)
        font_sandbox = LocalOpenSandbox(
            policy=policy, limits=font_cache.LIMITS, enforcement=self._enforcement, host=self._host
        )
        font_sandbox._gives_fonts = False
        return await font_cache.made_in(font_sandbox)

    async def _run(self, request: Request, program: LocalProgram, sink: Sink) -> Result:
        """Run; start once more if a warm helper fails before anything of the program has started."""
        await self._move_to_warm()
        is_open, has_workspace = self._connection is not None, self.workspace.fd >= 0
        self._start = COLD
        try:
            return await self._run_once(request, program, sink)
        except StartFailed as error:
            again = choose_second_start(self._slot, self._start, is_open=is_open)
            if again is None or self._is_closed:
                forget_host()
                raise
            log.warning("a warm start failed, starting afresh: %s", error)
            first = error
        await become_task()
        if again is COLD:
            await self._leave_slot(has_workspace=has_workspace)
        elif self._slot is not None:
            self._slot.invalidate()
        try:
            return await self._run_once(request, program, sink)
        except StartFailed:
            if not has_workspace:
                raise
            raise first from None  # the second try needs the same files, whose mount may be in the failed jail

    async def _leave_slot(self, *, has_workspace: bool) -> None:
        """Continue in a newly started helper, with the workspace if there was one before."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await finish(connection.close())
        self._release()
        self._pool = None
        self._network.leave_slot()
        if not has_workspace:
            self.workspace.forget()
        self._spec = build_spec(self._enforcement.level, self._policy, self._limits, self._host, self._guest_paths)

    async def _move_to_warm(self) -> None:
        """Leave a cold helper once a template is ready; the files stay."""
        connection = self._connection
        if connection is None or self._slot is not None or self._pool is None or self.workspace.fd < 0:
            return
        if connection.is_alive and self._pool.is_ready():
            outside, self._connection = self._spec.outside, None
            self._spec = build_spec(self._enforcement.level, self._policy, self._limits, self._host, self._guest_paths)
            self._spec.outside = outside  # the id claimed by this sandbox
            await finish(connection.close())

    async def _run_once(self, request: Request, program: LocalProgram, sink: Sink) -> Result:
        paths, inputs = program.paths(), program.inputs
        show_toolchain(program.run, self._spec, paths, self._host, self._policy, is_single=self._is_last)
        if self._spec.network is not None:
            program.run.env = {**self._network_variables(), **program.run.env}
        if self._policy.toolchains:
            program.run.env = with_toolchains(program.run.env, self._policy, request.env)
        self._chosen = None
        if self._policy.secrets is not None:
            secrets = self._network.secrets or await self._read_secrets(program.run)
            program.run.env = {**program.run.env, **secrets.variables}
            inputs = inputs if self._in_files is secrets else {**add_files(program.run, secrets), **inputs}
            program.run.authority = secrets.authority_block()
        sink = sink if sink is discard else started_first(sink)
        try:
            pipes = Pipes(request.stdin, self._limits, self._kill, sink, self.functions)
        except OSError as error:
            message = with_limit(f"cannot make the pipes of a run: {error}", error.errno)
            raise StartFailed(message, errno=error.errno) from error
        if sink is not discard:
            pipes.listen()
        try:
            ended = await self._attend(program.run, pipes.guest_ends(), sink, pipes)
            self._in_files = self._network.secrets
            await pipes.drain(is_quiet=any(report and report.get("is_quiet") for report in (ended, ended["ended"])))
            traffic = await self._traffic(ended) if self._spec.network is not None else Traffic()
        finally:
            pipes.close()
            if pipes.calls is not None and pipes.calls.calls.is_running:
                await finish(pipes.calls.wait_closed())
        changes = await self._look(inputs, program.run.timeout_s)
        return await self._result(program, pipes, ended, changes, traffic)

    async def _traffic(self, ended: Mapping[str, Any]) -> Traffic:
        """Return the traffic of a run that has ended, and close its remaining connections.

        A jail that is reused was given no socket by this run, so there is nothing to report.
        """
        network = self._network.used_by(self._slot)
        is_unused = self._start.kind != "own" and ended["ended"] is not None and not ended["ended"]["is_worn"]
        if network is None or is_unused:
            return Traffic()
        await become_task()
        return await network.report(ends=True)

    async def _attend(self, run: Run, streams: Sequence[int], sink: Sink, pipes: Pipes | None = None) -> dict[str, Any]:
        """Send a run and wait for its end; when cancelled, kill it and wait until it is dead."""
        self.workspace.clear_for(run)
        connection, building = await self._send(run, streams, is_awaited=sink is not discard)
        if pipes is not None:
            pipes.close_guest_ends()
            connection.calls_fd = pipes.calls.incoming if pipes.calls is not None else -1
        plan: list[PlanStep] = []

        def on_message(tag: str, body: dict[str, Any], fds: list[int]) -> None:
            if tag == "started" and pipes is not None and self._slot is None:
                pipes.listen_soon()
            if tag == "ready" or fds:
                self.workspace.take(fds)
            if sink is discard:
                return
            if tag == "ready":
                plan.extend(timed_steps(building.build, body["seconds"]))
            elif tag == "started" and (run.commands or run.python):
                plan.extend(timed_steps(building.steps_of_guest(), body.get("seconds", ()), whose="the program: "))
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("steps: %s", ", ".join(f"{step.name} {step.seconds * 1000:.2f} ms" for step in plan))
                sink(Started(plan=tuple(plan)))

        def wait(seconds: float) -> None:
            if pipes is not None and self._slot is not None:  # a slot's guest may have started already
                pipes.listen_soon(seconds)

        try:
            ended = await connection.attend(on_message, wait)
            self._is_over = self._is_last and (self._spec.level == "jail" or self._can_rest(ended))
            return ended
        except asyncio.CancelledError:
            connection.kill(KillCause.CANCELLED)
            with suppress_logged(log, "the end of a cancelled run", Exception):
                await finish(connection.attend(on_message))
            raise
        except StartFailed as error:
            if error.step == "files":
                raise SandboxFileRefused(f"cannot write the input files: {error}", path="/workspace") from error
            raise

    async def _send(self, run: Run, streams: Sequence[int], *, is_awaited: bool) -> tuple[HelperConnection, Building]:
        """Send a run to the helper; to a jail built ahead if helper and program allow it."""
        connection, jail = self._chosen or await self._choose(run)
        slot, fd, start = self._slot, self.workspace.fd, self._start
        if slot is not None and start.kind != "own":
            building = connection.send_warm_run(
                run, streams, jail, slot, start, workspace=fd, is_awaited=is_awaited,
                shares_workspace=any(not session.has_ended for session in self._sessions) if self._sessions else False,
            )  # fmt: skip
            return connection, building
        is_jail = self._spec.level == "jail"
        workspace = fd if is_jail else -1
        network = self._network.own().jail_end if self._spec.network is not None else -1
        return connection, connection.send_run(
            run, streams, workspace=workspace, network=network, is_last=self._is_last and is_jail
        )

    async def _choose(self, run: Run) -> tuple[HelperConnection, WarmJail]:
        """Choose how a run starts, and have its jail built where it needs one and none waits."""
        jail = warm_jail(self._policy, self._limits, self._spec, run, is_kept=not self._is_last)
        connection = await self._connected(jail)
        slot = self._slot
        start = self._start = choose_start(slot, jail, is_last=self._is_last)
        if slot is not None and start.kind != "own" and start.name != "pooled":
            lent = self._network.lent() if start.kind == "kept" else None
            connection.prepare(jail, slot, start, workspace=self.workspace.fd, network=lent)
        return connection, jail

    def _network_variables(self) -> Mapping[str, str]:
        is_jail = self._spec.level == "jail"
        return authority_variables(self._policy) if is_jail else variables_without_namespace(self._policy)

    async def _read_secrets(self, run: Run) -> GuestSecrets:
        """Have the secrets read into the network that the run will have, before its order is made."""
        self._chosen = await self._choose(run)
        return await self._network.fill(self._slot if self._start.kind == "single" else None)

    async def _connected(self, jail: WarmJail) -> HelperConnection:
        if self._is_closed:
            raise InvalidRequest("this sandbox is closed; open another one")
        if self._connection is None:
            self._claim_id()
            if self._slot is not None:  # left by a failed start
                self._release()
            self._slot = self._pool.take(jail) if self._pool is not None else None
            if self._slot is None:
                await become_task()
                self._begin_soon()
            connection = self._new_connection(self._spec, self._slot)
            try:
                await connection.start()
            except BaseException:
                await finish(connection.close())
                raise
            self._connection = connection
        if not self._connection.is_alive:
            lost = "the helper process of this sandbox is gone, and the workspace with it; open another sandbox"
            raise StartFailed(lost, step="helper")
        return self._connection

    def _showing(self) -> Show | None:
        """Return the function that shows the guest's files as this user's in a second mount; None if they are so."""
        ids = self._host.ids if self._spec.is_shown else None
        return ids.showing(self._spec.inside_id) if ids is not None else None

    def _new_connection(self, spec: Spec, slot: Slot | None) -> HelperConnection:
        namespace = self._host.namespace if spec.is_shown else -1
        return HelperConnection(spec, sys.executable, slot, self._claim.held if self._claim else -1, namespace)

    def _claim_id(self) -> None:
        """Claim an outside id for all runs and sessions of this sandbox; the helper of a single run claims its own."""
        if self._spec.outside is None or self._is_last:
            return
        if self._claim is None:
            try:
                self._claim = claim_outside_id(*self._spec.outside, self._spec.ids[2])
            except OSError as error:
                text = f"there is no outside id for this sandbox: {error}"
                raise StartFailed(text, step="identity", errno=error.errno) from error
        self._spec.outside = (self._claim.outside_id, 1)

    def _kill(self, cause: KillCause) -> None:
        if self._connection is not None:
            self._connection.kill(cause)

    async def _result(
        self, program: LocalProgram, pipes: Pipes, ended: dict[str, Any], changes: Changes, traffic: Traffic
    ) -> Result:
        report = pipes.report()
        if changes.save is not None and self._slot is not None and not self._spec.folder:
            # Everything stored, also files that no walk reached.
            self._slot.account_files(self.workspace.stored_bytes())
        runtime = program.runtime() if program.has_value else await asyncio.to_thread(program.runtime)
        engine = program.toolchain.engine if program.toolchain else None
        notes = run_notes(engine, runtime, self._limits, self._enforcement, ended["wall_s"])
        return make_result(
            decide(observed(ended, traffic.refused).with_refusal(report.refused)),
            stdout=pipes.kept("stdout"),
            stderr=pipes.kept("stderr"),
            is_truncated=pipes.is_truncated,
            value=report.value,
            value_is_repr=report.is_repr,
            outputs=report.outputs,
            usage=usage(ended),
            enforcement=self._enforcement,
            changes=changes,
            meta={**notes, "backend": "local", "start": self._start.name, **pipes.notes(), **traffic.notes()},
        )
