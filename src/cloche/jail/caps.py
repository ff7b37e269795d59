"""Capabilities: drop all, the bounding set too."""

from __future__ import annotations

import os

from .syscalls import (
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_CLEAR_ALL,
    PR_CAP_AMBIENT_RAISE,
    PR_CAPBSET_DROP,
    PR_SET_NO_NEW_PRIVS,
    call,
    prctl,
)  # fmt: skip

_VERSION_3 = 0x20080522
LAST_CAPABILITY = 63
EINVAL = 22
PR_SET_KEEPCAPS, CAP_DAC_READ_SEARCH = 8, 2


def drop_all(*, bounding: bool = True) -> None:
    """Drop every capability for good. `bounding` needs CAP_SETPCAP, which a namespace's creator has."""
    if bounding:
        _drop_bounding()
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    set_capabilities(0)


def _drop_bounding() -> None:
    for capability in range(LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            if error.errno == EINVAL:  # one past the last capability this kernel knows
                return
            raise


def set_capabilities(mask: int, *, inheritable: int = 0) -> None:
    """Set the effective and permitted sets to `mask`."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    inherit_low, inherit_high = inheritable & 0xFFFFFFFF, inheritable >> 32
    header = _VERSION_3.to_bytes(4, "little") + (0).to_bytes(4, "little")
    words = (low, low, inherit_low, high, high, inherit_high)
    call("capset", header, b"".join(word.to_bytes(4, "little") for word in words))


def forbid_new_privileges() -> None:
    """Make set-user-id programs and file capabilities powerless from here on."""
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def become(outside_id: int) -> None:
    """Switch to an ordinary id for good; with it, the kernel takes every capability."""
    os.setgroups([])
    os.setresgid(outside_id, outside_id, outside_id)
    os.setresuid(outside_id, outside_id, outside_id)


def become_keeping_read_search(outside_id: int) -> None:
    """Switch to an ordinary id but go on reading what only root may; Landlock then says which trees.

    The one use is an interpreter below a private home where no mount can show it (level confined, as root).
    """
    prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(outside_id, outside_id, outside_id)
    os.setresuid(outside_id, outside_id, outside_id)
    mask = 1 << CAP_DAC_READ_SEARCH
    set_capabilities(mask, inheritable=mask)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)
