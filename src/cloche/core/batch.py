"""The decisions of a batch: the form of a program, which one may start, whose result is due, which one is tried again.

Pure: no I/O, no clock. `execution/batch.py` runs the programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import BackendUnavailable, ClocheError, InvalidRequest, OutcomeUnknown, StartFailed
from .record import dataclass, fields
from .result import Result

Outcome = Result | ClocheError

MOST_AHEAD = 1_024  # programs that have started and whose results the caller has not taken
MOST_HELD_BYTES = 64 << 20  # of results that wait for the result of an earlier program
RESULT_BYTES = 4 << 10  # what a result without output takes in memory, about
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0  # before a program is tried again
LONGEST_ASKED_DELAY_S = 60.0  # a provider's own demand is followed up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Hold one program of a batch: the keywords of `cloche.run` that belong to it alone.

    None means that the call's own keyword applies. `id` returns with the result. `idempotent` says that the program may
    run twice.
    """

    code: str | None = None
    argv: Sequence[Any] | None = None
    language: str | None = None
    stdin: bytes | str | None = None
    env: Mapping[str, str] | None = None
    files: Any = None
    timeout: float | str | None = None
    id: str | int | None = None
    idempotent: bool | None = None

    def __post_init__(self) -> None:
        if self.code is None and not self.argv:
            raise InvalidRequest("program: give `code`, or a command as `argv`")
        _check("code", self.code, str)
        _check("argv", self.argv, list, tuple)
        _check("language", self.language, str)
        _check("env", self.env, Mapping)
        _check("id", self.id, str, int)
        _check("idempotent", self.idempotent, bool)
        _check("timeout", self.timeout, int, float, str)

    def keywords(self) -> dict[str, Any]:
        """Return the keywords for `run` that are given."""
        names = ("argv", "language", "stdin", "env", "files", "timeout")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_NAMES = tuple(field.name for field in fields(Program))


def _check(name: str, value: object, *kinds: type) -> None:
    """Refuse a value of another type; a truth value is no number."""
    if value is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
        return
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise InvalidRequest(f"{name}: give {wanted}, not {type(value).__name__}")


def read_program(value: object) -> Program:
    """Return a program that a caller wrote as text, as a mapping or as a record. Raises InvalidRequest."""
    if isinstance(value, Program):
        return value
    if isinstance(value, str):
        return Program(code=value)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"program: give text or a mapping with {', '.join(_NAMES)}; not {type(value).__name__}")
    for name in value:
        if name not in _NAMES:
            raise InvalidRequest(f"program: unknown key {str(name)[:80]!r}; known keys: {', '.join(_NAMES)}")
    return Program(**value)


class BatchOrder:
    """Decide which program may start and whose result is due.

    A program counts as running until `end`, and as outstanding until its outcome is taken. Both numbers and the bytes
    of held outcomes are bounded, so an endless input and a slow caller need no more memory than a short batch.
    """

    def __init__(
        self, *, concurrency: int, in_order: bool, most_ahead: int = MOST_AHEAD, most_bytes: int = MOST_HELD_BYTES
    ) -> None:
        self._concurrency, self._in_order = concurrency, in_order
        self._most_ahead, self._most_bytes = max(most_ahead, concurrency), most_bytes
        self._held: dict[int, tuple[Outcome, int]] = {}  # by index
        self._due: deque[int] = deque()  # indexes in the order of their ends; not used in order
        self._held_bytes = self._started = self._taken = self.running = 0

    @property
    def has_room(self) -> bool:
        """Tell whether a further program may start."""
        return (
            self.running < self._concurrency
            and self._started - self._taken < self._most_ahead
            and self._held_bytes < self._most_bytes
        )

    def start(self) -> int:
        """Note that a program starts, and return its index."""
        index, self._started, self.running = self._started, self._started + 1, self.running + 1
        return index

    def end(self, index: int, outcome: Outcome) -> None:
        """Note the outcome of a program."""
        size = size_of(outcome)
        self._held[index] = (outcome, size)
        self._held_bytes += size
        self.running -= 1
        if not self._in_order:
            self._due.append(index)

    def take(self) -> tuple[int, Outcome] | None:
        """Return the index and the outcome that the caller gets next; None if none is due."""
        if self._in_order:
            index = self._taken
        elif self._due:
            index = self._due.popleft()
        else:
            return None
        if index not in self._held:
            return None
        outcome, size = self._held.pop(index)
        self._held_bytes -= size
        self._taken += 1
        return index, outcome


def size_of(outcome: Outcome) -> int:
    """Estimate the bytes that an outcome keeps: output as text and as bytes, and the run's files."""
    if not isinstance(outcome, Result):
        return RESULT_BYTES
    output = len(outcome.stdout_bytes) + len(outcome.stderr_bytes)
    return RESULT_BYTES + 2 * output + sum(file.size for file in outcome.files)


def may_try_again(error: Exception, *, tried: int, retries: int, is_idempotent: bool) -> bool:
    """Tell whether a program whose `tried`-th attempt raised `error` is tried again.

    A program that never ran is; one that may have run only if it may run twice. All other errors would come again.
    """
    if tried > retries:
        return False
    return never_ran(error) or (is_idempotent and isinstance(error, OutcomeUnknown))


def never_ran(error: Exception) -> bool:
    """Tell whether nothing ran and another attempt may help: no start, or a provider with too many requests."""
    if isinstance(error, BackendUnavailable):
        return getattr(getattr(error, "failure", None), "name", "") == "RATE_LIMITED"
    return isinstance(error, StartFailed)


def delay_s(error: Exception, *, tried: int) -> float:
    """Return the seconds to wait before the next attempt: the provider's demand, or twice as long each time."""
    asked = getattr(error, "retry_after_s", None)
    if asked is not None:
        return min(max(0.0, float(asked)), LONGEST_ASKED_DELAY_S)
    doublings = min(tried - 1, 10)  # enough to reach the longest delay
    return float(min(FIRST_DELAY_S * 2**doublings, LONGEST_DELAY_S))
