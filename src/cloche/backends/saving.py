"""What a run changed, and how its files are copied into a folder of the caller's: through no link, whatever waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from cloche.core.errors import SandboxFileRefused
from cloche.core.result import FileRecord, SaveFiles

CHUNK_BYTES = 1 << 20
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Hold the files that a run created or changed, how many others were left out, and how to save them."""

    records: tuple[FileRecord, ...] = ()
    skipped: int = 0
    save: SaveFiles | None = None


class Source(Protocol):
    """Give a recorded file's content piece by piece; empty at its end."""

    def read(self, size: int, /) -> bytes: ...


OpenSource = Callable[[FileRecord], AbstractContextManager[Source]]


def copy_out(
    open_source: OpenSource, directory: str | os.PathLike[str], records: tuple[FileRecord, ...]
) -> tuple[str, ...]:
    """Copy the recorded files into `directory`, replacing regular files, through no link."""
    os.makedirs(directory, exist_ok=True)
    target_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for record in records:
            _copy_one(open_source, target_fd, record)
    finally:
        os.close(target_fd)
    return tuple(record.path for record in records)


def _copy_one(open_source: OpenSource, target_fd: int, record: FileRecord) -> None:
    folder, _, name = record.path.rpartition("/")
    here = _make_folder(target_fd, folder)
    try:
        with open_source(record) as source:
            _replace_file(here, name, source, record)
    except IsADirectoryError as error:
        raise SandboxFileRefused(f"cannot write {record.path!r}: a folder is in its place", path=record.path) from error
    finally:
        os.close(here)


def _replace_file(here: int, name: str, source: Source, record: FileRecord) -> None:
    """Write beside, then rename over: no reader sees half a file, and a link in the way is replaced, not followed."""
    temporary = f".{os.getpid()}-{os.urandom(6).hex()}.cloche"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o666, dir_fd=here)
    try:
        with open(fd, "wb") as target:
            left = record.size
            while left > 0 and (data := source.read(min(CHUNK_BYTES, left))):
                target.write(data)
                left -= len(data)
        os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
    except BaseException:
        os.unlink(temporary, dir_fd=here)
        raise


def _make_folder(target_fd: int, folder: str) -> int:
    here = os.open(".", DIRECTORY, dir_fd=target_fd)
    for name in folder.split("/") if folder else ():
        try:
            os.mkdir(name, dir_fd=here)
        except FileExistsError:
            pass
        try:
            there = os.open(name, DIRECTORY, dir_fd=here)
        except OSError as error:
            raise SandboxFileRefused(f"cannot write below {folder!r}: {error.strerror}", path=folder) from error
        finally:
            os.close(here)
        here = there
    return here


class Slice:
    """Read on from a place without moving the shared position of the descriptor."""

    def __init__(self, fd: int, place: int):
        self._fd, self._place = fd, place

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._fd, size, self._place)
        self._place += len(data)
        return data
