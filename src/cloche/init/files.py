"""Operations on files, in a process of their own that has a guest's rights: nothing of it is trusted, or has to be.

Content comes on stream 0 and goes to stream 1; what came of it goes to stream 3 as one JSON object: the answer, or
`{"error": {"kind", "message", "path"}}`. Paths are the sandbox's own, so a link leads to where it leads any process of
the same user. Whoever asks bounds the time and what it takes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tarfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

CHUNK = 1 << 16
CONTENT_IN, CONTENT_OUT, ANSWER = 0, 1, 3
MOST_DEPTH = 64
KINDS = {
    errno.ENOENT: "not_found", errno.EISDIR: "is_directory", errno.ENOTDIR: "not_directory",
    errno.EACCES: "permission", errno.EPERM: "permission", errno.EROFS: "permission", errno.EEXIST: "exists",
    errno.ENOTEMPTY: "not_empty", errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EFBIG: "full",
    errno.ELOOP: "loop", errno.ENAMETOOLONG: "name_too_long",
}  # fmt: skip
TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


class Refusal(Exception):
    """Hold why an operation was not done, where the kernel has no word for it."""

    def __init__(self, kind: str, message: str, path: str):
        super().__init__(message)
        self.kind, self.path = kind, path


def serve(order: dict[str, Any]) -> None:
    """Do one operation, answer, and end."""
    path = os.fsdecode(str(order.get("path", "")).encode("utf-8", "surrogateescape"))
    try:
        answer = OPERATIONS[str(order["do"])](path, order)
    except Refusal as error:
        answer = {"error": {"kind": error.kind, "message": str(error), "path": error.path}}
    except OSError as error:
        kind = KINDS.get(error.errno or 0, "other")
        answer = {"error": {"kind": kind, "message": error.strerror or str(error), "path": str(error.filename or path)}}
    except tarfile.TarError as error:
        answer = {"error": {"kind": "other", "message": f"no such archive: {error}", "path": path}}
    _write_all(ANSWER, json.dumps(answer).encode())


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a regular file, or a part of it; one that is larger than `most` bytes is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        state = os.fstat(fd)
        if stat.S_ISDIR(state.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(state.st_mode):
            raise Refusal("not_regular", "it is neither a regular file nor a link to one", path)
        offset, count, most = int(order.get("offset", 0)), order.get("count"), int(order["most"])
        size = max(0, state.st_size - offset) if count is None else int(count)
        if count is None and size > most:
            raise Refusal("too_large", f"it has {state.st_size} bytes, more than {most}", path)
        os.lseek(fd, offset, os.SEEK_SET)
        left = min(size if count is not None else most, most)
        while left > 0 and (data := os.read(fd, min(CHUNK, left))):
            _write_all(CONTENT_OUT, data)
            left -= len(data)
        return {"size": state.st_size}
    finally:
        os.close(fd)


def _write(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Write what comes: over a file, at its end, or only where there is none (`how`)."""
    how = order.get("how", "replace")
    if order.get("parents") and os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    if how == "replace" and not order.get("in_place"):
        return _replace(path, order)
    flags = {"append": os.O_APPEND, "new": os.O_EXCL, "replace": os.O_TRUNC}[how]
    mode = int(order.get("mode") or 0o644)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | flags, mode)
    try:
        count = _fill(fd)
        if order.get("mode") is not None:
            os.fchmod(fd, mode)
    except BaseException:
        if how == "new":
            os.unlink(path)
        raise
    finally:
        os.close(fd)
    return {"size": count}


