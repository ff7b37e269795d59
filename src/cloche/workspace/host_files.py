"""A folder of the host by its descriptor: what is below it is reached name by name, through no link and no mount."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from .. import hostfs
from .journal import Facts, names_of
from .mounts import mount_at, mount_of

PIECE_BYTES = 1 << 20
MOST_DEPTH = 128  # of folders that are open at once
PROBED_NAMES = 256  # of a folder, until one is found by which its kind can be told
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def _nothing() -> None:
    """Let it go on."""


class Tree:
    """Look at files below an open folder, `fd`, which whoever passes it closes.

    The folders down to the last path stay open, so go through them in order. What another file system, or another part
    of the same one, is mounted on raises OSError (EXDEV), as does what is too deep (ENAMETOOLONG) or may not be read.
    `check` is called before each look and each piece that is read: what it raises ends a work that nobody waits for.
    """

    def __init__(self, folder: int, check: Callable[[], None] = _nothing):
        self.fd, self.facts = folder, os.fstat(folder)
        self._check = check
        self._mount = mount_of(folder)
        self._open: list[tuple[str, int]] = []

    def close(self) -> None:
        """Close all folders but the first, after which they may be opened again."""
        self._leave(0)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def folder(self, names: Sequence[str]) -> int | None:
        """Return the descriptor of a folder, which is not the caller's to close; None where no folder is there."""
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
        """Return the folder that a path's last name is in, and that name; both are good until the next call.

        All folders are entered anew, since others may have been put in their place. Raises OSError.
        """
        *above, name = names_of(path)
        self.close()
        return self._entered(above), name

    def look(self, path: bytes | str) -> os.stat_result | None:
        """Return what is at a path, a link as a link; None where nothing is, or no folder above it."""
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
        """Return the descriptor of a folder, or of the last one on the way to it that is there."""
        while (fd := self.folder(names)) is None:
            names = names[:-1]
        return fd

    def target(self, path: bytes | str) -> bytes:
        """Return where a link leads to."""
        *above, name = os.fsdecode(path).split("/")
        return os.fsencode(os.readlink(name, dir_fd=self._entered(above)))

    def open_regular(self, path: bytes | str) -> tuple[int, os.stat_result]:
        """Return a descriptor of a regular file, which the caller closes, and what that says of it."""
        *above, name = os.fsdecode(path).split("/")
        fd, facts = hostfs.open_regular(name, self._entered(above))
        if mount_of(fd) != self._mount:
            os.close(fd)
            raise _mounted(os.fsdecode(path))
        return fd, facts

    def read(self, path: bytes | str) -> Iterator[bytes]:
        """Yield the content of a regular file, piece by piece; it is open from the first one on."""
        fd, _ = self.open_regular(path)
        try:
            while piece := os.read(fd, PIECE_BYTES):
                self._check()
                yield piece
        finally:
            os.close(fd)

    def names(self, path: bytes | str) -> list[tuple[bytes, bool]]:
        """Return the names in a folder, and whether each is a folder's, in their order; none where no folder is."""
        fd = self.folder(os.fsdecode(path).split("/") if path else ())
        if fd is None:
            return []
        with os.scandir(fd) as entries:
            return sorted((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries)

    def set_mode(self, path: str, ino: int, mode: int) -> bool:
        """Give a file or folder permission bits, if it is the one with this inode; tell whether it is.

        It needs no right to read it, and follows no link: `fchmod` takes no O_PATH descriptor, its name in /proc does.
        """
        parent_fd, name = self.parent(path)
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            facts = os.fstat(fd)
            if facts.st_ino != ino or stat.S_ISLNK(facts.st_mode):
                return False
            if mount_of(fd) != self._mount:
                raise _mounted(path)
            os.chmod(f"/proc/self/fd/{fd}", mode & 0o777)
            return True
        finally:
            os.close(fd)


def _mounted(path: str) -> OSError:
    return OSError(errno.EXDEV, "something else is mounted there", path)


def names_in(name: str, dir_fd: int) -> list[str]:
    """Return the names in a folder that is in an open one."""
    fd = hostfs.open_folder(name, dir_fd)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def facts_of(name: str, dir_fd: int) -> Facts | None:
    """Return what has a name in an open folder, None where nothing has."""
    facts = hostfs.look(name, dir_fd)
    return None if facts is None else Facts.of(facts)


def takes_names_for_equal(folder: int) -> bool:
    """Tell whether an open folder finds a file by its name in other letters, or in another form of Unicode.

    It is asked for a file that it has. One with several names tells nothing, and a folder without letters cannot tell.
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
    """Return what names have in common that such a folder takes for equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", os.fsdecode(name)).casefold())
