"""Write the log: a private folder with one current file, and the files that are full.

Theory of operation: each append opens the file again, so that `flock` also excludes threads and forked processes, takes
the lock, and reads only the end of the file: the last line has number and hash. If the end is byte for byte the line
that this process wrote last, number and hash come from a cache. Events are appended by one `write`, so the file may be
append-only (`chattr +a`). The remnant of a line that a crash cut off stays; a newline and a `recovery` event follow it.
A full file is renamed after the number of its first event. The new file begins with a `rotation` event, which continues
the chain and names the oldest event that is retained.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import contextmanager, suppress

from cloche import hostfs
from cloche.core.errors import AuditFailed
from cloche.core.record import dataclass

from .chain import FIRST, MOST_LINE_BYTES, RECOVERY, ROTATION, ChainLink, Line, is_beginning, line_after, read_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

NAME = "audit.jsonl"
FILE_BYTES = 32 << 20
MOST_FILES = 32  # full files that are retained
LOCK_TIMEOUT_S = 10.0
MOST_CACHED = 16  # folders whose last line is cached
_FULL_BEFORE, _FULL_AFTER, _LEAST_DIGITS = "audit-", ".jsonl", 12
_TAIL_BYTES = 4096
_REFUSED = "this user may not write there, or the file system is read-only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The end of a file: its last complete line, and the remnant of an interrupted write after it."""

    last: ChainLink
    remnant: bytes = b""
    lacks_newline: bool = False


# The last line that this process wrote in each folder, with the newlines around it. The next append compares it with
# the file, under the lock.
_written: dict[str, tuple[bytes, Tail]] = {}


def append(
    folder: str, kind: str, fields: Mapping[str, Any], *, file_bytes: int = FILE_BYTES, most_files: int = MOST_FILES
) -> ChainLink:
    """Append one event to the chain and return its link.

    Raises AuditFailed, leaving the log unchanged: for a folder or file that is not this user's alone, a log that was
    changed, one that stays locked, a full disk.
    """
    try:
        with opened_folder(folder, create=True) as folder_fd, _locked(folder_fd, folder) as (file, size):
            if size == 0:
                return _begin(folder_fd, file, folder, kind, fields, most_files)
            tail = _cached_tail(file, folder, size) or _tail_of(folder_fd, file, folder)
            if size >= file_bytes and not tail.remnant and _set_aside(folder_fd, file):
                with _locked(folder_fd, folder) as (fresh, _):
                    return _begin(folder_fd, fresh, folder, kind, fields, most_files)
            return _write(file, folder, size, tail, [(kind, fields)])
    except OSError as error:
        raise failure(f"{folder}/{NAME}", f"{reason(error)}") from error


def head(folder: str) -> ChainLink | None:
    """Return the last link of a chain, None if there is no event. Raises AuditFailed."""
    try:
        with opened_folder(folder, create=False) as folder_fd:
            last = FIRST
            with suppress(FileNotFoundError), opened_file(folder_fd, NAME, folder) as file:
                lock(file, time.monotonic() + LOCK_TIMEOUT_S, f"{folder}/{NAME}", how=fcntl.LOCK_SH, is_read=True)
                last = _tail_of(folder_fd, file, folder).last
            last = last if last.seq else _last_of_full(folder_fd, folder)
            return last if last.seq else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failure(f"{folder}/{NAME}", reason(error), is_read=True) from error


def check_writable(folder: str) -> None:
    """Check everything that writing an event needs, without writing. Raises AuditFailed, as `append` would."""
    try:
        with opened_folder(folder, create=False, is_read=False) as folder_fd:
            _check_space(folder)
            with (
                suppress(FileNotFoundError),
                opened_file(folder_fd, NAME, folder, flags=os.O_RDWR | os.O_APPEND) as file,
            ):
                lock(file, time.monotonic() + LOCK_TIMEOUT_S, f"{folder}/{NAME}", how=fcntl.LOCK_SH)
                if os.fstat(file).st_size:
                    _tail_of(folder_fd, file, folder)
    except FileNotFoundError:
        parent = os.path.dirname(folder)
        while not os.path.lexists(parent):
            parent = os.path.dirname(parent)
        _check_space(parent)
    except OSError as error:
        raise failure(f"{folder}/{NAME}", reason(error)) from error


