"""Which process works on a record, so that others can tell later whether it is gone.

A worker's name holds its host, boot, process id and when that started: nobody else ever has the same. Of a worker of
another host (of which a database may have several) nothing is known but its row, if it serves: where it is reached, and
a number that rises for as long as it lives.
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
    """Tell whether a process of this host has ended; False for what cannot be known."""
    found = _SHAPE.fullmatch(worker)
    if found is None or found[1] != _host():
        return False
    return found[2] != _boot() or _started(int(found[3])) != int(found[4])


def is_here(worker: str) -> bool:
    """Tell whether a worker is, or was, of this host; True for a name that says no host."""
    found = _SHAPE.fullmatch(worker)
    return found is None or found[1] == _host()


def are_together(one: str, other: str) -> bool:
    """Tell whether two workers are of the same host."""
    return one.partition("-")[0] == other.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Hold what is known of a worker that serves: `unix:/PATH` or `https://HOST:PORT`, and its certificate."""

    name: str
    address: str
    certificate: str | None
    beat: int


def join(session: Session, *, name: str, address: str, certificate: str | None) -> None:
    """Note where a worker is reached."""
    leave(session, name=name)
    session.execute(insert(Worker).values(name=name, address=address, certificate=certificate, beat=0))


def leave(session: Session, *, name: str) -> None:
    """Note that a worker serves no more."""
    session.execute(delete(Worker).where(Worker.name == name))


def note_alive(session: Session, *, name: str) -> bool:
    """Raise its number; False where it has no row any more."""
    query = update(Worker).where(Worker.name == name).values(beat=Worker.beat + 1).returning(Worker.beat)
    return session.scalar(query) is not None


def serving(session: Session) -> list[WorkerFacts]:
    """Return all that serve, as far as they could say so."""
    return [
        WorkerFacts(name=row.name, address=row.address, certificate=row.certificate, beat=row.beat)
        for row in session.scalars(select(Worker).order_by(Worker.name))
    ]


def shared_key(session: Session) -> str:
    """Return what the workers of this database know each other by; it is made at the first call."""
    found = session.scalar(select(SharedSecret.value).where(SharedSecret.name == "workers"))
    if found is None:
        found = secrets.token_hex(32)
        session.execute(insert(SharedSecret).values(name="workers", value=found))
    return found


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
