"""One call, one throwaway sandbox: settings, rules, request, queue, run.

Every front end goes through `prepare` and `run_in`, so that the same rules apply to every run. The module also has the
parts around a run: callbacks (`make_sink`), a run as a stream of events (`streamed`), host files that receive the full
output during the run (`Spill`; the result keeps only head and tail), and copying files out (`copy_out`).

Auto-fix (`run_fixing`): a fixer controls only the code. Request, policy and limits are fixed before the first run. The
function that a fixer calls takes only the new program text, and runs it in place of the first program's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, Unpack, cast

from cloche.audit.chain import sha256_of
from cloche.audit.recording import Execution, is_traced, is_wanted, note_fallback, recorded, refusals
from cloche.config.options import SandboxOptions
from cloche.config.settings import list_options_in_signature
from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest, PolicyDenied, SandboxFileError
from cloche.core.events import (
    Ended,
    Event,
    NetworkRefused,
    OutputChunk,
    PlaceholderSent,
    Sink,
    Started,
    Stream,
)
from cloche.core.languages import SESSION_LANGUAGES, language_named, session_language_named
from cloche.core.limits import Limits
from cloche.core.loops import become_task, check_event_loop, with_sink
from cloche.core.policy import DEFAULT_LANGUAGES, HOST_BACKENDS, Policy
from cloche.core.protocols import (
    OpenSandbox,
    SupportsBatchFiles,
    SupportsSingleRun,
    SupportsStreaming,
)
from cloche.core.record import dataclass, replace
from cloche.core.request import InputFile, Request, read_patterns
from cloche.core.result import Result
from cloche.hostfs import open_in_place_of

from .accounts import account_of, counted
from .concurrency import shared_slots
from .inputs import Files, Inputs, gather_files, has_host_files, read_argv, read_env, read_stdin
from .prepare import Prepared, prepare_in_thread, screen
from .tools import ToolsArgument, functions_for, offer, opening_with, runs_live

if TYPE_CHECKING:
    from cloche.agent.approval import Approver
    from cloche.core.fixing import Fixer, FixTask
    from cloche.core.functions import OfferedFunctions
    from cloche.functions.tool import ToolLimits

OnOutput = Callable[[Stream, bytes], None]

NO_ARGUMENTS: tuple[str, ...] = ()
NO_INPUTS = Inputs()
REQUIRED_META = frozenset(("backend", "level", "limits", "duration"))  # keys that every result's meta has
SPILL_FILE_NAMES: dict[Stream, str] = {"stdout": "stdout.txt", "stderr": "stderr.txt"}  # in the `spill` folder
NETWORK_FIELDS = ("host", "port", "why", "connections")
NOT_FOUND = 127  # a shell's exit code for a command that is not found (POSIX)
COMMAND_LANGUAGE = "bash"  # a bare command can do everything that a shell can, so it needs the same permission

log = logging.getLogger("cloche.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked request, and notes about it for the result's meta."""

    request: Request
    notes: Mapping[str, Any]


@list_options_in_signature
async def arun(
    code: str | None = None,
    *,
    language: str = "python",
    argv: Sequence[str | PathLike[str]] = (),
    stdin: bytes | str = b"",
    env: Mapping[str, str] | None = None,
    files: Files | None = None,
    on_output: OnOutput | None = None,
    on_event: Sink | None = None,
    out: str | PathLike[str] | None = None,
    spill: str | PathLike[str] | None = None,
    autofix: Fixer | None = None,
    tools: ToolsArgument | None = None,
    tool_limits: ToolLimits | None = None,
    approve: Approver | None = None,
    **options: Unpack[SandboxOptions],
) -> Result:
    """Run `code` in a throwaway sandbox and return the result.

    With `code`, `argv` holds the program's arguments; without it, `argv` is the whole command. `files` is a mapping of
    paths below /workspace to content (`bytes`, or `str` as text) or to host files and directories (path objects), or a
    list of host paths. The code runs from a file beside them, named `cloche-main.py`, `.cloche-main.js` and so on;
    given files cannot have such a name, and listings do not show it. `stdin` is bytes or text. `env` is the program's
    environment besides a fixed minimum. `on_output(stream, data)` gets each piece of output as bytes while the code
    runs, `on_event` every event of `cloche.core.events`. `out` is a host directory for the files that the run created
    or changed, `spill` one for the full output as stdout.txt and stderr.txt; in both, existing files are replaced, and
    links are not followed. With `autofix` (see `cloche.autofix.loop.AutoFix`) a failing program is repaired by a
    language model and run again, each time in a new sandbox. The result is that of the last run, and its `fix` lists
    the repairs; callbacks get the events of every run. `tools` are functions of the caller, by name, that the program
    imports from `cloche_host` and calls: a function that is not async runs in a thread, others on this loop. `approve`
    decides about calls of risky ones. The other keywords are those of `SandboxOptions`. Cancelling the call kills the
    run.

    A failure of the code is a status of the result. Raises InvalidRequest, PolicyDenied, BackendUnavailable,
    StartFailed.
    """
    check_event_loop()
    prepared = await prepare_program(code, language, files, **options)
    if autofix is not None or not vars(type(prepared.backend)).get("starts_eagerly", False):
        await become_task()
    fixer = None if autofix is None else check_fixer(autofix, prepared, code)
    functions = functions_for(tools, tool_limits, approve, prepared, None if code is None else language)
    collect = ("**",) if runs_live(functions, prepared) else ()
    prepared_request = await prepare_request(
        prepared, code, language=language, argv=argv, stdin=stdin, env=env, files=files, collect=collect
    )
    check_out(out)
    sink = make_sink(on_output, on_event)
    note_fallback(prepared.audit, prepared.notes)
    if fixer is None:
        return await run_once(prepared, prepared_request, sink=sink, out=out, spill=spill, functions=functions)
    return await run_fixing(
        fixer,
        prepared,
        prepared_request,
        lambda fixed_request: run_once(prepared, fixed_request, sink=sink, spill=spill, functions=functions),
        out,
    )


