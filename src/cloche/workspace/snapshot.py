"""The changes of a sandbox at one moment: a row for each path, and all contents in one file without a name.

They come as the stream of `init/changes.py`, from a process with the sandbox's rights: whatever it says is what a
sandbox may claim to have, so nothing is believed but that, and what is malformed or too much ends the reading.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

EntryKind = Literal["file", "directory", "link", "removed", "unchanged", "other"]
PIECE_BYTES = 1 << 20
CONTENT = 1 << 31  # set in the length of a frame that is content
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
NO_NAMES = frozenset((b"", b".", b".."))
# One object for each value that a million rows have in common.
KINDS = {kind: kind for kind in ("file", "directory", "link", "removed", "unchanged", "other")}
MODES = tuple(range(PERMISSIONS + 1))
# What the other end may say of a path that it could not send: its word, our sentence.
PROBLEMS = {
    "unreadable": "it cannot be read inside",
    "too_large": "it is larger than what may be taken out at once",
    "too_deep": "it is too deep, or its path is too long, to be looked into",
    "changed": "it was changed while it was read",
    "mount": "another file system is mounted there",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Hold what the sandbox has at one path, relative to the folder.

    `removed` is a whiteout: whatever the host has there is gone inside. An `opaque` directory shows nothing of the
    host's. `unchanged` comes from copies alone: it is there, as the host had it. `other` is neither file, directory
    nor link. A file that `is_copied` began as a copy of the host's, under this name or another one; a directory of
    a copy was not changed itself. `problem` says why its content could not be read.
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
    is_text: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Hold entries by path, folders before what is in them, and the descriptor of the file with their contents.

    `is_whole` says that it has an entry for all that is there, as a copy has: what it lacks is removed. Where it
    `is_partial`, there was more than was wanted, or could be named, and what it lacks means nothing.
    """

    entries: Mapping[bytes, Entry] = field(default_factory=dict)
    contents: int = -1
    is_whole: bool = False
    is_partial: bool = False

    def read(self, entry: Entry) -> Iterator[bytes]:
        """Yield a file's content, piece by piece."""
        at, end = entry.offset, entry.offset + entry.size
        while at < end:
            piece = os.pread(self.contents, min(PIECE_BYTES, end - at), at)
            if not piece:
                raise OSError("the snapshot is shorter than it says")
            yield piece
            at += len(piece)

    def add(self, entry: Entry, data: bytes) -> tuple[Entry, str]:
        """Return a file's entry with another content, and the hash of that; the contents grow by it."""
        offset, sha256 = os.lseek(self.contents, 0, os.SEEK_END), hashlib.sha256(data).hexdigest()
        view = memoryview(data)
        while view:
            view = view[os.write(self.contents, view) :]
        return replace(entry, size=len(data), offset=offset, sha256=sha256), sha256

    def close(self) -> None:
        """Let the contents go."""
        if self.contents >= 0:
            os.close(self.contents)


