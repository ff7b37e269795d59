"""One call, one throwaway sandbox: settings, rules, request, queue, run.

Every door goes through `prepare` and `run_in`, so that rules hold the same wherever a run comes from.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack, cast

from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied
from cloche.core.events import Event, OutputChunk, Sink, Started, Stream
from cloche.core.languages import language_named
from cloche.core.levels import Control, Level
from cloche.core.limits import Limits
from cloche.core.loops import become_task
from cloche.core.policy import Policy
from cloche.core.protocols import Backend, OpenSandbox, SupportsSingleRun, SupportsStreaming
from cloche.core.request import Request
from cloche.core.result import Result
from cloche.core.screen import apply_screen

from .audit import Audit, audit_for
from .factory import policy_for, row_of
from .fallback import LOCAL, check_local, fall_back
from .fixing import check_fixer, run_fixing
from .inputs import Files, Inputs, gather_files, has_host_files, read_argv, read_env, read_stdin
from .options import SandboxOptions, given, spelled_out
from .recording import Execution, is_wanted, note_fallback, recorded, refusals
from .selection import Found, Wish, find
from .settings import Settings, check_runnable, load_settings
from .slots import shared_slots
from .spill import Spill

if TYPE_CHECKING:
    from cloche.core.fixing import Fixer

OnOutput = Callable[[Stream, bytes], None]

NO_WORDS: tuple[str, ...] = ()
NO_INPUTS = Inputs()
ALWAYS_TOLD = frozenset(("backend", "level", "limits", "duration"))  # in the meta of a result
COMMAND_LANGUAGE = "bash"  # a bare command can do what a shell can, so it is allowed where a shell is

log = logging.getLogger("cloche.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Hold everything that is settled before a sandbox opens; results carry `notes` in their meta.

    `audit` is where it is recorded, None where that is off.
    """

    settings: Settings
    backend: Backend
    policy: Policy
    limits: Limits
    notes: Mapping[str, Any] = field(default_factory=dict)
    audit: Audit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Hold one checked request, and what has to be said about it in the result's meta."""

    request: Request
    notes: Mapping[str, Any]


@spelled_out
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
    **options: Unpack[SandboxOptions],
) -> Result:
    """Run `code` in a throwaway sandbox and return what came of it.

    With `code`, `argv` holds the program's arguments; without it, `argv` is the whole command. `files` is a
    mapping of paths below /workspace to content (`bytes`, or `str` as text) or to host files and directories
    (path objects), or a list of host paths. The code itself runs beside them, under a name that no file of theirs may
    have and no listing shows: `cloche-main.py`, `.cloche-main.js` and so on. `stdin` is bytes or text. `env` is the
    program's environment besides a fixed minimum. `on_output(stream, data)` gets each piece of output as bytes while
    the code runs, `on_event` every event of `cloche.core.events`. `out` is a host directory that receives the files
    the run created or changed, `spill` one that receives the full output as stdout.txt and stderr.txt; in both, what
    has the name of a file before is replaced, and a link never followed. With `autofix` (see
    `cloche.agent.autofix.AutoFix`) a program that fails is repaired by a language model and run again, each time in a
    sandbox of its own; the result is that of the last run and its `fix` says what was done, while callbacks hear every
    run. The other keywords are those of `SandboxOptions`. Cancelling the call kills the run.

    What the code did is a status of the result. Raises InvalidRequest, PolicyDenied, BackendUnavailable,
    StartFailed.
    """
    prepared = await prepare_beside(**options)
    if autofix is not None or not vars(type(prepared.backend)).get("begins_by_hand", False):
        await become_task()
    fixer = None if autofix is None else check_fixer(autofix, prepared, code)
    job = await make_job(prepared, code, language=language, argv=argv, stdin=stdin, env=env, files=files)
    sink = make_sink(on_output, on_event)
    note_fallback(prepared.audit, prepared.notes)
    if fixer is None:
        return await run_once(prepared, job, sink=sink, out=out, spill=spill)
    return await run_fixing(fixer, prepared, job, lambda one: run_once(prepared, one, sink=sink, spill=spill), out)


