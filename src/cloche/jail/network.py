"""The sockets through which a jail's network is served from outside: made in its network namespace, and handed out.

A jail has no interface but loopback. Here every IPv4 address becomes a local one, and sockets are bound for names and
for each served port. They go to the egress process over a link that the caller gave to the helper: pid 1 sends them
before there is any guest, and keeps none. A connection of the guest's then ends at such a socket, whose local address
is the address that the guest asked for. No packet of the guest's leaves its namespace.
"""

from __future__ import annotations

import posix

from . import messages
from .steps import StepFailed
from .syscalls import call, read_uint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .steps import Step

NAME_SERVER = (198, 18, 0, 1)
PREFIX_BITS = 15  # of 198.18.0.0/15 (RFC 2544), for benchmarks between networks: no host has such an address
DNS_PORT, BACKLOG, LOOPBACK = 53, 512, 1
EVERY = (0, 0, 0, 0)
STEP: Step = ("network", "open the sockets that the egress process serves", [])

AF_INET, SOCK_STREAM, SOCK_DGRAM, SOCK_RAW = 2, 1, 2, 3
AF_NETLINK, SOL_SOCKET, SO_REUSEADDR = 16, 1, 2
NEW_LINK, NEW_ADDRESS, NEW_ROUTE, ERROR = 16, 20, 24, 2
REQUEST, ACK, CREATE = 1, 4, 0x400
LOCAL_TABLE, STATIC, HOST_SCOPE, LOCAL_ROUTE = 255, 4, 254, 2
UP = 1
HEADER_BYTES, ANSWER_BYTES = 16, 4096


def open_sockets(network: dict[str, Any], link: int, jail: int = 0) -> None:
    """Make all sockets in the network namespace that we are in, and send them by `link`. Raises StepFailed.

    `network` has the `ports` that are served besides the name server's. They take the place of those that a `jail` of
    the same number had sent before: clones of a session have numbers, all other jails follow one another.
    """
    fds: list[int] = []
    try:
        _make_all_local()
        fds.append(_bound(SOCK_DGRAM, NAME_SERVER, DNS_PORT))
        fds.append(_listening(NAME_SERVER, DNS_PORT))
        fds.extend(_listening(EVERY, port) for port in network["ports"])
        messages.send_retrying(link, "sockets", {"ports": network["ports"], "jail": jail}, fds)
    except OSError as error:
        raise StepFailed(STEP, 0, 1, error) from error
    finally:
        for fd in fds:
            posix.close(fd)


def close_sockets(link: int, jail: int) -> None:
    """Have the egress process close all sockets of a jail that has ended; an error means that it has ended itself."""
    try:
        messages.send(link, "gone", {"jail": jail})
    except OSError:
        pass


def _listening(address: tuple[int, ...], port: int) -> int:
    fd = _bound(SOCK_STREAM, address, port)
    call("listen", fd, BACKLOG)
    return fd


def _bound(kind: int, address: tuple[int, ...], port: int) -> int:
    fd = call("socket", AF_INET, kind | posix.O_CLOEXEC | posix.O_NONBLOCK, 0)
    try:
        if kind == SOCK_STREAM:
            call("setsockopt", fd, SOL_SOCKET, SO_REUSEADDR, (1).to_bytes(4, "little"), 4)
        name = AF_INET.to_bytes(2, "little") + port.to_bytes(2, "big") + bytes(address) + bytes(8)
        call("bind", fd, name, len(name))
    except OSError:
        posix.close(fd)
        raise
    return fd


def _make_all_local() -> None:
    """Bring loopback up, with an address of the range, and make every IPv4 address a local one."""
    fd = call("socket", AF_NETLINK, SOCK_RAW | posix.O_CLOEXEC, 0)
    try:
        _ask(fd, NEW_LINK, bytes(4) + _integer(LOOPBACK) + _integer(UP) + _integer(UP))
        address = bytes((AF_INET, PREFIX_BITS, 0, HOST_SCOPE)) + _integer(LOOPBACK)
        _ask(fd, NEW_ADDRESS, address + _attribute(1, bytes(NAME_SERVER)) + _attribute(2, bytes(NAME_SERVER)))
        route = bytes((AF_INET, 0, 0, 0, LOCAL_TABLE, STATIC, HOST_SCOPE, LOCAL_ROUTE, 0, 0, 0, 0))
        _ask(fd, NEW_ROUTE, route + _attribute(4, _integer(LOOPBACK)))
    finally:
        posix.close(fd)


def _ask(fd: int, kind: int, body: bytes) -> None:
    """Send one request of rtnetlink, and read its acknowledgement. Raises OSError with the kernel's errno."""
    size = HEADER_BYTES + len(body)
    flags = (REQUEST | ACK | CREATE).to_bytes(2, "little")
    posix.write(fd, size.to_bytes(4, "little") + kind.to_bytes(2, "little") + flags + bytes(8) + body)
    answer = posix.read(fd, ANSWER_BYTES)
    code = read_uint(answer, HEADER_BYTES)
    if read_uint(answer, 4, 2) != ERROR or code:
        code = (1 << 32) - code if code else 71  # EPROTO
        raise OSError(code, f"rtnetlink: {posix.strerror(code)}")


def _attribute(kind: int, value: bytes) -> bytes:
    return (4 + len(value)).to_bytes(2, "little") + kind.to_bytes(2, "little") + value


def _integer(value: int) -> bytes:
    return value.to_bytes(4, "little")
