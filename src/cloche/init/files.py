"""Operations on files, in a separate process with a guest's rights: nothing of it is trusted, or has to be.

Content comes on stream 0 and goes to stream 1; the result goes to stream 3 as one JSON object: the answer, or
`{"error": {"kind", "message", "path"}}`. Names in it are written as `names` has them. Paths are the sandbox's own, so a
link resolves as for any process of the same user. Nothing waits for another end: special files are neither read nor
written. The client bounds the time and the resources.

An order may name the `owner` of what it creates. With `at_home`, relative paths and `~` begin in the home folder of the
owner, or else of the process's user; the answer has the absolute `path`.

`content` has the parts of operations, `folders` works on whole trees, `archive` packs and unpacks them, `facts`
describes files, `watch` reports changes, `changes` sends a sandbox's view of a host's folder, and `snapshots` saves
all writable folders.
"""

from __future__ import annotations

import errno
import json
import os
import stat

from . import archive, folders, snapshots
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
from .facts import Accounts, row_of, set_metadata, text_of
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
NO_DISKS = ("proc", "sysfs", "devpts", "mqueue", "cgroup2")
CANNOT_REPLACE = (errno.EBUSY, errno.EPERM, errno.EACCES, errno.EXDEV, errno.ENOENT)


def serve(order: dict[str, Any]) -> None:
    """Do one operation, answer, and end."""
    path = ""
    try:
        order["accounts"] = Accounts()
        path = _located(order.get("path", ""), order)
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


def _located(packed: object, order: dict[str, Any]) -> str:
    """Return a path of an order. Raises ValueError, and Refusal for another user's `~name`."""
    path = unpack_path(packed)
    if path.startswith("/") or not order.get("at_home"):
        return path
    if path[:1] == "~" and path[1:2] not in ("", "/"):
        raise Refusal("invalid", "cannot expand user-specific home dir", path)
    home = order["accounts"].home(order.get("owner") or order.get("user"))
    return os.path.normpath(f"{home}/{path.removeprefix('~')}")


def _ids_of_owner(order: dict[str, Any]) -> tuple[int, int] | None:
    name = order.get("owner")
    return None if name is None else order["accounts"].find(name)[:2]


def _make_folders(path: str, order: dict[str, Any]) -> None:
    """Make a folder, with those above it, for the order's owner."""
    ids = _ids_of_owner(order)
    for folder in folders.make_folders(path):
        if ids is not None:
            os.chown(folder, *ids, follow_symlinks=False)


def _error(kind: str, message: str, path: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message, "path": pack_path(path[:MOST_SHOWN])}}


def _blamed(error: OSError, path: str) -> str:
    """Return the path that an error is about; of two, the second is in the way."""
    first, second = error.filename, error.filename2
    blamed = second if second is not None and KINDS.get(error.errno or 0) in ("exists", "not_empty") else first
    return os.fsdecode(blamed) if isinstance(blamed, str | bytes) else path


