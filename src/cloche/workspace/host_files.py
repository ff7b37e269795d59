"""A folder of the host, read by descriptors: name by name, through no link, and on one file system alone."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from .. import hostfs

PIECE_BYTES = 1 << 20
MOST_DEPTH = 128  # of folders that are open at once
PROBED_NAMES = 256  # of a folder, until one is found by which its kind can be told
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def _nothing() -> None:
    """Let it go on."""


class Tree:
    """Look at files below an open folder. The folders down to the last path stay open, so go through them in order.

    What is on another file system raises OSError (EXDEV), as does what is too deep (ENAMETOOLONG) or may not be read.
    `check` is called before each look and each piece that is read: what it raises ends a work that nobody waits for.
    """

    def __init__(self, folder: int, check: Callable[[], None] = _nothing):
        self._check = check
        self._open: list[tuple[bytes, int]] = [(b"", os.dup(folder))]
        self._device = os.fstat(folder).st_dev

    def close(self) -> None:
        """Close all folders."""
        self._leave(0)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def folder(self, names: Sequence[bytes]) -> int | None:
        """Return the descriptor of a folder, which is not the caller's to close; None where no folder is there."""
        self._check()
        if len(names) > MOST_DEPTH:
            raise OSError(errno.ENAMETOOLONG, "too deep")
        depth = 0
        while depth < len(names) and depth + 1 < len(self._open) and self._open[depth + 1][0] == names[depth]:
            depth += 1
        self._leave(depth + 1)
        for name in names[depth:]:
            try:
                here = hostfs.open_folder(os.fsdecode(name), self._open[-1][1])
            except OSError as error:
                if error.errno in _NOT_THERE:
                    return None
                raise
            self._open.append((name, here))
            if os.fstat(here).st_dev != self._device:
                self._leave(len(self._open) - 1)
                raise OSError(errno.EXDEV, "another file system is mounted there")
        return self._open[-1][1]

    def _leave(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def look(self, path: bytes) -> os.stat_result | None:
        """Return what is at a path, a link as a link; None where nothing is."""
        *above, name = path.split(b"/")
        here = self.folder(above)
        return None if here is None else hostfs.look(os.fsdecode(name), here)

    def nearest_folder(self, names: Sequence[bytes]) -> int:
        """Return the descriptor of a folder, or of the last one on the way to it that is there."""
        while (here := self.folder(names)) is None:
            names = names[:-1]
        return here

    def target(self, path: bytes) -> bytes:
        """Return where a link leads to."""
        *above, name = path.split(b"/")
        return os.readlink(name, dir_fd=self._folder(above))

    def read(self, path: bytes) -> Iterator[bytes]:
        """Yield the content of a regular file, piece by piece; it is open from the first one on."""
        *above, name = path.split(b"/")
        fd, _ = hostfs.open_regular(os.fsdecode(name), self._folder(above))
        try:
            while piece := os.read(fd, PIECE_BYTES):
                self._check()
                yield piece
        finally:
            os.close(fd)

    def names(self, path: bytes) -> list[tuple[bytes, bool]]:
        """Return the names in a folder, and whether each is a folder's, in their order; none where no folder is."""
        here = self.folder(path.split(b"/") if path else ())
        if here is None:
            return []
        with os.scandir(here) as entries:
            return sorted((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries)

    def _folder(self, names: Sequence[bytes]) -> int:
        here = self.folder(names)
        if here is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return here


def takes_names_for_equal(folder: int) -> bool:
    """Tell whether an open folder finds a file by its name in other letters, or in another form of Unicode.

    It is asked for a file that it has. One with several names tells nothing, and a folder without letters cannot tell.
    """
    with os.scandir(folder) as entries:
        for _, entry in zip(range(PROBED_NAMES), entries, strict=False):
            other = _other_form(entry.name)
            if other == entry.name:
                continue
            try:
                found, itself = hostfs.look(other, folder), entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(itself.st_mode) or itself.st_nlink == 1:
                return found is not None and os.path.samestat(found, itself)
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
