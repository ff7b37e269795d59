"""Bring files out of a workspace after everything in it was killed.

The guest chose the names and may have left links, fifos, devices or a million files. So nothing is ever opened by
a path: directories are walked by descriptors, links are not followed, only regular files of the workspace's own
file system are read, and count and size are bounded.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cloche.core.errors import SandboxFileNotFound, SandboxFileRefused, SandboxFileTooLarge
from cloche.core.request import workspace_path
from cloche.core.result import FileRecord

from ..saving import CHUNK_BYTES, DIRECTORY

MAX_FILES = 10_000
MAX_DEPTH = 64
FEW_FILES = 4
# Not blocking: a fifo that slipped in between look and open must not hang us.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Remember a file as it was: its identity as the kernel keeps it (which no guest can set), and its hash."""

    inode: int
    changed_ns: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Hold what a walk found: every file as known now, the records of new and changed ones, and what was skipped."""

    known: Mapping[str, Known]
    changed: tuple[FileRecord, ...]
    skipped: int


def collect(root_fd: int, before: Mapping[str, Known], given: Mapping[str, bytes], *, max_bytes: int) -> Collection:
    """Walk the workspace. `given` maps the input files to their content: unchanged ones are not reported."""
    known: dict[str, Known] = {}
    changed: list[FileRecord] = []
    skipped, left = 0, max_bytes
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in given.items()}
    for path, state in _walk(root_fd):
        if state is None or len(known) >= MAX_FILES or state.st_size > left or not stat.S_ISREG(state.st_mode):
            skipped += 1
            continue
        old = before.get(path)
        if old is not None and (old.inode, old.changed_ns, old.size) == _identity(state):
            known[path] = old
            continue
        try:
            digest = _digest(root_fd, path, state)
        except (OSError, SandboxFileRefused):
            skipped += 1
            continue
        left -= state.st_size
        inode, changed_ns, size = _identity(state)
        known[path] = Known(inode=inode, changed_ns=changed_ns, size=size, sha256=digest)
        if digest != (digests.get(path) or (old.sha256 if old else None)):
            changed.append(FileRecord(path=path, size=size, sha256=digest))
    return Collection(known=known, changed=tuple(sorted(changed, key=lambda r: r.path)), skipped=skipped)


def is_as_given(root_fd: int, given: Mapping[str, bytes], *, entries: int) -> bool:
    """Tell whether a workspace of so many `entries`, its root among them, holds the given files and nothing else."""
    if entries != len(given) + 1 or len(given) > FEW_FILES:
        return False
    try:
        for path, data in given.items():
            if "/" in path or not _is_given(root_fd, path, data):
                return False
    except (OSError, SandboxFileRefused):
        return False
    return True


def _is_given(root_fd: int, name: str, content: bytes) -> bool:
    fd = os.open(name, _FILE, dir_fd=root_fd)
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode) or state.st_size != len(content) or len(content) > CHUNK_BYTES:
            return False
        return os.read(fd, len(content) + 1) == content
    finally:
        os.close(fd)


def _identity(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_ino, state.st_ctime_ns, state.st_size


def _walk(root_fd: int) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield every entry that is not a directory, with its path below the root and its own state.

    The state is None for what is left out: a folder that cannot be listed or lies too deep, and all that is in one
    whose names can be listed and no more.
    """
    device = os.fstat(root_fd).st_dev
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            here = _open_folder(root_fd, folder)
        except OSError:
            yield folder, None
            continue
        try:
            for name in sorted(os.listdir(here)):
                path = f"{folder}/{name}" if folder else name
                state = _state(name, here)
                if state is None or not stat.S_ISDIR(state.st_mode):
                    yield path, state
                elif state.st_dev == device and path.count("/") < MAX_DEPTH:
                    pending.append(path)
                else:
                    yield path, None
        finally:
            os.close(here)


def _state(name: str, here: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=here, follow_symlinks=False)
    except OSError:
        return None


def _open_folder(root_fd: int, folder: str) -> int:
    """Open a folder below the root, one name at a time, through no link."""
    here = os.open(".", DIRECTORY, dir_fd=root_fd)
    for name in folder.split("/") if folder else ():
        try:
            there = os.open(name, DIRECTORY, dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here


def open_regular(root_fd: int, path: str) -> int:
    """Open a regular file below the root for reading. Raises OSError or SandboxFileRefused."""
    folder, _, name = path.rpartition("/")
    here = _open_folder(root_fd, folder)
    try:
        fd = os.open(name, _FILE, dir_fd=here)
    finally:
        os.close(here)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or state.st_dev != os.fstat(root_fd).st_dev:
        os.close(fd)
        raise SandboxFileRefused(f"{path!r} is not a regular file of the workspace", path=path)
    return fd


def read_regular(root_fd: int, path: str, *, max_bytes: int) -> bytes:
    """Return a file of the workspace. Raises the SandboxFile errors."""
    inside = workspace_path(path)
    try:
        fd = open_regular(root_fd, inside)
    except FileNotFoundError:
        raise SandboxFileNotFound(f"no file {path!r} in the workspace", path=path) from None
    except OSError as error:
        raise SandboxFileRefused(
            f"cannot read {path!r}: {error.strerror}; links are not followed", path=path
        ) from error
    with open(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SandboxFileTooLarge(f"{path!r} is larger than max_bytes={max_bytes}", path=path)
    return data


def list_paths(root_fd: int, path: str = ".") -> tuple[str, ...]:
    """Return the paths of the regular files below `path`, relative to the workspace, sorted."""
    top = "" if path in (".", "", "/workspace") else workspace_path(path) + "/"
    found = (name for name, state in _walk(root_fd) if state and stat.S_ISREG(state.st_mode) and name.startswith(top))
    return tuple(sorted(found))


def _digest(root_fd: int, path: str, state: os.stat_result) -> str:
    digest = hashlib.sha256()
    with open(open_regular(root_fd, path), "rb") as file:
        left = state.st_size
        while left > 0 and (data := file.read(min(CHUNK_BYTES, left))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()
