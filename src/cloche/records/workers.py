"""Which process works on a record, so that others can tell later whether it is gone.

A worker's name holds its host, boot, process id and when that started: nobody else ever has the same. Of a worker of
another host (of which a database may have several) nothing is known.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from contextlib import suppress

_SHAPE = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,20})")


def own_worker() -> str:
    """Return the name of this process."""
    return f"{_host()}-{_boot()}-{os.getpid()}-{_started(os.getpid())}"


def is_gone(worker: str) -> bool:
    """Tell whether a process of this host has ended; False for what cannot be known."""
    found = _SHAPE.fullmatch(worker)
    if found is None or found[1] != _host():
        return False
    return found[2] != _boot() or _started(int(found[3])) != int(found[4])


@functools.cache
def _host() -> str:
    with suppress(OSError), open("/etc/machine-id", "rb") as file:
        return _digits(file.read() + socket.gethostname().encode())  # containers share the file, and not the name
    return _digits(socket.gethostname().encode())


@functools.cache
def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return _digits(file.read())


def _digits(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _started(pid: int) -> int:
    """Return when a process started, in ticks of the clock since boot; -1 where there is none."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
    return -1