async def prepare_program(
    code: str | None, language: str, files: Files | None, **options: Unpack[SandboxOptions]
) -> Prepared:
    """Resolve what is decided before a sandbox opens, with the program's packages and the caller's toolchains."""
    prepared = await prepare_in_thread(**options)
    if prepared.policy.packages:
        prepared = await _with_packages(prepared, code, language, files)
    if prepared.settings.toolchains:
        from .toolchains import with_toolchains  # needed by some runs only

        prepared = await with_toolchains(prepared)
    return prepared


async def _with_packages(prepared: Prepared, code: str | None, language: str, files: Files | None) -> Prepared:
    from .packages import with_packages  # needed by some runs only

    with refusals(prepared.settings, language=language, code=code):
        name = check_language(prepared.policy, language if code is not None else COMMAND_LANGUAGE)
    return await with_packages(prepared, code=code, language=name, files=files, is_own_list=True)


async def run_once(
    prepared: Prepared,
    prepared_request: PreparedRequest,
    *,
    sink: Sink | None = None,
    out: str | PathLike[str] | None = None,
    spill: str | PathLike[str] | None = None,
    functions: OfferedFunctions | None = None,
) -> Result:
    """Run a prepared request in its own sandbox."""
    async with shared_slots().hold(), _opening(prepared, functions) as opened:
        offer(opened, functions)
        if _supports_single_run(type(opened)):
            cast("SupportsSingleRun", opened).expect_single_run()
        return await run_in(opened, prepared, prepared_request, sink=sink, out=out, spill=spill)


def _opening(prepared: Prepared, functions: OfferedFunctions | None = None) -> AbstractAsyncContextManager[OpenSandbox]:
    opening = opening_with(functions, prepared)
    if not is_traced():
        return opening
    from cloche.audit.telemetry import opened_in_span

    return opened_in_span(opening, prepared.backend.name)


@functools.cache
def _supports_single_run(kind: type) -> bool:
    """Check a class once and cache it: `issubclass` with a protocol is slow."""
    return issubclass(kind, SupportsSingleRun)


async def prepare_request(
    prepared: Prepared,
    code: str | None,
    *,
    language: str,
    argv: Sequence[str | PathLike[str]],
    stdin: bytes | str,
    env: Mapping[str, str] | None,
    files: Files | None,
    timeout_s: float | None = None,
    collect: tuple[str, ...] = (),
) -> PreparedRequest:
    """Check the arguments of one run against the rules, and read the files that they name."""
    if code is not None and not isinstance(code, str):
        raise InvalidRequest(f"code: give text, not {type(code).__name__}")
    with refusals(prepared.settings, language=language, code=code):
        name = check_language(prepared.policy, language if code is not None else COMMAND_LANGUAGE)
        findings = await screen(prepared.policy.screen, name, code) if code is not None else ()
    inputs = NO_INPUTS if files is None else await gather(files, prepared)
    request = Request(
        code=code,
        language=name,
        argv=NO_ARGUMENTS if argv is NO_ARGUMENTS else read_argv(argv),
        stdin=stdin if type(stdin) is bytes else read_stdin(stdin),
        env={} if env is None else read_env(env),
        files=inputs.files,
        timeout_s=timeout_s,
        collect=collect,
    )
    notes: dict[str, Any] = {}
    if findings:
        notes["screen"] = [str(finding) for finding in findings]
    if inputs.left_out:
        notes["files_left_out"] = list(inputs.left_out)
    return PreparedRequest(request=request, notes=notes)


