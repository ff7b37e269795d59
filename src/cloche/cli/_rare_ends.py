"""Reports the end of a command of `_fast_path` that is more than an exit code, with the modules of the full command."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

from cloche.audit.log import switch_on
from cloche.audit.recording import conclude, failure
from cloche.audit.redaction import Redactor
from cloche.core.errors import ClocheError
from cloche.core.events import HeadTail
from cloche.core.record import replace
from cloche.core.result import KillCause
from cloche.execution.prepare import Prepared, prepare
from cloche.execution.registry import command_error, command_result
from cloche.execution.toolchains import advise
from cloche.keeper.attach import read_entry

from . import run as run_command
from ._fast_path import NOT_FOUND, FastRun, tell_unread_input
from .output import OutputFailed, exit_code_of, guarded, log_to_say


def tell(run: FastRun) -> int:
    """Record the end of a command, report it, and return the exit code."""
    switch_on("cli")
    log_to_say()
    return guarded(lambda: _record(run))


def _record(run: FastRun) -> int:
    stopped = run.stopped
    if run.failure is not None:
        process = str(run.events[0].get("id", "")) if run.events else None
        error = command_error(run.failure.error, str(run.failure), process=process)
        raise _noted(run, error, recorded=error)
    if stopped is None:
        return _conclude(run)
    if isinstance(stopped, OSError) and not isinstance(stopped, BrokenPipeError):
        stopped = OutputFailed(f"cannot pass the output on: {stopped.strerror}; the run was stopped")
    raise _noted(run, stopped, recorded=asyncio.CancelledError())


def _noted(run: FastRun, error: BaseException, *, recorded: BaseException) -> BaseException:
    """Write `recorded` to the audit log and return `error`."""
    with suppress(ClocheError):
        audit = _prepared(run).audit
        if audit is not None:
            duration_s = round(monotonic() - run.began_at, 6)
            audit.note("execution", **run.facts, **failure(recorded), duration_s=duration_s)
    return error


def _prepared(run: FastRun) -> Prepared:
    entry = read_entry(run.found.name, run.found.entry)
    return replace(prepare(backend=entry.backend), policy=entry.policy, limits=entry.limits)


def _conclude(run: FastRun) -> int:
    prepared, ended = _prepared(run), run.events[1]
    result = command_result(
        ended, KillCause.OUTPUT_LIMIT if run.is_flooded else None,
        kept={stream: _head_and_tail(pieces, prepared.limits.output_bytes) for stream, pieces in run.kept.items()},
        limits=prepared.limits, enforcement=read_entry(run.found.name, run.found.entry).enforcement,
        notes={**prepared.notes, "backend": prepared.backend.name, "process": str(run.events[0].get("id", ""))},
    )  # fmt: skip
    if prepared.audit is not None:
        conclude(prepared.audit, Redactor({}), {**run.facts, "limits": run.limits}, result)
    if result.exit_code == NOT_FOUND:
        asyncio.run(advise(result, prepared, run.command))
    run_command.conclude(result, as_json=False)
    tell_unread_input()
    return exit_code_of(result)


def _head_and_tail(pieces: list[bytes] | HeadTail, most_bytes: int) -> HeadTail:
    if isinstance(pieces, HeadTail):
        return pieces
    output = HeadTail(most_bytes)
    for piece in pieces:
        output.add(piece)
    return output
