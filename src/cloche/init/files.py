"""Operations on files, in a separate process with a guest's rights: nothing of it is trusted, or has to be.

Content comes on stream 0 and goes to stream 1; the result goes to stream 3 as one JSON object: the answer, or
`{"error": {"kind", "message", "path"}}`. Names in it are written as `names` has them. Paths are the sandbox's own, so a
link resolves as for any process of the same user. Nothing waits for another end: special files are neither read nor
written. The client bounds the time and the resources.

`content` has the parts of operations, `folders` works on whole trees, `archive` packs and unpacks them, `watch` reports
changes, and `changes` sends a sandbox's view of a host's folder.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from . import archive, folders
from .changes import changes
from .content import (
    ANSWER,
    CHUNK,
    CONTENT_IN,
    CONTENT_OUT,
    Refusal,
    failure,
    natural,
    not_regular,
    open_regular,
    open_unfinished,
    pass_on,
    put_in_place,
    write_all,
)
from .names import pack_path, unpack_path
from .watch import watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_SHOWN = 4096  # characters of a path, in an error
MOST_ENTRIES = 100_000
ROWS_AT_ONCE = 256
KINDS = {
    errno.ENOENT: "not_found", errno.EISDIR: "is_directory", errno.ENOTDIR: "not_directory",
    errno.EACCES: "permission", errno.EPERM: "permission", errno.EROFS: "permission", errno.EEXIST: "exists",
    errno.ENOTEMPTY: "not_empty", errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EFBIG: "full",
    errno.ELOOP: "loop", errno.ENAMETOOLONG: "name_too_long", errno.EBUSY: "busy", errno.ETXTBSY: "busy",
    errno.EINVAL: "invalid", errno.ENXIO: "not_regular",
}  # fmt: skip
TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
CANNOT_REPLACE = (errno.EBUSY, errno.EPERM, errno.EACCES, errno.EXDEV, errno.ENOENT)


def serve(order: dict[str, Any]) -> None:
    """Do one operation, answer, and end."""
    path = ""
    try:
        path = unpack_path(order.get("path", ""))
        answer = OPERATIONS[str(order.get("do"))](path, order)
    except Refusal as error:
        answer = _error(error.kind, str(error), error.path or path)
    except OSError as error:
        answer = _error(KINDS.get(error.errno or 0, "other"), error.strerror or str(error), _blamed(error, path))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        answer = _error("invalid", f"malformed: {type(error).__name__}: {error}", path)
    except MemoryError:
        answer = _error("other", "it needs more memory than is available", path)
    write_all(ANSWER, json.dumps(answer).encode())


def _error(kind: str, message: str, path: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message, "path": pack_path(path[:MOST_SHOWN])}}


def _blamed(error: OSError, path: str) -> str:
    """Return the path that an error is about; of two, the second is in the way."""
    first, second = error.filename, error.filename2
    blamed = second if second is not None and KINDS.get(error.errno or 0) in ("exists", "not_empty") else first
    return os.fsdecode(blamed) if isinstance(blamed, str | bytes) else path


def _read(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a regular file, or `count` bytes of it from `offset` on; to send more than `most` bytes is refused.

    A file of size 0, such as those of /proc, is read until its end.
    """
    fd = open_regular(path, os.O_RDONLY)
    try:
        size, offset = os.fstat(fd).st_size, natural(order, "offset", 0) or 0
        count, max_bytes = natural(order, "count", None), natural(order, "most", None)
        limits = [n for n in (count, max(0, size - offset) if size else None) if n is not None]
        if max_bytes is not None and size and min(limits) > max_bytes:
            raise Refusal("too_large", f"it has {size} bytes, more than the requested maximum of {max_bytes}", path)
        limit = min(limits, default=None if max_bytes is None else max_bytes + 1)
        os.lseek(fd, offset, os.SEEK_SET)
        sent = _send(fd, limit)
        if max_bytes is not None and sent > max_bytes:
            raise Refusal("too_large", f"it has more than {max_bytes} bytes", path)
        return {"size": size, "sent": sent}
    finally:
        os.close(fd)


