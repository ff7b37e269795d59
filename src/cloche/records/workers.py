"""The process that works on a record, so that others can tell later whether it has ended.

A worker's name consists of its host, boot, process id and start time, and is unique. About a worker of another host,
only its row is known, if it serves: its address, and a number that rises while it lives.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from contextlib import suppress

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from ..core.record import dataclass
from .tables import SharedSecret, Worker

_SHAPE = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,20})")


def own_worker() -> str:
    """Return the name of this process."""
    return f"{_host()}-{_boot()}-{os.getpid()}-{_started(os.getpid())}"


def is_gone(worker: str) -> bool:
    """Tell whether a process of this host has ended; False if that cannot be known."""
    match = _SHAPE.fullmatch(worker)
    if match is None or match[1] != _host():
        return False
    return match[2] != _boot() or _started(int(match[3])) != int(match[4])


def is_here(worker: str) -> bool:
    """Tell whether a worker is, or was, of this host; True for a name without a host."""
    match = _SHAPE.fullmatch(worker)
    return match is None or match[1] == _host()


def are_together(worker: str, other_worker: str) -> bool:
    """Tell whether two workers are of the same host."""
    return worker.partition("-")[0] == other_worker.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Hold a serving worker: `unix:/PATH` or `https://HOST:PORT`, and its certificate."""

    name: str
    address: str
    certificate: str | None
    beat: int


def join(session: Session, *, name: str, address: str, certificate: str | None) -> None:
    """Store a worker's address."""
    leave(session, name=name)
    session.execute(insert(Worker).values(name=name, address=address, certificate=certificate, beat=0))


def leave(session: Session, *, name: str) -> None:
    """Delete a worker's row."""
    session.execute(delete(Worker).where(Worker.name == name))


def note_alive(session: Session, *, name: str) -> bool:
    """Increment a worker's number; return False if its row is gone."""
    query = update(Worker).where(Worker.name == name).values(beat=Worker.beat + 1).returning(Worker.beat)
    return session.scalar(query) is not None


def serving(session: Session) -> list[WorkerFacts]:
    """Return all workers with a row."""
    return [
        WorkerFacts(name=row.name, address=row.address, certificate=row.certificate, beat=row.beat)
        for row in session.scalars(select(Worker).order_by(Worker.name))
    ]


def shared_key(session: Session) -> str:
    """Return the secret shared by the workers of this database, created at the first call."""
    key = session.scalar(select(SharedSecret.value).where(SharedSecret.name == "workers"))
    if key is None:
        key = secrets.token_hex(32)
        session.execute(insert(SharedSecret).values(name="workers", value=key))
    return key


@functools.cache
def _host() -> str:
    with suppress(OSError), open("/etc/machine-id", "rb") as file:
        return _digits(file.read() + socket.gethostname().encode())  # containers may share the file, but not the name
    return _digits(socket.gethostname().encode())


@functools.cache
def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return _digits(file.read())


def _digits(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _started(pid: int) -> int:
    """Return a process's start time in clock ticks since boot (proc_pid_stat(5), field 22), or -1."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
    return -1
