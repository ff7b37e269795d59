"""The changes of a sandbox at one moment: a row for each path, and all contents in one file without a name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

EntryKind = Literal["file", "directory", "link", "removed", "unchanged", "other"]
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Hold what the sandbox has at one path, relative to the folder.

    `removed` is a whiteout: whatever the host has there is gone inside. An `opaque` directory shows nothing of the
    host's. `unchanged` comes from copies alone: it is there, as the host had it. `other` is neither file, directory nor
    link. A file that `is_copied` began as a copy of the host's. `problem` says why its content could not be read.
    """

    path: bytes
    kind: EntryKind
    mode: int = 0
    size: int = 0
    offset: int = 0
    sha256: str = ""
    target: bytes = b""
    is_opaque: bool = False
    is_copied: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Hold entries by path, folders before what is in them, and the descriptor of the file with their contents.

    `is_whole` says that it has an entry for all that is there, as a copy has: what it lacks is removed.
    """

    entries: Mapping[bytes, Entry] = field(default_factory=dict)
    contents: int = -1
    is_whole: bool = False

    def read(self, entry: Entry) -> Iterator[bytes]:
        """Yield a file's content, piece by piece."""
        at, end = entry.offset, entry.offset + entry.size
        while at < end:
            piece = os.pread(self.contents, min(PIECE_BYTES, end - at), at)
            if not piece:
                raise OSError("the snapshot is shorter than it says")
            yield piece
            at += len(piece)

    def close(self) -> None:
        """Let the contents go."""
        if self.contents >= 0:
            os.close(self.contents)
