"""Read a folder of the host by its descriptor: paths below it are opened name by name, through no link and no mount."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from .. import hostfs
from .journal import FileFacts, names_of
from .mounts import mount_at, mount_of

PIECE_BYTES = 1 << 20
MOST_DEPTH = 128  # folders that are open at once
PROBED_NAMES = 256  # names tried per folder
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def _nothing() -> None:
    """Do nothing: the default `check`."""


class HostTree:
    """Read files below an open folder `fd`, which the caller closes.

    The folders above the last path stay open, so visit paths in order. A path on another mount raises OSError (EXDEV),
    including a bind mount of the same file system; one that is too deep raises ENAMETOOLONG. `check` is called before
    each lookup and after each piece that is read; an exception from it ends the work.
    """

    def __init__(self, folder: int, check: Callable[[], None] = _nothing):
        self.fd, self.facts = folder, os.fstat(folder)
        self._check = check
        self._mount = mount_of(folder)
        self._open: list[tuple[str, int]] = []

    def close(self) -> None:
        """Close all folders except the first; they are opened again when needed."""
        self._leave(0)

    def __enter__(self) -> HostTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def folder(self, names: Sequence[str]) -> int | None:
        """Return the descriptor of a folder, which this object closes; None if it does not exist."""
        try:
            return self._entered(names)
        except OSError as error:
            if error.errno in _NOT_THERE and len(names) <= MOST_DEPTH:
                return None
            raise

    def _entered(self, names: Sequence[str]) -> int:
        self._check()
        if len(names) > MOST_DEPTH:
            raise OSError(errno.ENAMETOOLONG, "too deep", "/".join(names))
        depth = 0
        while depth < len(names) and depth < len(self._open) and self._open[depth][0] == names[depth]:
            depth += 1
        self._leave(depth)
        for name in names[depth:]:
            fd = hostfs.open_folder(name, self._last())
            self._open.append((name, fd))
            if os.fstat(fd).st_dev != self.facts.st_dev or mount_of(fd) != self._mount:
                path = "/".join(entered_name for entered_name, _ in self._open)
                self._leave(len(self._open) - 1)
                raise _mounted(path)
        return self._last()

    def _last(self) -> int:
        return self._open[-1][1] if self._open else self.fd

    def _leave(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def parent(self, path: str) -> tuple[int, str]:
        """Return the descriptor of a path's parent and the last name, valid until the next call.

        All folders are opened again, since they may have been replaced. Raises OSError.
        """
        *above, name = names_of(path)
        self.close()
        return self._entered(above), name

    def look(self, path: bytes | str) -> os.stat_result | None:
        """Return the `lstat` of a path; None if it or a parent does not exist."""
        *above, name = os.fsdecode(path).split("/")
        folder_fd = self.folder(above)
        facts = None if folder_fd is None else hostfs.look(name, folder_fd)
        if facts is not None and folder_fd is not None and self._is_mounted(name, folder_fd):
            raise _mounted(os.fsdecode(path))
        return facts

    def _is_mounted(self, name: str, dir_fd: int) -> bool:
        try:
            return mount_at(name, dir_fd) != self._mount
        except FileNotFoundError:
            return False

    def nearest_folder(self, names: Sequence[str]) -> int:
        """Return the descriptor of a folder, or of its nearest existing parent."""
        while (fd := self.folder(names)) is None:
            names = names[:-1]
        return fd

    def target(self, path: bytes | str) -> bytes:
        """Return the target of a symbolic link."""
        *above, name = os.fsdecode(path).split("/")
        return os.fsencode(os.readlink(name, dir_fd=self._entered(above)))

    def open_regular(self, path: bytes | str) -> tuple[int, os.stat_result]:
        """Return a descriptor of a regular file, which the caller closes, and its `fstat`."""
        *above, name = os.fsdecode(path).split("/")
        fd, facts = hostfs.open_regular(name, self._entered(above))
        if mount_of(fd) != self._mount:
            os.close(fd)
            raise _mounted(os.fsdecode(path))
        return fd, facts

    def read(self, path: bytes | str) -> Iterator[bytes]:
        """Yield the content of a regular file in pieces; it is opened with the first one."""
        fd, _ = self.open_regular(path)
        try:
            while piece := os.read(fd, PIECE_BYTES):
                self._check()
                yield piece
        finally:
            os.close(fd)

    def names(self, path: bytes | str) -> list[tuple[bytes, bool]]:
        """Return the sorted names in a folder, each with whether it is a folder; empty if the folder does not exist."""
        fd = self.folder(os.fsdecode(path).split("/") if path else ())
        if fd is None:
            return []
        with os.scandir(fd) as entries:
            return sorted((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries)

    def set_mode(self, path: str, ino: int, mode: int) -> bool:
        """Set permission bits of a file or folder if it has this inode; tell whether it has."""
        parent_fd, name = self.parent(path)
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            facts = os.fstat(fd)
            if facts.st_ino != ino or stat.S_ISLNK(facts.st_mode):
                return False
            if mount_of(fd) != self._mount:
                raise _mounted(path)
            # open(2): an O_PATH descriptor needs no read permission, but fchmod(2) fails on it with EBADF.
            os.chmod(f"/proc/self/fd/{fd}", mode & 0o777)
            return True
        finally:
            os.close(fd)


def _mounted(path: str) -> OSError:
    return OSError(errno.EXDEV, "something else is mounted there", path)


def names_in(name: str, dir_fd: int) -> list[str]:
    """Return the names in a folder below an open one."""
    fd = hostfs.open_folder(name, dir_fd)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def facts_of(name: str, dir_fd: int) -> FileFacts | None:
    """Return the facts of a name in an open folder, None if it does not exist."""
    facts = hostfs.look(name, dir_fd)
    return None if facts is None else FileFacts.of(facts)


def takes_names_for_equal(folder: int) -> bool:
    """Tell whether an open folder finds its files under another case or Unicode normal form.

    It looks up one of its own files under another spelling. A file with several hard links proves nothing, and a folder
    without letters in its names cannot be tested.
    """
    with os.scandir(folder) as entries:
        for _, entry in zip(range(PROBED_NAMES), entries, strict=False):
            respelled = _other_form(entry.name)
            if respelled == entry.name:
                continue
            try:
                facts, itself = hostfs.look(respelled, folder), entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(itself.st_mode) or itself.st_nlink == 1:
                return facts is not None and os.path.samestat(facts, itself)
    return False


def _other_form(name: str) -> str:
    swapped = name.swapcase()
    if swapped != name:
        return swapped
    composed = unicodedata.normalize("NFC", name)
    return composed if composed != name else unicodedata.normalize("NFD", name)


def folded(name: bytes) -> str:
    """Return a key that is equal for names that such a folder treats as the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", os.fsdecode(name)).casefold())
