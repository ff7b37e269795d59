"""The output of a sandbox for packages: files as frames, read piece by piece, each bound checked before bytes are kept.

A frame is a kind (1 byte), the length of a name (2), the size of the content (8), the name in UTF-8, the content. The
sender has read untrusted files, so names, sizes and order are all checked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from ..core.record import dataclass

FRAME = struct.Struct(">BHQ")
SITE, SCRIPT, DATA, FILES_END, MODULE = 1, 2, 3, 4, 5
EXECUTABLE = 16  # added to a kind
MOST_NAME_BYTES, MOST_PART_BYTES, MOST_DEPTH = 1024, 240, 40


class WrongFrame(ValueError):
    """Report an invalid frame."""


class FileSink(Protocol):
    """Take the content of one file."""

    def write(self, data: bytes, /) -> object:
        """Take a piece."""
        ...

    def close(self) -> None:
        """Take note that it is complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bound the output: the number of files, and the bytes of all files together."""

    files: int
    total_bytes: int


class Reader:
    """Read frames from pieces as they come. `begin(kind, name, size)` returns the target of the content.

    Raises WrongFrame, and the errors of `begin`.
    """

    def __init__(self, begin: Callable[[int, str, int], FileSink], bounds: Bounds) -> None:
        self._begin, self._bounds = begin, bounds
        self._waiting = bytearray()
        self._target: FileSink | None = None
        self._left = 0
        self.files = self.total_bytes = 0

    @property
    def is_between(self) -> bool:
        """Tell whether the last frame is complete, and no other one has begun."""
        return self._target is None and not self._waiting

    def feed(self, data: bytes) -> None:
        """Take the next piece."""
        view = memoryview(data)
        while view or self._is_done():
            view = self._fill(view) if self._target is not None else self._start(view)

    def _is_done(self) -> bool:
        return self._target is not None and self._left == 0

    def _fill(self, view: memoryview) -> memoryview:
        """Pass content on; the target is closed with the last of it."""
        target = self._target
        if target is None:
            return view
        piece = view[: self._left]
        if piece:
            target.write(bytes(piece))
            self._left -= len(piece)
        if not self._left:
            self._target = None
            target.close()
        return view[len(piece) :]

    def _start(self, view: memoryview) -> memoryview:
        """Take the missing bytes of a header; begin the frame once it is complete."""
        header_bytes = FRAME.size
        if len(self._waiting) >= FRAME.size:
            header_bytes += FRAME.unpack_from(self._waiting)[1]
        missing = header_bytes - len(self._waiting)
        self._waiting += view[:missing]
        view = view[missing:]
        if len(self._waiting) < FRAME.size:
            return view
        kind, length, size = FRAME.unpack_from(self._waiting)
        if length > MOST_NAME_BYTES:
            raise WrongFrame(f"a name has {length} bytes")
        if len(self._waiting) == FRAME.size + length:
            name = bytes(self._waiting[FRAME.size :])
            self._waiting.clear()
            self._open(kind, name, size)
        return view

    def _open(self, kind: int, name: bytes, size: int) -> None:
        self.files += 1
        self.total_bytes += size
        if self.files > self._bounds.files:
            raise WrongFrame(f"there are more than {self._bounds.files} files")
        if self.total_bytes > self._bounds.total_bytes:
            raise WrongFrame(f"the files have more than {self._bounds.total_bytes} bytes")
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise WrongFrame("a name is not UTF-8") from None
        self._target, self._left = self._begin(kind, text, size), size


def check_path(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path that leads nowhere else. Raises WrongFrame."""
    names = tuple(path.split("/"))
    if len(names) > MOST_DEPTH:
        raise WrongFrame(f"a path has {len(names)} parts")
    for name in names:
        if name in ("", ".", "..") or "\0" in name:
            raise WrongFrame(f"the path {path[:200]!r} leads out of its folder")
        if len(name.encode()) > MOST_PART_BYTES:
            raise WrongFrame(f"a name of the path {path[:200]!r} is too long")
    return names