async def run_once(
    prepared: Prepared,
    job: Job,
    *,
    sink: Sink | None = None,
    out: str | PathLike[str] | None = None,
    spill: str | PathLike[str] | None = None,
) -> Result:
    """Run a job in a sandbox of its own."""
    async with shared_slots().hold(), prepared.backend.open(prepared.policy, prepared.limits) as opened:
        if _supports_single_run(type(opened)):
            cast("SupportsSingleRun", opened).expect_single_run()
        return await run_in(opened, prepared, job, sink=sink, out=out, spill=spill)


@functools.cache
def _supports_single_run(kind: type) -> bool:
    """Look once per class: protocols are slow to ask for."""
    return issubclass(kind, SupportsSingleRun)


def prepare(**options: Unpack[SandboxOptions]) -> Prepared:
    """Settle settings, rules and backend, or raise before anything is started.

    May wait some seconds for the answer of a daemon, where a backend needs one.
    """
    order = _read_order(options)
    found = _prepared_before(order)
    if found is not None:
        return found
    _check_order(order)
    return _prepared(order, _find(order))


async def prepare_beside(**options: Unpack[SandboxOptions]) -> Prepared:
    """Do as `prepare` does, in a thread where that may take its time."""
    order = _read_order(options)
    found = _prepared_before(order)
    if found is not None:
        return found
    _check_order(order)
    if order.given is None and row_of(order.settings.backend).asks_around:
        return _prepared(order, await asyncio.to_thread(_find, order))
    return _prepared(order, _find(order))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Hold the settings of a call, the backend object that was given with it, and whether an image was."""

    settings: Settings
    given: Backend | None
    wants_image: bool


def _read_order(options: SandboxOptions) -> Order:
    arguments = given(options)
    chosen = arguments.get("backend")
    if chosen is not None and not isinstance(chosen, str):
        if not callable(getattr(chosen, "open", None)):
            raise InvalidRequest(f"backend: give a name or a backend object, not {type(chosen).__name__}")
        if "prefer" in arguments:
            raise InvalidRequest("prefer is for a choice among backends, but one is given; drop one of the two")
        if "runtime" in arguments:
            raise InvalidRequest("runtime names a backend or docker's runtime, but one is given; drop one of the two")
        del arguments["backend"]
    else:
        chosen = None
    return Order(settings=load_settings(arguments), given=chosen, wants_image="image" in arguments)


def _check_order(order: Order) -> None:
    with refusals(order.settings):
        check_runnable(order.settings)
    _check_packages(order.settings.policy)


def _find(order: Order) -> Found:
    """Return the backend with the policy for it, that of a fallback where the policy has one."""
    with refusals(order.settings):
        return _screened(_find_backend(order), order)


def _screened(found: Found, order: Order) -> Found:
    """Let what comes to level process by best effort, on a host that has no more, have the strict screen too (R2b)."""
    policy, origin = found.policy, order.settings.origins.get("screen")
    may_be_less = policy.level is None and Control.FILESYSTEM in policy.best_effort
    if not may_be_less or origin != "default" or (order.given is None and order.settings.backend != LOCAL):
        return found
    if found.backend.capabilities().level > Level.PROCESS:
        return found
    return replace(found, policy=policy.with_changes(screen="block"))


def _find_backend(order: Order) -> Found:
    settings = order.settings
    if order.given is not None:
        return Found(backend=order.given, policy=settings.policy)
    wish = Wish(policy=settings.policy, prefer=settings.prefer, images=settings.images, wants_image=order.wants_image)
    try:
        if settings.backend == LOCAL and settings.policy.trusted and settings.policy.fallback != "none":
            check_local(settings.policy)
        return find(settings.backend, wish)
    except BackendUnavailable as error:
        return fall_back(error, settings, policy_for(settings.backend, settings.policy))


def _prepared(order: Order, found: Found) -> Prepared:
    limits = order.settings.limits
    log.debug("backend %s, policy %s, limits %s", found.backend.name, found.policy, limits)
    prepared = Prepared(
        settings=order.settings, backend=found.backend, policy=found.policy, limits=limits, notes=found.notes,
        audit=audit_for(order.settings),
    )  # fmt: skip
    _remember(order, prepared)
    return prepared


def _prepared_before(order: Order) -> Prepared | None:
    """Return what the very same settings came to before, where that depends on nothing else."""
    settings = order.settings
    found = _before.get(id(settings))
    if found is None or found.settings is not settings or order.given is not None or order.wants_image:
        return None
    return found if audit_for(settings) is found.audit else None


def _remember(order: Order, prepared: Prepared) -> None:
    """Keep what need not be settled again: a backend that is there or not without asking anybody."""
    settings = order.settings
    if order.given is not None or order.wants_image or settings.policy.trusted or prepared.notes:
        return
    if row_of(settings.backend).asks_around:
        return
    if len(_before) >= MOST_PREPARED:
        _before.clear()
    _before[id(settings)] = prepared


MOST_PREPARED = 64
_before: dict[int, Prepared] = {}  # by the settings' identity: these are the same object for as long as they hold
os.register_at_fork(after_in_child=_before.clear)  # a forked child measures for itself


async def make_job(
    prepared: Prepared,
    code: str | None,
    *,
    language: str,
    argv: Sequence[str | PathLike[str]],
    stdin: bytes | str,
    env: Mapping[str, str] | None,
    files: Files | None,
    timeout_s: float | None = None,
) -> Job:
    """Check the arguments of one run against the rules, and read what they name."""
    if code is not None and not isinstance(code, str):
        raise InvalidRequest(f"code: give text, not {type(code).__name__}")
    with refusals(prepared.settings, language=language, code=code):
        name = check_language(prepared.policy, language if code is not None else COMMAND_LANGUAGE)
        findings = apply_screen(prepared.policy.screen, name, code) if code is not None else ()
    inputs = NO_INPUTS if files is None else await _gather(files, prepared.limits)
    request = Request(
        code=code,
        language=name,
        argv=NO_WORDS if argv is NO_WORDS else read_argv(argv),
        stdin=stdin if type(stdin) is bytes else read_stdin(stdin),
        env={} if env is None else read_env(env),
        files=inputs.files,
        timeout_s=timeout_s,
    )
    notes: dict[str, Any] = {}
    if findings:
        notes["screen"] = [str(finding) for finding in findings]
    if inputs.left_out:
        notes["files_left_out"] = list(inputs.left_out)
    return Job(request=request, notes=notes)


async def _gather(files: Files | None, limits: Limits) -> Inputs:
    """Read given files; in a thread where that means the host's disk, so that no other run waits for it."""
    if not has_host_files(files):
        return gather_files(files, max_bytes=limits.disk_bytes, max_files=limits.inodes)
    return await asyncio.to_thread(gather_files, files, max_bytes=limits.disk_bytes, max_files=limits.inodes)


