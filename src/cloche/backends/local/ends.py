"""Ends of short runs, told without the helper: what it would have said of them, found out here."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from cloche.jail.cgroups import Cgroup

if TYPE_CHECKING:
    from cloche.zygote.pool import Slot

SHORT_S = 0.02  # how often a helper sums the memory: what lasts no longer was not looked at
LEAST_TIMEOUT_S = 1.0  # far from the clock


def is_short(started_at: float, ended: Mapping[str, Any], timeout_s: float) -> bool:
    """Tell whether the helper can have nothing to add to the end of a run, times on the monotonic clock in seconds.

    It ended by itself, and well, nothing of it is left, and neither clock nor sums had their turn.
    """
    is_well = ended["wait_status"] == 0 and ended["is_alone"] and not ended["is_worn"]
    return is_well and timeout_s >= LEAST_TIMEOUT_S and ended["at"] - started_at < SHORT_S


def short_report(started_at: float, ended: dict[str, Any], slot: Slot) -> dict[str, Any]:
    """Return what a helper reports of an end."""
    before = slot.counted
    now = count(slot)
    most = now.get("tasks", 0)
    return {
        "cause": "",
        "ended": ended,
        "wall_s": monotonic() - started_at,
        "cpu_user_s": ended["user_s"],
        "cpu_system_s": ended["system_s"],
        "peak_bytes": ended["most_kib"] * 1024,
        "tasks": most if most > before.get("tasks", 0) else 0,
        "counters": {name: number - before.get(name, 0) for name, number in now.items() if name != "tasks"},
        "is_task_limit_seen": False,
        "is_folder_over": False,
    }


def count(slot: Slot) -> dict[str, int]:
    """Return the figures of a slot's control group, and remember them: what comes on top is a later run's."""
    if slot.cgroup is not None:
        group = Cgroup(slot.cgroup["version"], slot.cgroup["folders"])
        slot.counted = {**group.counters(), "tasks": group.most_pids()}
    return slot.counted
