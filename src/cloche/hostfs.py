"""Host files by descriptor: open, read and write in folders where somebody else may replace any name at any moment.

Theory of operation: a folder is opened once, and what is below it name by name, by the descriptor of the folder above.
No symbolic link is followed, opening waits for nothing (a FIFO) and takes no terminal, and what a file is, its
descriptor says, not an earlier look at its name. A file is written under a temporary name and renamed over whatever has
the name: a link is replaced and not written through, a file that has another name elsewhere keeps its content there,
and no reader sees half of it. What else is refused, and with which error, is each caller's own: here everything is
OSError.
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

# Where nobody but the system puts anything: a terminal, or a descriptor, is what the user means by its name there.
DEVICES = ("/dev", "/dev/fd", "/dev/pts")
_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AS_IT_IS = os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC


class NotRegular(OSError):
    """Report what is neither a regular file nor a folder; `mode` is that of `os.stat`."""

    def __init__(self, mode: int):
        super().__init__(errno.EINVAL, "not a regular file")
        self.mode = mode


def own_folder(variable: str, below_home: str) -> str | None:
    """Return Cloche's folder as platformdirs does where the environment has it; None where that must find the home."""
    variable_value, home = os.environ.get(variable, ""), os.environ.get("HOME", "")
    if os.path.isabs(variable_value):
        return os.path.join(variable_value, "cloche")
    return os.path.join(home, below_home, "cloche") if os.path.isabs(home) else None


@functools.cache
def may_search_all() -> bool:
    """Tell whether this process has CAP_DAC_READ_SEARCH, which the root of a plain container lacks."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        permitted = next(line.split()[1] for line in file if line.startswith("CapPrm:"))
    return bool(int(permitted, 16) >> 2 & 1)  # its number


def own_temporary_folder() -> str:
    """Return this user's folder in that for temporary files, whether it is there or not. Raises as that one."""
    return os.path.join(temporary_folder(), f"cloche-{os.geteuid()}")


def temporary_folder() -> str:
    """Return the folder for temporary files: that of `tempfile`, else /dev/shm, rather than the working directory.

    Raises BackendUnavailable, with what to mount, where this user may write to none.
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


def open_folder(path: str | os.PathLike[str], dir_fd: int | None = None, *, follows_link: bool = False) -> int:
    """Return a descriptor of a folder, in an open one where `at` is given. A link is followed where the user named it.

    Only the last name is looked at: whoever passes a path of several trusts the folders before that one.
    """
    return os.open(path, _FOLDER if follows_link else _FOLDER | os.O_NOFOLLOW, dir_fd=dir_fd)


def make_folder(name: str, dir_fd: int, mode: int = 0o777) -> bool:
    """Make a folder in an open one, where nothing has its name; tell whether it was made."""
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return False
    return True


def descend(dir_fd: int, names: Sequence[str], *, mode: int | None = None, created: list[str] | None = None) -> int:
    """Return a descriptor of the folder that `names` lead to from an open one, through no link.

    With a `mode`, folders that are not there are made with it, and added to `made` as paths from the open one.
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
    """Hold open what `descend` returns."""
    fd = descend(dir_fd, names, mode=mode)
    try:
        yield fd
    finally:
        os.close(fd)


def look(name: str, dir_fd: int) -> os.stat_result | None:
    """Return what has a name in an open folder, a link as a link; None where nothing has."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def open_regular(name: str, dir_fd: int, flags: int = os.O_RDONLY, mode: int = 0o600) -> tuple[int, os.stat_result]:
    """Return a descriptor of a regular file in an open folder, and what that says of it.

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
    """Give a new file in an open folder, and its name, which nothing had; it is removed where something is raised.

    Otherwise it stays, and open, for whoever asked to rename and close it.
    """
    temporary = name or f".{os.getpid()}-{os.urandom(6).hex()}.cloche"
    file = open(os.open(temporary, _NEW, mode, dir_fd=dir_fd), "wb")  # noqa: SIM115 - who asked closes it
    try:
        yield temporary, file
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        with suppress(OSError):  # what it still holds has no place, either
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
    """Write a file that takes the place of what has this name in an open folder: whole or not at all.

    `kept` are permissions that it gets whatever the umask is.
    """
    with new_file(dir_fd, mode, name=temporary) as (beside, file):
        with file:
            _fill(file, data, permissions)
        os.rename(beside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def open_in_place_of(folder: str | os.PathLike[str], name: str, data: bytes = b"") -> BinaryIO:
    """Return a file that begins with `data` and takes the place of what has this name in a folder, to be written on.

    Raises OSError, where a folder is in its place above all.
    """
    dir_fd = open_folder(folder, follows_link=True)
    try:
        return _open_over(dir_fd, name, data, 0o666, None)
    finally:
        os.close(dir_fd)


def open_named(path: str, data: bytes = b"", *, is_private: bool = False) -> BinaryIO:
    """Return a file that the user named, likewise; what is in `/dev` (`/dev/stdout`, a terminal) is opened itself.

    A file of the user's that is replaced passes its mode on, unless the new one is to be private. Raises OSError.
    """
    folder, name = os.path.split(path)
    dir_fd = open_folder(folder or ".", follows_link=True)
    try:
        if not _is_of_devices(dir_fd):
            permissions = None if is_private else _own_mode(name, dir_fd)
            return _open_over(dir_fd, name, data, 0o600 if is_private else 0o666, permissions)
        file = open(os.open(name, _AS_IT_IS, dir_fd=dir_fd), "wb")  # noqa: SIM115 - who asked closes it
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
    """Return the permissions of a regular file of ours; None where nothing like that is there."""
    state = look(name, dir_fd)
    if state is None or not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        return None
    return state.st_mode & 0o777