def _replace(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Write beside, then rename over: nobody sees half a file, and one that cannot be written stays as it was.

    A file that is there keeps its mode and must be writable, as for any other way of writing; a link stays one.
    """
    path = os.path.realpath(path)
    mode = order.get("mode")
    try:
        state = os.stat(path)
    except FileNotFoundError:
        state = None
    if state is not None and stat.S_ISDIR(state.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if state is not None and not os.access(path, os.W_OK, effective_ids=True):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
    folder, name = os.path.split(path)
    beside = f"{folder}/.{os.urandom(8).hex()}.cloche"
    if state is not None and (not stat.S_ISREG(state.st_mode) or state.st_nlink > 1 or not _may_replace(folder)):
        return _write(path, {**order, "in_place": True, "parents": False})
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            count = _fill(fd)
            os.fchmod(fd, int(mode) if mode is not None else stat.S_IMODE(state.st_mode) if state else 0o644)
        finally:
            os.close(fd)
        os.rename(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
    return {"size": count, "name": name}


def _may_replace(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _fill(fd: int) -> int:
    count = 0
    while data := os.read(CONTENT_IN, CHUNK):
        _write_all(fd, data)
        count += len(data)
    return count


def _row(path: str, name: str) -> dict[str, Any]:
    state = os.lstat(path)
    row: dict[str, Any] = {
        "name": name, "type": TYPES.get(stat.S_IFMT(state.st_mode), "other"), "size": state.st_size,
        "mode": stat.S_IMODE(state.st_mode), "mtime": state.st_mtime, "uid": state.st_uid, "gid": state.st_gid,
    }  # fmt: skip
    if stat.S_ISLNK(state.st_mode):
        row["target"] = os.readlink(path)
        try:
            row["leads_to"] = TYPES.get(stat.S_IFMT(os.stat(path).st_mode), "other")
        except OSError:
            row["leads_to"] = ""
    return row


def _stat(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Describe what is at a path: a link itself, with what it leads to."""
    return {**_row(path, os.path.basename(path)), "real": os.path.realpath(path)}


def _list(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a row for each entry of a folder, and of those below where it is `recursive`, one JSON object a line."""
    most, depth = int(order["entries"]), MOST_DEPTH if order.get("recursive") else 1
    count = 0
    lines: list[bytes] = []
    for name in _walk(path, "", depth):
        count += 1
        if count > most:
            raise Refusal("too_large", f"it has more than {most} entries", path)
        try:
            lines.append(json.dumps(_row(f"{path}/{name}", name)).encode() + b"\n")
        except FileNotFoundError:
            continue  # it has gone meanwhile
        if len(lines) >= 256:
            _write_all(CONTENT_OUT, b"".join(lines))
            lines.clear()
    _write_all(CONTENT_OUT, b"".join(lines))
    return {"count": count}


def _walk(top: str, prefix: str, depth: int) -> Iterator[str]:
    """Yield the paths below a folder, parents first, in the order of their names."""
    with os.scandir(f"{top}/{prefix}" if prefix else top) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        yield name
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            try:
                yield from _walk(top, name, depth - 1)
            except (PermissionError, FileNotFoundError):
                continue


def _make_folder(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Make a folder, with those above it where `parents` are wanted; one that is there is no error then."""
    if order.get("parents"):
        os.makedirs(path, exist_ok=True)
    else:
        os.mkdir(path)
    return {}


def _move(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Rename, also to another file system; over a file only where `replaces`."""
    target = str(order["target"])
    if not order.get("replaces") and os.path.lexists(target):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    try:
        os.rename(path, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.move(path, target)
    return {}


def _remove(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Remove a file, a link, or a folder: an empty one, any where `recursive`."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        if order.get("recursive"):
            shutil.rmtree(path)
        else:
            os.rmdir(path)
    else:
        os.unlink(path)
    return {}


def _pack(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send a folder, or a file, as a tar archive; what cannot be read is left out and counted."""
    skipped = 0
    os.lstat(path)
    with (
        os.fdopen(os.dup(CONTENT_OUT), "wb", CHUNK) as out,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive,
    ):
        is_folder = os.path.isdir(path)
        for name in _walk(path, "", MOST_DEPTH) if is_folder else [""]:
            whole = f"{path}/{name}" if name else path
            try:
                member = archive.gettarinfo(whole, arcname=name or os.path.basename(path))
                if member is None:  # a socket
                    skipped += 1
                elif member.isreg():
                    with open(whole, "rb") as file:
                        archive.addfile(member, _Exactly(file, member.size))
                else:
                    archive.addfile(member)
            except OSError:
                skipped += 1
    return {"skipped": skipped}


class _Exactly:
    """Read as many bytes of a file as its archive announces, whatever happens to it meanwhile."""

    def __init__(self, file: Any, size: int):
        self.file, self.left = file, size

    def read(self, count: int) -> bytes:
        data: bytes = self.file.read(min(count, self.left))
        data = data.ljust(min(count, self.left), b"\0")
        self.left -= len(data)
        return data


def _unpack(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Unpack a tar archive of files, folders and links into a folder, through none of the links that it brings."""
    os.makedirs(path, exist_ok=True)
    count = 0
    with os.fdopen(os.dup(CONTENT_IN), "rb", CHUNK) as source, tarfile.open(fileobj=source, mode="r|*") as archive:
        for member in archive:
            if order.get("owner") is None:
                member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
            archive.extract(member, path, set_attrs=True, filter=_checked)
            count += 1
        while source.read(CHUNK):
            pass
    return {"count": count}


def _checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    try:
        return tarfile.data_filter(member, path)
    except tarfile.FilterError as error:
        raise Refusal("other", f"the archive holds what does not belong there: {error}", member.name) from None


def _chmod(path: str, order: dict[str, Any]) -> dict[str, Any]:
    os.chmod(path, int(order["mode"]))
    return {}


OPERATIONS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "read": _read,
    "write": _write,
    "stat": _stat,
    "list": _list,
    "make_folder": _make_folder,
    "move": _move,
    "remove": _remove,
    "pack": _pack,
    "unpack": _unpack,
    "chmod": _chmod,
}
