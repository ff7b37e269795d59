"""Ending all that belongs to a process: stopped first, so that a fork bomb stands still, then killed."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SIGKILL, SIGSTOP = 9, 19
MOST_PASSES = 50  # of stopping; who is faster than that is killed as far as it was found, and looked for again


def send(pid: int, number: int) -> None:
    """Send a signal; who has gone meanwhile needs none."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill(members: Callable[[], list[int]]) -> bool:
    """Kill all that `members` finds; tell whether there was anybody, who may take a moment to be gone."""
    stopped: set[int] = set()
    for _ in range(MOST_PASSES):
        new = set(members()) - stopped
        if not new:
            break
        for pid in new:
            send(pid, SIGSTOP)
        stopped |= new
    for pid in stopped:
        send(pid, SIGKILL)
    return bool(stopped)
