"""Folders as tar archives, in and out. Our own code, because importing `tarfile` takes longer than most operations.

It writes the format of GNU tar, and reads those of POSIX and GNU: files, folders, links of both kinds. All members are
extracted below one folder, and each name is walked there folder by folder through no link, so that neither a link of
the archive nor an existing one can redirect a member.
"""

from __future__ import annotations

import errno
import os
import stat

from .content import (
    CHUNK,
    CONTENT_IN,
    CONTENT_OUT,
    FOLDER,
    OPEN,
    Refusal,
    natural,
    open_unfinished,
    put_in_place,
    write_all,
)
from .folders import Walk, make_folders
from .names import unpack_path
from .patterns import matches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

BLOCK = 512
MOST_ENTRIES = 100_000
MOST_HEADER_BYTES = 1 << 16  # of a long name, or of a POSIX extended header
MOST_NUMBER_DIGITS = 20
FILE, HARD_LINK, LINK, DIRECTORY = b"0", b"1", b"2", b"5"
LONG_NAME, LONG_LINK, EXTENDED, GLOBAL = b"L", b"K", b"x", b"g"
OLD_FILES = (b"\0", b"7")  # as they were written once, and those that should be contiguous
PERMISSIONS = 0o777  # no archive may set the setuid, setgid and sticky bits


# Out.


def pack(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a folder, or a file, as an archive; unreadable files and special files are left out and counted.

    More than `entries`, or than `most` bytes, are refused.
    """
    packing = Packing(natural(order, "most", None), path)
    if stat.S_ISDIR(os.stat(path).st_mode):
        walk = Walk(path, max_entries=natural(order, "entries", MOST_ENTRIES) or 0)
        for name, _ in walk:
            packing.add(f"{path}/{name}", os.fsencode(name))
        packing.skipped += walk.skipped
    else:
        packing.add(path, os.fsencode(os.path.basename(path)), os.O_RDONLY)
    packing.finish()
    return {"skipped": packing.skipped}


def collect(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send the regular files below a folder that match one of `patterns` and have changed since the time `since` (ns).

    Files beyond the bounds `entries`, `most_files` and `most` (bytes) are left out; the answer names the exceeded
    bound.
    """
    packing = Packing(None, path)
    since, files = natural(order, "since", 0) or 0, natural(order, "most_files", 0) or 0
    max_bytes = natural(order, "most", 0) or 0
    patterns = [unpack_path(packed) for packed in order["patterns"]]
    partial: set[str] = set()
    walk = Walk(path, max_entries=natural(order, "entries", MOST_ENTRIES) or 0)
    try:
        for name, entry in walk:
            if not entry.is_file(follow_symlinks=False) or not any(matches(pattern, name) for pattern in patterns):
                continue
            try:
                state = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # it has gone
            if state.st_ctime_ns < since:
                continue
            over = "files" if files <= 0 else "bytes" if state.st_size > max_bytes else ""
            if over:
                partial.add(over)
                packing.skipped += 1
                continue
            files, max_bytes = files - 1, max_bytes - state.st_size
            packing.add(f"{path}/{name}", os.fsencode(name))
    except Refusal:
        partial.add("entries")
    if walk.skipped:
        partial.add("access")
    packing.finish()
    return {"skipped": packing.skipped + walk.skipped, "partial": sorted(partial)}


class Packing:
    """Write members, small ones together."""

    def __init__(self, max_bytes: int | None, path: str):
        self.max_bytes, self.path = max_bytes, path
        self.skipped = self.count = 0
        self.held: list[bytes] = []

    def add(self, path: str, name: bytes, flags: int = os.O_RDONLY | os.O_NOFOLLOW) -> None:
        try:
            state = os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW)
            kind = stat.S_IFMT(state.st_mode)
            link = os.fsencode(os.readlink(path)) if kind == stat.S_IFLNK else b""
            fd = os.open(path, flags | OPEN) if kind == stat.S_IFREG else -1
        except OSError:
            self.skipped += 1
            return
        if kind == stat.S_IFREG:
            try:
                self._add_file(fd, name)
            finally:
                os.close(fd)
        elif kind == stat.S_IFDIR:
            self._put(header(name + b"/", DIRECTORY, state))
        elif kind == stat.S_IFLNK:
            self._put(header(name, LINK, state, link=link))
        else:
            self.skipped += 1

    def _add_file(self, fd: int, name: bytes) -> None:
        """Write exactly the announced number of bytes of a file, even if it changes meanwhile."""
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            self.skipped += 1
            return
        self._check(state.st_size)
        self._put(header(name, FILE, state, size=state.st_size))
        left_bytes = state.st_size
        while left_bytes:
            data = os.read(fd, min(CHUNK, left_bytes)) or bytes(min(CHUNK, left_bytes))
            self._put(data)
            left_bytes -= len(data)
        self._put(bytes(-state.st_size % BLOCK))

    def _check(self, more: int) -> None:
        if self.max_bytes is not None and self.count + more > self.max_bytes:
            raise Refusal("too_large", f"it has more than {self.max_bytes} bytes", self.path)

    def _put(self, data: bytes) -> None:
        self._check(len(data))
        self.count += len(data)
        if len(data) == CHUNK and not self.held:
            write_all(CONTENT_OUT, data)
            return
        self.held.append(data)
        if len(self.held) >= 128 or len(data) > BLOCK:
            self._flush()

    def _flush(self) -> None:
        write_all(CONTENT_OUT, b"".join(self.held))
        self.held.clear()

    def finish(self) -> None:
        self.held.append(bytes(2 * BLOCK))
        self._flush()


