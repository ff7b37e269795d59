"""Per-process limits of the kernel: the second line behind control groups, and the first without them."""

from __future__ import annotations

import resource

from .calls import make

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .calls import Call

# The kernel's numbers, the same on every machine Cloche runs on.
NUMBERS = {
    "fsize": 1,
    "data": 2,
    "core": 4,
    "nproc": 6,
    "nofile": 7,
    "memlock": 8,
    "sigpending": 11,
    "msgqueue": 12,
    "nice": 13,
    "rtprio": 14,
}


def setting(limits: Iterable[tuple[str, int]]) -> list[Call]:
    """Set each soft and hard limit, never above what this process, and so the helper it starts, already has."""
    calls = []
    for name, amount in limits:
        _, hard = resource.getrlimit(NUMBERS[name])
        granted = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        calls.append(make("prlimit64", 0, NUMBERS[name], granted.to_bytes(8, "little") * 2, None))
    return calls
