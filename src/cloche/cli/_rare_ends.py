"""How a command of `_fast_path` ended, where that is more than an exit code: told by the whole command's modules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, NoReturn

from cloche.audit.log import switch_on
from cloche.audit.recording import conclude, failure
from cloche.audit.redaction import Redactor
from cloche.backends.init_link import failure_of
from cloche.backends.live import command_result, not_started, observed_end
from cloche.core.errors import ClocheError, OutcomeUnknown
from cloche.core.events import HeadTail
from cloche.core.processes import Detached
from cloche.core.record import replace
from cloche.core.result import KillCause, decide
from cloche.execution.prepare import Prepared, prepare
from cloche.execution.toolchains import advise
from cloche.keeper.attach import read_entry

from . import run as run_command
from ._fast_path import NOT_FOUND, Run, tell_unread_input
from .output import OutputFailed, exit_code_of, guarded, log_to_say


class RareEnd:
    """Tell how a command ended; each method returns our exit code."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def conclude(self, ended: dict[str, Any]) -> int:
        """Record and tell how it ended."""
        return self._told(lambda: self._conclude(ended))

    def fail(self, said: dict[str, Any] | None, message: str) -> int:
        """Record and tell why it was not started, or why its end is not known."""
        error = self._error(said, message)
        return self._told(lambda: self._raise(error, recorded=error))

    def stop(self, error: BaseException) -> int:
        """Record that it was stopped, and say why."""
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            error = OutputFailed(f"cannot pass the output on: {error.strerror}; the run was stopped")
        return self._told(lambda: self._raise(error, recorded=asyncio.CancelledError()))

    def _told(self, work: Callable[[], int]) -> int:
        switch_on("cli")
        log_to_say()
        return guarded(work)

    def _prepared(self) -> Prepared:
        kept = read_entry(self._run.found.name, self._run.found.entry)
        return replace(prepare(backend=kept.backend), policy=kept.policy, limits=kept.limits)

    def _conclude(self, ended: dict[str, Any]) -> int:
        run, prepared = self._run, self._prepared()
        kept = {stream: _head_and_tail(pieces, prepared.limits.output_bytes) for stream, pieces in run.kept.items()}
        result = command_result(
            decide(observed_end(ended, KillCause.OUTPUT_LIMIT if run.is_flooded else None)), ended, kept=kept,
            limits=prepared.limits, enforcement=read_entry(run.found.name, run.found.entry).enforcement,
            notes={"backend": prepared.backend.name, "process": str(run.events[0].get("id", ""))},
        )  # fmt: skip
        if prepared.audit is not None:
            conclude(prepared.audit, Redactor({}), {**run.facts, "limits": run.limits}, result)
        result.meta = {**prepared.notes, **result.meta}
        if result.exit_code == NOT_FOUND:
            asyncio.run(advise(result, prepared, run.command))
        run_command.conclude(result, as_json=False)
        tell_unread_input()
        return exit_code_of(result)

    def _error(self, said: dict[str, Any] | None, message: str) -> Exception:
        if said is None:
            return OutcomeUnknown(message)
        error = failure_of(said)
        if not self._run.events or error.kind == "start":
            return not_started(error)
        if error.kind == "replaced":
            return Detached(f"process {self._run.events[0].get('id', '')}: {error}")
        return OutcomeUnknown(f"the end of the process is not known: {error}")

    def _raise(self, error: BaseException, *, recorded: BaseException) -> NoReturn:
        with suppress(ClocheError):
            audit = self._prepared().audit
            if audit is not None:
                duration_s = round(monotonic() - self._run.began_at, 6)
                audit.note("execution", **self._run.facts, **failure(recorded), duration_s=duration_s)
        raise error


def _head_and_tail(pieces: list[bytes] | HeadTail, most: int) -> HeadTail:
    if isinstance(pieces, HeadTail):
        return pieces
    found = HeadTail(most)
    for piece in pieces:
        found.add(piece)
    return found
