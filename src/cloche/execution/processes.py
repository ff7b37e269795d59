"""Commands and processes in a live sandbox: `exec`, `start`, `terminal`, and `AsyncProcess`.

Rules treat every command as a use of the shell's language: where bash is not allowed, no command runs. Commands are
recorded as runs are. The record of a started process ends when the process ends, is detached, or its sandbox is closed.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self

from cloche.audit.recording import Execution, is_wanted, recorded, refusals
from cloche.config.origins import DEFAULT
from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.events import Sink, discard
from cloche.core.limits import MIB, parse_duration
from cloche.core.loops import any_of, finish, with_sink
from cloche.core.policy import Policy
from cloche.core.processes import ProcessInfo, ProcessRequest, shell_argv, signal_number
from cloche.core.protocols import OpenLiveSandbox, OpenProcess, OpenStream
from cloche.core.request import MAX_STDIN_BYTES
from cloche.core.result import Result
from cloche.core.screen import apply_screen

from .accounts import account_of, counted
from .inputs import read_argv, read_env, read_stdin
from .live import LiveOperations
from .prepare import Prepared
from .run import COMMAND_LANGUAGE, NOT_FOUND, OnOutput, check_language, make_sink

Argv = Sequence[str | PathLike[str]]
SignalTarget = Literal["process", "group", "tree"]
TARGETS = ("process", "group", "tree")
MOST_CELLS = 1 << 12  # rows or columns of a terminal
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


class AsyncProcess:
    """A process of a live sandbox; made by `start`, `terminal` and `process` of `AsyncSandbox`.

        async with await sandbox.start(["python3", "-m", "http.server", "8000"]) as server:
            async for piece in server.stderr:
                ...

    `stdout` and `stderr` yield bytes as they arrive, by iteration or `read`. As with a pipe, a process blocks once
    about 256 KiB of a stream are unread. `wait` reads the streams that have no reader yet. Leaving the block kills the
    process and everything it started, unless it was detached (`detach`, `keep=True`).
    """

    def __init__(
        self,
        process: OpenProcess,
        *,
        notes: Mapping[str, Any],
        is_kept: bool = False,
        recording: asyncio.Task[Result] | None = None,
    ) -> None:
        self._process, self._notes, self._recording = process, notes, recording
        self._is_kept = is_kept

    @property
    def id(self) -> str:
        """Return the ID for `AsyncSandbox.process`; it is never reused in the sandbox."""
        return self._process.id

    @property
    def pid(self) -> int:
        """Return its process ID inside."""
        return self._process.pid

    @property
    def is_terminal(self) -> bool:
        """Tell whether it has a terminal."""
        return bool(getattr(self._process, "is_terminal", False))

    @property
    def has_input(self) -> bool:
        """Tell whether it still reads its standard input, if it was found with `reads=False`."""
        return bool(getattr(self._process, "has_input", True))

    @property
    def stdout(self) -> OpenStream:
        """Return its standard output; with a terminal, all of the terminal's output."""
        return self._process.stdout

    @property
    def stderr(self) -> OpenStream:
        """Return its standard error; empty with a terminal."""
        return self._process.stderr

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_kept:
            await self.detach()
        else:
            await self.close()

    async def write(self, data: bytes | str) -> bool:
        """Write to its standard input, at the speed of its reads; return False if it has closed it."""
        return await self._process.write(read_stdin(data))

    async def close_stdin(self) -> None:
        """Close its standard input; on a terminal, send the end-of-file character (Ctrl-D)."""
        self._process.close_stdin()

    async def signal(self, number: int | str, to: SignalTarget = "process") -> None:
        """Send a signal, by number or name: to the process, to its `group`, or to its `tree` of everything it started.

        With a terminal, the group is the foreground process group.
        """
        if to not in TARGETS:
            raise InvalidRequest(f"to: {to!r} is none of {', '.join(TARGETS)}")
        self._process.signal(signal_number(number), to)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        _check_size(rows, columns)
        self._process.resize(rows, columns)

    async def wait(self, timeout: float | str | None = None) -> Result:  # noqa: ASYNC109 - waiting ends, not the process
        """Wait for its end and return the result. Raises TimeoutError after `timeout`; the process continues.

        The result's `stdout` and `stderr` contain unread output, its head and tail within the output limit. To collect
        it, `wait` starts reading each stream that has no reader yet, which can then not be read otherwise. A stream
        with a reader is left alone; a process that writes to it waits for that reader.

        Raises OutcomeUnknown if the sandbox is gone.
        """
        seconds = None if timeout is None else parse_duration(timeout, name="timeout")
        async with asyncio.timeout(seconds):
            result = await self._process.result()
        result.meta = {**self._notes, **result.meta}
        return result

    async def kill(self) -> None:
        """Kill the process and everything it started; `wait` returns when that is done."""
        self._process.kill()

    async def detach(self) -> None:
        """Let the process continue without this object, until the sandbox ends; `process` finds it again by its ID.

        Output that has been received but not read is lost.
        """
        self._process.detach()
        await self._recorded()

    async def close(self) -> None:
        """Kill the process, unless it has ended or is detached, and wait until everything it started is gone."""
        await self._process.close()
        await self._recorded()

    async def _recorded(self) -> None:
        if self._recording is not None:
            await asyncio.wait([self._recording])


