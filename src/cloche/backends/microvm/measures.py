"""Say, before a run and truly, what a virtual machine enforces here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cloche.core.enforcement import Measure
from cloche.core.levels import Control, State

from .acceleration import Found

NOT_A_WALL = "software emulation (no KVM): QEMU's authors do not call its translator a security boundary"


AROUND: Mapping[str, str] = {
    "qemu": "QEMU under its own seccomp filter",
    "firecracker": "Firecracker under its own seccomp filters, in a root of its own",
}


def measures(found: Found, *, is_root: bool | None = None, engine: str = "qemu") -> Mapping[Control, Measure]:
    """Return one measure per control."""
    root = os.geteuid() == 0 if is_root is None else is_root
    return {
        Control.FILESYSTEM: _enforced(
            "root disk opened by the monitor for reading alone, nothing of the host's shared"
        ),
        Control.NETWORK: _enforced("a machine without a network device"),
        Control.MEMORY: _enforced(
            "control group (v2) in the guest, private memory watched every 20 ms; the size of the machine around it"
        ),
        Control.CPU: _enforced(_processors(found)),
        Control.PIDS: _enforced("pids control group (v2) in the guest"),
        Control.DISK: _enforced("tmpfs with size and inode limits in the guest; no disk that could be written"),
        Control.TIME: _enforced("wall clock outside; the machine is killed when it does not obey"),
        Control.OUTPUT: _enforced("bounded buffers outside, flood limit kills"),
        Control.SYSCALLS: _syscalls(found, AROUND[engine]),
        Control.IDENTITY: _identity(root),
    }


def _enforced(mechanism: str) -> Measure:
    return Measure(state=State.ENFORCED, mechanism=mechanism)


def _processors(found: Found) -> str:
    around = "the machine's processors" if found.kind == "kvm" else "the machine's only processor, as it is emulated,"
    return f"CPU quota of a control group (v2) in the guest; {around} around it"


def _syscalls(found: Found, around: str) -> Measure:
    if found.kind == "kvm":
        return _enforced(f"a kernel of its own on KVM; {around}")
    return Measure(
        state=State.PARTIAL,
        mechanism=f"a kernel of its own on an emulated processor (TCG); {around}",
        reason=NOT_A_WALL,
    )


def _identity(is_root: bool) -> Measure:
    if is_root:
        return _enforced("the monitor has an id of its own, that no user of the host has; not root inside")
    return Measure(
        state=State.PARTIAL,
        mechanism="not root inside; the monitor has no new privileges and no files but its own",
        reason="the monitor runs as the calling user",
    )
