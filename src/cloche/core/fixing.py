"""Auto-fix as values: what is handed to whoever repairs a program, what each round came to, why it ended."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .errors import ClocheError
from .limits import Limits

if TYPE_CHECKING:
    from .result import Result

MOST_COMPARED_LINES = 2_000  # comparing takes time with the square of it
# What a report's JSON says of the run of a round; the last one's enforcement and meta stand in the result itself.
_TOLD = ("status", "exit_code", "stdout", "stderr", "duration", "truncated", "timed_out")


class FixStop(enum.StrEnum):
    """Say why auto-fix ended. FIXED and NOT_NEEDED leave a program that works."""

    NOT_NEEDED = "not_needed"  # the first run ended well
    FIXED = "fixed"
    MAX_ROUNDS = "max_rounds"
    SAME_ERROR = "same_error"
    UNCHANGED_CODE = "unchanged_code"
    NO_CODE = "no_code"  # the answer held nothing that could be run
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - the tokens of a language model
    TIME_BUDGET = "time_budget"
    MODEL_ERROR = "model_error"  # the endpoint or the callable failed
    LOST_STATE = "lost_state"  # the session's interpreter has ended, and what earlier cells defined with it
    NOT_ISOLATED = "not_isolated"  # the sandbox is too weak for code that a model writes


class StateLost(ClocheError):
    """Report that no other code can run in the place of the first: the interpreter whose cell it was has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixTask:
    """Hand over a program to run until it works.

    With `keeps_state` it is a cell of a session. `notes` is what holds beside the limits: `network`, for example.
    """

    code: str
    language: str
    limits: Limits
    keeps_state: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRound:
    """Hold one question to the model and what came of it.

    `reply` is the model's text, bounded; `code` what was taken from it, empty when that was nothing; `diff` the unified
    diff from the code before. `result` is the run's, None when nothing ran, and `refusal` then says why. `tokens` is
    what the round cost, `duration_s` what it took, both with the question.
    """

    number: int
    reply: str = field(repr=False)
    code: str = field(default="", repr=False)
    diff: str = field(default="", repr=False)
    result: Result | None = None
    refusal: str = ""
    tokens: int = 0
    duration_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "number": self.number,
            "reply": self.reply,
            "code": self.code,
            "diff": self.diff,
            "result": told(self.result),
            "refusal": self.refusal,
            "tokens": self.tokens,
            "duration_s": self.duration_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FixReport:
    """Say what auto-fix did: why it ended, in a word and in words, and each round.

    `code` is the program that ran last, `diff` what changed in it since the first, `first` the first run. `model` and
    `host` say where code and output went, empty for a callable. `tokens` counts all rounds.
    """

    stop: FixStop
    message: str
    code: str = field(repr=False)
    diff: str = field(default="", repr=False)
    first: Result | None = field(default=None, repr=False)
    rounds: tuple[FixRound, ...] = ()
    model: str = ""
    host: str = ""
    tokens: int = 0
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Tell whether the program works now."""
        return self.stop in (FixStop.FIXED, FixStop.NOT_NEEDED)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "stop": str(self.stop),
            "ok": self.ok,
            "message": self.message,
            "code": self.code,
            "diff": self.diff,
            "first": told(self.first),
            "rounds": [one.as_dict() for one in self.rounds],
            "model": self.model,
            "host": self.host,
            "tokens": self.tokens,
            "duration_s": self.duration_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FixAsking:
    """Say that a model is about to be asked: code and output are about to leave for `host`, empty for a callable."""

    number: int
    max_rounds: int
    model: str
    host: str
    error: str  # the failure in one line


@dataclass(frozen=True, slots=True, kw_only=True)
class FixAnswering:
    """Say how much of an answer has come in."""

    number: int
    chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRunning:
    """Say that the program of a round is about to run."""

    number: int
    code: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixTried:
    """Carry a round that is over."""

    round: FixRound


@dataclass(frozen=True, slots=True, kw_only=True)
class FixEnded:
    """Carry the report; the last event."""

    report: FixReport


FixEvent = FixAsking | FixAnswering | FixRunning | FixTried | FixEnded
FixSink = Callable[[FixEvent], None]
Attempt = Callable[[str], Awaitable["Result"]]


@runtime_checkable
class Fixer(Protocol):
    """Repair programs. `attempt` runs other code under the same request and policy; nothing else can be changed."""

    async def fix(self, task: FixTask, attempt: Attempt) -> Result:
        """Run the task's code, and what is made of it, until it works or there is a reason to stop.

        Returns the result of the last run, its `fix` filled in.
        """
        ...


def told(result: Result | None) -> dict[str, Any] | None:
    """Return what a report says of a run."""
    if result is None:
        return None
    return {name: getattr(result, name) if name != "status" else str(result.status) for name in _TOLD}


def code_diff(before: str, after: str) -> str:
    """Return the unified diff between two programs; of very long ones only that they differ."""
    old, new = before.splitlines(), after.splitlines()
    if old == new:
        return ""
    if len(old) + len(new) > MOST_COMPARED_LINES:
        return f"--- before\n+++ after\n(too long to compare: {len(old)} lines before, {len(new)} after)\n"
    lines = difflib.unified_diff(old, new, "before", "after", lineterm="")
    return "\n".join(lines) + "\n"