def why_not_in(folder: str, *, is_private: bool = False) -> str:
    """Return why this user cannot write to a folder of that name; empty if they can, or can create it.

    An `is_private` folder must have mode 0700, and no other user may be able to replace it. Faults of an existing log
    are reported by `append`.
    """
    above = folder
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not _may_write(above):
        return _REFUSED
    if is_private and above == folder:
        state, above = os.lstat(folder), os.path.dirname(folder)
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            return "it is not this user's alone"
    state = os.stat(above)
    is_safe = state.st_uid in (0, os.geteuid()) and (not state.st_mode & 0o022 or state.st_mode & stat.S_ISVTX)
    return "" if is_safe or not is_private else "others may replace it"


def _may_write(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _check_space(folder: str) -> None:
    if not _may_write(folder):
        raise failure(folder, _REFUSED)
    if os.statvfs(folder).f_bavail == 0:
        raise failure(folder, os.strerror(errno.ENOSPC))


def failure(path: str, why: str, *, is_read: bool = False) -> AuditFailed:
    """Return the error with file, reason and remedy."""
    if is_read:
        return AuditFailed(f"the audit log {path} cannot be read: {why}")
    return AuditFailed(
        f"the audit log {path} cannot be written: {why}. While the audit is on, nothing runs without it: fix "
        "this, name another folder (CLOCHE_AUDIT=/FOLDER), or switch it off (CLOCHE_AUDIT=off)"
    )


def reason(error: OSError) -> str:
    """Return the system's message for an error."""
    return error.strerror or str(error)


@contextmanager
def opened_folder(folder: str, *, create: bool, is_read: bool | None = None) -> Iterator[int]:
    """Open the folder, which only this user may own and write to; with `create`, it is created if missing.

    `is_read` selects whether errors speak of reading or writing; the default is reading, unless `create`.
    """
    folder_fd = _open_folder(folder, create=create, is_read=not create if is_read is None else is_read)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


def _open_folder(folder: str, *, create: bool, is_read: bool) -> int:
    if not os.path.isabs(folder):
        raise failure(folder, "that is not an absolute path; maybe there is no home folder", is_read=is_read)
    try:
        folder_fd = _open_or_make(folder) if create else hostfs.open_folder(folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise failure(folder, "it is a symbolic link, or no folder", is_read=is_read) from error
        raise
    return _checked_folder(folder_fd, folder, is_read=is_read)


def _checked_folder(folder_fd: int, folder: str, *, is_read: bool) -> int:
    facts = os.fstat(folder_fd)
    why = ""
    if facts.st_uid != os.geteuid():
        why = f"the folder belongs to user {facts.st_uid}, not to {os.geteuid()}"
    elif facts.st_mode & 0o022:
        why = "others may write to the folder; chmod go-w it"
    if why:
        os.close(folder_fd)
        raise failure(folder, why, is_read=is_read)
    return folder_fd


@contextmanager
def opened_below(folder_fd: int, name: str, folder: str) -> Iterator[int]:
    """Open a subfolder, which only this user may own and write to. Raises OSError, and AuditFailed."""
    below = _checked_folder(hostfs.open_folder(name, folder_fd), f"{folder}/{name}", is_read=True)
    try:
        yield below
    finally:
        os.close(below)


def _open_or_make(folder: str) -> int:
    try:
        return hostfs.open_folder(folder)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    return hostfs.open_folder(folder)


@contextmanager
def opened_file(folder_fd: int, name: str, folder: str, *, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file of the folder, which must be regular, this user's own, and private."""
    file, _ = _open_file(folder_fd, name, folder, flags)
    try:
        yield file
    finally:
        os.close(file)


def _open_file(folder_fd: int, name: str, folder: str, flags: int) -> tuple[int, os.stat_result]:
    path = f"{folder}/{name}"
    try:
        file, facts = hostfs.open_regular(name, folder_fd, flags, 0o600)
    except (hostfs.NotRegular, IsADirectoryError) as error:
        raise failure(path, "it is not a regular file") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise failure(path, "it is a symbolic link") from error
        raise
    why = ""
    if facts.st_uid != os.geteuid():
        why = f"it belongs to user {facts.st_uid}, not to {os.geteuid()}"
    elif facts.st_nlink > 1:
        why = "it has another name (a hard link)"
    elif facts.st_mode & 0o077:
        why = "others may read or write it; chmod 600 it"
    if why:
        os.close(file)
        raise failure(path, why)
    return file, facts


@contextmanager
def _locked(folder_fd: int, folder: str) -> Iterator[tuple[int, int]]:
    """Open and lock the current file, not one that was renamed meanwhile.

    Yields the descriptor and the file's size.
    """
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        file, _ = _open_file(folder_fd, NAME, folder, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            lock(file, until, f"{folder}/{NAME}")
            facts = os.fstat(file)
            try:
                if is_current_file(folder_fd, facts):
                    yield file, facts.st_size
                    return
            finally:  # flock(2): a forked child shares the lock through its copy of the descriptor, so close() keeps it
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)


def lock(file: int, until: float, path: str, *, how: int = fcntl.LOCK_EX, is_read: bool = False) -> None:
    """Lock a file. Raises AuditFailed if another process still holds the lock at `until` (monotonic clock)."""
    pause_s = 0.0002
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                why = f"another process has held its lock for {LOCK_TIMEOUT_S:g} s; is one stopped? lslocks shows it"
                raise failure(path, why, is_read=is_read) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)


def is_current_file(folder_fd: int, facts: os.stat_result) -> bool:
    """Tell whether an open file is the current one, not renamed since it was opened."""
    named = hostfs.look(NAME, folder_fd)
    return named is not None and os.path.samestat(named, facts)


def _cached_tail(file: int, folder: str, size: int) -> Tail | None:
    """Return the end of the file from the cache, None if the file does not end with the line that this process wrote
    last.
    """
    line, tail = _written.get(folder, (b"", None))
    is_same = line and size >= len(line) and os.pread(file, len(line), size - len(line)) == line
    return tail if is_same else None


def _tail_of(folder_fd: int, file: int, folder: str) -> Tail:
    """Return the end of the current file; only the end is read. Raises AuditFailed if it was changed."""
    size = os.fstat(file).st_size
    tail = _read_tail(file, size)
    if tail is None and size <= MOST_LINE_BYTES:  # the first write to this file was interrupted
        before, data = _last_of_full(folder_fd, folder), os.pread(file, size, 0)
        if all(is_beginning(piece, before) for piece in data.split(b"\n")):
            return Tail(last=before, remnant=data)
    if tail is None:
        raise _changed(f"{folder}/{NAME}")
    return tail


def _last_of_full(folder_fd: int, folder: str) -> ChainLink:
    """Return the last link of the full files; FIRST if there are none."""
    full = full_files(folder_fd)
    if not full:
        return FIRST
    with opened_file(folder_fd, full[-1][1], folder) as file:
        tail = _read_tail(file, os.fstat(file).st_size)
        if tail is None or tail.remnant:
            raise _changed(f"{folder}/{full[-1][1]}")
        return tail.last


def _read_tail(file: int, size: int) -> Tail | None:
    """Return the end of a file, None if it was changed."""
    for length in (_TAIL_BYTES, 2 * MOST_LINE_BYTES, 8 * MOST_LINE_BYTES):
        data = os.pread(file, length, max(0, size - length))
        is_all = length >= size
        last_line = _last_line(data, is_all=is_all)
        if last_line is not None:
            line, remnant = last_line
            return _with_remnant(line, remnant) if remnant else Tail(last=line.link)
        if is_all:
            break
    return None


def _last_line(data: bytes, *, is_all: bool) -> tuple[Line, bytes] | None:
    """Return the last complete line in the end of a file, and all bytes after its newline."""
    end = len(data)
    while (newline := data.rfind(b"\n", 0, end)) >= 0:
        start = data.rfind(b"\n", 0, newline) + 1
        if start == 0 and not is_all:
            return None
        line = read_line(data[start:newline])
        if line is not None:
            return line, data[newline + 1 :]
        end = newline
    return None


def _with_remnant(line: Line, remnant: bytes) -> Tail | None:
    """Return the tail for an interrupted write; None for bytes that Cloche did not write."""
    *ended, last_piece = remnant.split(b"\n")
    line_without_newline = None if ended else read_line(last_piece)
    if line_without_newline is not None and line_without_newline.prev == line.link.hash:
        return Tail(last=line_without_newline.link, lacks_newline=True)
    if last_piece and all(is_beginning(piece, line.link) for piece in (*ended, last_piece)):
        return Tail(last=line.link, remnant=remnant)
    return None


def _changed(path: str) -> AuditFailed:
    return failure(
        path,
        'its end is damaged; "cloche audit verify" shows details. Move all audit*.jsonl files away to start a new log',
    )


def _write(file: int, folder: str, size: int, tail: Tail, events: list[tuple[str, Mapping[str, Any]]]) -> ChainLink:
    """Write all events by one call, or none of them."""
    data, line, last = b"", b"", tail.last
    if tail.remnant:
        import hashlib

        data = b"\n"
        recovery = {"left_bytes": len(tail.remnant), "left_sha256": hashlib.sha256(tail.remnant).hexdigest()}
        events = [(RECOVERY, recovery), *events]
    elif tail.lacks_newline:
        data = b"\n"
    for kind, fields in events:
        line, last = line_after(last, kind, _now(), fields)
        data += line
    try:
        written = os.write(file, data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):  # in an append-only file the remnant stays, and the next writer records it
            os.ftruncate(file, size)
        raise
    if len(_written) >= MOST_CACHED:
        _written.clear()
    if size:  # then the byte before this line is a newline
        _written[folder] = (b"\n" + line, Tail(last=last))
    return last


def _now() -> str:
    global _last_second
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    last = _last_second  # other threads may replace it
    if last[0] != seconds:
        last = _last_second = (seconds, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)))
    return f"{last[1]}.{nanoseconds // 1000:06d}Z"


