"""What a helper reports of an end, read; and waiting for one, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

from cloche.core.outcome import KillCause, Observed
from cloche.core.result import Usage

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """Wait until `work` is done, however often the waiting is cancelled; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody else will ask for it
        raise cancelled
    return task.result()


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