async def gather(files: Files | None, prepared: Prepared) -> Inputs:
    """Read given files; host files are read in a thread, so that other runs do not wait for the disk."""
    limits = prepared.limits
    if not has_host_files(files):
        return gather_files(files, max_bytes=limits.disk_bytes, max_files=limits.inodes)
    from cloche.core.changes import SupportsStreamedFiles  # needed by some runs only

    maps = isinstance(prepared.backend, SupportsStreamedFiles) and prepared.backend.streams_files
    return await asyncio.to_thread(gather_files, files, max_bytes=limits.disk_bytes, max_files=limits.inodes, maps=maps)


def check_language(policy: Policy, language: str) -> str:
    """Return a language's canonical name. Raises InvalidRequest for an unknown one, PolicyDenied for one not
    allowed.
    """
    name = language_named(language).name
    return _allowed(policy, name, is_allowed=name in policy.languages)


def check_session_language(policy: Policy, language: str) -> str:
    """Return a session's language, as `check_language` does. One without runs is allowed where all usual ones are."""
    name = session_language_named(language).name
    is_usual = name in SESSION_LANGUAGES and set(DEFAULT_LANGUAGES) <= set(policy.languages)
    return _allowed(policy, name, is_allowed=is_usual or name in policy.languages)


def _allowed(policy: Policy, name: str, *, is_allowed: bool) -> str:
    if not is_allowed:
        allowed = ", ".join(policy.languages)
        raise PolicyDenied(f'language "{name}" is not allowed here (allowed: {allowed}); name it in sandbox.languages')
    return name


def make_sink(on_output: OnOutput | None, on_event: Sink | None) -> Sink | None:
    """Combine the caller's two callbacks into one sink; None if there are none."""
    if on_output is None:
        return on_event

    def deliver(event: Event) -> None:
        if on_event is not None:
            on_event(event)
        if isinstance(event, OutputChunk):
            on_output(event.stream, event.data)

    return deliver


async def run_in(
    opened: OpenSandbox,
    prepared: Prepared,
    prepared_request: PreparedRequest,
    *,
    sink: Sink | None = None,
    out: str | PathLike[str] | None = None,
    spill: str | PathLike[str] | None = None,
) -> Result:
    """Run a prepared request in an open sandbox, complete the result's meta, and copy its files to `out` if given.

    Raises AuditFailed before anything runs, if auditing is on and the log cannot be written.
    """
    if is_wanted(prepared.audit):
        run = _run_in_phases if sink is not None and is_traced() else _run_counted
        running = functools.partial(run, opened, prepared, prepared_request, sink, spill)
        result = await recorded(running, prepared.audit, _execution(prepared, prepared_request.request))
    else:
        result = await _run_counted(opened, prepared, prepared_request, sink, spill)
    if out is not None:
        await copy_out(result, out)
    return result


def _execution(prepared: Prepared, request: Request) -> Execution:
    return Execution(
        kind="run", backend=prepared.backend.name, language=request.language, code=request.code, argv=request.argv,
        env=request.env, limits=prepared.limits, timeout_s=request.timeout_s, policy=prepared.policy,
        account=account_of(prepared.backend),
    )  # fmt: skip


async def _run_in_phases(
    opened: OpenSandbox,
    prepared: Prepared,
    prepared_request: PreparedRequest,
    sink: Sink | None,
    spill: str | PathLike[str] | None,
) -> Result:
    """Run with a span for each phase. Without a sink there are none, since reporting the program's start costs time."""
    from cloche.audit.telemetry import Phases

    phases = Phases()

    def note(event: Event) -> None:
        phases.note(event)
        if sink is not None:
            sink(event)

    result = await _run_counted(opened, prepared, prepared_request, note, spill)
    phases.end(result)
    return result


async def _run_counted(
    opened: OpenSandbox,
    prepared: Prepared,
    prepared_request: PreparedRequest,
    sink: Sink | None,
    spill: str | PathLike[str] | None,
) -> Result:
    if account_of(prepared.backend) is None:
        return await _run_prepared(opened, prepared, prepared_request, sink, spill)
    running = functools.partial(_run_prepared, opened, prepared, prepared_request, sink, spill)
    return await counted(running, prepared.backend, prepared_request.request.timeout_s or prepared.limits.timeout_s)


