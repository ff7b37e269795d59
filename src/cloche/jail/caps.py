"""Capabilities: which system calls drop them all, the bounding set too."""

from __future__ import annotations

import functools

from .calls import EINVAL, make
from .syscalls import (
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_CLEAR_ALL,
    PR_CAP_AMBIENT_RAISE,
    PR_CAPBSET_DROP,
    PR_SET_NO_NEW_PRIVS,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .calls import Call

_VERSION_3 = 0x20080522
LAST_CAPABILITY = 63
PR_SET_KEEPCAPS, CAP_DAC_READ_SEARCH = 8, 2


def prctl(option: int, *arguments: int) -> Call:
    """Return a call of prctl with its unused arguments set to 0, as most options demand."""
    return make("prctl", option, *arguments, *(0,) * (4 - len(arguments)))


def drop_all() -> list[Call]:
    """Drop every capability for good; the bounding set needs CAP_SETPCAP, which a namespace's creator has."""
    return [*drop_bounding(), *drop_own()]


def drop_bounding() -> list[Call]:
    """Drop every capability that executing a file could grant."""
    last, excuse = _last_capability()
    return [make("prctl", PR_CAPBSET_DROP, number, 0, 0, 0, excuse=excuse) for number in range(last + 1)]


def drop_own() -> list[Call]:
    """Drop every capability that the process has, or would hand on."""
    return [prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL), set_capabilities(0)]


@functools.cache
def _last_capability() -> tuple[int, tuple[int, ...]]:
    """Return the last capability of this kernel; where it does not say, the last there can be, and an excuse."""
    try:
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            return int(file.read()), ()
    except (OSError, ValueError):
        return LAST_CAPABILITY, (EINVAL,)


def set_capabilities(mask: int, *, inheritable: int = 0) -> Call:
    """Set the effective and permitted sets to `mask`."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    inherit_low, inherit_high = inheritable & 0xFFFFFFFF, inheritable >> 32
    header = _VERSION_3.to_bytes(4, "little") + (0).to_bytes(4, "little")
    words = (low, low, inherit_low, high, high, inherit_high)
    return make("capset", header, b"".join(word.to_bytes(4, "little") for word in words))


def forbid_new_privileges() -> Call:
    """Make set-user-id programs and file capabilities powerless from here on."""
    return prctl(PR_SET_NO_NEW_PRIVS, 1)


def keep_read_search(switch: list[Call]) -> list[Call]:
    """Switch to an ordinary id but go on reading what only root may; Landlock then says which trees.

    The one use is an interpreter below a private home where no mount can show it (level confined, as root).
    """
    mask = 1 << CAP_DAC_READ_SEARCH
    return [
        prctl(PR_SET_KEEPCAPS, 1),
        *switch,
        set_capabilities(mask, inheritable=mask),
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH),
    ]
