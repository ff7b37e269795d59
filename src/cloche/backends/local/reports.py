"""What a helper reports of an end, read."""

from __future__ import annotations

import os
from typing import Any

from cloche.core.outcome import KillCause, Observed
from cloche.core.result import Usage

from ..waiting import finish

__all__ = ["finish", "observed", "usage"]


def observed(ended: dict[str, Any]) -> Observed:
    """Read the helper's report of an end."""
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
    )


def usage(ended: dict[str, Any]) -> Usage:
    """Read what a run used."""
    return Usage(
        wall_s=ended["wall_s"],
        cpu_user_s=ended["cpu_user_s"],
        cpu_system_s=ended["cpu_system_s"],
        peak_memory_bytes=ended["peak_bytes"],
        processes=max(1, ended["tasks"]),
    )