def header(name: bytes, kind: bytes, state: os.stat_result, *, size: int = 0, link: bytes = b"") -> bytes:
    """Return the header of a member."""
    long = [_long(kind, text) for kind, text in ((LONG_NAME, name), (LONG_LINK, link)) if len(text) > 100]
    mode, owner = stat.S_IMODE(state.st_mode), (state.st_uid, state.st_gid)
    return b"".join([*long, block_of(name, kind, mode, owner, size, int(state.st_mtime), link)])


def _long(kind: bytes, text: bytes) -> bytes:
    size = len(text) + 1
    return block_of(b"././@LongLink", kind, 0o644, (0, 0), size, 0, b"") + text + bytes(1 + -size % BLOCK)


def block_of(name: bytes, kind: bytes, mode: int, owner: tuple[int, int], size: int, mtime: int, link: bytes) -> bytes:
    """Return one block: the header, or that of what extends the next one."""
    before = b"".join([
        name[:100].ljust(100, b"\0"), _number(mode, 8), _number(owner[0], 8), _number(owner[1], 8), _number(size, 12),
        _number(max(mtime, 0), 12),
    ])  # fmt: skip
    after = b"".join([kind, link[:100].ljust(100, b"\0"), b"ustar  \0", bytes(247)])
    return b"".join([before, b"%06o\0 " % (sum(before) + 8 * 32 + sum(after)), after])


def _number(value: int, width: int) -> bytes:
    digits = b"%0*o" % (width - 1, value)
    return digits + b"\0" if len(digits) < width else b"\x80" + value.to_bytes(width - 1, "big")


# In.