class ProcessOperations(LiveOperations):
    """Start commands in a live sandbox."""

    _recordings: set[asyncio.Task[Result]]

    async def exec(
        self,
        argv: Argv | None = None,
        *,
        shell: str | None = None,
        stdin: bytes | str = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | str | None = None,  # noqa: ASYNC109 - it ends the command, not the call
        on_output: OnOutput | None = None,
        on_event: Sink | None = None,
    ) -> Result:
        """Run a command, the list `argv` or a line of `shell`, concurrently with other runs, and return its result.

        Its working directory is `cwd`, by default /workspace; `env` extends the sandbox's environment. `timeout`
        defaults to the sandbox's; it ends the command and everything the command started, and nothing else. Processes
        that the command leaves in the background live until the sandbox ends. `on_output` and `on_event` are as for
        `run`. Cancelling the call kills the command.

        A missing program is a result with exit code 127. Raises InvalidRequest, PolicyDenied, StartFailed,
        SandboxFileError for a `cwd` that cannot be entered, OutcomeUnknown.
        """
        live = self._require_live("exec")
        data = _checked_stdin(stdin)
        request = self._command(argv, shell, cwd, env, user, timeout_s=self.timeout_s(timeout), has_input=bool(data))
        sink = make_sink(on_output, on_event)
        async with self._turns:
            return await _noted(self._prepared, lambda: _run_command(live, request, data, sink), "exec", request, shell)

    async def start(
        self,
        argv: Argv | None = None,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | str | None = None,  # noqa: ASYNC109 - it ends the command, not the call
        keep: bool = False,
        tag: str = "",
        alone: bool = False,
        has_input: bool = True,
    ) -> AsyncProcess:
        """Start a command and return it while it runs; the arguments are as for `exec`.

        It has no time-out unless one is given. With `keep`, the end of its block detaches it instead of killing it.
        `process` finds it by its `tag`, too. With `alone`, it ends when its output does, which processes that it has
        started may still write, and its time-out kills none of these. Without `has_input` its standard input is empty.
        """
        limit = None if timeout is None else parse_duration(timeout, name="timeout")
        request = self._command(
            argv, shell, cwd, env, user, timeout_s=limit, kept=keep, has_input=has_input, tag=tag, alone=alone
        )
        return await self._started("start", request, shell)

    async def terminal(
        self,
        argv: Argv | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | str | None = None,  # noqa: ASYNC109 - it ends the command, not the call
        keep: bool = False,
        tag: str = "",
        alone: bool = False,
    ) -> AsyncProcess:
        """Start a command, by default a shell, with its own terminal. All of its output is in `stdout`.

        With `keep` it goes on when this object is gone: its terminal does not hang up then.
        """
        _check_size(rows, columns)
        command = SHELL if argv is None else argv
        limit = None if timeout is None else parse_duration(timeout, name="timeout")
        request = self._command(
            command, None, cwd, env, user, timeout_s=limit, terminal=(rows, columns), kept=keep, tag=tag, alone=alone
        )
        return await self._started("terminal", request, None)

    async def process(
        self,
        id: str | None = None,  # noqa: A002 - as the process's own property
        *,
        pid: int | None = None,
        tag: str | None = None,
        reads: bool = True,
    ) -> AsyncProcess:
        """Return a process by its ID, its process ID or its tag: a running one, or one that ended recently.

        Of several with a tag it is the last. It is taken from any other object that holds it. Of each stream, the last
        32 KiB of unread output can be read. With `reads=False` it must run, its output stays with its reader, and it
        goes on at the end of the block: it can be written to, signalled, resized and killed.
        """
        given = {name: value for name, value in (("id", id), ("pid", pid), ("tag", tag)) if value is not None}
        kinds = {"id": str, "pid": int, "tag": str}
        if len(given) != 1 or not all(isinstance(value, kinds[name]) for name, value in given.items()):
            raise InvalidRequest("process: give one of id, pid and tag; processes lists them")
        live = self._require_live("process")
        opened = await (live.attach_process(given) if reads else live.control_process(given))
        return AsyncProcess(opened, notes=self._prepared.notes, is_kept=not reads)

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the processes that commands and runs started: running ones, and those that ended recently."""
        return tuple(await self._require_live("processes").list_processes())

    def timeout_s(self, timeout: float | str | None) -> float:
        """Return the time-out of one run in seconds."""
        raise NotImplementedError

    def _command(
        self,
        argv: Argv | None,
        shell: str | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        *,
        timeout_s: float | None = None,
        terminal: tuple[int, int] | None = None,
        kept: bool = False,
        has_input: bool = True,
        tag: str = "",
        alone: bool = False,
    ) -> ProcessRequest:
        """Check the arguments of a command against the rules, and return the request."""
        if (argv is None) == (shell is None):
            raise InvalidRequest("give a command: either argv, a list of words, or shell, a shell command")
        policy = self._prepared.policy
        if user not in (None, policy.account) and not policy.users:
            origin = self._prepared.settings.origins.get("users", DEFAULT)
            remedy = f"lift ceilings.users ({origin})" if origin.kind == "ceiling" else "open it with users=True"
            raise InvalidRequest(
                f"user: {user!r} is not available, because this sandbox has one user; leave it out, or {remedy}"
            )
        with refusals(self._prepared.settings, language=COMMAND_LANGUAGE, code=shell):
            name = check_language(self._prepared.policy, COMMAND_LANGUAGE)
            if shell is not None:
                apply_screen(self._prepared.policy.screen, name, shell)
        return ProcessRequest(
            argv=shell_argv(shell) if shell is not None else read_argv(argv or ()),
            cwd=_checked_folder(cwd, policy), env={**self._env, **read_env(env)}, user=user, timeout_s=timeout_s,
            terminal=terminal, kept=kept, has_input=has_input, tag=tag, alone=alone,
        )  # fmt: skip

    async def _started(self, kind: str, request: ProcessRequest, shell: str | None) -> AsyncProcess:
        live = self._require_live(kind)
        notes = self._prepared.notes
        if not is_wanted(self._prepared.audit) and account_of(self._prepared.backend) is None:
            return AsyncProcess(await live.start_process(request), notes=notes, is_kept=request.kept)
        started: asyncio.Future[OpenProcess] = asyncio.get_running_loop().create_future()
        self_ref = weakref.ref(self)  # the recording task must not keep the sandbox alive

        async def run() -> Result:
            process = await live.start_process(request)
            started.set_result(process)
            try:
                return await process.result(takes_output=False)
            except OutcomeUnknown:
                sandbox = self_ref()
                if sandbox is not None and sandbox._opened is not None:
                    raise
                raise asyncio.CancelledError from None  # the process was killed with its sandbox

        recording = asyncio.ensure_future(_noted(self._prepared, run, kind, request, shell))
        self._recordings.add(recording)
        recording.add_done_callback(self._recordings.discard)
        recording.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # retrieves the exception, which is recorded
        try:
            await any_of(started, recording)
        except asyncio.CancelledError:
            recording.cancel()
            if started.done():
                await finish(started.result().close())
            raise
        if not started.done():
            await recording  # raises the error of starting
        return AsyncProcess(started.result(), notes=notes, is_kept=request.kept, recording=recording)


async def _noted(
    prepared: Prepared,
    run: Callable[[], Awaitable[Result]],
    kind: str,
    request: ProcessRequest,
    shell: str | None,
) -> Result:
    """Run, record the run if it is audited or traced, and complete the result's meta."""
    running = functools.partial(counted, run, prepared.backend, request.timeout_s)
    if is_wanted(prepared.audit):
        execution = Execution(
            kind=kind, backend=prepared.backend.name, language=COMMAND_LANGUAGE, code=shell, argv=request.argv,
            env=request.env, limits=prepared.limits, timeout_s=request.timeout_s, policy=prepared.policy,
            account=account_of(prepared.backend),
        )  # fmt: skip
        result = await recorded(running, prepared.audit, execution)
    else:
        result = await running()
    result.meta = {**prepared.notes, **result.meta}
    if result.exit_code == NOT_FOUND and shell is None:
        from .toolchains import advise

        await advise(result, prepared, request.argv)
    return result


