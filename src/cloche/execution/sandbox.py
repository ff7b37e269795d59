"""Sandboxes and sessions that live for several runs: `AsyncSandbox` and `AsyncSession`.

A sandbox has a workspace: every run in it is a fresh process that sees the files of earlier runs. A session is an
interpreter in a sandbox, with a history, an idle time-out, checkpoints, forks, and restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from cloche.audit.recording import Execution, is_wanted, note_fallback, recorded, refusals
from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable, InternalError, InvalidRequest, StartFailed
from cloche.core.events import Event, Sink, discard
from cloche.core.limits import parse_duration
from cloche.core.loops import with_sink
from cloche.core.protocols import (
    OpenSandbox,
    OpenSession,
    SupportsCollecting,
    SupportsFork,
    SupportsSessions,
    SupportsSessionsApart,
)
from cloche.core.record import replace
from cloche.core.request import CellOptions
from cloche.core.result import Result
from cloche.keeper.attach import Kept, find_kept

from .accounts import account_of, counted
from .concurrency import shared_slots
from .held import ALREADY_OPEN, HeldOperations, SessionInterpreter
from .history import History, HistoryEntry
from .inputs import Files, gather_files, read_env
from .installing import PackageOperations
from .live import in_time, most_at_once
from .naming import Duration, read_terms
from .network import NetworkOperations
from .open_folder import OpenFolder, read_folder
from .paths import READ_BYTES, PathOperations
from .ports import AsyncConnection, AsyncForward, PortOperations
from .prepare import Prepared, prepare
from .run import (
    OnOutput,
    PreparedRequest,
    cell_task,
    check_session_language,
    collected,
    copy_out,
    fix_cell,
    make_sink,
    prepare_request,
    run_fixing,
    run_in,
    streamed,
    write_all,
)
from .snapshots import SnapshotOperations
from .tools import ToolsArgument, functions_for, offer
from .trial import TrialOperations

if TYPE_CHECKING:
    from cloche.agent.approval import Approver
    from cloche.core.fixing import Fixer
    from cloche.core.secrets import GivenSecrets
    from cloche.functions.tool import ToolLimits

MOST_FORKS = 64  # per call


class AsyncSession:
    """Run cells in one interpreter that keeps its state; made by `AsyncSandbox.session`.

        async with AsyncSandbox() as sandbox:
            session = await sandbox.session()
            await session.run("x = 20")
            result = await session.run("x + 1")

    Cells run one at a time. A cell that exceeds its time-out is interrupted, and the state is kept unless the cell
    ignores the interrupt: then the interpreter is killed, `result.meta["state"]` is `lost`, and `restart` starts a new
    one. The same applies if the interpreter exits by itself.
    """

    def __init__(
        self,
        sandbox: AsyncSandbox,
        opened: OpenSession,
        *,
        language: str,
        env: Mapping[str, str],
        idle_timeout_s: float | None,
        close_sandbox: Callable[[], Awaitable[None]] | None = None,
        beside: AsyncSandbox | AsyncSession | None = None,
    ) -> None:
        self._sandbox, self._env = sandbox, env
        self._beside = beside  # keeps the object alive that closes the sandbox
        self._interpreter = SessionInterpreter(opened, close_sandbox)
        self._language, self._idle_timeout_s = language, idle_timeout_s
        self._history = History()
        self._is_expired = False
        self._running = 0
        self._last_used = time.monotonic()
        self._check_idle()

    def __del__(self) -> None:
        if "_interpreter" in self.__dict__ and not self._sandbox._in_block:
            self._interpreter.let_go(self)

    @property
    def sandbox(self) -> AsyncSandbox:
        """Return the sandbox whose workspace this session uses, which may be a separate one."""
        return self._sandbox

    @property
    def language(self) -> str:
        """Return the language of the cells."""
        return self._language

    @property
    def runtime(self) -> str:
        """Return the engine's name and version, as it reports them."""
        return self._interpreter.opened.runtime

    @property
    def is_alive(self) -> bool:
        """Tell whether the next run will find the state of the last one."""
        return not self._interpreter.is_closed and not self._is_expired and self._interpreter.opened.is_alive

    @property
    def why_ended(self) -> str:
        """Return why the next run will not find the state of the last one, as far as is known; empty if it will."""
        if self._is_expired:
            return f"it was not used for {self._idle_timeout_s:g} s"
        why = self._interpreter.opened.why_ended
        return f"it has ended ({why})" if why else ""

    @property
    def history(self) -> tuple[HistoryEntry, ...]:
        """Return the cells that were run, oldest first: the last thousand, of at most four million characters."""
        return tuple(self._history)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(
        self,
        code: str,
        *,
        timeout: float | str | None = None,
        on_output: OnOutput | None = None,
        on_event: Sink | None = None,
        out: str | PathLike[str] | None = None,
        collect: Sequence[str] | None = None,
        autofix: Fixer | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        notebook: bool = False,
    ) -> Result:
        """Run one cell and return its result.

        `result.value` is the last expression; `result.outputs` holds everything displayed, including figures and the
        last expression's rich representation, as MIME bundles. `timeout`, `on_output`, `on_event`, `out` and `collect`
        are as for `Sandbox.run`; `on_event` also gets `Displayed` and `Cleared`. Output that tasks, threads and
        processes of earlier cells have printed since the last cell comes first, up to 64 KiB of each stream. Cancelling
        the call interrupts the cell; if the cell ignores that, it is killed together with the session. With `autofix`,
        a failing cell is repaired and run again, in the state that the failed one left.

        `env` has variables for this cell alone, `cwd` the folder that it begins in, which stays. With `notebook` the
        cell answers as in a notebook: an error's traceback is `meta["error"]["traceback"]` instead of on `stderr`, the
        value is displayed before the cell's figures, and lists, tables and figures are displayed as data, too.

        Raises InvalidRequest if the session is closed, has expired, or has ended.
        """
        if not isinstance(code, str):
            raise InvalidRequest(f"code: give text, not {type(code).__name__}")
        self._check_open()
        options = CellOptions(env=read_env(env), cwd=cwd, is_notebook=notebook)
        if autofix is not None:
            again = functools.partial(
                self.run, timeout=timeout, on_output=on_output, on_event=on_event, collect=collected(collect, out),
                env=env, cwd=cwd, notebook=notebook,
            )  # fmt: skip
            fixer, limits = self._sandbox.checked_fixer(autofix, code), self._sandbox.limits
            limits = limits.with_changes(timeout_s=self._sandbox.timeout_s(timeout))
            task = cell_task(code, self._language, limits, self._sandbox.policy.network)
            return await fix_cell(fixer, task, again, is_alive=lambda: self.is_alive, out=out)
        limit = self._sandbox.timeout_s(timeout)
        findings = await self._sandbox.screened(code, self._language)
        sink = make_sink(on_output, on_event)
        patterns = collected(collect, out)
        cell = await self._sandbox.install_for_cell(code, self._language, is_notebook=notebook)
        async with self._sandbox._slot():
            self._running += 1
            try:
                result = await self._sandbox.run_cell(
                    lambda: self._run(cell, limit, sink, patterns, options), code, self._language, self._env, limit
                )
            finally:
                self._running -= 1
                self._last_used = time.monotonic()
        result.meta.update(self._sandbox.notes)
        if findings:
            result.meta["screen"] = [str(finding) for finding in findings]
        self._history.remember(code, result)
        if out is not None:
            await copy_out(result, out)
        return result

    async def install(self, *packages: str) -> tuple[str, ...]:
        """Install packages in this session's sandbox, as `Sandbox.install` does; the next cell can import them."""
        return await self._sandbox.install(*packages)

    def _run(
        self, code: str, timeout_s: float, sink: Sink | None, collect: tuple[str, ...], options: CellOptions
    ) -> Awaitable[Result]:
        run: Callable[..., Coroutine[Any, Any, Result]] = self._interpreter.opened.run
        if collect and isinstance(self._interpreter.opened, SupportsCollecting):
            run = functools.partial(self._interpreter.opened.run_collecting, collect=collect)
        if sink is None:
            return run(code, timeout_s=timeout_s, sink=discard, options=options)
        return with_sink(lambda guarded: run(code, timeout_s=timeout_s, sink=guarded, options=options), sink)

    def stream(self, code: str, *, timeout: float | str | None = None) -> AsyncIterator[Event]:
        """Run as `run` does; yield Started, OutputChunk and Displayed, and finally Ended."""
        return streamed(lambda sink: self.run(code, timeout=timeout, on_event=sink))

    async def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does; its result has the status `signaled`."""
        await self._interpreter.opened.interrupt()

    async def checkpoint(self, name: str) -> None:
        """Save memory and workspace under `name`.

        Raises InvalidRequest naming what cannot be saved (a running thread or process, a file open for writing, a
        socket, shared memory, a timer), and BackendUnavailable without checkpoints. The state is kept in either case.
        """
        if not name or not isinstance(name, str):
            raise InvalidRequest(f"checkpoint: {name!r} is not a name; give a string")
        self._check_open()
        await self._forkable().checkpoint(name)
        self._last_used = time.monotonic()

    async def rollback(self, name: str) -> None:
        """Restore memory and workspace from a checkpoint, any number of times; later checkpoints are removed.

        It also revives a session whose interpreter has ended.
        """
        self._check_open()
        await self._forkable().rollback(name)
        self._last_used = time.monotonic()

    async def fork(self, count: int = 1) -> list[AsyncSession]:
        """Return `count` sessions that begin with this one's memory and workspace, each in its own sandbox.

        They can neither see nor signal one another, and are closed at the latest with this session's sandbox. Raises
        the errors of `checkpoint`.
        """
        if not 1 <= count <= MOST_FORKS:
            raise InvalidRequest(f"fork: {count!r} is not a number of forks from 1 to {MOST_FORKS}")
        self._check_open()
        forks = await self._forkable().fork(count)
        self._last_used = time.monotonic()
        return [self._sandbox._register_fork(self, opened) for opened in forks]

    def _copy_for_fork(self, sandbox: AsyncSandbox, opened: OpenSession) -> AsyncSession:
        copy = AsyncSession(
            sandbox, opened, language=self._language, env=self._env, idle_timeout_s=self._idle_timeout_s, beside=self
        )
        copy._history = History(self._history)
        return copy

    def _forkable(self) -> SupportsFork:
        if not isinstance(self._interpreter.opened, SupportsFork):
            raise BackendUnavailable(
                f"backend {self._sandbox.backend!r} has no checkpoints and no forks; Python sessions of backend "
                '"local" have, at level jail'
            )
        return self._interpreter.opened

    async def restart(self) -> None:
        """Start a new interpreter without the state; the workspace and the history stay."""
        if self._interpreter.is_closed:
            raise InvalidRequest("this session is closed; open another one")
        await self.end()
        self._interpreter.opened = await self._sandbox.open_interpreter(self._language, self._env)
        self._is_expired = False
        self._last_used = time.monotonic()
        self._check_idle()

    async def end(self) -> None:
        """End the interpreter and everything it started, as an idle time-out does; `restart` starts a new one."""
        await self._interpreter.end()

    async def close(self) -> None:
        """End the interpreter for good, and everything it started; the sandbox and its workspace stay.

        A session with `checkpoints` in a live sandbox has a separate sandbox, which is removed. Its forks stay.
        """
        await self._interpreter.close()

    async def read_file(self, path: str, *, max_bytes: int = READ_BYTES, timeout: Duration | None = None) -> bytes:
        """Return a file of the workspace; see `AsyncSandbox.read_file`."""
        return await self._sandbox.read_file(path, max_bytes=max_bytes, timeout=timeout)

    async def write_file(self, path: str, data: bytes | str, *, timeout: Duration | None = None) -> None:
        """Create or replace a file of the workspace; see `AsyncSandbox.write_file`."""
        await self._sandbox.write_file(path, data, timeout=timeout)

    def _check_open(self) -> None:
        if self._interpreter.is_closed:
            raise InvalidRequest("this session is closed; open another one")
        if self._is_expired:
            raise InvalidRequest(
                f"this session was not used for {self._idle_timeout_s:g} s and has expired; call restart, "
                "or open it with a longer idle_timeout"
            )

    def _check_idle(self) -> None:
        """Expire the session if it was idle for too long, or schedule the next check."""
        if self._idle_timeout_s is None or self._interpreter.is_closed or self._is_expired:
            return
        remaining_s = self._last_used + self._idle_timeout_s - time.monotonic()
        if self._running or remaining_s > 0:
            pause = self._idle_timeout_s if self._running else remaining_s
            self._interpreter.look_again_in(max(pause, 0.01), weakref.WeakMethod(self._check_idle))
            return
        self._is_expired = True
        self._interpreter.end_soon()


class AsyncSandbox(
    HeldOperations,
    TrialOperations,
    PathOperations,
    PortOperations,
    NetworkOperations,
    PackageOperations,
    SnapshotOperations,
):
    """Open a sandbox for several runs.

        async with AsyncSandbox(preset="standard") as sandbox:
            await sandbox.write_file("in.csv", data)
            result = await sandbox.run("...")

    Takes the keywords of SandboxOptions. `env` applies to every run; `files` (as in `run`) exist from the start.
    Leaving the block kills all processes and removes all files. Without a block, `open` and `close` do the same:
    `sandbox = await AsyncSandbox().open()`.

    A live sandbox is one small machine for its whole life: runs, commands (`exec`) and processes (`start`, `terminal`)
    run concurrently, and share files, loopback and background processes. Results have the files that `collect` asks
    for. Backends `local` (at level `jail`, with fewer features at `confined`), `docker`, `gvisor`, `microvm` and
    `firecracker` have live sandboxes.

    Without one, and with `live=False`, runs take turns, each in its own jail: they share only the workspace, and
    results have all files that a run changed. `is_live` tells which it is, and `meta["not_live"]` of each result says
    why it is not live; with `live=True` that is an error.

    A live sandbox of backend `local` may have a `name`, unique per user, by which other processes enter it with
    `attach`. With `keep`, a separate process holds it, and neither leaving the block nor the death of this process ends
    it. It ends by `kill`, or by time: `keep` after its last client; `lifetime` in all (24 h); `idle` without a call.
    With `at_end="pause"` it is paused when one of the first two is over, with `"pause-files"` without its processes.

    With `workspace`, the path of a folder of this machine, the sandbox works in a view of that folder, at its own path
    or at `workspace_at`; /workspace is a link to it. Changes go to a layer of `workspace_disk` bytes (2 GiB): `diff`
    shows them, `commit` writes them to the folder, `discard` reverts them. Files with keys are hidden, as are matches
    of `workspace_hide`. Folders of `workspace_read` are read-only. `meta["workspace"]` says if it is a copy.
    With `snapshot`, the path of an archive that `snapshot()` wrote, a live sandbox begins with those files.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        files: Files | None = None,
        live: bool | None = None,
        name: str | None = None,
        keep: Duration | None = None,
        lifetime: Duration | None = None,
        idle: Duration | None = None,
        at_end: str | None = None,
        workspace: str | PathLike[str] | None = None,
        workspace_at: str | None = None,
        workspace_disk: int | str | None = None,
        workspace_hide: Sequence[str] | None = None,
        workspace_read: Sequence[str | PathLike[str]] | None = None,
        snapshot: str | PathLike[str] | None = None,
        tools: ToolsArgument | None = None,
        tool_limits: ToolLimits | None = None,
        approve: Approver | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        self._options = options
        self._folder_options = read_folder(workspace, workspace_at, workspace_disk, workspace_hide, workspace_read)
        self._folder: OpenFolder | None = None
        self._terms = read_terms(name, keep, lifetime, idle, at_end)
        self._existing: Kept | None = None  # the kept sandbox that it attaches to
        self._env, self._files, self._name = read_env(env), files, name
        self._prepared: Prepared = prepare(**options)
        self._functions = functions_for(tools, tool_limits, approve, self._prepared)
        self._first_files = None if snapshot is None else os.path.abspath(os.fspath(snapshot))
        needs_live = self.policy.users or self.policy.account is not None or snapshot is not None
        self._is_live = True if name is not None or workspace is not None or needs_live else live
        self._stack = AsyncExitStack()
        self._opened: OpenSandbox | None = None
        self._turns = asyncio.Semaphore(1)  # for runs and commands; a live sandbox has more
        self._recordings: set[asyncio.Task[Result]] = set()
        self._forwards: set[AsyncForward] = set()
        self._connections: weakref.WeakSet[AsyncConnection] = weakref.WeakSet()

    @classmethod
    def attach(cls, name: str, *, env: Mapping[str, str] | None = None, secrets: GivenSecrets | None = None) -> Self:
        """Return this user's sandbox of that name, to be entered like a new one.

        It keeps its rules, limits and secrets; given ones must have the same names and hosts, and are not read. Leaving
        the block only detaches. Raises InvalidRequest, or BackendUnavailable if another version of Cloche holds it.
        """
        existing = find_kept(name, secrets)
        sandbox = cls(env=env, live=True, backend=existing.backend)
        sandbox._prepared = replace(sandbox._prepared, policy=existing.policy, limits=existing.limits)
        sandbox._name, sandbox._existing = name, existing
        return sandbox

    @property
    def name(self) -> str | None:
        """Return its name, or None."""
        return self._name

    async def _open_here(self) -> None:
        if self._opened is not None:
            raise InvalidRequest(ALREADY_OPEN)
        note_fallback(self.audit, self.notes)
        if self.policy.packages and self._existing is None:
            from .packages import check_not_auto, with_packages  # needed by some sandboxes only

            check_not_auto(self.policy)
            self._prepared = await with_packages(self._prepared, approve=self._approve_packages)
        if self._prepared.settings.toolchains and self._existing is None:
            from .toolchains import with_toolchains

            self._prepared = await with_toolchains(self._prepared, self._folder_options)
        async with AsyncExitStack() as on_failure:
            opened = None if self._folder_options is not None else await self._take_spare(on_failure)
            if opened is None:
                self._grow(on_failure)
                opened = await on_failure.enter_async_context(self._opening_with_folder())
            offer(opened, self._functions)
            await self._restore(opened)
            await write_all(opened, gather_files(self._files, max_bytes=self.limits.disk_bytes).files)
            self._stack = on_failure.pop_all()
        self._opened = opened
        self._turns = asyncio.Semaphore(most_at_once(self.limits.pids)) if self._is_live else self._turns

    async def _close_here(self, *raised: Any) -> None:  # noqa: ANN401 - as __aexit__ has it
        self._opened = None
        await self._close_ports()
        await self._stack.__aexit__(*raised or (None, None, None))
        if self._recordings:
            await asyncio.wait(self._recordings)

    async def run(
        self,
        code: str | None = None,
        *,
        language: str = "python",
        argv: Sequence[str | PathLike[str]] = (),
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        files: Files | None = None,
        timeout: float | str | None = None,
        on_output: OnOutput | None = None,
        on_event: Sink | None = None,
        out: str | PathLike[str] | None = None,
        spill: str | PathLike[str] | None = None,
        collect: Sequence[str] | None = None,
        autofix: Fixer | None = None,
    ) -> Result:
        """Run `code`, or the command `argv`, in this sandbox's workspace; see `cloche.run`.

        In a live sandbox, `result.files` has the files below /workspace that match a pattern of `collect`, such as
        `*.csv` or `out/**`, and were created or changed during the run, also by concurrent runs
        (`meta["files_shared"]`). With `out` alone, all such files are collected. In any other sandbox `collect` has no
        effect. With `autofix`, every attempt finds the workspace as the failed one left it.
        """
        opened = self._require_open()
        fixer = None if autofix is None else self.checked_fixer(autofix, code)
        prepared_request = await prepare_request(
            self._prepared, code, language=language, argv=argv, stdin=stdin, env={**self._env, **(env or {})},
            files=files, timeout_s=self.timeout_s(timeout) if timeout is not None else None,
            collect=collected(collect, out),
        )  # fmt: skip
        sink = make_sink(on_output, on_event)
        if fixer is None:
            return await self._run_in_turn(opened, prepared_request, sink, out, spill)
        return await run_fixing(
            fixer, self._prepared, prepared_request,
            lambda fixed_request: self._run_in_turn(opened, fixed_request, sink, spill=spill), out,
        )  # fmt: skip

    def stream(
        self,
        code: str | None = None,
        *,
        language: str = "python",
        argv: Sequence[str | PathLike[str]] = (),
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        files: Files | None = None,
        timeout: float | str | None = None,
    ) -> AsyncIterator[Event]:
        """Run as `run` does; yield Started, OutputChunk, and finally Ended. Closing the iterator kills the run."""
        return streamed(
            lambda sink: self.run(
                code, language=language, argv=argv, stdin=stdin, env=env, files=files, timeout=timeout, on_event=sink
            )
        )

    async def _run_in_turn(
        self,
        opened: OpenSandbox,
        prepared_request: PreparedRequest,
        sink: Sink | None,
        out: str | PathLike[str] | None = None,
        spill: str | PathLike[str] | None = None,
    ) -> Result:
        async with self._turns, self._slot():
            return await run_in(opened, self._prepared, prepared_request, sink=sink, out=out, spill=spill)

    def _slot(self) -> AbstractAsyncContextManager[None]:
        """Return the limit on concurrent runs in this process. A live sandbox has its own, `_turns`."""
        return contextlib.nullcontext() if self._is_live else shared_slots().hold()

    async def session(
        self,
        language: str = "python",
        *,
        env: Mapping[str, str] | None = None,
        idle_timeout: float | str | None = None,
        checkpoints: bool = False,
        timeout: Duration | None = None,
    ) -> AsyncSession:
        """Start an interpreter that keeps its state between runs, in this sandbox's workspace.

        `language` is python, javascript or bash, or java on backend `local`. `env` extends the sandbox's environment. A
        session that is not used for `idle_timeout` (seconds, or text such as `30m`) is ended; all end with the sandbox.

        In a live sandbox, a session shares files, processes and loopback with everything else in it, and has no
        checkpoints and no forks. With `checkpoints` it has them, but runs in a separate sandbox, with the same limits
        again and a copy of the workspace, and shares nothing; its `read_file` and `write_file` access its own files. In
        any other sandbox `checkpoints` has no effect. In a live sandbox no start takes longer than the sandbox's own
        time-out.

        Raises PolicyDenied, InvalidRequest, BackendUnavailable; StartFailed, also if starting takes longer than
        `timeout`.
        """
        with refusals(self._prepared.settings, language=language):
            name = check_session_language(self.policy, language)
        variables = {**self._env, **read_env(env)}
        limit = None if idle_timeout is None else parse_duration(idle_timeout, name="idle_timeout")
        async with in_time(timeout, lambda late: StartFailed(f"the start of the {name} session: {late}")):
            if checkpoints and self._is_live:
                return await self._open_apart(name, variables, limit)
            opened = await self.open_interpreter(name, variables)
        session = AsyncSession(self, opened, language=name, env=variables, idle_timeout_s=limit)
        self._stack.push_async_callback(session._interpreter.close)
        return session

    async def open_interpreter(self, language: str, env: Mapping[str, str]) -> OpenSession:
        """Start the interpreter of a session. Callers usually want `session`."""
        opened = self._require_open()
        if isinstance(opened, SupportsSessions):
            return await opened.open_session(language, env)
        raise BackendUnavailable(f"backend {self.backend!r} has no sessions; use run, or another backend")

    async def _open_apart(self, language: str, env: Mapping[str, str], idle_timeout_s: float | None) -> AsyncSession:
        live = self._require_open()
        if not isinstance(live, SupportsSessionsApart):
            raise BackendUnavailable(
                f"backend {self.backend!r} has no checkpoints and no forks; leave checkpoints=True out, or use "
                'backend "local"'
            )
        opened = await live.open_session_apart(language, env)
        sandbox = self._beside(opened.sandbox)
        session = AsyncSession(
            sandbox, opened, language=language, env=env, idle_timeout_s=idle_timeout_s,
            close_sandbox=getattr(opened.sandbox, "close", None), beside=self,
        )  # fmt: skip
        self._stack.push_async_exit(sandbox)  # together with its forks
        self._stack.push_async_callback(session._interpreter.close)
        return session

    def _beside(self, opened: OpenSandbox) -> AsyncSandbox:
        """Return a sandbox like this one around another workspace, which is closed together with it."""
        sandbox = AsyncSandbox.__new__(AsyncSandbox)
        sandbox.__dict__.update(self.__dict__)
        sandbox._holder = None  # closed by this sandbox's stack
        sandbox._opened, sandbox._stack, sandbox._turns = opened, AsyncExitStack(), asyncio.Semaphore(1)
        sandbox._is_live, sandbox._recordings, sandbox._forwards = False, set(), set()
        sandbox._connections = weakref.WeakSet()
        sandbox._share_folder_of(self)
        closing = getattr(opened, "close", None)
        if closing is not None:
            sandbox._stack.push_async_callback(closing)
        return sandbox

    def run_cell(
        self, run: Callable[[], Awaitable[Result]], code: str, language: str, env: Mapping[str, str], timeout_s: float
    ) -> Awaitable[Result]:
        """Run a session's cell, and record it if it is audited or traced."""
        if account_of(self._prepared.backend) is not None:
            run = functools.partial(counted, run, self._prepared.backend, timeout_s)
        if not is_wanted(self._prepared.audit):
            return run()
        execution = Execution(
            kind="cell", backend=self.backend, language=language, code=code, env=env, limits=self.limits,
            timeout_s=timeout_s, policy=self.policy, account=account_of(self._prepared.backend),
        )  # fmt: skip
        return recorded(run, self.audit, execution)

    def _register_fork(self, session: AsyncSession, fork: OpenSession) -> AsyncSession:
        """Return the session of a fork, in a sandbox that closes with this one."""
        if not isinstance(fork, SupportsFork):
            raise InternalError("the fork does not report its sandbox")
        sandbox = self._beside(fork.sandbox)
        copy = session._copy_for_fork(sandbox, fork)
        sandbox._stack.push_async_callback(copy._interpreter.close)
        self._stack.push_async_exit(sandbox)  # together with its sessions and forks
        return copy

    def timeout_s(self, timeout: float | str | None) -> float:
        """Return the time-out of one run in seconds, after ceilings and the global override."""
        if timeout is None:
            return self.limits.timeout_s
        options: SandboxOptions = {**self._options, "timeout": timeout}
        return prepare(**options).limits.timeout_s
