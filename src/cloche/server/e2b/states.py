"""The states of a sandbox, what each request does in each of them, and what renews a life. `rows()` is its document.

| state | meaning |
|---|---|
| running | it has time left |
| paused | its processes and the clock of its life stand still: by request, or since its time ended with auto-pause |
| expired | its time has ended without auto-pause |
| dead | it was killed, its first process ended, or its host was restarted |

A sandbox whose time has ended is expired or paused from that moment on, whether or not a row says so yet.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.record import dataclass
from cloche.records import sandboxes as records
from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts

from .errors import E2BError

RUNNING, PAUSED, EXPIRED, DEAD = STATES = ("running", "paused", "expired", "dead")
ENDS, PAUSES, KEEPS_FILES = AT_END = ("end", "pause", "pause-files")  # what a sandbox does when its time ends
NOT_FOUND = 404


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold the status of the answer to a request in one state, and what happens."""

    status: int
    what: str

    @property
    def is_refused(self) -> bool:
        """Tell whether the request does nothing."""
        return self.status >= 400


def _row(
    running: tuple[int, str], paused: tuple[int, str], gone: tuple[int, str] = (NOT_FOUND, "refused: not found")
) -> Mapping[str, Outcome]:
    outcomes = (running, paused, gone, gone)
    return {state: Outcome(status=outcome[0], what=outcome[1]) for state, outcome in zip(STATES, outcomes, strict=True)}


_ANOTHER = 201, "another sandbox; the same `Idempotency-Key` gives this one"
_PAUSED_404 = 404, "refused: not found among the running ones, as E2B answers; connect first"
TABLE: Mapping[str, Mapping[str, Outcome]] = {
    "create": _row(_ANOTHER, _ANOTHER, _ANOTHER),
    "connect": _row(
        (200, "its time ends after `timeout` seconds, or later if it did before"),
        (201, "it is resumed, and its time ends after `timeout` seconds; auto-pause stays set"),
    ),
    "resume": _row((409, "refused: it runs already"), (201, "as connect")),
    "timeout": _row((204, "its time ends after `timeout` seconds; 0 ends it now"), _PAUSED_404),
    "refresh": _row((204, "its time ends after `duration` seconds, or later if it did before"), _PAUSED_404),
    "pause": _row((204, "it is paused, and its streams are cut"), (409, "refused: it is paused already")),
    "kill": _row((204, "it is dead"), (204, "it is dead")),
    "read": _row((200, "nothing; a query renews no life"), (200, "nothing")),
    "metrics": _row((200, "nothing"), (200, "nothing: the values before the pause")),
    "network": _row((204, "its rules are replaced"), (409, "refused: connect first")),
    "snapshot": _row((201, "a snapshot; it runs on"), (201, "a snapshot; it stays paused")),
    "fork": _row((201, "new sandboxes with its files; it runs on"), (409, "refused: connect first")),
    "ports": _row(
        (200, "the request is passed on"),
        (502, "refused; with `autoResume` it is resumed first"),
        (502, "refused: not found"),
    ),
}


def rows() -> list[Sequence[str]]:
    """Return the table for documents: a heading, then one row for each request."""
    return [("request", *STATES), *((name, *(_cell(row[state]) for state in STATES)) for name, row in TABLE.items())]


def _cell(outcome: Outcome) -> str:
    return f"{outcome.status}: {outcome.what}"


def state_of(facts: SandboxFacts, now: float | None = None) -> str:
    """Return the state of a sandbox by its row, at a time (seconds since 1970)."""
    if facts.status in (records.ENDED, records.STARTING):
        return DEAD
    if facts.status == records.PAUSED:
        return PAUSED
    ends_at = facts.document.get("endsAt")
    if ends_at is None or moment(time.time() if now is None else now) < ends_at:
        return RUNNING
    return EXPIRED if facts.document.get("atEnd", ENDS) == ENDS else PAUSED


def has_memory(facts: SandboxFacts) -> bool:
    """Tell whether the processes of a paused sandbox go on when it is resumed."""
    if facts.status == records.PAUSED:
        return bool(facts.document.get("hasMemory", True))
    return bool(facts.document.get("atEnd", ENDS) != KEEPS_FILES)


def wakes(facts: SandboxFacts) -> bool:
    """Tell whether traffic resumes a sandbox."""
    return state_of(facts) == PAUSED and bool(facts.document["e2b"]["autoResume"]) and has_memory(facts)


def check(action: str, facts: SandboxFacts, sandbox_id: str) -> str:
    """Return the state of a sandbox in which an action is allowed. Raises E2BError with the table's status."""
    state = state_of(facts)
    outcome = TABLE[action][state]
    if outcome.status == NOT_FOUND:
        raise not_found(sandbox_id)
    if outcome.is_refused:
        raise E2BError(outcome.status, f"sandbox {sandbox_id}, which is {state}: {action} is {outcome.what}")
    return state


def not_found(sandbox_id: Any) -> E2BError:  # noqa: ANN401 - text of a client
    """Return the error for a sandbox that there is not, or that another key has."""
    return E2BError(NOT_FOUND, f"sandbox {str(sandbox_id)[:64]!r} was not found")