async def _run_command(live: OpenLiveSandbox, request: ProcessRequest, stdin: bytes, sink: Sink | None) -> Result:
    if sink is None:
        return await _run_to_end(live, request, stdin, discard)
    return await with_sink(lambda guarded: _run_to_end(live, request, stdin, guarded), sink)


async def _run_to_end(live: OpenLiveSandbox, request: ProcessRequest, stdin: bytes, sink: Sink) -> Result:
    process = await live.start_process(request, sink)
    sending = asyncio.ensure_future(_send(process, stdin)) if stdin else None
    try:
        return await process.result()
    except asyncio.CancelledError:
        await finish(process.close())
        raise
    finally:
        if sending is not None:
            sending.cancel()


async def _send(process: OpenProcess, data: bytes) -> None:
    if await process.write(data):
        process.close_stdin()


def _checked_stdin(stdin: object) -> bytes:
    data = read_stdin(stdin)
    if len(data) > MAX_STDIN_BYTES:
        raise InvalidRequest(
            f"stdin: {len(data)} bytes exceed the limit of {MAX_STDIN_BYTES // MIB} MiB; write a file instead, or "
            "start the command and write to it"
        )
    return data


def _checked_folder(cwd: object, policy: Policy) -> str:
    if cwd is None:
        return "/workspace" if policy.account is None else "~"
    if not isinstance(cwd, str) or not cwd or "\0" in cwd:
        raise InvalidRequest(f"cwd: {cwd!r} is not a folder of the sandbox; give text such as /tmp")
    is_whole = cwd.startswith(("/", "~/")) or cwd == "~"
    return cwd if is_whole else f"/workspace/{cwd}"


def _check_size(rows: object, columns: object) -> None:
    for name, value in (("rows", rows), ("columns", columns)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_CELLS:
            raise InvalidRequest(f"{name}: {value!r} is not a size of a terminal; give a number from 1 to {MOST_CELLS}")