def unpack(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Unpack an archive below a folder, which is made where it is missing; files and links that are there are replaced.

    No more than `entries`.
    """
    make_folders(path)
    unpacking = Unpacking(path)
    max_entries = natural(order, "entries", MOST_ENTRIES) or 0
    count = 0
    for member in Members(CONTENT_IN):
        count += 1
        if count > max_entries:
            raise Refusal("too_large", f"the archive has more than {max_entries} entries", path)
        unpacking.extract(member)
    unpacking.finish()
    return {"count": count}


def _wrong(message: str, name: bytes = b"") -> Refusal:
    return Refusal("invalid", f"the archive {message}", os.fsdecode(name))


class ArchiveMember:
    """Hold an archive's entry for one file; its content can be read until the next entry is read."""

    __slots__ = ("bits", "fields", "kind", "link", "mode", "mtime", "name", "owner", "read", "size")

    def __init__(self, block: bytes, fields: dict[bytes, bytes], read: Callable[[], bytes]):
        self.kind, self.read = block[156:157], read
        self.bits, self.mtime = read_number(block[100:108]) & 0o7777, read_number(block[136:148])
        self.mode = self.bits & PERMISSIONS
        self.owner, self.fields = (read_number(block[108:116]), read_number(block[116:124])), fields
        name, prefix = block[:100].partition(b"\0")[0], b""
        if block[257:263] == b"ustar\0":
            prefix = block[345:500].partition(b"\0")[0]
        self.name = fields.get(b"path", prefix + b"/" + name if prefix else name)
        self.link = fields.get(b"linkpath", block[157:257].partition(b"\0")[0])
        self.size = read_number(fields[b"size"], base=10) if b"size" in fields else read_number(block[124:136])
        if self.kind in OLD_FILES:
            self.kind = DIRECTORY if self.name.endswith(b"/") else FILE
        if self.kind not in (FILE, HARD_LINK, LINK, DIRECTORY):
            raise _wrong("contains an entry that is neither a file, a folder nor a link", self.name)


class Members:
    """Yield the members of an archive that is read from a descriptor."""

    def __init__(self, fd: int):
        self.fd = fd
        self.buffer = b""
        self.left = self.padding = 0  # of the content of the current member

    def __iter__(self) -> Members:
        return self

    def __next__(self) -> ArchiveMember:
        fields: dict[bytes, bytes] = {}
        while True:
            while self.left:
                self.read()
            self._take(self.padding)
            self.padding = 0
            block = self._take(BLOCK)
            if not any(block):
                self._drop_rest()
                raise StopIteration
            _check_sum(block)
            kind = block[156:157]
            if kind not in (LONG_NAME, LONG_LINK, EXTENDED, GLOBAL):
                member = ArchiveMember(block, fields, self.read)
                if member.kind == FILE:
                    self.left, self.padding = member.size, -member.size % BLOCK
                return member
            size = read_number(block[124:136])
            if size > MOST_HEADER_BYTES:
                raise _wrong(f"has a name of {size} bytes")
            text = self._take(size + -size % BLOCK)[:size]
            if kind == EXTENDED:
                fields.update(_extended(text))
            elif kind != GLOBAL:
                fields.setdefault(b"path" if kind == LONG_NAME else b"linkpath", text.partition(b"\0")[0])

    def read(self) -> bytes:
        """Return the next bytes of the current member; empty at its end."""
        data = self.buffer or os.read(self.fd, CHUNK)
        if self.left and not data:
            raise _wrong("ends too early")
        piece, self.buffer = data[: self.left], data[self.left :]
        self.left -= len(piece)
        return piece

    def _take(self, count: int) -> bytes:
        pieces, missing = [self.buffer[:count]], count - len(self.buffer[:count])
        self.buffer = self.buffer[count:]
        while missing:
            data = os.read(self.fd, CHUNK)
            if not data:
                raise _wrong("ends too early")
            pieces.append(data[:missing])
            self.buffer = data[missing:]
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _drop_rest(self) -> None:
        while os.read(self.fd, CHUNK):
            pass


def read_number(field: bytes, base: int = 8) -> int:
    """Read a number of a header. Raises Refusal."""
    if field[:1] in (b"\x80", b"\xff"):
        value = int.from_bytes(field[1:], "big") if field[:1] == b"\x80" else 0  # a time before 1970
    else:
        text = field.partition(b"\0")[0].strip()
        if len(text) > MOST_NUMBER_DIGITS or (text and not text.isdigit()):
            raise _wrong("is not a tar archive, or is damaged")
        try:
            value = int(text or b"0", base)
        except ValueError:
            raise _wrong("is not a tar archive, or is damaged") from None
    if value >= 1 << 62:
        raise _wrong("is not a tar archive, or is damaged")
    return value


def _check_sum(block: bytes) -> None:
    if sum(block) - sum(block[148:156]) + 8 * 32 != read_number(block[148:156]):
        raise _wrong("is not a tar archive, or is damaged")


def _extended(text: bytes) -> dict[bytes, bytes]:
    """Return the records of POSIX: `LENGTH NAME=VALUE` and a line feed, each."""
    records: dict[bytes, bytes] = {}
    while text:
        length, blank, _ = text[:24].partition(b" ")
        end = int(length) if length.isdigit() else 0
        record = text[len(length) + 1 : end - 1]
        if not blank or not len(length) + 1 < end <= len(text):
            raise _wrong("is damaged")
        name, _, value = record.partition(b"=")
        if name.startswith(b"GNU.sparse."):
            raise _wrong("contains a sparse file; create it without --sparse")
        records[name] = value
        text = text[end:]
    return records


class Unpacking:
    """Extract members below a folder, through no link."""

    def __init__(self, top: str):
        self.top = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.last = (b"", os.dup(self.top))  # the folder that was used last
        self.folders: list[tuple[bytes, int, int]] = []  # set last, for their modes may forbid later members

    def extract(self, member: ArchiveMember) -> None:
        """Put one member where it belongs."""
        name = self._checked(member.name)
        if not name:  # the folder itself
            return
        folder, _, last = name.rpartition(b"/")
        folder_fd = self._folder(folder)
        try:
            if member.kind == DIRECTORY:
                self._folder(name)
                self.folders.append((name, member.mode, member.mtime))
                return
            if member.kind == FILE:
                self._place(member, last, folder_fd)
                return
            self._clear(last, folder_fd)
            if member.kind == LINK:
                self._place_link(member, last, folder_fd)
            else:
                self._place_hard_link(member, last)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fsdecode(member.name)) from error

    def _checked(self, name: bytes) -> bytes:
        """Return a name without empty components. Raises Refusal for one that leads out."""
        names = [component for component in name.split(b"/") if component not in (b"", b".")]
        if name.startswith(b"/") or b".." in names:
            raise _wrong("contains a name that leads out of the folder", name)
        return b"/".join(names)

    def _folder(self, path: bytes) -> int:
        """Return an open folder, made if it is missing; it stays open until the next call."""
        if path == self.last[0]:
            return self.last[1]
        folder_fd = os.dup(self.top)
        try:
            for name in path.split(b"/") if path else ():
                child_fd = _enter(name, folder_fd, path)
                os.close(folder_fd)
                folder_fd = child_fd
        except BaseException:
            os.close(folder_fd)
            raise
        os.close(self.last[1])
        self.last = (path, folder_fd)
        return folder_fd

    def _place(self, member: ArchiveMember, name: bytes, folder_fd: int) -> None:
        _place_file(member, name, folder_fd)

    def _place_link(self, member: ArchiveMember, name: bytes, folder_fd: int) -> None:
        os.symlink(member.link, name, dir_fd=folder_fd)

    def _clear(self, name: bytes, folder_fd: int) -> None:
        """Make room for a member. Raises OSError where a folder is in the way."""
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            os.unlink(name, dir_fd=folder_fd)
        except FileNotFoundError:
            pass

    def _place_hard_link(self, member: ArchiveMember, last: bytes) -> None:
        folder_fd = os.dup(self.last[1])
        try:
            folder, _, name = self._checked(member.link).rpartition(b"/")
            target_fd = self._folder(folder)
            os.link(name, last, src_dir_fd=target_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        finally:
            os.close(folder_fd)

    def finish(self) -> None:
        """Give the folders their permissions and times."""
        for name, mode, mtime in reversed(self.folders):
            folder_fd = self._folder(name)
            os.fchmod(folder_fd, mode)
            _set_time(folder_fd, mtime)


def _enter(name: bytes, folder_fd: int, path: bytes) -> int:
    try:
        os.mkdir(name, 0o755, dir_fd=folder_fd)
    except FileExistsError:
        pass
    # Old versions of gVisor follow a link all the same, so it is looked at first.
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
        raise Refusal("not_directory", "the archive has a path through a file that is not a folder", os.fsdecode(path))
    return os.open(name, FOLDER, dir_fd=folder_fd)


def _place_file(member: ArchiveMember, name: bytes, folder_fd: int) -> None:
    """Write a file beside, and rename it when it is complete."""
    fd, unfinished = open_unfinished(folder_fd)
    try:
        while data := member.read():
            write_all(fd, data)
        os.fchmod(fd, member.mode)
        _set_time(fd, member.mtime)
        placed, unfinished = unfinished, ""
        put_in_place(fd, placed, name, folder_fd)
    finally:
        os.close(fd)
        if unfinished:
            os.unlink(unfinished, dir_fd=folder_fd)


def _set_time(fd: int, mtime: int) -> None:
    seconds = min(mtime, 1 << 33)
    os.utime(fd, (seconds, seconds))
