"""The jail's own network namespace: nothing but a loopback device, and that one up."""

from __future__ import annotations

import os

from .calls import make
from .syscalls import SOCK_DGRAM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .calls import Call

AF_INET = 2
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
IFREQ_BYTES, IFNAMSIZ = 40, 16


def raise_loopback() -> list[Call]:
    """Bring `lo` up, so that a server and a client of the same run can meet."""
    request = b"lo".ljust(IFNAMSIZ, b"\0") + (IFF_UP | IFF_RUNNING).to_bytes(2, "little")
    return [
        make("socket", AF_INET, SOCK_DGRAM | os.O_CLOEXEC, 0, keep="control"),
        make("ioctl", "control", SIOCSIFFLAGS, request.ljust(IFREQ_BYTES, b"\0")),
        make("close", "control"),
    ]
