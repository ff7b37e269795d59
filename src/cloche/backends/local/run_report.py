"""The end of a run: three sources report it. `RunEnd` decides which report counts; `observed` and `usage` read it.

`RunEnd` uses no I/O and no clock. This module also counts the runs of this process that are under way: when they
outnumber the processors, some wait for one.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from cloche.core.errors import ClocheError, OutcomeUnknown, StartFailed
from cloche.core.events import PlanStep
from cloche.core.result import KillCause, Observed, Usage
from cloche.forkserver.slot import UNWATCHED_S

from ..host import with_limit

if TYPE_CHECKING:
    from cloche.jail.steps import Step

SHORT_S = UNWATCHED_S  # memory and tasks of a shorter run were not sampled
LEAST_TIMEOUT_S = 1.0  # a time-out that a short run cannot have reached
# The sources of reports: the shared status, in which a guest marks the start of its program; the prefork jail, on the
# handoff socket; the helper, on its link. (Not an enum: member access is a function call in Python 3.11.)
ReportSource = Literal["status", "jail", "helper"]
_PROCESSORS = len(os.sched_getaffinity(0))
_running: set[object] = set()  # adding to a set is atomic under the GIL
os.register_at_fork(after_in_child=_running.clear)


class Ask(enum.Enum):
    """Say that the report received so far does not decide the end."""

    HELPER = enum.auto()  # pass the jail's report to the helper, whose own report decides


Conclusion = dict[str, Any] | ClocheError | Ask


class RunEnd:
    """Decide how one run ended.

    Theory of operation: the jail reports an end first. Its report is enough for a short run about which the helper can
    know nothing more. The helper's report decides for all other runs, for a killed run, and for a run without a
    reported start. Before the caller acts on a helper's message that ends a run, it must have read the shared status
    and the handoff socket, because their messages are older. Messages of earlier runs may arrive late; their number
    tells them apart. One such message counts: it says that the jail to which the orders were sent has ended, and the
    orders are lost with it.
    """

    __slots__ = ("_is_counted", "_timeout_s", "generation", "is_given_up", "number", "started_at", "was_killed")

    def __init__(self, number: int = 0, timeout_s: float = 0.0, *, generation: int = 0, is_counted: bool = False):
        """Begin with the facts known when the orders are sent.

        `generation` is that of the prefork jail that received the orders, 0 if the helper passes them on. `is_counted`
        says that a control group counts the run's refused requests.
        """
        self.number, self._timeout_s = number, timeout_s
        self.generation, self._is_counted = generation, is_counted
        self.started_at = 0.0  # on the monotonic clock, once the program has started
        self.was_killed = self.is_given_up = False

    def take(self, source: ReportSource, tag: str, body: dict[str, Any]) -> Conclusion | None:
        """Take one message and return the conclusion: a report, an error, or `Ask`; None if the run goes on.

        A report from the jail lacks the wall time and the control group's figures, which the caller adds.
        """
        if source == "jail":  # its message of a start only prompts a look at the status
            is_end = tag == "ended" and body["number"] == self.number
            return (self._short_report(body) or Ask.HELPER) if is_end else None
        if tag == "started":
            self.started_at = self.started_at or body["at"]
        elif tag == "ended":
            if body["number"] == self.number:
                return body
            if 0 < self.generation < body["generation"]:
                return self.loss()
        elif tag == "failed":
            return None if self.is_of_earlier(body) else self._failure(body)
        elif tag in ("", "lost"):
            return self.loss()
        return None

    def is_of_earlier(self, body: Mapping[str, Any]) -> bool:
        """Tell whether a message belongs to an earlier run, abandoned for this one."""
        return bool(body["number"] < self.number)

    def _short_report(self, ended: Mapping[str, Any]) -> dict[str, Any] | None:
        if self.was_killed or not self.started_at:
            return None
        if not is_short(self.started_at, ended, self._timeout_s, is_counted=self._is_counted):
            return None
        return {
            "cause": "",
            "ended": ended,
            "cpu_user_s": ended["user_s"],
            "cpu_system_s": ended["system_s"],
            "peak_bytes": ended["most_kib"] * 1024,
            "is_task_limit_seen": False,
            "is_folder_over": False,
        }

    def _failure(self, body: Mapping[str, Any]) -> ClocheError:
        if self.started_at:
            return OutcomeUnknown(f"{body['message']}; the code had been started, and may have run in part")
        message = with_limit(body["message"], body["errno"])
        return StartFailed(message, step=body["step"], index=body["index"], errno=body["errno"])

    def loss(self) -> ClocheError:
        """Return the error of a run whose end can no longer be reported."""
        if self.is_given_up:
            return OutcomeUnknown(
                "the helper process did not report the end of the run (it may have been stopped by a signal or a frozen"
                " control group), and was killed with all processes of the run; the code may have run in part"
            )
        if self.started_at:
            return OutcomeUnknown("the helper process ended while the code was running; it may have run in part")
        return StartFailed("the helper process ended before the code was started", step="helper")


def is_short(started_at: float, ended: Mapping[str, Any], timeout_s: float, *, is_counted: bool) -> bool:
    """Tell whether the helper can add nothing to the report of an end. Times are in seconds of the monotonic clock.

    That holds if the run ended by itself, none of its processes is left, and neither the time-out nor the sampling of
    resources came into play. `is_counted` says that a control group counts refused requests, which may be why it
    failed.
    """
    code = ended["wait_status"]
    is_well = (code == 0 or (is_counted and code & 0x7F == 0)) and ended["is_alone"] and not ended["is_worn"]
    return is_well and timeout_s >= LEAST_TIMEOUT_S and ended["at"] - started_at < SHORT_S


def observed(ended: dict[str, Any], network_refused: int = 0) -> Observed:
    """Read a report of an end. `network_refused` is the number of connections that the network refused."""
    report = ended["ended"]
    status = report["wait_status"] if report else None
    signal = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
    counters = ended["counters"]
    return Observed(
        exit_code=os.WEXITSTATUS(status) if status is not None and signal is None else None,
        signal=signal,
        cause=KillCause(ended["cause"]) if ended["cause"] else None,
        oom_kills=counters.get("oom_kills", 0),
        pids_hits=counters.get("pids_hits", 0) + int(ended["is_task_limit_seen"]),
        workspace_full=bool(ended["is_folder_over"] or (report and report["full"])),
        denied=report.get("denied", 0) if report else 0,
        network_refused=network_refused,
    )


def usage(ended: dict[str, Any]) -> Usage:
    """Read the resources that a run used."""
    return Usage(
        wall_s=ended["wall_s"],
        cpu_user_s=ended["cpu_user_s"],
        cpu_system_s=ended["cpu_system_s"],
        peak_memory_bytes=ended["peak_bytes"],
        processes=max(1, ended["tasks"]),
    )


def begin_run(sandbox: object) -> None:
    """Count a run that begins."""
    _running.add(sandbox)


def end_run(sandbox: object) -> None:
    """Stop counting a run that is over."""
    _running.discard(sandbox)


def is_under_load() -> bool:
    """Tell whether there are more runs than processors."""
    return len(_running) > _PROCESSORS


def timed_steps(steps: Sequence[Step], seconds: Sequence[float], *, whose: str = "") -> Iterator[PlanStep]:
    """Yield the steps with their durations; steps without a duration, of a guest that had waited, are left out."""
    for (name, description, _), spent in zip(steps, seconds, strict=False):
        yield PlanStep(name=name, description=whose + description, seconds=spent)
