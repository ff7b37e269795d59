"""Open, read and write host files by descriptor, in folders where another process may replace any name at any time.

Theory of operation: a folder is opened once, and everything below it is opened name by name, relative to the descriptor
of its parent (`dir_fd`). Symbolic links are not followed (O_NOFOLLOW). Opening never blocks on a FIFO (O_NONBLOCK) and
never acquires a controlling terminal (O_NOCTTY). The type of a file comes from `fstat` on the descriptor, not from an
earlier `stat` of the name.

A file is written under a temporary name and renamed over the existing name. So a symbolic link is replaced, not written
through; a hard-linked file keeps its content under its other names; and a reader never sees a partial file. All
failures are OSError: refusing more, and with which error, is up to the caller.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

# Only the system creates entries here, so a name means the existing terminal or descriptor and is not replaced.
DEVICES = ("/dev", "/dev/fd", "/dev/pts")
_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# open(2): O_NONBLOCK so that a FIFO without a writer does not block, O_NOCTTY so that a terminal does not become
# the controlling one.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AS_IT_IS = os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC


class NotRegular(OSError):
    """Report an entry that is neither a regular file nor a folder. `mode` is its `st_mode`."""

    def __init__(self, mode: int):
        super().__init__(errno.EINVAL, "not a regular file")
        self.mode = mode


def own_folder(variable: str, below_home: str) -> str | None:
    """Return Cloche's folder as platformdirs would, from the environment alone; None if the home directory must be
    looked up.
    """
    variable_value, home = os.environ.get(variable, ""), os.environ.get("HOME", "")
    if os.path.isabs(variable_value):
        return os.path.join(variable_value, "cloche")
    return os.path.join(home, below_home, "cloche") if os.path.isabs(home) else None


@functools.cache
def may_search_all() -> bool:
    """Tell whether this process has CAP_DAC_READ_SEARCH, which root lacks in a default container."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        permitted = next(line.split()[1] for line in file if line.startswith("CapPrm:"))
    return bool(int(permitted, 16) >> 2 & 1)  # CAP_DAC_READ_SEARCH is bit 2 (linux/capability.h)


def own_temporary_folder() -> str:
    """Return this user's own folder in the folder for temporary files, existing or not. Raises as `temporary_folder`
    does.
    """
    return os.path.join(temporary_folder(), f"cloche-{os.geteuid()}")


def temporary_folder() -> str:
    """Return the folder for temporary files: the one `tempfile` chooses, or /dev/shm instead of the working directory.

    Raises BackendUnavailable, with a mount to add, if this user cannot write to any of them.
    """
    import tempfile

    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        folder = ""
    if folder and (folder in _TEMPORARY or folder != os.getcwd() or folder == os.environ.get("TMPDIR")):
        return folder
    if os.access("/dev/shm", os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return "/dev/shm"
    if folder:
        return folder
    from cloche.core.errors import BackendUnavailable

    raise BackendUnavailable(
        "there is no folder for temporary files: this user may write to none of TMPDIR, /tmp, /var/tmp and /dev/shm.",
        remedy="Mount one: docker run --tmpfs=/tmp, or in a pod an emptyDir at /tmp.",
    )


def write_whole(fd: int, data: bytes) -> None:
    """Write all of `data`. Raises OSError where the disk is full: a single call of write(2) may write less."""
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]


def open_folder(path: str | os.PathLike[str], dir_fd: int | None = None, *, follows_link: bool = False) -> int:
    """Return a descriptor of a folder, relative to `dir_fd` if given. `follows_link` is for a path that the user named.

    Only the last name is protected by O_NOFOLLOW: with a path of several names, the caller trusts the folders above.
    """
    return os.open(path, _FOLDER if follows_link else _FOLDER | os.O_NOFOLLOW, dir_fd=dir_fd)


def make_folder(name: str, dir_fd: int, mode: int = 0o777) -> bool:
    """Create a folder in an open one unless the name exists; tell whether it was created."""
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return False
    return True


def descend(dir_fd: int, names: Sequence[str], *, mode: int | None = None, created: list[str] | None = None) -> int:
    """Return a descriptor of the folder at `names` below an open one, without following links.

    With a `mode`, missing folders are created with it and appended to `created` as paths relative to the open folder.
    """
    fd = open_folder(".", dir_fd)
    try:
        for depth, name in enumerate(names, 1):
            if mode is not None and make_folder(name, fd, mode) and created is not None:
                created.append("/".join(names[:depth]))
            above, fd = fd, open_folder(name, fd)
            os.close(above)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def descended(dir_fd: int, names: Sequence[str], *, mode: int | None = None) -> Iterator[int]:
    """Hold open the folder that `descend` returns."""
    fd = descend(dir_fd, names, mode=mode)
    try:
        yield fd
    finally:
        os.close(fd)


