"""Objects of a possibly hostile git repository, loose and packed. Sizes are bounded before unpacking.

No link is followed. Nothing is mapped into memory, since a file that shrinks would raise SIGBUS (mmap(2)). Objects of
alternates are treated as missing. Information that cannot be determined is Unknown; other parts of the state are still
read.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from cloche.hostfs import descended, open_regular

from ..core.record import dataclass, field

MOST_OBJECT_BYTES = 8 << 20
MOST_PACKS = 64
_MOST_DELTAS = 300
_CHUNK = 1 << 14
_KINDS = {1: b"commit", 2: b"tree", 3: b"blob", 4: b"tag"}
_OFFSET_DELTA, _NAMED_DELTA = 6, 7
_INDEX_MAGIC = b"\xfftOc\x00\x00\x00\x02"
_FAN_AT, _NAMES_AT, _NAME = 8, 8 + 4 * 256, 20
_FOLDER_MODE = 0o40000


class Unknown(Exception):
    """Report that something about a repository cannot be determined, and why."""


class Stopped(Unknown):
    """Report that reading stopped at a bound."""


@dataclass(slots=True, kw_only=True)
class ReadBudget:
    """Hold the remaining budget: time (of `time.monotonic`), names, bytes read for comparisons."""

    deadline: float
    names: int = 1_000_000  # in the index, in folders, in trees
    content_bytes: int = 512 << 20
    noted: list[str] = field(default_factory=list)

    def check_time(self) -> None:
        """Raise Stopped after the deadline."""
        if time.monotonic() > self.deadline:
            raise Stopped("there was not enough time to compare all files")

    def count_name(self) -> None:
        """Count a name. Raises Stopped for too many, and after the deadline."""
        self.names -= 1
        if self.names < 0:
            raise Stopped("there are too many files to compare all")
        if not self.names & 63:
            self.check_time()

    def note(self, reason: object) -> None:
        """Record, once, a reason why the state is partial."""
        if (text := str(reason)) not in self.noted:
            self.noted.append(text)

    @contextmanager
    def noting(self, *, is_last: bool = False) -> Iterator[None]:
        """Record Unknown and continue. Stopped is recorded if `is_last`, else it passes."""
        try:
            yield
        except Unknown as error:
            if isinstance(error, Stopped) and not is_last:
                raise
            self.note(error)


def read_small(folder: int, path: str, max_bytes: int) -> bytes | None:
    """Return a regular file below an open folder, None if the name does not exist.

    Raises Unknown for a larger file, another kind of file, and a path through a link.
    """
    *folders, name = path.split("/")
    try:
        with descended(folder, folders) as parent:
            fd, _ = open_regular(name, parent)
        with open(fd, "rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unknown(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise Unknown(f"{path} is larger than {max_bytes} bytes")
    return data


class _Pack(NamedTuple):
    index_fd: int
    data_fd: int
    objects: int

    def find(self, name: bytes) -> int | None:
        """Return the offset of an object in the pack."""
        low = self._number(_FAN_AT + 4 * (name[0] - 1)) if name[0] else 0
        high = self._number(_FAN_AT + 4 * name[0])
        if not low <= high <= self.objects:
            raise Unknown("the index of a pack is damaged")
        while low < high:
            middle = (low + high) // 2
            candidate = _read_at(self.index_fd, _NAMES_AT + _NAME * middle, _NAME)
            if candidate == name:
                return self._offset(middle)
            low, high = (middle + 1, high) if candidate < name else (low, middle)
        return None

    def _offset(self, number: int) -> int:
        offset = self._number(_NAMES_AT + (_NAME + 4) * self.objects + 4 * number)
        if offset < 1 << 31:
            return offset
        far = _NAMES_AT + (_NAME + 8) * self.objects + 8 * (offset - (1 << 31))
        return int.from_bytes(_read_at(self.index_fd, far, 8), "big") & (1 << 62) - 1

    def _number(self, offset: int) -> int:
        return int(struct.unpack(">I", _read_at(self.index_fd, offset, 4))[0])


class Objects:
    """Read commits and trees of the repository whose `.git` is an open folder. Close it at the end."""

    def __init__(self, git: int, bounds: ReadBudget):
        self._git, self._bounds = git, bounds
        self._opened = ExitStack()
        self._packs: list[_Pack] | None = None

    def close(self) -> None:
        """Close the packs."""
        self._opened.close()

    def tree_of(self, commit: bytes) -> bytes:
        """Return the name of a commit's tree. Raises Unknown."""
        first, _, _ = self.read(commit, b"commit").partition(b"\n")
        with suppress(ValueError):
            if first.startswith(b"tree ") and len(name := bytes.fromhex(first[5:].decode("ascii", "replace"))) == _NAME:
                return name
        raise Unknown("the commit is damaged")

    def tree(self, name: bytes) -> Mapping[bytes, tuple[int, bytes]]:
        """Return the mode and the object's name for each entry of a tree. Raises Unknown."""
        data, offset = self.read(name, b"tree"), 0
        entries: dict[bytes, tuple[int, bytes]] = {}
        while offset < len(data):
            end = data.find(b"\0", offset)
            mode, _, file = data[offset:end].partition(b" ")
            offset = end + 1 + _NAME
            if end < 0 or not file or offset > len(data) or not mode or mode.strip(b"01234567"):
                raise Unknown("a tree is damaged")
            self._bounds.count_name()
            entries[file] = (int(mode, 8), data[end + 1 : offset])
        return entries

    def read(self, name: bytes, kind: bytes) -> bytes:
        """Return an object of a kind. Raises Unknown for a missing, too large or damaged one, and for another kind."""
        self._bounds.check_time()
        typed_data = self._read_loose(name) or self._read_packed(name)
        if typed_data is None:
            raise Unknown(f"object {name.hex()[:12]} is not in this repository's own folder")
        if typed_data[0] != kind:
            raise Unknown(f"object {name.hex()[:12]} is no {kind.decode()}")
        return typed_data[1]

    def _read_loose(self, name: bytes) -> tuple[bytes, bytes] | None:
        text = name.hex()
        try:
            with descended(self._git, ["objects", text[:2]]) as folder:
                fd, _ = open_regular(text[2:], folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unknown(f"object {text[:12]} cannot be read: {error.strerror}") from error
        try:
            head, _, data = _inflate(fd, 0, MOST_OBJECT_BYTES).partition(b"\0")
        finally:
            os.close(fd)
        return head.partition(b" ")[0], data

    def _read_packed(self, name: bytes) -> tuple[bytes, bytes] | None:
        for pack in self._all_packs():
            offset = pack.find(name)
            if offset is not None:
                return _unpack(pack, offset)
        return None

    def _all_packs(self) -> list[_Pack]:
        if self._packs is None:
            self._packs = []
            with suppress(FileNotFoundError), self._bounds.noting():
                self._open_packs(self._packs)
        return self._packs

    def _open_packs(self, packs: list[_Pack]) -> None:
        try:
            with descended(self._git, ["objects", "pack"]) as folder, os.scandir(folder) as names:
                for entry in names:
                    self._bounds.count_name()
                    if not entry.name.endswith(".idx"):
                        continue
                    if len(packs) == MOST_PACKS:
                        raise Unknown(f"there are more than {MOST_PACKS} packs")
                    packs.append(self._open_pack(folder, entry.name))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unknown(f"the packs cannot be read: {error.strerror}") from error

    def _open_pack(self, folder: int, name: str) -> _Pack:
        index, _ = open_regular(name, folder)
        self._opened.callback(os.close, index)
        data, _ = open_regular(f"{name.removesuffix('.idx')}.pack", folder)
        self._opened.callback(os.close, data)
        if _read_at(index, 0, len(_INDEX_MAGIC)) != _INDEX_MAGIC:
            raise Unknown("a pack's index has an unsupported version")
        return _Pack(index, data, struct.unpack(">I", _read_at(index, _NAMES_AT - 4, 4))[0])


def _unpack(pack: _Pack, offset: int) -> tuple[bytes, bytes]:
    """Return kind and data of the object at an offset, with its deltas applied."""
    deltas: list[bytes] = []
    while True:
        number, size, data_offset, base = _header(pack, offset)
        if size > MOST_OBJECT_BYTES or len(deltas) > _MOST_DELTAS or sum(map(len, deltas)) > 4 * MOST_OBJECT_BYTES:
            raise Unknown("an object in a pack is too large to be read here")
        data = _inflate(pack.data_fd, data_offset, size)
        if len(data) != size:
            raise Unknown("a pack is damaged")
        if base is None:
            break
        deltas.append(data)
        offset = base
    for delta in reversed(deltas):
        data = _patched(data, delta)
    return _KINDS.get(number, b"?"), data


def _header(pack: _Pack, offset: int) -> tuple[int, int, int, int | None]:
    """Return kind, size, the offset of the data, and the offset of a delta's base."""
    head = os.pread(pack.data_fd, 64, offset)
    try:
        number, size, position, shift = head[0] >> 4 & 7, head[0] & 15, 1, 4
        while head[position - 1] & 128:
            size |= (head[position] & 127) << shift
            position, shift = position + 1, shift + 7
        if number == _OFFSET_DELTA:
            back, position = head[position] & 127, position + 1
            while head[position - 1] & 128:
                back, position = (back + 1) << 7 | head[position] & 127, position + 1
            if not 0 < back < offset:
                raise Unknown("a pack is damaged")
            return number, size, offset + position, offset - back
        if number == _NAMED_DELTA:
            base = pack.find(head[position : position + _NAME].ljust(_NAME, b"\0"))
            if base is None:
                raise Unknown("a pack is not complete")
            return number, size, offset + position + _NAME, base
    except IndexError:
        raise Unknown("a pack is damaged") from None
    return number, size, offset + position, None


def _patched(base: bytes, delta: bytes) -> bytes:
    """Apply a delta to its base. Raises Unknown."""
    out = bytearray()
    try:
        _, position = _varint(delta, 0)
        size, position = _varint(delta, position)
        while position < len(delta) and len(out) <= size <= MOST_OBJECT_BYTES:
            op, position = delta[position], position + 1
            if not op & 128:
                out += delta[position : position + op]
                position += op
                continue
            where = length = 0
            for bit in range(7):
                if op >> bit & 1:
                    shifted = delta[position] << 8 * (bit if bit < 4 else bit - 4)
                    where, length = (where | shifted, length) if bit < 4 else (where, length | shifted)
                    position += 1
            out += base[where : where + (length or 0x10000)]
    except IndexError:
        raise Unknown("a pack is damaged") from None
    if len(out) != size:
        raise Unknown("a pack is damaged")
    return bytes(out)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[position] & 127) << shift
        position, shift = position + 1, shift + 7
        if not data[position - 1] & 128 or shift > 63:
            return value, position


def _inflate(fd: int, offset: int, max_bytes: int) -> bytes:
    """Return the decompressed data at an offset. Raises Unknown beyond `max_bytes`, and for damage."""
    unpacker, out, remaining = zlib.decompressobj(), bytearray(), 2 * max_bytes + (1 << 16)
    try:
        while not unpacker.eof and len(out) <= max_bytes and remaining > 0:
            chunk = os.pread(fd, _CHUNK, offset)
            if not chunk:
                break
            offset, remaining = offset + len(chunk), remaining - len(chunk)
            out += unpacker.decompress(chunk, max_bytes + 1 - len(out))
    except zlib.error:
        raise Unknown("an object is damaged") from None
    if len(out) > max_bytes or not unpacker.eof:
        raise Unknown("an object is damaged, or too large to be read here")
    return bytes(out)


def _read_at(fd: int, offset: int, size: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise Unknown("the index of a pack is damaged")
    return data


def is_folder_mode(mode: int) -> bool:
    """Tell whether a mode in a tree is that of a subtree."""
    return mode == _FOLDER_MODE
