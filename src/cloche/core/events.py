"""What happens while a sandbox works, as frozen values. Sinks are plain functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from .result import Output, Result

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Say that the guest's code began to run."""

    plan: tuple[PlanStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """Describe one applied step of the jail's set-up, and the seconds it took."""

    name: str
    description: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """Carry bytes the guest wrote, in order per stream."""

    stream: Stream
    data: bytes = field(repr=False)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Displayed:
    """Carry a rich output that a session's code displayed."""

    output: Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Carry the result; the last event of a run."""

    result: Result


Event = Started | OutputChunk | Displayed | Ended
Sink = Callable[[Event], None]


def discard(event: Event) -> None:
    """Drop an event."""