def _send(fd: int, limit: int | None) -> int:
    sent = 0
    while limit is None or sent < limit:
        data = os.read(fd, CHUNK if limit is None else min(CHUNK, limit - sent))
        if not data:
            break
        write_all(CONTENT_OUT, data)
        sent += len(data)
    return sent


def _write(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Write the content: over a file, at its end, or to a new file only (`how`)."""
    how = order.get("how", "replace")
    folder = os.path.dirname(path)
    if order.get("parents") and folder:
        folders.make_folders(folder)
    mode = natural(order, "mode", None)
    if how == "replace":
        return {"size": _replace(path, mode)}
    flags = {"append": os.O_CREAT | os.O_APPEND, "new": os.O_CREAT | os.O_EXCL}[how]
    if os.path.lexists(path) or path.endswith("/"):  # also a link to nothing
        return {"size": _fill(path, flags, mode)}
    return {"size": _write_beside(path, os.path.dirname(path), 0o644 if mode is None else mode & 0o7777, flags)}


def _fill(path: str, flags: int, mode: int | None, source: int = CONTENT_IN) -> int:
    """Write the content into the file itself; all of it is kept if the mode cannot be set."""
    fd = open_regular(path, os.O_WRONLY | flags, 0o644 if mode is None else mode & 0o7777)
    try:
        if mode is not None:
            os.fchmod(fd, mode & 0o7777)
        if not flags & os.O_APPEND:
            os.ftruncate(fd, 0)
        return pass_on(source, fd)
    finally:
        os.close(fd)


def _replace(path: str, mode: int | None) -> int:
    """Write beside, then rename over: no process sees half a file, and one that cannot be written stays as it was.

    An existing file keeps its mode and must be writable, as for any other way of writing; a link stays one. A file of
    another user, or with several names, or in a folder where no name can be added, is written in place, once all
    content has come.
    """
    if path.endswith("/"):
        raise failure(errno.EISDIR, path)
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return _write_beside(path, folder, 0o644 if mode is None else mode & 0o7777)
    if stat.S_ISDIR(state.st_mode):
        raise failure(errno.EISDIR, path)
    if not stat.S_ISREG(state.st_mode):
        raise not_regular(path)
    if not os.access(path, os.W_OK, effective_ids=True):
        raise failure(errno.EACCES, path)
    may_add = os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
    if not may_add or state.st_nlink > 1 or state.st_uid != os.geteuid():
        return _write_through(path, folder if may_add else os.environ.get("TMPDIR", "/tmp"), mode)
    return _write_beside(path, folder, stat.S_IMODE(state.st_mode) if mode is None else mode & 0o7777)


def _write_beside(path: str, folder: str, mode: int, flags: int = os.O_CREAT) -> int:
    """Write a file that gets its name when it is complete; `flags` are those for opening the target in place."""
    with _Unfinished(folder, path) as file:
        count = pass_on(CONTENT_IN, file.fd)
        os.fchmod(file.fd, mode)
        try:
            file.put_in_place(replaces=flags == os.O_CREAT)
        except OSError as error:
            if error.errno not in CANNOT_REPLACE and not (flags & os.O_APPEND and error.errno == errno.EEXIST):
                raise failure(error.errno or 0, path) from error
            os.lseek(file.fd, 0, os.SEEK_SET)
            _fill(path, flags, mode, file.fd)
        return count


def _write_through(path: str, folder: str, mode: int | None) -> int:
    with _Unfinished(folder, path) as file:
        pass_on(CONTENT_IN, file.fd)
        os.lseek(file.fd, 0, os.SEEK_SET)
        return _fill(path, 0, mode, file.fd)


class _Unfinished:
    """Hold a new file in a folder, for a path; it is removed unless it was put in its place."""

    def __init__(self, folder: str, path: str):
        self.path = path
        try:
            self.folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self.fd, self.name = open_unfinished(self.folder)
            except OSError:
                os.close(self.folder)
                raise
        except OSError as error:
            raise failure(error.errno or 0, path) from error

    def __enter__(self) -> _Unfinished:
        return self

    def put_in_place(self, *, replaces: bool) -> None:
        name, self.name = self.name, ""
        put_in_place(self.fd, name, os.path.basename(self.path), self.folder, replaces=replaces)

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        if self.name:
            os.unlink(self.name, dir_fd=self.folder)
        os.close(self.folder)


def _row(path: str, name: str, state: os.stat_result) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": pack_path(name), "type": _type(state), "size": state.st_size, "mode": stat.S_IMODE(state.st_mode),
        "mtime": state.st_mtime, "uid": state.st_uid, "gid": state.st_gid,
    }  # fmt: skip
    if stat.S_ISLNK(state.st_mode):
        try:
            row["target"] = pack_path(os.readlink(path))
            row["leads_to"] = _type(os.stat(path))
        except OSError:
            row.setdefault("target", "")
            row["leads_to"] = ""
    return row


def _type(state: os.stat_result) -> str:
    return TYPES.get(stat.S_IFMT(state.st_mode), "other")


def _stat(path: str, _: dict[str, Any]) -> dict[str, Any]:
    """Describe the file at a path: a link itself, with its target."""
    row = _row(path, os.path.basename(path.rstrip("/")) or "/", os.lstat(path))
    return {**row, "real": pack_path(os.path.realpath(path))}


def _list(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a row for each entry of a folder, and of all below if it is `recursive`, one JSON object a line."""
    max_entries = natural(order, "entries", MOST_ENTRIES) or 0
    walk = folders.Walk(path, max_entries=max_entries, depth=folders.MOST_DEPTH if order.get("recursive") else 1)
    count, vanished = 0, 0
    lines: list[bytes] = []
    for name, entry in walk:
        try:
            state = entry.stat(follow_symlinks=False)
        except OSError as error:
            if error.errno not in folders.PASSED_OVER:
                raise
            vanished += error.errno != errno.ENOENT
            continue
        lines.append(json.dumps(_row(f"{path}/{name}", name, state)).encode() + b"\n")
        count += 1
        if len(lines) >= ROWS_AT_ONCE:
            write_all(CONTENT_OUT, b"".join(lines))
            lines.clear()
    write_all(CONTENT_OUT, b"".join(lines))
    return {"count": count, "skipped": walk.skipped + vanished}


def _make_folder(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Make a folder, with those above it for `parents`; then an existing one is no error."""
    if not order.get("parents"):
        os.mkdir(path)
    elif os.path.exists(path) and not os.path.isdir(path):
        raise failure(errno.EEXIST, path)
    else:
        folders.make_folders(path)
    return {}


def _move(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Rename, also to another file system; a file or an empty folder is replaced only if it `replaces`."""
    target = unpack_path(order["target"])
    os.lstat(path)
    if not order.get("replaces") and os.path.lexists(target):
        raise failure(errno.EEXIST, target)
    try:
        os.rename(path, target)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise failure(errno.ENOENT, os.path.dirname(target)) from error
        if error.errno != errno.EXDEV:
            raise
        folders.move_across(path, target, MOST_ENTRIES)
    return {}


def _remove(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Remove a file, a link, or an empty folder; any folder if `recursive`."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif order.get("recursive"):
        folders.remove_tree(path)
    else:
        os.rmdir(path)
    return {}


def _remove_all(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Remove what is at each of the `paths` below a folder, folders with all in them; missing ones are passed over."""
    for packed in order["paths"]:
        try:
            _remove(f"{path}/{unpack_path(packed)}", {"recursive": True})
        except (FileNotFoundError, NotADirectoryError):
            pass
    return {}


def _chmod(path: str, order: dict[str, Any]) -> dict[str, Any]:
    os.chmod(path, (natural(order, "mode", None) or 0) & 0o7777)
    return {}


OPERATIONS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "read": _read,
    "write": _write,
    "stat": _stat,
    "list": _list,
    "make_folder": _make_folder,
    "move": _move,
    "remove": _remove,
    "remove_all": _remove_all,
    "chmod": _chmod,
    "pack": archive.pack,
    "collect": archive.collect,
    "unpack": archive.unpack,
    "watch": watch,
    "changes": changes,
}