def check_language(policy: Policy, language: str) -> str:
    """Return a language's own name. Raises InvalidRequest for an unknown one, PolicyDenied for one not allowed."""
    name = language_named(language).name
    if name not in policy.languages:
        allowed = ", ".join(policy.languages)
        raise PolicyDenied(f'language "{name}" is not allowed here (allowed: {allowed}); name it in sandbox.languages')
    return name


def _check_packages(policy: Policy) -> None:
    if policy.packages:
        raise BackendUnavailable(
            "packages: this version of Cloche installs none. Install them next to Cloche (pip install); "
            "the local sandbox shows the packages of its own interpreter."
        )


def make_sink(on_output: OnOutput | None, on_event: Sink | None) -> Sink | None:
    """Join the caller's two callbacks to one sink; None when there is neither."""
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
    job: Job,
    *,
    sink: Sink | None = None,
    out: str | PathLike[str] | None = None,
    spill: str | PathLike[str] | None = None,
) -> Result:
    """Run a job in an open sandbox, complete the result's meta, and copy its files to `out` when given.

    Raises AuditFailed, with nothing run, where the audit is on and cannot be written.
    """
    if is_wanted(prepared.audit):
        running = functools.partial(_run_job, opened, prepared, job, sink, spill)
        result = await recorded(running, prepared.audit, _execution(prepared, job.request))
    else:
        result = await _run_job(opened, prepared, job, sink, spill)
    if out is not None:
        await copy_out(result, out)
    return result