async def _run_prepared(
    opened: OpenSandbox,
    prepared: Prepared,
    prepared_request: PreparedRequest,
    sink: Sink | None,
    spill: str | PathLike[str] | None,
) -> Result:
    notes = dict(prepared_request.notes)
    if spill is not None:
        with Spill(spill, sink) as spill_sink:
            result = await run_with_sink(opened, prepared_request.request, spill_sink)
        notes["spilled"] = spill_sink.paths()
    else:
        result = await (
            opened.run(prepared_request.request)
            if sink is None
            else run_with_sink(opened, prepared_request.request, sink)
        )
    if result.exit_code == NOT_FOUND and prepared_request.request.code is None:
        from .toolchains import advise

        await advise(result, prepared, prepared_request.request.argv)
    meta = result.meta
    if not meta.keys() >= REQUIRED_META:
        defaults = {"level": str(result.enforcement.level), "limits": prepared.limits.as_dict()}
        meta = {"backend": prepared.backend.name, **defaults, "duration": result.duration, **meta}
    result.meta = {**prepared.notes, **notes, **meta}
    if sink is not None:
        for row in result.network_refused:
            sink(NetworkRefused(**{name: row[name] for name in NETWORK_FIELDS}))
        if prepared.policy.secrets is not None:
            from .secrets import placeholders_sent

            for row in placeholders_sent(result):
                sink(PlaceholderSent(**{name: row[name] for name in NETWORK_FIELDS}))
    log.debug(
        "%s: %s, exit code %d, %.3f s",
        prepared.backend.name,
        result.status,
        result.exit_code,
        result.duration,
    )
    return result


def collected(collect: Sequence[str] | None, out: str | PathLike[str] | None) -> tuple[str, ...]:
    """Return the patterns of the files that a result has: the given ones, or all files if they are copied `out`."""
    check_out(out)
    return (("**",) if out is not None else ()) if collect is None else read_patterns(collect)


def check_out(folder: str | PathLike[str] | None) -> None:
    """Refuse, before anything runs, a host folder that cannot be created or written to."""
    existing = "" if folder is None else os.path.abspath(folder)
    while existing and not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if existing and not os.path.isdir(existing):
        raise InvalidRequest(f"out: cannot write to the folder {str(folder)!r}: {existing!r} is a file")
    if existing and not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidRequest(
            f"out: cannot write to the folder {str(folder)!r}: {existing!r} may not be written to by this user"
        )


async def copy_out(result: Result, folder: str | PathLike[str]) -> None:
    """Copy a result's files to a folder of the host. Raises InvalidRequest if it cannot be created or written to."""
    try:
        await _finish_in_thread(result.save, folder)
    except OSError as error:
        if isinstance(error, SandboxFileError):
            raise
        raise InvalidRequest(f"out: cannot write to the folder {str(folder)!r}: {error.strerror}") from error


async def write_all(opened: OpenSandbox, files: Sequence[InputFile]) -> None:
    """Write files into an open sandbox, in one call if the backend can."""
    if not files:
        return
    if isinstance(opened, SupportsBatchFiles):
        await opened.write_files(files)
        return
    for file in files:
        await opened.write_file(file.path, file.data)


async def run_with_sink(opened: OpenSandbox, request: Request, sink: Sink) -> Result:
    """Run a request and pass events to `sink`."""
    return await with_sink(lambda guarded: _run_with_events(opened, request, guarded), sink)


async def _run_with_events(opened: OpenSandbox, request: Request, sink: Sink) -> Result:
    if isinstance(opened, SupportsStreaming):
        return await opened.run_streaming(request, sink)
    sink(Started())
    result = await opened.run(request)
    report_output(result, sink)
    return result


def report_output(result: Result, sink: Sink) -> None:
    """Pass the whole output of a finished run to `sink`, one chunk per stream."""
    outputs: tuple[tuple[Stream, bytes], ...] = (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes))
    for stream, data in outputs:
        if data:
            sink(OutputChunk(stream=stream, data=data))


async def _finish_in_thread(work: Callable[..., object], *arguments: object) -> None:
    """Run blocking work in a thread; a cancelled caller waits for its end, so that the work's files stay valid."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def streamed(run: Callable[[Sink], Coroutine[Any, Any, Result]]) -> AsyncIterator[Event]:
    """Start a run, and yield its events and finally Ended; raise its errors. Closing the iterator cancels the run."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    running = asyncio.ensure_future(run(events.put_nowait))
    running.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        yield Ended(result=await running)
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()) is not None:
            log.debug("a run failed after its stream had ended: %s", type(error).__name__)


