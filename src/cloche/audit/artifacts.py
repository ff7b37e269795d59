"""Artifacts stored beside the log: code and output, each in a file named by the SHA-256 of its content.

An artifact is never changed, and stored only once; its mtime is the last time it was stored. Storing holds a shared
lock on the folder, removing (`prune`) an exclusive one. Recent artifacts are not removed, since the event that names
them may not be written yet.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import os
import time
from contextlib import suppress

from cloche import hostfs

from .writer import LOCK_TIMEOUT_S, failure, lock, opened_file, opened_folder, reason

FOLDER = "audit-artifacts"


class ArtifactState(enum.Enum):
    """The state of the artifact with a hash."""

    WHOLE = enum.auto()
    CHANGED = enum.auto()
    MISSING = enum.auto()


def store(folder: str, data: bytes) -> str:
    """Store data, once for equal data, and return its hash. Raises AuditFailed."""
    digest = hashlib.sha256(data).hexdigest()
    path = f"{folder}/{FOLDER}/{digest[:2]}"
    try:
        with opened_folder(folder, create=True), opened_folder(f"{folder}/{FOLDER}", create=True) as artifacts_fd:
            lock(artifacts_fd, time.monotonic() + LOCK_TIMEOUT_S, f"{folder}/{FOLDER}", how=fcntl.LOCK_SH)
            with opened_folder(path, create=True) as subfolder_fd:
                _store_once(subfolder_fd, path, digest, data)
    except OSError as error:
        raise failure(f"{path}/{digest}", reason(error)) from error
    return digest


def _store_once(subfolder_fd: int, path: str, digest: str, data: bytes) -> None:
    with suppress(FileNotFoundError), opened_file(subfolder_fd, digest, path) as existing:
        if os.fstat(existing).st_size == len(data):
            os.utime(existing)
            return
    hostfs.replace(subfolder_fd, digest, data, mode=0o600, temporary=f".{digest}.{os.urandom(6).hex()}")


def load(folder: str, digest: str) -> bytes | None:
    """Return the artifact of a hash, None where it is missing or changed. Raises AuditFailed."""
    data = _read(folder, digest)
    return data if data is not None and hashlib.sha256(data).hexdigest() == digest else None


def state_of(folder: str, digest: str) -> ArtifactState:
    """Return whether the artifact of a hash is whole, changed or missing. Raises AuditFailed."""
    data = _read(folder, digest)
    if data is None:
        return ArtifactState.MISSING
    return ArtifactState.WHOLE if hashlib.sha256(data).hexdigest() == digest else ArtifactState.CHANGED


def _read(folder: str, digest: str) -> bytes | None:
    path = f"{folder}/{FOLDER}/{digest[:2]}"
    try:
        with (
            opened_folder(path, create=False) as subfolder_fd,
            opened_file(subfolder_fd, digest, path) as file,
            os.fdopen(os.dup(file), "rb") as reader,
        ):
            return reader.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failure(f"{path}/{digest}", reason(error), is_read=True) from error
