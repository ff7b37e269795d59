"""Per-process limits of the kernel: the second line behind control groups, and the first without them."""

from __future__ import annotations

import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NUMBERS = {
    "core": resource.RLIMIT_CORE,
    "data": resource.RLIMIT_DATA,
    "fsize": resource.RLIMIT_FSIZE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "msgqueue": 12,
    "nice": 13,
    "rtprio": 14,
}


def apply(limits: Iterable[tuple[str, int]]) -> None:
    """Set each soft and hard limit, never above what the process already has."""
    for name, amount in limits:
        number = NUMBERS[name]
        _, hard = resource.getrlimit(number)
        granted = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(number, (granted, granted))
