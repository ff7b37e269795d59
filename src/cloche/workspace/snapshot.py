"""The changes of a sandbox at one moment: an entry for each path, and all contents in one unnamed file.

They come as the stream of `init/changes.py`, from a process with the sandbox's rights. A sandbox may send any entries
for its own files; malformed or oversized data ends the reading.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO, Literal, cast

from ..core.record import dataclass, field, replace
from .rows import Rows

EntryKind = Literal["file", "directory", "link", "removed", "unchanged", "other"]
PIECE_BYTES = 1 << 20
CONTENT = 1 << 31  # bit in a frame's length that marks content
MOST_BYTES = 2 << 30
MOST_ENTRIES = 1_000_000
MOST_PATH_BYTES = 4096
MOST_NAME_BYTES = 255
MOST_NAMES = 128  # of one path
MOST_ROW_BYTES = 1 << 16
MOST_CONTENT_BYTES = 1 << 20  # of one frame
MOST_ROWS_BYTES = 256 << 20  # of all rows together
LOOKED_AT_BYTES = 8000  # what git looks at to tell whether a file is text
PERMISSIONS = 0o7777
MOST_MTIME_S = 1 << 33
NO_NAMES = frozenset((b"", b".", b".."))
# Shared objects, so that a million entries do not hold copies of equal values.
KINDS = {kind: kind for kind in ("file", "directory", "link", "removed", "unchanged", "other")}
MODES = tuple(range(PERMISSIONS + 1))
UNREAD = "it cannot be read inside"
# Reasons that the sender may give for a path that it could not send: its code, and the sentence shown.
PROBLEMS = {
    "unreadable": UNREAD,
    "too_large": "it is larger than the maximum for one diff",
    "too_deep": "it is too deep, or its path is too long, to be looked into",
    "changed": "it was changed while it was read",
    "mount": "another file system is mounted there",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEntry:
    """The sandbox's file at one path, relative to the folder.

    - `removed`: a whiteout; the host's file is removed inside.
    - `unchanged`: sent for copies only; the file is as the host had it. A snapshot with a base has the base's entry.
    - `other`: neither file, directory nor link.
    - `is_opaque`: a directory that shows nothing of the host's.
    - `is_copied`: a file that began as a copy of a host file, under this name or another; a directory of a copy that
      was not changed itself.
    - `problem`: why the content could not be read.
    - `source`: 0 if the content is in the snapshot's own file, else the number of one in `earlier`.
    """

    path: bytes
    kind: EntryKind
    mode: int = 0
    mtime_s: int = 0
    size: int = 0
    offset: int = 0
    sha256: str = ""
    target: bytes = b""
    is_opaque: bool = False
    is_copied: bool = False
    is_text: bool = False
    problem: str = ""
    source: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Entries by path, folders before their contents, and the descriptor of the file with the contents.

    `is_whole`: there is an entry for every file, as in a copy, so a missing path was removed. `is_partial`: some
    entries are missing, because there were too many or their names could not be sent, so a missing path means nothing.
    """

    entries: Mapping[bytes, SnapshotEntry] = field(default_factory=dict)
    contents: int = -1
    earlier: tuple[int, ...] = ()  # descriptors of its base
    is_whole: bool = False
    is_partial: bool = False

    def read(self, entry: SnapshotEntry) -> Iterator[bytes]:
        """Yield a file's content in pieces: consecutive frames of the stream."""
        offset, remaining = entry.offset, entry.size
        fd = (self.contents, *self.earlier)[entry.source]
        while remaining:
            size = int.from_bytes(os.pread(fd, 4, offset), "big") & ~CONTENT
            piece = os.pread(fd, size, offset + 4) if 0 < size <= MOST_CONTENT_BYTES else b""
            if not piece or len(piece) != size:
                raise OSError("the snapshot is shorter than it says")
            yield piece
            offset += 4 + size
            remaining -= size

    def add(self, entry: SnapshotEntry, data: bytes) -> tuple[SnapshotEntry, str]:
        """Append new content for a file; return the new entry and the content's SHA-256."""
        offset, sha256 = os.lseek(self.contents, 0, os.SEEK_END), hashlib.sha256(data).hexdigest()
        with os.fdopen(self.contents, "ab", closefd=False) as file:
            for start in range(0, len(data), MOST_CONTENT_BYTES):
                piece = data[start : start + MOST_CONTENT_BYTES]
                file.write((CONTENT | len(piece)).to_bytes(4, "big") + piece)
        return replace(entry, size=len(data), offset=offset, sha256=sha256), sha256

    def close(self) -> None:
        """Close the file with the contents."""
        if self.contents >= 0:
            os.close(self.contents)


