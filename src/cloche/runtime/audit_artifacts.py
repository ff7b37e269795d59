"""Code and output beside the log, each in a file that is called by the SHA-256 of what is in it.

Theory of operation: what is kept is never changed, and kept once however often it comes; its time is that of the last
time it came. Whoever keeps something holds a shared lock of the folder meanwhile, whoever removes something
(`audit_pruning`) an exclusive one, and that leaves alone what came just now: the event that names it is on its way.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import os
import secrets
import time
from contextlib import suppress

from cloche import hostfs

from .audit_file import PATIENCE_S, failure, lock, opened_file, opened_folder

FOLDER = "audit-artifacts"


class Kept(enum.Enum):
    """Say what there is under a hash."""

    WHOLE = enum.auto()
    CHANGED = enum.auto()
    MISSING = enum.auto()


def store(folder: str, data: bytes) -> str:
    """Keep data, once however often it comes, and return its hash. Raises AuditFailed."""
    digest = hashlib.sha256(data).hexdigest()
    place = f"{folder}/{FOLDER}/{digest[:2]}"
    try:
        with opened_folder(folder, create=True), opened_folder(f"{folder}/{FOLDER}", create=True) as whole:
            lock(whole, time.monotonic() + PATIENCE_S, f"{folder}/{FOLDER}", how=fcntl.LOCK_SH)
            with opened_folder(place, create=True) as at:
                _put(at, place, digest, data)
    except OSError as error:
        raise failure(f"{place}/{digest}", error.strerror or str(error)) from error
    return digest


def _put(at: int, place: str, digest: str, data: bytes) -> None:
    with suppress(FileNotFoundError), opened_file(at, digest, place) as there:
        if os.fstat(there).st_size == len(data):
            os.utime(there)
            return
    hostfs.replace(at, digest, data, mode=0o600, temporary=f".{digest}.{secrets.token_hex(6)}")


def load(folder: str, digest: str) -> bytes | None:
    """Return what is kept under a hash, None where it is not there or is something else. Raises AuditFailed."""
    data = _read(folder, digest)
    return data if data is not None and hashlib.sha256(data).hexdigest() == digest else None


def state_of(folder: str, digest: str) -> Kept:
    """Say whether what was kept under a hash is there, as it was kept. Raises AuditFailed."""
    data = _read(folder, digest)
    if data is None:
        return Kept.MISSING
    return Kept.WHOLE if hashlib.sha256(data).hexdigest() == digest else Kept.CHANGED


def _read(folder: str, digest: str) -> bytes | None:
    place = f"{folder}/{FOLDER}/{digest[:2]}"
    try:
        with (
            opened_folder(place, create=False) as at,
            opened_file(at, digest, place) as file,
            os.fdopen(os.dup(file), "rb") as reader,
        ):
            return reader.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failure(f"{place}/{digest}", error.strerror or str(error), is_read=True) from error
