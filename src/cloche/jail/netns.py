"""The jail's own network namespace: nothing but a loopback device, and that one up."""

from __future__ import annotations

import _socket

from .syscalls import call

SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
IFREQ_BYTES, IFNAMSIZ = 40, 16


def raise_loopback() -> None:
    """Bring `lo` up, so that a server and a client of the same run can meet."""
    request = b"lo".ljust(IFNAMSIZ, b"\0") + (IFF_UP | IFF_RUNNING).to_bytes(2, "little")
    control = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        call("ioctl", control.fileno(), SIOCSIFFLAGS, request.ljust(IFREQ_BYTES, b"\0"))
    finally:
        control.close()