def look(name: str, dir_fd: int) -> os.stat_result | None:
    """Return the `lstat` of a name in an open folder; None if it does not exist."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def open_regular(name: str, dir_fd: int, flags: int = os.O_RDONLY, mode: int = 0o600) -> tuple[int, os.stat_result]:
    """Return a descriptor of a regular file in an open folder, and its `fstat`.

    Raises NotRegular, IsADirectoryError for a folder, and any other OSError.
    """
    fd = os.open(name, flags | _FILE, mode, dir_fd=dir_fd)
    try:
        facts = os.fstat(fd)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(facts.st_mode):
            raise NotRegular(facts.st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd, facts


@contextmanager
def new_file(dir_fd: int, mode: int = 0o666, *, name: str | None = None) -> Iterator[tuple[str, BinaryIO]]:
    """Create a file under a new name in an open folder, and yield its name and the file. An exception removes it.

    On success the file stays, still open: the caller renames and closes it.
    """
    temporary = name or f".{os.getpid()}-{os.urandom(6).hex()}.cloche"
    file = open(os.open(temporary, _NEW, mode, dir_fd=dir_fd), "wb")  # noqa: SIM115 - the caller closes it
    try:
        yield temporary, file
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        with suppress(OSError):  # closing flushes the buffer, which fails on a full disk
            file.close()
        raise


def replace(
    dir_fd: int,
    name: str,
    data: bytes,
    *,
    mode: int = 0o666,
    permissions: int | None = None,
    temporary: str | None = None,
) -> None:
    """Write a file and rename it over this name in an open folder, so that it is replaced completely or not at all.

    `permissions` are set with `fchmod`, so the umask does not reduce them.
    """
    with new_file(dir_fd, mode, name=temporary) as (beside, file):
        with file:
            _fill(file, data, permissions)
        os.rename(beside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def open_in_place_of(folder: str | os.PathLike[str], name: str, data: bytes = b"") -> BinaryIO:
    """Create a file that begins with `data`, rename it over this name in a folder, and return it open for writing.

    Raises OSError, for example if the name is a folder.
    """
    dir_fd = open_folder(folder, follows_link=True)
    try:
        return _open_over(dir_fd, name, data, 0o666, None)
    finally:
        os.close(dir_fd)


def open_named(path: str, data: bytes = b"", *, is_private: bool = False) -> BinaryIO:
    """Replace a file that the user named, and return the new one open for writing; files in `/dev` are opened
    themselves.

    The new file keeps the mode of the user's own file that it replaces, unless `is_private`. Raises OSError.
    """
    folder, name = os.path.split(path)
    dir_fd = open_folder(folder or ".", follows_link=True)
    try:
        if not _is_of_devices(dir_fd):
            permissions = None if is_private else _own_mode(name, dir_fd)
            return _open_over(dir_fd, name, data, 0o600 if is_private else 0o666, permissions)
        file = open(os.open(name, _AS_IT_IS, dir_fd=dir_fd), "wb")  # noqa: SIM115 - the caller closes it
        try:
            file.write(data)
            file.flush()
        except BaseException:
            file.close()
            raise
        return file
    finally:
        os.close(dir_fd)


def _open_over(dir_fd: int, name: str, data: bytes, mode: int, permissions: int | None) -> BinaryIO:
    with new_file(dir_fd, mode) as (beside, file):
        _fill(file, data, permissions)
        os.rename(beside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    return file


def _fill(file: BinaryIO, data: bytes, permissions: int | None) -> None:
    if permissions is not None:
        os.fchmod(file.fileno(), permissions)
    file.write(data)
    file.flush()


def _is_of_devices(dir_fd: int) -> bool:
    facts = os.fstat(dir_fd)
    return any(
        os.path.samestat(facts, os.stat(device_folder)) for device_folder in DEVICES if os.path.isdir(device_folder)
    )


def _own_mode(name: str, dir_fd: int) -> int | None:
    state = look(name, dir_fd)
    if state is None or not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        return None
    return state.st_mode & 0o777
