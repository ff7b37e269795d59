"""The agent's own folders: /memory and /configs, kept on the host in folders that the operator chose.

Every path is followed one name at a time, by descriptors: no link is followed, at no place, and `..` is refused, so
nothing outside of a root is ever opened, whoever changes the folder meanwhile.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Self

from cloche.core.errors import (
    InvalidRequest,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileRefused,
    SandboxFileTooLarge,
)
from cloche.runtime.settings import Settings

MOUNTS = ("/memory", "/configs")
MOST_LISTED = 10_000
MOST_FOLDERS, MOST_NAMES = 20_000, 100_000  # that are walked, and that are read in one of them
MOST_DEPTH = 64  # folders within folders
_NEVER = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe or a device shall not hold us up
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Roots:
    """Hold host folders by the names that a model knows them by. Raises InvalidRequest for a folder that is not there.

    `folders` maps `/memory` and `/configs`, or one of them, to folders of the host.
    """

    def __init__(self, folders: Mapping[str, str | os.PathLike[str]]):
        for name, folder in folders.items():
            if name not in MOUNTS:
                raise InvalidRequest(f"roots: {name!r} is none of: {', '.join(MOUNTS)}")
            if not os.path.isdir(folder):
                raise InvalidRequest(f"roots: {name} is to be {os.fspath(folder)!r}, which is no folder; make it first")
        self._folders = {name: os.path.realpath(folder) for name, folder in folders.items()}

    @classmethod
    def configured(cls, settings: Settings) -> Self:
        """Return the folders that the configuration names. Raises InvalidRequest, with who named it, for one that is
        not there.
        """
        for root, folder in settings.roots.items():
            if not os.path.isdir(folder):
                by = settings.origins[f"roots.{root}"]
                raise InvalidRequest(f"roots.{root} ({by}) is {folder!r}, which is no folder; make it, or write none")
        return cls({f"/{root}": folder for root, folder in settings.roots.items()})

    @staticmethod
    def has(path: str) -> bool:
        """Tell whether a path is one of these, whether or not its folder was given."""
        return any(path == mount or path.startswith(f"{mount}/") for mount in MOUNTS)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file. Raises the SandboxFile errors."""
        with (
            self._parent(path, make=False) as (folder, name),
            open(os.open(name, os.O_RDONLY | _NEVER, dir_fd=folder), "rb") as file,
        ):
            _check_own(file.fileno(), path)
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileTooLarge(f"{path} has more than {max_bytes} bytes", path=path)
        return data

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its folders: whole or not at all. Raises the SandboxFile errors."""
        with self._parent(path, make=True) as (folder, name):
            kept: int | None = None
            with suppress(FileNotFoundError):
                mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                if not stat.S_ISREG(mode):
                    raise SandboxFileRefused(f"{path} is no regular file, and is not replaced", path=path)
                kept = stat.S_IMODE(mode) & 0o777
            fresh = f".{secrets.token_hex(12)}.part"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NEVER
                with open(os.open(fresh, flags, 0o644 if kept is None else 0o600, dir_fd=folder), "wb") as file:
                    if kept is not None:
                        os.fchmod(file.fileno(), kept)
                    file.write(data)
                os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(fresh, dir_fd=folder)
                raise

    def list_files(self, path: str) -> tuple[str, ...]:
        """Return the regular files below a folder, as a model names them, sorted. Raises the SandboxFile errors."""
        mount, names = self._split(path)
        fd = self._descend(path, mount, names, make=False)
        try:
            found = _walk(fd, "/".join([mount, *names]), MOST_DEPTH - len(names), set())
            return tuple(sorted(islice(found, MOST_LISTED)))
        except OSError as error:
            raise _told(error, path) from error
        finally:
            os.close(fd)

    def _split(self, path: str) -> tuple[str, list[str]]:
        mount = next(mount for mount in MOUNTS if path == mount or path.startswith(f"{mount}/"))
        names = [name for name in path[len(mount) :].split("/") if name not in ("", ".")]
        if ".." in names or "\0" in path:
            raise SandboxFileRefused(f"{path!r}: '..' is not followed", path=path)
        if len(names) > MOST_DEPTH:
            raise SandboxFileRefused(f"a path has at most {MOST_DEPTH} parts, not {len(names)}", path=path)
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise SandboxFileRefused(f"{path!r} is no name that a file can have", path=path) from None
        return mount, names

    def _descend(self, path: str, mount: str, names: list[str], *, make: bool) -> int:
        """Return a descriptor of the folder that `names` lead to."""
        if mount not in self._folders:
            raise SandboxFileNotFound(f"{mount} has no folder here; the operator configures one", path=path)
        try:
            fd = os.open(self._folders[mount], _FOLDER)
        except OSError:
            raise SandboxFileNotFound(f"the folder of {mount} cannot be opened any more", path=path) from None
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o755, dir_fd=fd)
                below = os.open(name, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = below
        except OSError as error:
            os.close(fd)
            raise _told(error, path) from error
        return fd

    @contextmanager
    def _parent(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Hold the folder that a file is in, and the file's name."""
        mount, names = self._split(path)
        if not names:
            raise SandboxFileRefused(f"{path} is a folder", path=path)
        fd = self._descend(path, mount, names[:-1], make=make)
        try:
            yield fd, names[-1]
        except OSError as error:
            raise (error if isinstance(error, SandboxFileError) else _told(error, path)) from error
        finally:
            os.close(fd)


def _told(error: OSError, path: str) -> SandboxFileError:
    """Return what a model is told; nothing of the host's own paths is in it."""
    if isinstance(error, FileNotFoundError):
        return SandboxFileNotFound(f"there is no {path}", path=path)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return SandboxFileRefused(f"{path} leads through a link or a file, which is not followed", path=path)
    return SandboxFileRefused(f"{path}: {error.strerror}", path=path)


def _check_own(fd: int, path: str) -> None:
    """Refuse what is no regular file, and one that has another name: that may be outside of the root."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise SandboxFileRefused(f"{path} is no regular file", path=path)
    if facts.st_nlink > 1:
        raise SandboxFileRefused(f"{path} is a hard link, and is not read", path=path)


def _walk(fd: int, told: str, depth: int, visited: set[tuple[int, int]]) -> Iterator[str]:
    """Yield the files below a folder, each folder once: whoever else works there may move it about."""
    facts = os.fstat(fd)
    if (facts.st_dev, facts.st_ino) in visited or len(visited) >= MOST_FOLDERS:
        return
    visited.add((facts.st_dev, facts.st_ino))
    with os.scandir(fd) as entries:
        found = sorted(islice(entries, MOST_NAMES), key=lambda entry: entry.name)
    for entry in found:
        if entry.is_file(follow_symlinks=False):
            yield f"{told}/{entry.name}"
        elif depth > 0 and entry.is_dir(follow_symlinks=False):
            with suppress(OSError):  # it went away meanwhile, or became a link
                below = os.open(entry.name, _FOLDER, dir_fd=fd)
                try:
                    yield from _walk(below, f"{told}/{entry.name}", depth - 1, visited)
                finally:
                    os.close(below)
