"""Code and output beside the log, each in a file that is called by the SHA-256 of what is in it."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress

from .audit_file import failure, opened_file, opened_folder

FOLDER = "audit-artifacts"


def store(folder: str, data: bytes) -> str:
    """Keep data, once however often it comes, and return its hash. Raises AuditFailed."""
    digest = hashlib.sha256(data).hexdigest()
    place = f"{folder}/{FOLDER}/{digest[:2]}"
    try:
        with (
            opened_folder(folder, create=True),
            opened_folder(f"{folder}/{FOLDER}", create=True),
            opened_folder(place, create=True) as at,
        ):
            _put(at, place, digest, data)
    except OSError as error:
        raise failure(f"{place}/{digest}", error.strerror or str(error)) from error
    return digest


def _put(at: int, place: str, digest: str, data: bytes) -> None:
    with suppress(FileNotFoundError), opened_file(at, digest, place) as there:
        if os.fstat(there).st_size == len(data):
            return
    fresh = f".{digest}.{secrets.token_hex(6)}"
    try:
        with opened_file(at, fresh, place, flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        os.rename(fresh, digest, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh, dir_fd=at)
        raise


def load(folder: str, digest: str) -> bytes | None:
    """Return what is kept under a hash, None where it is not there or is something else. Raises AuditFailed."""
    place = f"{folder}/{FOLDER}/{digest[:2]}"
    try:
        with (
            opened_folder(place, create=False) as at,
            opened_file(at, digest, place) as file,
            os.fdopen(os.dup(file), "rb") as reader,
        ):
            data = reader.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failure(f"{place}/{digest}", error.strerror or str(error), is_read=True) from error
    return data if hashlib.sha256(data).hexdigest() == digest else None
