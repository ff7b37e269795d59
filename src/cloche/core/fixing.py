"""Auto-fix as values: the task of a fixer, its protocol, and the events of its rounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from .errors import ClocheError
from .limits import Limits
from .record import dataclass, field
from .result import FixReport, FixRound, Result


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
class FixAsking:
    """Report that code and output are about to be sent to a model at `host`, empty for a callable."""

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
Attempt = Callable[[str], Awaitable[Result]]


@runtime_checkable
class Fixer(Protocol):
    """Repair programs. `attempt` runs other code under the same request and policy; nothing else can be changed."""

    async def fix(self, task: FixTask, attempt: Attempt) -> Result:
        """Run the task's code and its successors until one works or there is a reason to stop.

        Returns the result of the last run, its `fix` filled in.
        """
        ...
