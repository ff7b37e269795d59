"""Decide the status of a run from what was observed. Pure; the one place that knows the precedence."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .result import EXIT_TIMEOUT, Status


class KillCause(enum.StrEnum):
    """Say why *we* killed the guest. Whoever kills says why; nobody infers it from a signal.

    They stand in the order of precedence, for where two killed it at once.
    """

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Hold the facts of one ended run.

    `exit_code` and `signal` come from the kernel's wait status: exactly one of them is not None, unless the whole
    sandbox was killed before the main process could be waited for. The counters are rises during this run. `denied`
    counts what the policy was seen to block, by the kernel or by a process of ours that no guest can reach.
    """

    exit_code: int | None = None
    signal: int | None = None
    cause: KillCause | None = None
    oom_kills: int = 0
    pids_hits: int = 0
    workspace_full: bool = False
    denied: int = 0

    def with_refusal(self, refused: str) -> Observed:
        """Return the facts of a run that told more than is read, where it did: whatever else, that ended it."""
        return replace(self, cause=self.cause or KillCause.OUTPUT_LIMIT) if refused else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Hold the status, the exit code to report, and every limit that was hit."""

    status: Status
    exit_code: int
    hits: Mapping[str, int] = field(default_factory=dict)


SIGKILL, SIGXFSZ = 9, 25


def decide(seen: Observed) -> Verdict:
    """Return the verdict, by the precedence of `Status`. Exit 0 is `ok` whatever was hit."""
    raw = (
        128 + seen.signal
        if seen.signal is not None
        else seen.exit_code
        if seen.exit_code is not None
        else 128 + SIGKILL
    )
    hits = _hits(seen)
    if seen.cause is KillCause.TIMEOUT:
        return Verdict(status=Status.TIMEOUT, exit_code=EXIT_TIMEOUT, hits=hits)
    if seen.cause is None and raw == 0:
        return Verdict(status=Status.OK, exit_code=0, hits=hits)
    if seen.cause is KillCause.OUT_OF_MEMORY or seen.oom_kills:
        return Verdict(status=Status.OUT_OF_MEMORY, exit_code=128 + SIGKILL, hits=hits)
    if seen.cause is KillCause.OUTPUT_LIMIT:
        return Verdict(status=Status.OUTPUT_LIMIT, exit_code=128 + SIGKILL, hits=hits)
    if seen.pids_hits:
        return Verdict(status=Status.PIDS_LIMIT, exit_code=raw, hits=hits)
    if seen.cause is KillCause.DISK_LIMIT or seen.signal == SIGXFSZ or seen.workspace_full:
        return Verdict(status=Status.DISK_LIMIT, exit_code=raw or 128 + SIGKILL, hits=hits)
    if seen.signal is not None or seen.exit_code is None:
        return Verdict(status=Status.SIGNALED, exit_code=raw, hits=hits)
    if seen.denied:
        return Verdict(status=Status.DENIED, exit_code=raw, hits=hits)
    return Verdict(status=Status.ERROR, exit_code=raw, hits=hits)


def _hits(seen: Observed) -> dict[str, int]:
    counts = {
        "timeout": int(seen.cause is KillCause.TIMEOUT),
        "out_of_memory": seen.oom_kills + int(seen.cause is KillCause.OUT_OF_MEMORY),
        "output_limit": int(seen.cause is KillCause.OUTPUT_LIMIT),
        "pids_limit": seen.pids_hits,
        "disk_limit": int(seen.workspace_full or seen.cause is KillCause.DISK_LIMIT or seen.signal == SIGXFSZ),
        "denied": seen.denied,
    }
    return {name: count for name, count in counts.items() if count}
