"""Cases of a graded program, and the verdict: what is sent inside, how the answer is judged, what the caller gets.

A case is written as a mapping (a line of JSON), or as text with asserts. `read_cases` makes `StdinCase` and `CallCase`
of them; each has `judge`, which says why an answer is wrong, or nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from .asserts import Assertion, read_asserts, whole_test
from .comparison import COMPARISONS, DEFAULT_TOLERANCE, Compare, are_equal, compare_output
from .errors import InvalidRequest
from .limits import parse_duration
from .literal import MAX_SHOWN_CHARS, expression, shown
from .record import asdict, dataclass, field

Outcome = Literal["passed", "failed", "undecided", "not_run"]
MAX_CASES = 10_000
MAX_WHY_CHARS = 400
MAX_OUTPUT_CHARS = MAX_SHOWN_CHARS
WEAK_TESTS = "the program ran beside its tests"
_STDIN_KEYS = frozenset(("stdin", "stdout", "compare", "tolerance", "timeout"))
_CALL_KEYS = frozenset(("call", "args", "kwargs", "result", "tolerance", "timeout"))
_CALLABLE = re.compile(r"[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*(?:\(\))?)*")
_ASSERT_KEYS = frozenset(("assert", "timeout"))
# What a condition may raise for an answer of the wrong type or size.
_WRONG_ANSWER = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinCase:
    """Run the program with this standard input, and compare its standard output."""

    stdin: bytes = field(repr=False)
    expected: bytes = field(repr=False)
    compare: Compare = "tokens"
    tolerance: float = DEFAULT_TOLERANCE
    timeout_s: float | None = None

    def judge(self, answer: bytes) -> str:
        """Return why an output is wrong, empty if it is right."""
        return compare_output(answer, self.expected, self.compare, self.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """Evaluate `calls` inside, and compare their values with `expected`, or by the condition of an assert.

    `setup` is run before them, in the program's module. Without calls it is a whole test, whose verdict is weak.
    """

    calls: tuple[str, ...]
    setup: str = field(default="", repr=False)
    expected: Any = field(default=None, repr=False)
    tolerance: float = 0.0
    assertion: Assertion | None = None
    timeout_s: float | None = None

    def judge(self, values: Sequence[Any]) -> str:
        """Return why values are wrong, empty if they are right."""
        if len(values) != len(self.calls):
            return "it sent another number of results than there are calls"
        if not self.calls:
            return ""
        if self.assertion is None:
            return "" if are_equal(values[0], self.expected, self.tolerance) else "the result is not the expected one"
        try:
            return "" if self.assertion.holds(values) else "the assertion is false for the result"
        except _WRONG_ANSWER as error:
            return f"the assertion cannot be computed from the result: {type(error).__name__}: {error}"


Case = StdinCase | CallCase


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Hold one case's end; `number` counts from 1.

    `outcome` is "passed", "failed", "undecided" (Cloche or its backend failed), or "not_run". `output` is the program's
    standard output or its result, at most 4,096 characters; `why` says what was wrong, without what was expected.
    `status` is that of the run, empty where nothing ran; `duration` is in seconds.
    """

    number: int
    outcome: Outcome
    output: str = ""
    why: str = ""
    status: str = ""
    duration: float = 0.0

    @property
    def passed(self) -> bool:
        """Tell whether the answer was right."""
        return self.outcome == "passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerdict:
    """Say whether a program passed all of its cases.

    `outcome` is "passed", "failed", or "undecided" where Cloche or its backend failed before an answer was wrong; `why`
    is then that failure. `weak` says why the program could have forged it, and is empty where it could not.
    """

    outcome: Outcome
    cases: tuple[CaseResult, ...]
    why: str = ""
    weak: str = ""

    @property
    def passed(self) -> bool:
        """Tell whether every case passed; an undecided verdict is no pass."""
        return self.outcome == "passed"

    @property
    def score(self) -> float | None:
        """Return the share of cases that passed; None where a case is undecided."""
        if any(case.outcome == "undecided" for case in self.cases) or self.outcome == "undecided":
            return None
        return sum(case.passed for case in self.cases) / len(self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            **asdict(self),
            "passed": self.passed,
            "score": self.score,
            "cases": [asdict(case) for case in self.cases],
        }


def conclude(cases: Sequence[CaseResult], weak: str) -> CheckVerdict:
    """Return the verdict of all cases: one wrong answer is a failure, all right ones a pass."""
    failed = next((case for case in cases if case.outcome == "failed"), None)
    undecided = next((case for case in cases if case.outcome == "undecided"), None)
    if failed is not None:
        return CheckVerdict(outcome="failed", cases=tuple(cases), why=f"case {failed.number}: {failed.why}", weak=weak)
    if undecided is not None:
        return CheckVerdict(
            outcome="undecided", cases=tuple(cases), why=f"case {undecided.number}: {undecided.why}", weak=weak
        )
    return CheckVerdict(outcome="passed", cases=tuple(cases), weak=weak)


