"""What the contest costs besides time: memory that waits between runs, and what would be left behind.

This process adopts orphans while it measures, so that nothing which Cloche started can end up as somebody else's child.
"""

from __future__ import annotations

import os
import time
from typing import Any, Protocol, cast

from cloche.jail.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from cloche.runtime.factory import backend_named
from cloche.testing.conformance_leftovers import leftovers, status_of

SETTLE_S = 0.5  # slots build their next jail, and the last guest's end is cleared up
PATIENCE_S = 10.0
KIB = 1024


class _CoolsDown(Protocol):
    """Be a backend that can end what it keeps warm."""

    def cool_down(self) -> None: ...


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own below this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def memory_of_pool() -> dict[str, Any]:
    """Return what waits for the next run, in MiB of PSS: shared pages count in parts, so that sums are true.

    The template is the one direct child; what it forked are slots, each a helper with what is below it.
    """
    time.sleep(SETTLE_S)
    children = _children()
    templates = [pid for pid in children.get(os.getpid(), []) if children.get(pid)]
    slots = [slot for template in templates for slot in children[template]]
    if not slots:
        return {"reason": "nothing is kept warm here"}
    try:
        own = {pid: _memory(pid) for template in templates for pid in _tree(template, children)}
    except PermissionError:
        return {"reason": "only root may look into these processes (they are closed to others on purpose)"}
    per_slot = [[own[pid] for pid in _tree(slot, children)] for slot in slots]
    return {
        "slots": len(slots),
        "processes_per_slot": round(sum(map(len, per_slot)) / len(slots), 1),
        "slot_mib": _mib(sum(pss for slot in per_slot for pss, _ in slot) / len(slots)),
        "slot_private_mib": _mib(sum(private for slot in per_slot for _, private in slot) / len(slots)),
        "template_mib": _mib(sum(own[template][0] for template in templates)),
        "all_mib": _mib(sum(pss for pss, _ in own.values())),
    }


def processes_below(root: int) -> list[int]:
    """Return the processes that descend from `root`."""
    return _tree(root, _children())[1:]


def memory_of(others: frozenset[int]) -> dict[str, float]:
    """Return how many processes are below this one besides `others`, and their memory in MiB of PSS."""
    own = [_memory(pid) for pid in processes_below(os.getpid()) if pid not in others]
    return {
        "processes": len(own),
        "pss_mib": _mib(sum(pss for pss, _ in own)),
        "private_mib": _mib(sum(private for _, private in own)),
    }


def available_bytes() -> int:
    """Return the memory that can still be had on this machine."""
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file)
    return int(rows["MemAvailable"].split()[0]) * KIB


def _mib(kib: float) -> float:
    return round(kib / KIB, 2)


def _memory(pid: int) -> tuple[int, int]:
    """Return a process's PSS and what is its alone, in KiB; zeros when it is gone."""
    rows: dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
            for line in file:
                words = line.split()
                if len(words) == 3 and words[2] == "kB":
                    rows[words[0]] = int(words[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return rows.get("Pss:", 0), rows.get("Private_Clean:", 0) + rows.get("Private_Dirty:", 0)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (status := status_of(int(name))):
            found.setdefault(int(status["PPid"]), []).append(int(name))
    return found


def _tree(root: int, children: dict[int, list[int]]) -> list[int]:
    return [root, *(pid for child in children.get(root, []) for pid in _tree(child, children))]


def cool_down(name: str = "local") -> None:
    """End what is kept warm, so that the next event does not pay for the one before."""
    backend = backend_named(name)
    cast(_CoolsDown, backend).cool_down()


def leaks_after(before: frozenset[str]) -> list[str]:
    """End what is kept warm and return what is still there after ten seconds and was not before.

    Looked at are processes below this one, mounts, control groups and folders that bear this process's name.
    """
    cool_down()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        _bury()
        left = leftovers() - before
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.05)


def _bury() -> None:
    """Take note of the end of adopted children: nobody else waits for them."""
    for pid in _children().get(os.getpid(), []):
        if status_of(pid).get("State", "").startswith("Z"):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass  # somebody waited for it meanwhile
