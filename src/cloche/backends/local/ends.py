"""Ends of short runs, told without the helper: what it would have said of them, found out here."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from cloche.jail.cgroups import PERIOD_US, Cgroup
from cloche.zygote.door import UNWATCHED_S

if TYPE_CHECKING:
    from cloche.jail.spec import Spec
    from cloche.zygote.pool import Slot

SHORT_S = UNWATCHED_S  # what lasts no longer was not looked at
START_S = 0.005  # of processor time, at least, that it takes to have another guest ready
MOST_SPENT = 0.5  # of a quota
LEAST_TIMEOUT_S = 1.0  # far from the clock


def is_short(started_at: float, ended: Mapping[str, Any], timeout_s: float, *, is_counted: bool) -> bool:
    """Tell whether the helper can have nothing to add to the end of a run, times on the monotonic clock in seconds.

    It ended by itself, nothing of it is left, and neither clock nor sums had their turn. `is_counted` says that a
    control group counts what was refused to it, which may be why it failed.
    """
    code = ended["wait_status"]
    is_well = (code == 0 or (is_counted and code & 0x7F == 0)) and ended["is_alone"] and not ended["is_worn"]
    return is_well and timeout_s >= LEAST_TIMEOUT_S and ended["at"] - started_at < SHORT_S


def short_report(started_at: float, ended: dict[str, Any], slot: Slot) -> dict[str, Any]:
    """Return what a helper reports of an end."""
    slot.spent_s += ended["user_s"] + ended["system_s"] + START_S
    return {
        "cause": "",
        "ended": ended,
        "wall_s": monotonic() - started_at,
        "cpu_user_s": ended["user_s"],
        "cpu_system_s": ended["system_s"],
        "peak_bytes": ended["most_kib"] * 1024,
        "is_task_limit_seen": False,
        "is_folder_over": False,
        **count_since(slot),
    }


def count_since(slot: Slot) -> dict[str, Any]:
    """Return what a report says of a run's own part in the figures of its control group."""
    before = slot.counted
    now = count(slot)
    most = now.get("tasks", 0)
    return {
        "tasks": most if most > before.get("tasks", 0) else 0,
        "counters": {name: number - before.get(name, 0) for name, number in now.items() if name != "tasks"},
    }


def refill_quota(slot: Slot, spec: Spec) -> None:
    """Fill a slot's processor quota before it runs out: a run shall not pay for those before. Raises OSError."""
    if slot.cgroup is None or spec.cgroup is None:
        return
    cpus = spec.cgroup["amounts"]["cpus"]
    if slot.spent_s > MOST_SPENT * cpus * PERIOD_US / 1e6:
        slot.spent_s = 0.0
        Cgroup(slot.cgroup["version"], slot.cgroup["folders"]).renew_quota(cpus)


def count(slot: Slot) -> dict[str, int]:
    """Return the figures of a slot's control group, and remember them: what comes on top is a later run's."""
    if slot.gauges is not None:
        slot.counted = slot.gauges.read()
    return slot.counted