def write_snapshot(snapshot: Snapshot, file: BinaryIO) -> Snapshot:
    """Write a snapshot to a file as a stream of `init/changes.py`, less entries with problems; return it as written.

    The file's descriptor belongs to the result. `file` stands where the stream begins.
    """
    entries: Rows[SnapshotEntry] = Rows(SnapshotEntry)
    for path, entry in snapshot.entries.items():
        if entry.problem or entry.kind == "other":
            continue
        row = json.dumps(_as_row(entry), separators=(",", ":")).encode()
        file.write(len(row).to_bytes(4, "big") + row)
        entries[path] = replace(entry, offset=file.tell() if entry.kind == "file" else 0, source=0)
        file.writelines((CONTENT | len(piece)).to_bytes(4, "big") + piece for piece in snapshot.read(entry))
        if entry.kind == "file":
            file.write(CONTENT.to_bytes(4, "big"))
    return Snapshot(entries=entries, contents=os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC))


def _as_row(entry: SnapshotEntry) -> dict[str, Any]:
    row = {"path": _pack(entry.path), "kind": entry.kind, "mode": entry.mode, "mtime": entry.mtime_s}
    if entry.kind == "link":
        row["target"] = _pack(entry.target)
    return {**row, "opaque": entry.is_opaque, "copied": entry.is_copied}