def _execution(prepared: Prepared, request: Request) -> Execution:
    return Execution(
        kind="run", backend=prepared.backend.name, language=request.language, code=request.code, argv=request.argv,
        env=request.env, limits=prepared.limits, timeout_s=request.timeout_s, policy=prepared.policy,
    )  # fmt: skip


async def _run_job(
    opened: OpenSandbox, prepared: Prepared, job: Job, sink: Sink | None, spill: str | PathLike[str] | None
) -> Result:
    notes = dict(job.notes)
    if spill is not None:
        with Spill(spill, sink) as spilling:
            result = await run_with_sink(opened, job.request, spilling)
        notes["spilled"] = spilling.paths()
    else:
        result = await (opened.run(job.request) if sink is None else run_with_sink(opened, job.request, sink))
    told = result.meta
    if not told.keys() >= ALWAYS_TOLD:
        shown = {"level": str(result.enforcement.level), "limits": prepared.limits.as_dict()}
        told = {"backend": prepared.backend.name, **shown, "duration": result.duration, **told}
    result.meta = {**prepared.notes, **notes, **told}
    log.debug(
        "%s: %s, exit code %d, %.3f s",
        prepared.backend.name,
        result.status,
        result.exit_code,
        result.duration,
    )
    return result


async def copy_out(result: Result, folder: str | PathLike[str]) -> None:
    """Copy a result's files to a folder of the host."""
    await _finish_in_thread(result.save, folder)


async def run_with_sink(opened: OpenSandbox, request: Request, sink: Sink) -> Result:
    """Run a request and hand events to `sink`."""
    return await with_sink(lambda guarded: _run_reporting(opened, request, guarded), sink)


async def with_sink(run: Callable[[Sink], Coroutine[Any, Any, Result]], sink: Sink) -> Result:
    """Run and hand events to `sink`. If it raises, that ends the run and is raised once all is killed."""
    failures: list[BaseException] = []

    def guarded(event: Event) -> None:
        try:
            if not failures:
                sink(event)
        except BaseException as error:  # a sink is the caller's code: nothing it raises may end up in the backend
            failures.append(error)
            task.cancel()

    task = asyncio.ensure_future(run(guarded))
    try:
        result = await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if failures and not (current and current.cancelling()):
            raise failures[0] from None
        raise
    if failures:
        raise failures[0]
    return result


async def _run_reporting(opened: OpenSandbox, request: Request, sink: Sink) -> Result:
    """Stream where the backend can; else report the output once it is there."""
    if isinstance(opened, SupportsStreaming):
        return await opened.run_streaming(request, sink)
    sink(Started())
    result = await opened.run(request)
    report_output(result, sink)
    return result


def report_output(result: Result, sink: Sink) -> None:
    """Hand the whole output of a run that has ended to `sink`, one chunk per stream."""
    outputs: tuple[tuple[Stream, bytes], ...] = (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes))
    for stream, data in outputs:
        if data:
            sink(OutputChunk(stream=stream, data=data))


async def _finish_in_thread(work: Callable[..., object], *arguments: object) -> None:
    """Do blocking work in a thread, and when cancelled let it finish first: its files must outlive it."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
