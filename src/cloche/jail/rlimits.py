"""Per-process limits of the kernel: the second line behind control groups, and the first without them."""

from __future__ import annotations

from .syscalls import call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# The kernel's numbers, the same on every machine Cloche runs on; `resource` would cost every run a module.
NUMBERS = {
    "fsize": 1,
    "data": 2,
    "core": 4,
    "nproc": 6,
    "nofile": 7,
    "memlock": 8,
    "msgqueue": 12,
    "nice": 13,
    "rtprio": 14,
}
_WORD_BYTES = 8


def apply(limits: Iterable[tuple[str, int]]) -> None:
    """Set each soft and hard limit, never above what the process already has."""
    for name, amount in limits:
        number = NUMBERS[name]
        present = bytes(bytearray(2 * _WORD_BYTES))  # a fresh object that nobody else holds: the kernel writes into it
        call("prlimit64", 0, number, None, present)
        hard = int.from_bytes(present[_WORD_BYTES:], "little")
        granted = min(amount, hard).to_bytes(_WORD_BYTES, "little")
        call("prlimit64", 0, number, granted * 2, None)
