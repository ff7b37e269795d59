"""Say, before a run and truly, what a machine of microsandbox's enforces.

No machine of it could be run where this was written, so nothing that rests on it alone is called enforced.
"""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.enforcement import Measure
from cloche.core.levels import Control, State

UNTRIED = "as microsandbox documents it; this version of Cloche was never tried on it"


def measures() -> Mapping[Control, Measure]:
    """Return one measure per control."""
    return {
        Control.FILESYSTEM: _partial("the image's own root, nothing of the host's shared"),
        Control.NETWORK: _partial("a network policy that denies all, in both directions"),
        Control.MEMORY: _partial(
            "RLIMIT_DATA of each process; the size of the machine for all, with its places in memory"
        ),
        Control.CPU: _partial("the machine's processors, rounded up"),
        Control.PIDS: _partial("limit of processes per user in the guest"),
        Control.DISK: _partial("places in memory with a size; no limit on the number of files"),
        Control.TIME: Measure(
            state=State.ENFORCED, mechanism="wall clock outside; the machine is killed when it does not obey"
        ),
        Control.OUTPUT: Measure(state=State.ENFORCED, mechanism="bounded buffers outside, flood limit kills"),
        Control.SYSCALLS: _partial("a kernel of its own on KVM, under libkrun"),
        Control.IDENTITY: _partial("not root inside; the monitor runs as the calling user"),
    }


def _partial(mechanism: str) -> Measure:
    return Measure(state=State.PARTIAL, mechanism=mechanism, reason=UNTRIED)