class SnapshotReader:
    """Read a stream of `init/changes.py`, in pieces of any size; `close` it where it is not finished.

    Everything is bounded: `most` bytes of content, `entries` rows. All that is malformed raises ValueError.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        most: int = MOST_BYTES,
        entries: int = MOST_ENTRIES,
        is_whole: bool = False,
    ):
        self._most, self._most_entries, self._is_whole = most, entries, is_whole
        self._entries: dict[bytes, Entry] = {}
        self._rows_bytes = 0
        self._frame = bytearray()  # a length, or a length and a row, as far as they have come
        self._left = 0  # of a frame of content
        self._content: _Content | None = None  # of the file that comes
        self._size = 0
        self._fd = _unnamed_file(folder)
        self._file = os.fdopen(self._fd, "wb", buffering=PIECE_BYTES, closefd=False)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream. Raises ValueError, and OSError where they cannot be written."""
        view, at = memoryview(data), 0
        while at < len(data):
            if self._left:
                piece = view[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._take_content(piece)
                continue
            wanted = 4 if len(self._frame) < 4 else 4 + int.from_bytes(self._frame[:4], "big")
            piece = view[at : at + wanted - len(self._frame)]
            at += len(piece)
            self._frame += piece
            if len(self._frame) == 4:
                self._begin_frame(int.from_bytes(self._frame, "big"))
            elif len(self._frame) == wanted:
                self._take_row(self._frame[4:])
                self._frame.clear()

    def finish(self, answer: Mapping[str, Any]) -> Snapshot:
        """Return what has come, given the other end's answer. Raises ValueError where either is not complete."""
        if self._left or self._frame or self._content is not None:
            raise ValueError("the changes end too early")
        count = answer.get("count")
        if type(count) is not int or count != len(self._entries):
            raise ValueError(f"{len(self._entries)} changes came, which is not what was announced")
        self._file.close()
        contents, self._fd = self._fd, -1
        is_partial = bool(answer.get("too_many") or answer.get("skipped"))
        return Snapshot(entries=self._entries, contents=contents, is_whole=self._is_whole, is_partial=is_partial)

    def close(self) -> None:
        """Let go what has come, unless a snapshot has it."""
        if self._fd >= 0:
            with suppress(OSError):
                self._file.close()  # or it would write what it holds when it is collected
            os.close(self._fd)
            self._fd = -1

    def _begin_frame(self, length: int) -> None:
        if not length & CONTENT:
            if not 0 < length <= MOST_ROW_BYTES:
                raise ValueError(f"a row of the changes has {length} bytes")
            self._rows_bytes += length
            if self._rows_bytes > MOST_ROWS_BYTES:
                raise ValueError(f"the names of the changes have more than {MOST_ROWS_BYTES} bytes")
            return
        self._frame.clear()
        self._left = length & ~CONTENT
        if self._content is None:
            raise ValueError("the changes hold content that is no file's")
        if self._left > MOST_CONTENT_BYTES or self._size + self._content.size + self._left > self._most:
            raise ValueError(f"the changes have more than {self._most} bytes")
        if not self._left:
            self._end_content("")

    def _take_content(self, piece: memoryview) -> None:
        if self._content is not None:
            self._file.write(piece)
            self._content.take(piece)

    def _end_content(self, problem: str) -> None:
        content, self._content = self._content, None
        if content is None:
            return
        self._size += content.size
        facts: dict[str, Any] = {"problem": problem}
        if not problem:
            facts = {"size": content.size, "sha256": content.digest.hexdigest(), "is_text": content.is_text()}
        self._entries[content.path] = replace(self._entries[content.path], **facts)

    def _take_row(self, text: bytes | bytearray) -> None:
        try:
            row = json.loads(text.decode())
        except (ValueError, RecursionError):
            raise ValueError("a row of the changes is no JSON") from None
        if not isinstance(row, dict):
            raise ValueError("a row of the changes is no object")
        if self._content is not None:
            if not (problem := _problem(row)):
                raise ValueError("the content of a file has no end")
            self._end_content(problem)
            return
        if len(self._entries) >= self._most_entries:
            raise ValueError(f"there are more than {self._most_entries} changes")
        entry = _read_entry(row, offset=self._size, is_whole=self._is_whole)
        if entry.path in self._entries:
            raise ValueError("the changes hold a path twice")
        above = self._entries.get(entry.path.rpartition(b"/")[0])
        if above is not None and (above.kind != "directory" or above.problem):
            raise ValueError("the changes hold a path below what is no directory")
        self._entries[entry.path] = entry
        if entry.kind == "file" and not entry.problem:
            self._content = _Content(entry.path)


class _Content:
    """Hold what is known of a file's content as far as it has come."""

    __slots__ = ("_decoder", "digest", "path", "size")

    def __init__(self, path: bytes):
        self.path, self.size, self.digest = path, 0, hashlib.sha256()
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    def take(self, piece: memoryview) -> None:
        """Take the next bytes."""
        self.digest.update(piece)
        if self._decoder is not None and not self._is_text_so_far(self._decoder, piece):
            self._decoder = None
        self.size += len(piece)

    def _is_text_so_far(self, decoder: codecs.IncrementalDecoder, piece: memoryview) -> bool:
        if self.size < LOOKED_AT_BYTES and b"\0" in bytes(piece[: LOOKED_AT_BYTES - self.size]):
            return False
        try:
            decoder.decode(bytes(piece))
        except UnicodeDecodeError:
            return False
        return True

    def is_text(self) -> bool:
        """Tell whether all that has come is text."""
        try:
            return self._decoder is not None and self._decoder.decode(b"", final=True) == ""
        except UnicodeDecodeError:
            return False


def _read_entry(row: Mapping[str, Any], *, offset: int, is_whole: bool) -> Entry:
    """Return what a row says. Raises ValueError for what no sandbox can have."""
    kind, mode = row.get("kind"), row.get("mode", 0)
    if not isinstance(kind, str) or kind not in KINDS or kind == ("removed" if is_whole else "unchanged"):
        raise ValueError("the changes hold an unknown kind")
    if type(mode) is not int or not 0 <= mode <= PERMISSIONS:
        raise ValueError("the changes hold a malformed mode")
    target = b""
    problem = _problem(row)
    if kind == "link" and not problem:
        target = _unpack(row.get("target"))
        if not 0 < len(target) <= MOST_PATH_BYTES:
            raise ValueError("the changes hold a malformed link")
    return Entry(
        path=_checked(_unpack(row.get("path"))),
        kind=cast("EntryKind", KINDS[kind]),
        mode=MODES[mode],
        offset=offset if kind == "file" else 0,
        target=target,
        is_opaque=kind == "directory" and row.get("opaque") is True,
        is_copied=row.get("copied") is True,
        problem=problem,
    )


def _problem(row: Mapping[str, Any]) -> str:
    word = row.get("problem", "")
    if not word:
        return ""
    if not isinstance(word, str) or word not in PROBLEMS:
        raise ValueError("the changes hold an unknown problem")
    return PROBLEMS[word]


def _unpack(value: object) -> bytes:
    """Return a name as `init/names.py` packs it."""
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


def _checked(path: bytes) -> bytes:
    """Return a path that stays below its folder. Raises ValueError for another one."""
    names = path.split(b"/")
    if len(path) > MOST_PATH_BYTES or len(names) > MOST_NAMES or max(map(len, names)) > MOST_NAME_BYTES:
        raise ValueError("the changes hold a path that is too long")
    if not NO_NAMES.isdisjoint(names):
        raise ValueError("the changes hold a path that is not one below the folder")
    return path


def _unnamed_file(folder: str | os.PathLike[str]) -> int:
    """Return the descriptor of a new file that is gone with it."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        fd, name = tempfile.mkstemp(dir=folder)  # this file system has none without a name
        os.unlink(name)
        return fd