class Spill:
    """A sink that writes the output to two files during one run, and passes events on to another sink."""

    def __init__(self, folder: str | os.PathLike[str], behind: Sink | None):
        self._paths: dict[Stream, str] = {
            stream: os.path.join(folder, name) for stream, name in SPILL_FILE_NAMES.items()
        }
        self._behind = behind
        self._files: dict[Stream, BinaryIO] = {}
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"spill: cannot make the folder {os.fspath(folder)!r}: {error.strerror}") from error

    def __enter__(self) -> Self:
        path = ""
        try:
            for stream, path in self._paths.items():
                self._files[stream] = open_in_place_of(*os.path.split(path))
        except OSError as error:
            self._close()
            raise InvalidRequest(f"spill: cannot write {path!r}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, event: Event) -> None:
        if isinstance(event, OutputChunk):
            self._files[event.stream].write(event.data)
        if self._behind is not None:
            self._behind(event)

    def paths(self) -> dict[str, str]:
        """Return the file of each stream, for the result's meta."""
        return {str(stream): path for stream, path in self._paths.items()}

    def _close(self) -> None:
        for file in self._files.values():
            file.close()


def check_fixer(fixer: object, prepared: Prepared, code: str | None) -> Fixer:
    """Return the value of `autofix`. Raises InvalidRequest for another type, and if a model's code must not run."""
    from cloche.core.fixing import Fixer

    if not isinstance(fixer, Fixer):
        raise InvalidRequest(
            f"autofix: give an AutoFix, not {type(fixer).__name__}: "
            "from cloche.autofix.loop import AutoFix; autofix=AutoFix(...)"
        )
    if code is None:
        raise InvalidRequest("autofix repairs code; a command in argv has no code")
    policy = prepared.policy
    if policy.trusted:
        raise InvalidRequest("trusted: auto-fix runs code of a model, which is never trusted; leave trusted out")
    is_weak = policy.level is not None and policy.level < Level.CONFINED
    if is_weak or prepared.settings.backend in HOST_BACKENDS:
        raise InvalidRequest(
            "auto-fix runs a model's answer, so it needs a sandbox; drop --no-sandbox, or use a backend "
            "that isolates (cloche backends)"
        )
    return fixer


async def run_fixing(
    fixer: Fixer,
    prepared: Prepared,
    prepared_request: PreparedRequest,
    run: Callable[[PreparedRequest], Awaitable[Result]],
    out: str | PathLike[str] | None,
) -> Result:
    """Let `fixer` run the request with its own code and with replacements; the last run's files go to `out`."""
    request, attempts = prepared_request.request, 0

    async def attempt(code: str) -> Result:
        nonlocal attempts
        if not isinstance(code, str):
            raise InvalidRequest(f"code: give text, not {type(code).__name__}")
        findings = await screen(prepared.policy.screen, request.language, code)
        notes = {name: value for name, value in prepared_request.notes.items() if name != "screen"}
        if findings:
            notes["screen"] = [str(finding) for finding in findings]
        result = await run(replace(prepared_request, request=replace(request, code=code), notes=notes))
        if prepared.audit is not None and attempts:
            prepared.audit.note(
                "fix_round",
                round=attempts,
                code_sha256=sha256_of(code),
                status=str(result.status),
                is_fixed=result.ok,
            )
        attempts += 1
        return result

    limits = prepared.limits.with_changes(timeout_s=request.timeout_s)
    notes = {"network": prepared.policy.network}
    from cloche.core.fixing import FixTask

    task = FixTask(code=request.code or "", language=request.language, limits=limits, notes=notes)
    result = await fixer.fix(task, attempt)
    if out is not None:
        await copy_out(result, out)
    return result


async def fix_cell(
    fixer: Fixer,
    task: FixTask,
    again: Callable[[str], Awaitable[Result]],
    *,
    is_alive: Callable[[], bool],
    out: str | PathLike[str] | None,
) -> Result:
    """Let `fixer` run a cell with its own code and with replacements, in the state that each left."""
    from cloche.core.fixing import StateLost

    async def attempt(fixed_code: str) -> Result:
        if not is_alive():
            raise StateLost("the interpreter has ended, and its state is lost; restart the session")
        return await again(fixed_code)

    result = await fixer.fix(task, attempt)
    if out is not None:
        await copy_out(result, out)
    return result


def cell_task(code: str, language: str, limits: Limits, network: str) -> FixTask:
    """Return a fixer's task: a cell, whose session keeps its state."""
    from cloche.core.fixing import FixTask

    return FixTask(code=code, language=language, limits=limits, keeps_state=True, notes={"network": network})