class SnapshotReader:
    """Store a stream of `init/changes.py`, which comes in pieces of any size, and read it. `close` it if it is not
    finished.

    Limits: `max_bytes` of content, `entries` rows. Malformed data raises ValueError. `feed` only writes to disk, since
    the sandbox is frozen meanwhile; `finish` parses. `base` has the files that come as unchanged; it must stay open as
    long as the snapshot.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = MOST_BYTES,
        entries: int = MOST_ENTRIES,
        is_whole: bool = False,
        base: Snapshot | None = None,
    ):
        self._max_bytes, self._most_entries, self._is_whole, self._base = max_bytes, entries, is_whole, base
        self._max_stored_bytes = (
            max_bytes + max_bytes // 256 + MOST_ROWS_BYTES + entries * 16
        )  # including the frames' length fields
        self._entries: Rows[SnapshotEntry] = Rows(SnapshotEntry)
        self._count = self._rows_bytes = self._size = 0
        self._folders = {b""}  # directories seen, which may have entries below
        self._fd = _unnamed_file(folder)
        self.stored_bytes = 0

    def feed(self, data: bytes) -> None:
        """Store the next bytes of the stream. Raises ValueError beyond the limit, OSError if they cannot be written."""
        self.stored_bytes += len(data)
        if self.stored_bytes > self._max_stored_bytes:
            raise ValueError(f"the changes have more than {self._max_bytes} bytes")
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self, answer: Mapping[str, Any], note: Callable[[int], None] = lambda _: None) -> Snapshot:
        """Parse the stored stream and return the snapshot, given the sender's final answer. Raises ValueError if it is
        malformed.

        `note` is called with the number of bytes read so far; an exception from it ends the reading.
        """
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(self._fd, "rb", buffering=PIECE_BYTES, closefd=False) as file:
            self._read(file, note)
        count = answer.get("count")
        if type(count) is not int or count != self._count:
            raise ValueError(f"{self._count} changes came, which is not the announced number")
        contents, self._fd = self._fd, -1
        is_partial = bool(answer.get("too_many") or answer.get("skipped"))
        base = self._base
        return Snapshot(
            entries=self._entries, contents=contents, is_whole=self._is_whole, is_partial=is_partial,
            earlier=() if base is None else (base.contents, *base.earlier),
        )  # fmt: skip

    def close(self) -> None:
        """Close the stored stream, unless a snapshot owns it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, file: BinaryIO, note: Callable[[int], None]) -> None:
        content: _Content | None = None  # of the file that is arriving
        noted_bytes = read_bytes = 0
        while head := file.read(4):
            length = int.from_bytes(head, "big")
            size, is_content = length & ~CONTENT, bool(length & CONTENT)
            if len(head) == 4:
                self._check_frame(size, content, is_content=is_content)
            data = file.read(size)
            if len(head) < 4 or len(data) < size:
                raise ValueError("the changes end too early")
            read_bytes += 4 + size
            if read_bytes - noted_bytes >= PIECE_BYTES:
                noted_bytes = read_bytes
                note(read_bytes)
            if content is None:
                content = self._take_row(_row(data), read_bytes)
            elif data and is_content:
                content.take(data)
            elif not (problem := "" if is_content else _problem(_row(data))) and not is_content:
                raise ValueError("the content of a file has no end")
            else:
                self._end_content(content, problem)
                content = None
        if content is not None:
            raise ValueError("the changes end too early")

    def _check_frame(self, size: int, content: _Content | None, *, is_content: bool) -> None:
        if not is_content:
            if not 0 < size <= MOST_ROW_BYTES:
                raise ValueError(f"a row of the changes has {size} bytes")
            self._rows_bytes += size
            if self._rows_bytes > MOST_ROWS_BYTES:
                raise ValueError(f"the names of the changes have more than {MOST_ROWS_BYTES} bytes")
        elif content is None:
            raise ValueError("the changes contain content for an entry that is not a file")
        elif size > MOST_CONTENT_BYTES or self._size + content.size + size > self._max_bytes:
            raise ValueError(f"the changes have more than {self._max_bytes} bytes")

    def _end_content(self, content: _Content, problem: str) -> None:
        self._size += content.size
        facts: dict[str, Any] = {"problem": problem}
        if not problem:
            facts = {"size": content.size, "sha256": content.digest.hexdigest(), "is_text": content.is_text()}
        self._entries[content.entry.path] = replace(content.entry, **facts)

    def _take_row(self, row: Mapping[str, Any], offset: int) -> _Content | None:
        """Take a row that ends at this offset of the stream; return a _Content if the file's content follows."""
        if self._count >= self._most_entries:
            raise ValueError(f"there are more than {self._most_entries} changes")
        not_sent = {"removed"} if self._is_whole else {"unchanged"} if self._base is None else set()
        entry = _read_entry(row, offset=offset, not_sent=not_sent)
        if entry.kind == "unchanged" and self._base is not None:
            entry = self._of_base(entry)
        if entry.path in self._entries:
            raise ValueError("the changes hold a path twice")
        above = entry.path.rpartition(b"/")[0]
        if above not in self._folders and above in self._entries:
            raise ValueError("the changes hold a path below what is not a directory")
        self._count += 1
        if entry.kind == "directory" and not entry.problem:
            self._folders.add(entry.path)
        if row.get("kind") == "file" and not entry.problem:
            return _Content(entry)
        self._entries[entry.path] = entry
        return None

    def _of_base(self, entry: SnapshotEntry) -> SnapshotEntry:
        base = cast("Snapshot", self._base).entries.get(entry.path)
        if base is None or base.kind != "file" or base.problem:  # it could not be read then, and is as it was
            return replace(entry, kind="file", problem=base.problem if base is not None and base.problem else UNREAD)
        return replace(base, source=base.source + 1)


