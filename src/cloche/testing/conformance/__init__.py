"""The conformance suite: required behaviour of any backend, tested through `core.protocols`. Needs no test framework.

    rows = run_conformance(LocalBackend(), level=Level.PROCESS, deviations={"host files": "no isolation at this level"})
    assert all(row.ok for row in rows)

A deviation names a check that a backend cannot pass, with the reason. A declared deviation that passes is an error, so
that the list stays accurate.

Each file has the attempts of some families, and their table `CHECKS`: `results` (contents and statuses of results),
`limits`, `files` (input and output files), `sandbox` (state between runs, leftovers), `truth` (reported enforcement
compared with attempts, isolation of every sandbox), `sessions` (sessions and forks, skipped without backend support),
`live` and `live_files` (live sandboxes: processes, limits, files). `subject` has their tools.
"""

from __future__ import annotations

import asyncio
import enum
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence

from cloche.core.enforcement import Enforcement, Level, State
from cloche.core.errors import InvalidRequest
from cloche.core.policy import Policy
from cloche.core.protocols import Backend
from cloche.core.record import dataclass

from . import files, limits, live, live_files, results, sandbox, sessions, truth
from .subject import Broken, Check, Skipped, Subject, enforcement_of

CHECKS: tuple[Check, ...] = (
    *results.CHECKS,
    *limits.CHECKS,
    *files.CHECKS,
    *sandbox.CHECKS,
    *truth.CHECKS,
    *sessions.CHECKS,
)
LIVE_CHECKS: tuple[Check, ...] = (  # of live sandboxes
    *live.CHECKS,
    *live_files.CHECKS,
    *sessions.CHECKS,
    *sessions.LIVE_CHECKS,
)
CHECK_TIMEOUT_S = 240.0


class Outcome(enum.StrEnum):
    """The outcome of one check."""

    KEPT = "kept"
    DEVIATES = "deviates"
    BROKEN = "broken"
    SKIPPED = "skipped"
    UNEXPECTED = "unexpected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold one check's outcome. `reason` is the observation, or why the backend deviates or the check was skipped."""

    check: Check
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Tell whether the outcome is as declared."""
        return self.outcome in (Outcome.KEPT, Outcome.DEVIATES, Outcome.SKIPPED)

    def as_dict(self) -> dict[str, object]:
        """Return plain data, ready for JSON."""
        return {
            "family": self.check.family,
            "check": self.check.name,
            "ok": self.ok,
            "outcome": str(self.outcome),
            "claim": self.check.claim,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
        }


def run_conformance(
    backend: Backend,
    *,
    level: Level | None = None,
    deviations: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    at_once: int = 6,
    on_row: Callable[[Row], None] | None = None,
    is_live: bool = False,
) -> tuple[Row, ...]:
    """Run every check against `backend` and return a row for each. For callers without an event loop."""
    return asyncio.run(
        check_conformance(
            backend, level=level, deviations=deviations, only=only, at_once=at_once, on_row=on_row, is_live=is_live
        )
    )


async def check_conformance(
    backend: Backend,
    *,
    level: Level | None = None,
    deviations: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    at_once: int = 6,
    on_row: Callable[[Row], None] | None = None,
    is_live: bool = False,
) -> tuple[Row, ...]:
    """Run the checks named in `only` (all if empty), `at_once` of them concurrently.

    `level` None leaves the choice to the backend. `deviations` maps names of checks to the reason why this backend
    cannot pass them; None derives them from its reported enforcement (`deviations_of`). With `is_live`, the sandboxes
    are live sandboxes and the checks are `LIVE_CHECKS`. Raises InvalidRequest for an unknown name.
    """
    subject = Subject(backend=backend, policy=Policy(level=level), is_live=is_live)
    checks = LIVE_CHECKS if is_live else CHECKS
    chosen = _named(tuple(only), checks) or checks
    if deviations is None:
        deviations = deviations_of(await enforcement_of(subject))
    _named(tuple(deviations), checks)
    slots = asyncio.Semaphore(at_once)

    async def try_check(check: Check) -> Row:
        async with slots:
            row = await _row(check, subject, deviations.get(check.name))
        if on_row is not None:
            on_row(row)
        return row

    together = await asyncio.gather(*(try_check(check) for check in chosen if not check.alone))
    alone = [await try_check(check) for check in chosen if check.alone]
    rows = {row.check.name: row for row in [*together, *alone]}
    return tuple(rows[check.name] for check in chosen)


def deviations_of(enforcement: Enforcement) -> Mapping[str, str]:
    """Return the checks that rest on a control reported as absent, with that as the reason."""
    absent = {control: measure for control, measure in enforcement.controls.items() if measure.state is State.ABSENT}
    return {
        check.name: f"{check.rests_on} is absent at level {enforcement.level}"
        for check in CHECKS
        if check.rests_on in absent
    }


def _named(names: Sequence[str], checks: Sequence[Check]) -> tuple[Check, ...]:
    by_name = {check.name: check for check in checks}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise InvalidRequest(f"unknown check {unknown[0]!r}; known checks: {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


async def _row(check: Check, subject: Subject, deviation: str | None) -> Row:
    started = time.monotonic()
    try:
        broken, skipped = await _broken_by(check, subject), ""
    except Skipped as error:
        broken, skipped = "", str(error)
    seconds = time.monotonic() - started
    if skipped:
        outcome, reason = Outcome.SKIPPED, skipped
    elif deviation is None:
        outcome, reason = (Outcome.KEPT, "") if not broken else (Outcome.BROKEN, broken)
    elif broken:
        outcome, reason = Outcome.DEVIATES, deviation
    else:
        outcome, reason = Outcome.UNEXPECTED, f"declared as a deviation ({deviation}), but it passes"
    return Row(check=check, outcome=outcome, reason=reason, seconds=seconds)


async def _broken_by(check: Check, subject: Subject) -> str:
    """Return why the claim is broken, empty if it holds."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await check.attempt(subject)
    except Broken as error:
        return str(error)
    except Skipped:
        raise
    except TimeoutError:
        return f"no answer within {CHECK_TIMEOUT_S:g} s"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({frame.name}, line {frame.lineno})"
    return ""
