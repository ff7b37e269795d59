"""How often a program wanted to reach what lies outside: the kernel counts it, in each network namespace.

A namespace that has nothing but a loopback device has no route to anywhere else. So whatever was tried, a connection, a
datagram, a name that a server would have to be asked for, has ended at the same place in the kernel.
"""

from __future__ import annotations

import posix

MOST_BYTES = 1 << 14


def count() -> int:
    """Return how often there was no route, since this namespace was made; 0 where the kernel does not say."""
    return _in_table(_read("/proc/net/snmp")) + _in_list(_read("/proc/net/snmp6"))


def _in_table(rows: list[bytes]) -> int:
    """Find the figure of IPv4, in a row of names above a row of figures."""
    names, figures = ([row.split() for row in rows if row.startswith(b"Ip:")] + [[], []])[:2]
    return int(dict(zip(names, figures, strict=False)).get(b"OutNoRoutes", 0))


def _in_list(rows: list[bytes]) -> int:
    return sum(int(row.split()[1]) for row in rows if row.startswith(b"Ip6OutNoRoutes"))


def _read(path: str) -> list[bytes]:
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return []
    try:
        return posix.read(fd, MOST_BYTES).split(b"\n")
    finally:
        posix.close(fd)
