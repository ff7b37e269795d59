"""The index of a git repository (versions 2 to 4), as a tree of folders with the hashes of git's tree objects.

A folder whose hash equals that of the commit's tree has no staged change, so that tree need not be unpacked.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..core.record import dataclass, field
from .git_objects import ReadBudget, Unknown

MOST_DEPTH = 100  # of folders
MOST_FILES = 200_000
MOST_FOLDERS = 50_000  # each takes some hundred bytes of memory, and one or two of the file
_MOST_PATH = 4096
_ENTRY = struct.Struct(">10I20sH")
_VALID, _EXTENDED, _SKIPPED, _INTENDED = 0x8000, 0x4000, 0x4000, 0x2000
LINK, SUBMODULE = 0o120000, 0o160000


class IndexEntry(NamedTuple):
    """A file as it was when it was added. `is_trusted`: git does not check it (assume-unchanged, skip-worktree)."""

    mode: int
    name: bytes
    size: int
    times: tuple[int, int, int, int]  # changed, modified: seconds and nanoseconds of each
    inode: int
    is_trusted: bool
    is_intended: bool


@dataclass(slots=True)
class Folder:
    """Hold one folder of the index. `unmerged` has the stages of each name, as bits."""

    files: dict[bytes, IndexEntry] = field(default_factory=dict)
    folders: dict[bytes, Folder] = field(default_factory=dict)
    unmerged: dict[bytes, int] = field(default_factory=dict)
    hashed: bytes | None = None

    def paths(self, prefix: bytes = b"") -> Iterator[tuple[bytes, IndexEntry]]:
        """Yield each file below, with its path."""
        for name, entry in self.files.items():
            yield prefix + name, entry
        for name, folder in self.folders.items():
            yield from folder.paths(prefix + name + b"/")

    def unmerged_paths(self, prefix: bytes = b"") -> Iterator[tuple[bytes, int]]:
        """Yield each unmerged path with its stages."""
        for name, stages in self.unmerged.items():
            yield prefix + name, stages
        for name, folder in self.folders.items():
            yield from folder.unmerged_paths(prefix + name + b"/")

    def tree_hash(self) -> bytes | None:
        """Return the hash of the tree object that a commit would create; None for an empty one."""
        if self.hashed is None:
            rows = [
                (name, b"%o" % entry.mode, entry.name) for name, entry in self.files.items() if not entry.is_intended
            ]
            below = [(name + b"/", folder.tree_hash()) for name, folder in self.folders.items()]
            rows += [(name, b"40000", hashed) for name, hashed in below if hashed]
            data = b"".join(b"%s %s\0%s" % (mode, name.rstrip(b"/"), oid) for name, mode, oid in sorted(rows))
            self.hashed = hashlib.sha1(b"tree %d\0%s" % (len(data), data), usedforsecurity=False).digest()
            if not rows:
                self.hashed = b""
        return self.hashed or None


def parse_index(data: bytes, bounds: ReadBudget) -> Folder:
    """Return the files of an index. Raises Unknown for a damaged or unsupported one."""
    root, offset, path, folders = Folder(), 12, b"", 0
    try:
        magic, version, count = struct.unpack_from(">4sII", data)
        if magic != b"DIRC" or version not in (2, 3, 4):
            raise Unknown("the index has an unsupported version")
        if count > MOST_FILES:
            raise Unknown(f"the index has more than {MOST_FILES} files")
        for _ in range(count):
            bounds.count_name()
            path, entry, stage, offset = _parse_entry(data, offset, version, path)
            folders += _add(root, path, entry, stage)
            if folders > MOST_FOLDERS:
                raise Unknown(f"the index has more than {MOST_FOLDERS} folders")
    except struct.error:
        raise Unknown("the index is damaged") from None
    _check_extensions(data, offset)
    return root


def _parse_entry(data: bytes, start: int, version: int, before: bytes) -> tuple[bytes, IndexEntry, int, int]:
    """Return path, entry, stage, and the offset of the next entry."""
    *facts, name, flags = _ENTRY.unpack_from(data, start)
    offset, more = start + _ENTRY.size, 0
    if flags & _EXTENDED:
        (more,) = struct.unpack_from(">H", data, offset)
        offset += 2
    prefix = b""
    if version == 4:
        cut, offset = _strip_length(data, offset)
        prefix = before[: max(0, len(before) - cut)]
    end = data.find(b"\0", offset, offset + _MOST_PATH)
    if end < 0:
        raise Unknown("the index is damaged")
    path = prefix + data[offset:end]
    after = end + 1 if version == 4 else start + (end - start + 8) // 8 * 8
    entry = IndexEntry(
        mode=facts[6], name=name, size=facts[9], times=(facts[0], facts[1], facts[2], facts[3]), inode=facts[5],
        is_trusted=bool(flags & _VALID or more & _SKIPPED), is_intended=bool(more & _INTENDED),
    )  # fmt: skip
    return path, entry, flags >> 12 & 3, after


def _strip_length(data: bytes, offset: int) -> tuple[int, int]:
    value = -1
    while True:
        (byte,) = struct.unpack_from("B", data, offset)
        value, offset = (value + 1) << 7 | byte & 127, offset + 1
        if not byte & 128 or value > _MOST_PATH:
            return value, offset


def _add(root: Folder, path: bytes, entry: IndexEntry, stage: int) -> int:
    if not path:
        raise Unknown("the index is split over two files, which is not supported")
    *folders, name = path.split(b"/")
    # Names are opened in the folder above: none may lead out of it.
    if len(path) > _MOST_PATH or any(
        component in (b"", b".", b"..") or component.lower() == b".git" for component in (*folders, name)
    ):
        raise Unknown("the index has a path that git would refuse")
    if len(folders) >= MOST_DEPTH:
        raise Unknown(f"the index has folders deeper than {MOST_DEPTH}")
    folder, created = root, 0
    for folder_name in folders:
        if folder_name not in folder.folders:
            folder.folders[folder_name], created = Folder(), created + 1
        folder = folder.folders[folder_name]
    if stage:
        folder.unmerged[name] = folder.unmerged.get(name, 0) | 1 << stage - 1
    else:
        folder.files[name] = entry
    return created


def _check_extensions(data: bytes, offset: int) -> None:
    """Raise Unknown for an extension that changes the meaning of entries, such as a split or sparse index."""
    while offset + 8 <= len(data) - 20:
        if not data[offset : offset + 1].isupper():
            raise Unknown("the index has an unsupported extension")
        offset += 8 + int.from_bytes(data[offset + 4 : offset + 8], "big")