class _Content:
    """The state of one file's content while it arrives."""

    __slots__ = ("_decoder", "digest", "entry", "size")

    def __init__(self, entry: SnapshotEntry):
        self.entry, self.size, self.digest = entry, 0, hashlib.sha256()
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    def take(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.digest.update(piece)
        if self._decoder is not None and not self._is_text_so_far(self._decoder, piece):
            self._decoder = None
        self.size += len(piece)

    def _is_text_so_far(self, decoder: codecs.IncrementalDecoder, piece: bytes) -> bool:
        if self.size < LOOKED_AT_BYTES and b"\0" in piece[: LOOKED_AT_BYTES - self.size]:
            return False
        try:
            decoder.decode(piece)
        except UnicodeDecodeError:
            return False
        return True

    def is_text(self) -> bool:
        """Tell whether the content so far is complete UTF-8 text."""
        try:
            return self._decoder is not None and self._decoder.decode(b"", final=True) == ""
        except UnicodeDecodeError:
            return False


def _row(data: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise ValueError("a row of the changes is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("a row of the changes is not an object")
    return row


def _read_entry(row: Mapping[str, Any], *, offset: int, not_sent: Collection[str]) -> SnapshotEntry:
    """Return the entry of a row. Raises ValueError for values that no sandbox can have."""
    kind, mode, mtime_s = row.get("kind"), row.get("mode", 0), row.get("mtime", 0)
    if not isinstance(kind, str) or kind not in KINDS or kind in not_sent:
        raise ValueError("the changes hold an unknown kind")
    if type(mode) is not int or not 0 <= mode <= PERMISSIONS:
        raise ValueError("the changes hold a malformed mode")
    if type(mtime_s) is not int:
        raise ValueError("the changes hold a malformed time")
    target = b""
    problem = _problem(row)
    if kind == "link" and not problem:
        target = _unpack(row.get("target"))
        if not 0 < len(target) <= MOST_PATH_BYTES:
            raise ValueError("the changes hold a malformed link")
    return SnapshotEntry(
        path=_checked(_unpack(row.get("path"))),
        kind=cast("EntryKind", KINDS[kind]),
        mode=MODES[mode],
        mtime_s=min(max(mtime_s, 0), MOST_MTIME_S),
        offset=offset if kind == "file" else 0,
        target=target,
        is_opaque=kind == "directory" and row.get("opaque") is True,
        is_copied=row.get("copied") is True,
        problem=problem,
    )


def _problem(row: Mapping[str, Any]) -> str:
    problem = row.get("problem", "")
    if not problem:
        return ""
    if not isinstance(problem, str) or problem not in PROBLEMS:
        raise ValueError("the changes hold an unknown problem")
    return PROBLEMS[problem]


def _unpack(value: object) -> bytes:
    """Return a name that was packed by `init/names.py`."""
    try:
        if isinstance(value, str):
            name = value.encode()
        elif isinstance(value, dict) and isinstance(value.get("hex"), str):
            name = bytes.fromhex(value["hex"])
        else:
            name = b"\0"
    except ValueError:
        name = b"\0"
    if b"\0" in name:
        raise ValueError("the changes hold a malformed name")
    return name


def _pack(name: bytes) -> str | dict[str, str]:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return {"hex": name.hex()}


def _checked(path: bytes) -> bytes:
    """Return a path that stays below its folder. Raises ValueError for any other."""
    names = path.split(b"/")
    if len(path) > MOST_PATH_BYTES or len(names) > MOST_NAMES or max(map(len, names)) > MOST_NAME_BYTES:
        raise ValueError("the changes hold a path that is too long")
    if not NO_NAMES.isdisjoint(names):
        raise ValueError("the changes hold a path that is not one below the folder")
    return path


def _unnamed_file(folder: str | os.PathLike[str]) -> int:
    """Return the descriptor of a new unnamed file."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        fd, name = tempfile.mkstemp(dir=folder)  # open(2): O_TMPFILE is not supported by every file system
        os.unlink(name)
        return fd
