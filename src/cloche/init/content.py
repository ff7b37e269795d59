"""The parts of operations on files: content in and out, checks for regular files, and refusals."""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 1 << 16
CONTENT_IN, CONTENT_OUT, ANSWER = 0, 1, 3
UNFINISHED = ".cloche"
NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
# No open waits for another end, and none makes a terminal ours.
OPEN = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unfinished_name() -> str:
    """Return a temporary name for a file that will be renamed when it is complete."""
    return f".{os.urandom(8).hex()}{UNFINISHED}"


def beside(folder: str) -> str:
    """Return a path in a folder that has such a name."""
    return f"{folder}/{unfinished_name()}"


def open_unfinished(folder: int) -> tuple[int, str]:
    """Return a new file in an open folder, and its name: empty for one that is gone when we are killed."""
    try:
        return os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder), ""
    except OSError as error:
        if error.errno not in NO_UNNAMED_FILES:
            raise
    name = unfinished_name()
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder), name


def put_in_place(fd: int, unfinished: str, name: bytes | str, folder: int, *, replaces: bool = True) -> None:
    """Give such a file its name, in place of another if it `replaces`; on failure it is removed. Raises OSError."""
    if unfinished and not replaces:
        try:
            os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.unlink(unfinished, dir_fd=folder)
        return
    if not unfinished:
        try:
            _link(fd, name, folder)
            return
        except FileExistsError:
            if not replaces:
                raise
        unfinished = unfinished_name()
        _link(fd, unfinished, folder)
    try:
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(unfinished, dir_fd=folder)
        raise


def _link(fd: int, name: bytes | str, folder: int) -> None:
    os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)


def is_unfinished(name: str) -> bool:
    """Tell whether `unfinished_name` made this name."""
    return len(name) == 17 + len(UNFINISHED) and name.startswith(".") and name.endswith(UNFINISHED)


class Refusal(Exception):
    """Hold why an operation was not done, where the kernel has no word for it."""

    def __init__(self, kind: str, message: str, path: str):
        super().__init__(message)
        self.kind, self.path = kind, path


def failure(code: int, path: str) -> OSError:
    """Return the kernel's error for a path."""
    return OSError(code, os.strerror(code), path)


def open_regular(path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
    """Open a regular file, or a link to one. Raises OSError, and Refusal for all else but a folder."""
    fd = os.open(path, flags | OPEN, mode, dir_fd=dir_fd)
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind == stat.S_IFDIR:
            raise failure(21, path)  # EISDIR
        if kind != stat.S_IFREG:
            raise not_regular(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def not_regular(path: str) -> Refusal:
    """Return the refusal of a file that could block: a pipe, a device, a socket."""
    return Refusal("not_regular", "it is neither a regular file nor a link to one", path)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pass_on(source: int, target: int, limit: int | None = None) -> int:
    """Copy from one descriptor to another until the end, or at most so many bytes; return how many came."""
    count = 0
    while data := os.read(source, CHUNK if limit is None else min(CHUNK, limit - count)):
        write_all(target, data)
        count += len(data)
    return count


def natural(order: dict[str, Any], name: str, default: int | None) -> int | None:
    """Return a number of an order that is not negative. Raises ValueError for another one."""
    value = order.get(name, default)
    if value is None:
        return default
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {value!r}")
    return value