_last_second = (-1, "")  # seconds since the epoch, and their text


def full_files(folder_fd: int) -> list[tuple[int, str]]:
    """Return the full files, oldest first, each with the number of its first event."""
    candidates = [(name.removeprefix(_FULL_BEFORE).removesuffix(_FULL_AFTER), name) for name in os.listdir(folder_fd)]
    return sorted((int(digits), name) for digits, name in candidates if _is_full(digits, name))


def _is_full(digits: str, name: str) -> bool:
    is_number = digits.isascii() and digits.isdigit() and len(digits) >= _LEAST_DIGITS
    return is_number and name == f"{_FULL_BEFORE}{digits}{_FULL_AFTER}"


def _set_aside(folder_fd: int, file: int) -> bool:
    """Rename a full file; if renaming is not permitted, it continues to grow."""
    first, comma, _ = os.pread(file, 64, 0).removeprefix(b'{"v":1,"seq":').partition(b",")
    if not comma or not first.isdigit():
        return False
    name = f"{_FULL_BEFORE}{int(first):012d}{_FULL_AFTER}"
    if hostfs.look(name, folder_fd) is None:
        with suppress(OSError):
            os.rename(NAME, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            return True
    return False


def _begin(folder_fd: int, file: int, folder: str, kind: str, fields: Mapping[str, Any], most_files: int) -> ChainLink:
    """Begin a file: the first of the log, or one that continues the chain."""
    size = os.fstat(file).st_size  # another process may have written to it since
    if size:
        return _write(file, folder, size, _tail_of(folder_fd, file, folder), [(kind, fields)])
    full = full_files(folder_fd)
    events: list[tuple[str, Mapping[str, Any]]] = [(kind, fields)]
    dropped, retained = full[:-most_files], full[-most_files:]
    if retained:
        rotation = {"file": full[-1][1], "first_seq": full[-1][0], "oldest_seq": retained[0][0]}
        events = [(ROTATION, rotation), *events]
    link = _write(file, folder, 0, Tail(last=_last_of_full(folder_fd, folder)), events)
    for _, name in dropped:
        os.unlink(name, dir_fd=folder_fd)
    return link
