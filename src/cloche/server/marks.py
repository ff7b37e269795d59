"""What was changed in a folder of a sandbox since a mark: a list of its files with hashes, which the client keeps.

Theory of operation: a mark has a text for each path, such as `file 0644 9f86…`, and a time of the sandbox's clock.
Later the sandbox reports its files as for a copy of a client's folder (`init.changes`): files without a change after
that time have no content, the others are hashed here. A path whose text differs has changed. Pure.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from cloche.core.record import dataclass, field
from cloche.workspace.snapshot import Snapshot, SnapshotEntry

ENTRY_PATTERN = r"^(file|link|directory|other) [0-7]{4}( [0-9a-f]{64})?$"
NOT_IN_MARK = "it is as old as the mark, which does not have it"
BLOCK = tarfile.BLOCKSIZE
MOST_HELD_BYTES, ROW_BYTES = 32 << 20, 512  # of differences in memory; of one beside its names
FileType = Literal["file", "link", "directory", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """Say what became of a path: `what` is created, modified, removed or mode; a removed one has its old text only."""

    path: bytes
    what: Literal["created", "modified", "removed", "mode"]
    old: str = ""
    entry: SnapshotEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Hold the differences by path, and why paths are left out, in so many bytes of memory.

    If partial, removed paths are not known.
    """

    rows: tuple[FileDifference, ...] = ()
    left_out: Mapping[bytes, str] = field(default_factory=dict)
    is_partial: bool = False
    held_bytes: int = 0


def entry_text(entry: SnapshotEntry) -> str:
    """Return the text of a path in a mark: type, permission bits, and the SHA-256 of its content or target."""
    digest = hashlib.sha256(entry.target).hexdigest() if entry.kind == "link" else entry.sha256
    return f"{entry.kind} {entry.mode:04o} {digest}".rstrip()


def compare(before: Mapping[bytes, str], now: Snapshot, *, most_bytes: int = MOST_HELD_BYTES) -> Differences:
    """Return what differs from a mark, in the order of paths, as far as it has at most so many bytes."""
    rows, left_out = list[FileDifference](), dict[bytes, str]()
    held_bytes, is_partial = 0, now.is_partial
    for path, entry in now.entries.items():
        if (why := _why_left_out(path, before, entry)) is not None:
            left_out[path] = why
        elif entry.kind != "unchanged" and (difference := _difference(path, before.get(path), entry)) is not None:
            rows.append(difference)
        else:
            continue
        held_bytes += ROW_BYTES + len(path) + len(entry.target)
        if held_bytes > most_bytes:
            is_partial = True
            break
    if not is_partial:
        lengths = {len(path) for path in left_out}
        gone = [path for path in before if path not in now.entries and not _is_below(path, left_out, lengths)]
        rows += [FileDifference(path=path, what="removed", old=before[path]) for path in gone]
        held_bytes += sum(ROW_BYTES + len(path) for path in gone)
    rows.sort(key=lambda row: row.path)
    return Differences(rows=tuple(rows), left_out=left_out, is_partial=is_partial, held_bytes=held_bytes)


def _why_left_out(path: bytes, before: Mapping[bytes, str], entry: SnapshotEntry) -> str | None:
    """Return why a path is neither equal nor different; None for any other."""
    if entry.problem:
        return entry.problem
    return NOT_IN_MARK if entry.kind == "unchanged" and path not in before else None


def _difference(path: bytes, old: str | None, entry: SnapshotEntry) -> FileDifference | None:
    if old is None:
        return FileDifference(path=path, what="created", entry=entry)
    new = entry_text(entry)
    if old == new:
        return None
    is_mode = _without_mode(old) == _without_mode(new)
    return FileDifference(path=path, what="mode" if is_mode else "modified", old=old, entry=entry)


def _without_mode(text: str) -> list[str]:
    kind, _, *digest = text.split(" ")
    return [kind, *digest]


def _is_below(path: bytes, folders: Collection[bytes], lengths: Collection[int]) -> bool:
    """Tell whether a path is below one of the folders, which could not be looked into, of such lengths."""
    return any(path[length : length + 1] == b"/" and path[:length] in folders for length in lengths)


def archive(differences: Differences, now: Snapshot) -> Iterator[bytes]:
    """Yield a tar archive of what was created and modified, with the content of the snapshot."""
    for row in differences.rows:
        if (entry := row.entry) is not None and entry.kind != "other":
            yield _header(entry)
            if entry.kind == "file":
                yield from now.read(entry)
                yield bytes(-entry.size % BLOCK)
    yield bytes(2 * BLOCK)


def _header(entry: SnapshotEntry) -> bytes:
    member = tarfile.TarInfo(os.fsdecode(entry.path))
    member.type = {"link": tarfile.SYMTYPE, "directory": tarfile.DIRTYPE}.get(entry.kind, tarfile.REGTYPE)
    member.mode, member.linkname = entry.mode & 0o777, os.fsdecode(entry.target)
    member.size = entry.size if entry.kind == "file" else 0
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