def _read(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a regular file, or `count` bytes of it from `offset` on; to send more than `most` bytes is refused.

    A file of size 0, such as those of /proc, is read until its end. With `describes`, a line of JSON comes before the
    content; then `range` has the first and the last byte, each of which may be None, and `count` is None for no range.
    """
    fd = open_regular(path, os.O_RDONLY)
    try:
        if order.get("describes"):
            order = {**order, **_describe_part(path, fd, order)}
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


def _describe_part(path: str, fd: int, order: dict[str, Any]) -> dict[str, int | None]:
    """Send the facts of a file and of the part that is asked for; return the part. `count` is 0 for one beyond it."""
    state = os.fstat(fd)
    first, last = order.get("range") or (None, None)
    size = state.st_size
    part: dict[str, int | None] = {"offset": 0, "count": None}
    if size and first is not None:
        part = {"offset": first, "count": max(0, min(size if last is None else last + 1, size) - first)}
    elif size and last is not None:
        part = {"offset": max(0, size - last), "count": min(size, last)}
    line = {"path": pack_path(path), "size": size, "mtime": state.st_mtime, **part}
    write_all(CONTENT_OUT, json.dumps(line).encode() + b"\n")
    return part


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
    """Write the content: over a file, at its end, or to a new file only (`how`); `metadata` replaces the file's."""
    how = order.get("how", "replace")
    folder = os.path.dirname(path)
    if order.get("parents") and folder:
        _make_folders(folder, order)
    size = _replace(path, order) if how == "replace" else _add(path, order, how)
    return {"size": size, "path": pack_path(path)}


def _write_many(_: str, order: dict[str, Any]) -> dict[str, Any]:
    """Write several files, whose `contents`, each a path and a size, come one after the other."""
    written = [_write(_located(packed, order), {**order, "size": size}) for packed, size in order["contents"]]
    return {"paths": [row["path"] for row in written]}


def _add(path: str, order: dict[str, Any], how: str) -> int:
    flags = {"append": os.O_CREAT | os.O_APPEND, "new": os.O_CREAT | os.O_EXCL}[how]
    mode = natural(order, "mode", None)
    if os.path.lexists(path) or path.endswith("/"):  # also a link to nothing
        return _fill(path, flags, mode, order)
    return _write_beside(path, os.path.dirname(path), 0o644 if mode is None else mode & 0o7777, order, flags)


def _fill(path: str, flags: int, mode: int | None, order: dict[str, Any], source: int = CONTENT_IN) -> int:
    """Write the content into the file itself; all of it is kept if the mode cannot be set."""
    fd = open_regular(path, os.O_WRONLY | flags, 0o644 if mode is None else mode & 0o7777)
    try:
        if mode is not None:
            os.fchmod(fd, mode & 0o7777)
        if not flags & os.O_APPEND:
            os.ftruncate(fd, 0)
        count = pass_on(source, fd, natural(order, "size", None))
        _settle(fd, order)
        return count
    finally:
        os.close(fd)


def _settle(fd: int, order: dict[str, Any]) -> None:
    """Give a written file its owner and its metadata, as far as the order names them."""
    ids = _ids_of_owner(order)
    if ids is not None:
        os.fchown(fd, *ids)
    if order.get("metadata") is not None:
        set_metadata(fd, order["metadata"])


def _replace(path: str, order: dict[str, Any]) -> int:
    """Write beside, then rename over: no process sees half a file, and one that cannot be written stays as it was.

    An existing file keeps its mode and must be writable, as for any other way of writing; a link stays one. A file of
    another user, or with several names, or in a folder where no name can be added, is written in place, once all
    content has come. With an `owner`, another user's file becomes the owner's.
    """
    mode = natural(order, "mode", None)
    if path.endswith("/"):
        raise failure(errno.EISDIR, path)
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return _write_beside(path, folder, 0o644 if mode is None else mode & 0o7777, order)
    if stat.S_ISDIR(state.st_mode):
        raise failure(errno.EISDIR, path)
    if not stat.S_ISREG(state.st_mode):
        raise not_regular(path)
    if not os.access(path, os.W_OK, effective_ids=True):
        raise failure(errno.EACCES, path)
    may_add = os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
    keeps_owner = order.get("owner") is None and state.st_uid != os.geteuid()
    if not may_add or state.st_nlink > 1 or keeps_owner:
        return _write_through(path, folder if may_add else os.environ.get("TMPDIR", "/tmp"), mode, order)
    return _write_beside(path, folder, stat.S_IMODE(state.st_mode) if mode is None else mode & 0o7777, order)


def _write_beside(path: str, folder: str, mode: int, order: dict[str, Any], flags: int = os.O_CREAT) -> int:
    """Write a file that gets its name when it is complete; `flags` are those for opening the target in place."""
    with _Unfinished(folder, path) as file:
        count = pass_on(CONTENT_IN, file.fd, natural(order, "size", None))
        _settle(file.fd, order)  # first: it clears the bits of set-user-id
        os.fchmod(file.fd, mode)
        try:
            file.put_in_place(replaces=flags == os.O_CREAT)
        except OSError as error:
            if error.errno not in CANNOT_REPLACE and not (flags & os.O_APPEND and error.errno == errno.EEXIST):
                raise failure(error.errno or 0, path) from error
            os.lseek(file.fd, 0, os.SEEK_SET)
            _fill(path, flags, mode, order, file.fd)
        return count


def _write_through(path: str, folder: str, mode: int | None, order: dict[str, Any]) -> int:
    with _Unfinished(folder, path) as file:
        pass_on(CONTENT_IN, file.fd, natural(order, "size", None))
        os.lseek(file.fd, 0, os.SEEK_SET)
        return _fill(path, 0, mode, order, file.fd)


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


def _stat(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Describe the file at a path: a link itself, with its target."""
    row = row_of(path, os.path.basename(path.rstrip("/")) or "/", os.lstat(path), order["accounts"])
    real = {} if row["type"] == "link" else {"real": pack_path(os.path.realpath(path))}
    return {**row, **real, "path": pack_path(path)}


def _list(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a row for each entry of a folder, and of those below if it is `recursive` or has a `depth`, one JSON object
    a line.
    """
    max_entries = natural(order, "entries", MOST_ENTRIES) or 0
    depth = natural(order, "depth", folders.MOST_DEPTH if order.get("recursive") else 1) or 1
    walk = folders.Walk(path, max_entries=max_entries, depth=min(depth, folders.MOST_DEPTH))
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
        row = row_of(f"{path}/{name}", name, state, order["accounts"])
        lines.append(json.dumps(row).encode() + b"\n")
        count += 1
        if len(lines) >= ROWS_AT_ONCE:
            write_all(CONTENT_OUT, b"".join(lines))
            lines.clear()
    write_all(CONTENT_OUT, b"".join(lines))
    return {"count": count, "skipped": walk.skipped + vanished, "path": pack_path(path)}


def _make_folder(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Make a folder, with those above it for `parents`; then an existing one is no error, unless it must be `new`."""
    if not order.get("parents"):
        os.mkdir(path)
    elif os.path.exists(path) and (order.get("is_new") or not os.path.isdir(path)):
        raise failure(errno.EEXIST if os.path.isdir(path) or not order.get("is_new") else errno.ENOTDIR, path)
    else:
        _make_folders(path, order)
    return _stat(path, order)


def _move(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Rename, also to another file system; a file or an empty folder is replaced only if it `replaces`."""
    target = _located(order["target"], order)
    os.lstat(path)
    if order.get("parents"):
        _make_folders(os.path.dirname(target.rstrip("/")), order)
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
    return _stat(target, order)


def _remove(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Remove a file, a link, or an empty folder; any folder if `recursive`. With `may_be_gone` it may be missing."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if order.get("may_be_gone"):
            return {}
        raise
    if not is_folder:
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


def _compose(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Write the contents of all `sources`, in their order, as one file, and remove the sources."""
    sources = [_located(source, order) for source in order["sources"]]
    for source in sources:
        os.close(open_regular(source, os.O_RDONLY))
        if os.path.exists(path) and os.path.samefile(source, path):
            raise Refusal("invalid", "a source cannot be the same file as the destination", source)
    _make_folders(os.path.dirname(path), order)
    if os.path.isdir(path):
        raise failure(errno.EISDIR, path)
    with _Unfinished(os.path.dirname(path), path) as file:
        count = sum(_append(source, file.fd) for source in sources)
        _settle(file.fd, order)
        os.fchmod(file.fd, 0o644)
        file.put_in_place(replaces=True)
    for source in sources:
        folders.remove(source)
    return {"size": count, "path": pack_path(path)}


def _append(source: str, target: int) -> int:
    fd = open_regular(source, os.O_RDONLY)
    try:
        return pass_on(fd, target)
    finally:
        os.close(fd)


def _space(path: str, _: dict[str, Any]) -> dict[str, Any]:
    """Tell how many bytes are used in all file systems that can be written to, and free in that of the path."""
    used: dict[int, int] = {}
    for row in text_of("/proc/self/mounts").split("\n"):
        folder, kind, options = row.split(" ")[1:4] if row.count(" ") > 2 else ("",) * 3
        if options.startswith("rw") and kind not in NO_DISKS:
            try:
                state = os.statvfs(folder)
                used[os.stat(folder).st_dev] = (state.f_blocks - state.f_bfree) * state.f_frsize
            except OSError:
                continue  # no user may look there
    state = os.statvfs(path)
    return {"used": sum(used.values()), "free": state.f_bavail * state.f_frsize}


def _chmod(path: str, order: dict[str, Any]) -> dict[str, Any]:
    os.chmod(path, (natural(order, "mode", None) or 0) & 0o7777)
    return {}


OPERATIONS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "read": _read,
    "write": _write,
    "write_many": _write_many,
    "stat": _stat,
    "list": _list,
    "make_folder": _make_folder,
    "move": _move,
    "remove": _remove,
    "remove_all": _remove_all,
    "chmod": _chmod,
    "compose": _compose,
    "space": _space,
    "pack": archive.pack,
    "collect": archive.collect,
    "unpack": archive.unpack,
    "watch": watch,
    "changes": changes,
    "save": snapshots.save,
    "restore": snapshots.restore,
}