def read_cases(
    cases: str | Iterable[str | Mapping[str, Any]], *, entry_point: str | None = None, in_program: bool = False
) -> tuple[Case, ...]:
    """Return cases as they are run. Raises InvalidRequest for none, too many, or a wrong one, with its number."""
    if not isinstance(cases, Iterable):
        raise InvalidRequest(f"cases: give a list of cases, or text with asserts, not {type(cases).__name__}")
    rows = [cases] if isinstance(cases, str | Mapping) else list(itertools.islice(cases, MAX_CASES + 1))
    read: list[Case] = []
    for number, row in enumerate(rows, 1):
        try:
            read += _read_row(row, entry_point, in_program=in_program)
        except InvalidRequest as error:
            raise InvalidRequest(f"case {number}: {error}") from None
        if len(read) > MAX_CASES:
            raise InvalidRequest(f"cases: there are more than {MAX_CASES}; check them in several calls")
    if not read:
        raise InvalidRequest("cases: there are none, and no cases are not a pass; give inputs, calls or asserts")
    return tuple(read)


def _read_row(row: object, entry_point: str | None, *, in_program: bool) -> Iterable[Case]:
    if isinstance(row, str):
        return _read_test(row, entry_point, None, in_program=in_program)
    if not isinstance(row, Mapping):
        raise InvalidRequest(f"give a mapping, or text with asserts, not {type(row).__name__}")
    timeout_s = None if row.get("timeout") is None else parse_duration(row["timeout"], name="timeout")
    if "assert" in row:
        _check_keys(row, _ASSERT_KEYS, ("assert",))
        return _read_test(row["assert"], entry_point, timeout_s, in_program=in_program)
    if "call" in row:
        _check_keys(row, _CALL_KEYS, ("call", "result"))
        return [_read_call(row, timeout_s)]
    _check_keys(row, _STDIN_KEYS, ("stdout",))
    return [_read_stdin(row, timeout_s)]


def _check_keys(row: Mapping[str, Any], known: frozenset[str], needed: Sequence[str]) -> None:
    unknown = sorted(map(str, row.keys() - known))
    if unknown:
        raise InvalidRequest(f"it has an unknown key {unknown[0]!r}; such a case has {', '.join(sorted(known))}")
    missing = [key for key in needed if key not in row]
    if missing:
        raise InvalidRequest(
            f'it has no "{missing[0]}"; a case has "stdin" and "stdout", "call" and "result", or "assert"'
        )


def _read_test(test: object, entry_point: str | None, timeout_s: float | None, *, in_program: bool) -> Iterable[Case]:
    if not isinstance(test, str):
        raise InvalidRequest(f"assert: give text, not {type(test).__name__}")
    if in_program:
        return [CallCase(calls=(), setup=whole_test(test, entry_point), timeout_s=timeout_s)]
    return [
        CallCase(calls=assertion.calls, setup=assertion.imports, assertion=assertion, timeout_s=timeout_s)
        for assertion in read_asserts(test, entry_point)
    ]


def _read_call(row: Mapping[str, Any], timeout_s: float | None) -> CallCase:
    name, args, kwargs = row["call"], row.get("args", ()), row.get("kwargs", {})
    if not isinstance(name, str) or not _CALLABLE.fullmatch(name):
        raise InvalidRequest(f'call: {name!r} is no function; give a name such as "add" or "Solution().add"')
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise InvalidRequest("args: give a list of arguments, and a mapping of names to values as kwargs")
    if not all(isinstance(word, str) and word.isidentifier() for word in kwargs):
        raise InvalidRequest("kwargs: a name is no identifier")
    words = [f"{word}={expression(value, what=word)}" for word, value in kwargs.items()]
    call = f"{name}({', '.join([*(expression(value, what='args') for value in args), *words])})"
    expression(row["result"], what="result")
    return CallCase(
        calls=(call,), expected=row["result"], tolerance=_read_tolerance(row.get("tolerance", 0.0)), timeout_s=timeout_s
    )


def _read_stdin(row: Mapping[str, Any], timeout_s: float | None) -> StdinCase:
    compare = row.get("compare", "tokens")
    if compare not in COMPARISONS:
        raise InvalidRequest(f"compare: {compare!r} is not one of {', '.join(COMPARISONS)}")
    return StdinCase(
        stdin=_read_bytes(row.get("stdin", ""), "stdin"), expected=_read_bytes(row["stdout"], "stdout"),
        compare=compare, tolerance=_read_tolerance(row.get("tolerance", DEFAULT_TOLERANCE)), timeout_s=timeout_s,
    )  # fmt: skip


def _read_bytes(value: object, name: str) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    raise InvalidRequest(f"{name}: give text or bytes, not {type(value).__name__}")


def _read_tolerance(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidRequest(f"tolerance: {value!r} is no number of at least 0")
    return float(value)


def shown_values(values: Sequence[Any]) -> str:
    """Return the text of results for the caller."""
    return shown(values[0]) if len(values) == 1 else shown(list(values))
