"""One open sandbox of containers: a persistent workspace, a new container for each run, and sessions beside.

Theory of operation: a container runs one program. After that it is idle: only its first process is left, which serves
the workspace until the next container is up. So at any time one container holds the files, and none runs twice. Each
backend defines by a few methods how a container is made and where the workspace is. A session has its own container,
which also has the workspace mounted, and holds it after the session's end if no other container does.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from cloche.core.enforcement import Enforcement
from cloche.core.errors import InvalidRequest, OutcomeUnknown, SandboxFileError, StartFailed
from cloche.core.events import PlanStep, Sink, discard
from cloche.core.languages import PROGRAM_FILES
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.request import InputFile, Request, workspace_path
from cloche.core.result import KillCause, Result
from cloche.core.suppressed import suppress_logged
from cloche.egress.client import Traffic
from cloche.egress.windows import SharedNetwork

from ..archive import pack
from ..live_files import FILE_MODE
from ..network import network_rules
from ..saved_files import Changes, Until, time_for_files
from ..session import Session
from .container import SMALL_BYTES, Container, G
from .pool import deferral, shared_pool
from .program import TEMPORARY, WORKSPACE, Program, SessionProgram
from .run import ANSWER_S, FileRequest, KillTimer, Lost, RunListener, WorkspaceHashes, observed_end, result_of
from .session import SessionContainer

if TYPE_CHECKING:
    from ..secrets import ContainerSecrets

log = logging.getLogger("cloche.containers")

C = TypeVar("C", bound=Container[Any])


class ContainerSandbox(ABC, Generic[G, C]):
    """Run requests one at a time; see core.protocols.OpenSandbox."""

    _advice = ""  # advice in the error about a lost container
    _loses_notice_of_start = False  # over a network, STARTED may be lost with the link although the code runs

    def __init__(self, *, policy: Policy, limits: Limits, enforcement: Enforcement):
        self._policy, self._limits, self._enforcement = policy, limits, enforcement
        self._turn = asyncio.Lock()
        self._fresh: C | None = None  # has not run anything yet
        self._used: C | None = None  # holds the workspace; runs no further program
        self._coming: asyncio.Task[None] | None = None
        self._last: C | None = None  # started last, even if it is lost now
        self._workspace = WorkspaceHashes()
        self._is_last = self._is_closed = False
        self._secrets: ContainerSecrets | None = None
        # A container that was prepared for any sandbox has no authority, and no secrets, of a single one.
        self._prepares = policy.warm and policy.secrets is None

    @abstractmethod
    def _find_rootfs(self, request: Request | None) -> G:
        """Return the root file system for a request; for None, one whose container can serve files. Blocks."""

    @abstractmethod
    def _build_program(self, request: Request, rootfs: G) -> Program:
        """Return the program of a request."""

    @abstractmethod
    def _make(self, rootfs: G, after: C | None) -> C:
        """Start a container, with the workspace of `after` if given. Blocks. Raises StartFailed."""

    @abstractmethod
    def _kind(self, rootfs: G) -> tuple[object, ...]:
        """Return a key that is equal for two containers if one can replace the other."""

    @abstractmethod
    def _release(self, container: C, *, with_workspace: bool = False) -> None:
        """End a container in the background."""

    @abstractmethod
    def _notes(self, container: C) -> dict[str, Any]:
        """Return the container's entries for `meta` of results."""

    def _enforced(self, container: C) -> Enforcement:  # noqa: ARG002 - for backends whose containers differ
        """Return the enforcement report of this container."""
        return self._enforcement

    async def _hold_workspace(self, holder: C | None) -> None:
        """Ensure that the next container gets the workspace, even if none holds it. Raises StartFailed."""

    def expect_single_run(self) -> None:
        """Announce that only one more run follows, so that no container is prepared for later runs."""
        self._is_last = True

    async def run(self, request: Request) -> Result:
        """Run code or a command and return its result."""
        return await self.run_streaming(request, discard)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run like `run`, and pass `Started` and `OutputChunk` events to `sink` as they happen."""
        async with self._turn:
            rootfs = await self._rootfs(lambda: self._find_rootfs(request))
            await self._open_secrets()
            program = self._build_program(replace(request, env=self._with_secrets(request.env)), rootfs)
            container, start = await self._take(rootfs)
            with deferral.hold() if start == "pooled" else nullcontext():
                return await self._run(container, request, program, sink, start)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return the content of a regular file of the workspace. Raises the SandboxFile errors."""
        inside = workspace_path(path)
        async with self._turn:
            holder = await self._holder()
            if holder.init_files is not None:
                return await holder.init_files.read_file(inside, max_bytes=max_bytes)
            file_request = FileRequest(max_bytes)
            await self._ask(holder, file_request, {"do": "read", "path": inside, "max_bytes": max_bytes})
            file_request.spool.file.seek(0)
            data = file_request.spool.file.read()
            file_request.spool.file.close()
            return data

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of all regular files below `path`, relative to the workspace."""
        top = "" if path in (".", "", "/workspace") else workspace_path(path) + "/"
        async with self._turn:
            holder = await self._holder()
            if holder.init_files is not None:
                paths: Sequence[str] = await holder.init_files.list_files()
            else:
                file_request = FileRequest(0)
                await self._ask(holder, file_request, {"do": "list"})
                paths = file_request.spool.take_names(file_request.spool.size)
            return tuple(path for path in paths if path.startswith(top) and path not in PROGRAM_FILES)

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace, with its folders. Raises the SandboxFile errors."""
        await self.write_files([InputFile(path=path, data=data)])

    async def write_files(self, files: Sequence[InputFile]) -> None:
        """Create or replace all of `files`."""
        async with self._turn:
            holder = await self._holder()
            if holder.init_files is not None:
                for file in files:
                    await holder.init_files.write_path(file.path, file.data, mode=file.mode & 0o777)
            else:
                await self._ask(holder, FileRequest(0), {"do": "write"}, pack(files))
            self._workspace.note(files)

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        self._is_closed = True
        try:
            if self._coming is not None:
                await finish(self._coming)
        finally:  # also if the wait is cancelled
            self._release_all()

    def _release_all(self) -> None:
        holders = [container for container in (self._used, self._fresh) if container is not None]
        for container in holders or ([self._last] if self._last is not None else []):
            self._release(container, with_workspace=True)
        self._used = self._fresh = self._last = None
        if self._secrets is not None:
            self._secrets.close()

    async def _rootfs(self, find: Callable[[], G]) -> G:
        if self._is_closed:
            raise InvalidRequest("this sandbox is closed; open another one")
        return await asyncio.to_thread(find)

    def _current_holder(self) -> C | None:
        """Return a container that holds the workspace; idle ones come first."""
        all_of_them = (self._used, self._fresh, *self._other_holders())
        return next((container for container in all_of_them if container is not None and not container.is_lost), None)

    def _other_holders(self) -> Sequence[C]:
        """Return further containers that hold the workspace."""
        return ()

    async def _take(self, rootfs: G) -> tuple[C, str]:
        """Return a fresh container with this sandbox's workspace, and "cold" or "pooled".

        Raises StartFailed, or InvalidRequest if the sandbox was closed meanwhile, because the container would never be
        released.
        """
        taken_container = await self._take_one(rootfs)
        if self._is_closed:
            self._release(taken_container[0], with_workspace=True)
            raise InvalidRequest("this sandbox was closed before the container was up; open another one")
        return taken_container

    async def _take_one(self, rootfs: G) -> tuple[C, str]:
        if self._coming is not None:
            await asyncio.shield(self._coming)
            self._coming = None
        fresh, self._fresh = self._fresh, None
        if fresh is not None and not fresh.is_lost and fresh.rootfs.id == rootfs.id:
            return fresh, "pooled"
        if fresh is not None and self._current_holder() is None:
            self._used, fresh = fresh, None
        try:
            started = await self._start(rootfs)
        finally:
            if fresh is not None:
                self._release(fresh)
        return started

    async def _start(self, rootfs: G) -> tuple[C, str]:
        start = "cold"
        if self._last is None:
            container: Any = shared_pool().take(self._kind(rootfs)) if self._prepares else None
            start = "pooled" if container is not None else start
            container = container if container is not None else await self._start_container(rootfs, None)
        else:
            holder = self._current_holder()
            await self._hold_workspace(holder)
            container = await self._start_container(rootfs, holder or self._last)
        self._last = container
        return container, start

    async def _open_secrets(self) -> None:
        """Read this sandbox's secrets, once."""
        if self._policy.secrets is not None and self._secrets is None:
            from ..secrets import ContainerSecrets  # needed by some sandboxes only

            self._secrets = await ContainerSecrets.open(self._policy)

    def _with_secrets(self, env: Mapping[str, str]) -> Mapping[str, str]:
        return env if self._secrets is None else {**env, **self._secrets.guest.variables}

    async def _start_container(self, rootfs: G, after: C | None) -> C:
        """Start a container in a thread. If the caller is cancelled, the container is released."""
        await self._open_secrets()
        making = asyncio.ensure_future(asyncio.to_thread(self._make, rootfs, after))
        try:
            container = await finish(making)
            if after is None:
                await self._write_secrets(container)
        except BaseException:
            if making.done() and not making.cancelled() and making.exception() is None:
                self._release(making.result(), with_workspace=after is None)
            raise
        return container

    async def _write_secrets(self, container: C) -> None:
        """Write the files with placeholders into a new workspace, which is the home folder."""
        if self._secrets is not None and self._secrets.guest.texts:
            files = [
                InputFile(path=path, data=text.encode(), mode=FILE_MODE)
                for path, text in self._secrets.guest.texts.items()
            ]
            await self._ask(container, FileRequest(0), {"do": "write"}, pack(files))
            self._workspace.note(files)

    async def _run(self, container: C, request: Request, program: Program, sink: Sink, start: str) -> Result:
        before, self._used = self._used, container
        if before is not None:
            self._release(before)
        timeout_s = request.timeout_s or self._limits.timeout_s
        kill_timer = KillTimer(container)
        listener = RunListener(self._limits, sink, kill_timer.kill, lambda: kill_timer.expect(timeout_s))
        if sink is not discard:
            shown = shlex.join(container.argv())
            listener.plan = (PlanStep(name="container", description=shown, seconds=container.start_s),)
        container.listen(listener)
        answer: dict[str, Any] = {}
        try:
            order = program.order(request, self._limits, timeout_s)
            payloads = (pack(program.files), *((request.stdin,) if request.stdin else ()))
            answer = await self._attend(container, listener, kill_timer, order, payloads)
        except Lost:
            if not listener.has_started and kill_timer.cause is None and not self._loses_notice_of_start:
                raise StartFailed(f"the container was lost before the code ran{container.last_output()}") from None
            answer = {"partial": ["time"]}
        finally:
            kill_timer.close()
            container.listen(None)
            self._prepare_next(container, program)
        end = await observed_end(container, listener.report, kill_timer.cause, timeout_s)
        if end is None:
            raise OutcomeUnknown(f"{container.why_lost()}. {self._advice}{container.last_output()}")
        traffic = await container.network.report(ends=True) if container.network is not None else Traffic()
        until = Until(time_for_files(timeout_s))
        changes = await self._workspace.changes(listener.spool, program.input_hashes(), answer, until)
        return result_of(
            end, listener, changes, program=program, limits=self._limits, enforcement=self._enforced(container),
            traffic=traffic, notes={**self._notes(container), "start": start},
        )  # fmt: skip

    def _prepare_next(self, container: C, program: Program) -> None:
        """Prepare the next container of this sandbox, or one for the next sandbox of the same kind."""
        if not self._prepares:
            return
        rootfs, expects_python = cast(G, container.rootfs), program.python is not None
        if self._is_last:
            shared_pool().refill(self._kind(rootfs), lambda: self._make_ahead(rootfs, expects_python=expects_python))
        elif not container.is_lost and not self._is_closed:
            self._coming = asyncio.create_task(self._succeed(rootfs, expects_python=expects_python))

    def _make_ahead(self, rootfs: G, *, expects_python: bool) -> C:
        """Start a container for another sandbox. Blocks. Raises StartFailed."""
        container = self._make(rootfs, None)
        if expects_python:
            _prefork(container)
        return container

    async def _succeed(self, rootfs: G, *, expects_python: bool) -> None:
        """Start the next run's container while the last one holds the workspace."""
        with suppress_logged(log, "no container was made ready, so the next run starts its own", Exception):
            self._fresh, _ = await self._start(rootfs)
            if expects_python:
                _prefork(self._fresh)

    async def _attend(
        self,
        container: C,
        listener: RunListener,
        kill_timer: KillTimer,
        order: dict[str, Any],
        payloads: tuple[bytes, ...],
    ) -> dict[str, Any]:
        """Send a run and wait for its end. If cancelled, kill it and wait until it is dead."""
        sending = asyncio.ensure_future(_send(container, order, payloads))
        sending.add_done_callback(lambda _: None if listener.has_started else kill_timer.expect_start())
        try:
            return await asyncio.shield(listener.answer)
        except asyncio.CancelledError:
            kill_timer.kill(KillCause.CANCELLED)
            with suppress_logged(log, "how a cancelled run ended, which nobody waits for any more", Exception):
                await finish(listener.answer)
            raise
        finally:
            with suppress_logged(log, "not all of a run was sent, whose end says more", OSError):
                await finish(sending)

    async def _ask(
        self, container: Container[Any], file_request: FileRequest, order: dict[str, Any], *payloads: bytes
    ) -> dict[str, Any]:
        container.listen(file_request)
        try:
            return await _answer(container, file_request, order, payloads)
        except TimeoutError as error:
            await asyncio.to_thread(container.kill)
            raise StartFailed(
                "the container that has the workspace does not answer, and was killed; open another sandbox",
                step="container",
            ) from error
        except (Lost, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                raise
            raise StartFailed(
                "the workspace is gone with its container; open another sandbox", step="container"
            ) from error
        finally:
            container.listen(None)

    async def _holder(self) -> C:
        """Return a container that holds the workspace; starts one if necessary."""
        if self._is_closed:
            raise InvalidRequest("this sandbox is closed; open another one")
        holder = self._current_holder()
        if holder is None:
            self._fresh, _ = await self._take(await self._rootfs(lambda: self._find_rootfs(None)))
            holder = self._fresh
        return holder


def _prefork(container: Container[Any]) -> None:
    with suppress_logged(log, "a container is gone, as the next run will find", OSError):
        container.expect_python()


async def _answer(
    container: Container[Any], file_request: FileRequest, order: dict[str, Any], payloads: tuple[bytes, ...]
) -> dict[str, Any]:
    """Wait for the answer, even if cancelled: a late answer would be taken for that of the next request."""
    try:
        await finish(_send(container, order, payloads))
        return await finish(asyncio.wait_for(asyncio.shield(file_request.answer), ANSWER_S))
    except BaseException:
        file_request.spool.file.close()
        raise


async def _send(container: Container[Any], order: dict[str, Any], payloads: tuple[bytes, ...]) -> None:
    if sum(map(len, payloads)) < SMALL_BYTES:
        container.order(order, *payloads)
    else:
        await asyncio.to_thread(container.order, order, *payloads)


class SessionSandbox(ContainerSandbox[G, C]):
    """Run requests, and keep interpreters; see core.protocols.SupportsSessions."""

    def __init__(self, *, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._sessions: dict[C, Session | None] = {}  # by their containers; None while one starts

    @abstractmethod
    def _find_session_rootfs(self, language: str) -> G:
        """Return the root file system of a session's container.

        Raises BackendUnavailable if there can be no session.
        """

    @abstractmethod
    def _build_session_program(self, language: str, env: Mapping[str, str], rootfs: G) -> SessionProgram:
        """Return the program of a session. Raises InvalidRequest or BackendUnavailable."""

    async def open_session(self, language: str, env: Mapping[str, str]) -> Session:
        """Start an interpreter that lives in this workspace; see core.protocols.SupportsSessions."""
        async with self._turn:
            rootfs = await self._rootfs(lambda: self._find_session_rootfs(language))
            await self._open_secrets()
            program = self._build_session_program(language, self._with_secrets(env), rootfs)
            container, start = await self._take(rootfs)
            session_container = SessionContainer(container, self._limits, self._enforced(container), self._in_memory())
            container.init_files = session_container
            self._sessions[container] = None
        try:
            transport = await session_container.open_transport(self, program)
            if self._is_closed:
                raise InvalidRequest("this sandbox was closed before its session was up; open another one")
        except BaseException:
            self.take_back(container)
            raise
        session = Session(
            transport, lambda timeout_s: self._changes_in(session_container, timeout_s), language=program.language.name,
            interrupt=program.interrupt, limits=self._limits, enforcement=session_container.enforcement,
            notes={**self._notes(container), "start": start},
        )  # fmt: skip
        rules = network_rules(self._policy)
        if container.network is not None and rules is not None:
            session.network, session.owns_network = SharedNetwork(container.network, rules), True
        self._sessions[container] = session
        try:
            await session.await_ready(await transport.start())
        except BaseException:
            await finish(session.close())
            raise
        return session

    def _in_memory(self) -> Sequence[str]:
        """Return the file systems whose content a container's kernel counts as shared memory."""
        return (WORKSPACE, *TEMPORARY)

    def take_back(self, container: Container[Any]) -> None:
        """Take over the container of an ended session, which may be the only holder of the workspace."""
        mine = next(session_container for session_container in self._sessions if session_container is container)
        del self._sessions[mine]
        if self._is_closed or mine.is_lost or self._current_holder() is not None:
            self._release(mine, with_workspace=self._is_closed)
        else:
            self._used = mine

    async def _changes_in(self, session_container: SessionContainer, timeout_s: float) -> Changes:
        """Return the files that changed, after a cell with a limit of `timeout_s`; empty if they cannot be read any
        more.
        """
        async with self._turn:
            if session_container.container.is_lost or self._is_closed:
                return Changes()
            try:
                spool, answer = await session_container.changed_files(timeout_s)
            except SandboxFileError:
                return Changes(skipped=1)
            except (TimeoutError, ValueError, OutcomeUnknown):
                await asyncio.to_thread(session_container.container.kill)
                return Changes()
            return await self._workspace.changes(spool, {}, answer, Until(time_for_files(timeout_s)))

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        self._is_closed = True
        async with AsyncExitStack() as stack:  # closes the rest even if one is interrupted
            stack.push_async_callback(super().close)
            for session in reversed(self._sessions.values()):
                if session is not None:
                    stack.push_async_callback(session.close)

    def _other_holders(self) -> Sequence[C]:
        return list(self._sessions)
