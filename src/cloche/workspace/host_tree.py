"""A folder of the host by its descriptor: what is below it is reached name by name, through no link and no mount."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from cloche import hostfs

from .journal import Facts, names_of


class Tree:
    """Hold an open folder of the host. Whoever passes the descriptor closes it.

    A mount below it is another file system, or the same one at another place (a bind mount): the first has another
    device, the second another mount's number, which the kernel tells in `/proc/self/fdinfo`.
    """

    def __init__(self, folder: int):
        self.fd = folder
        self.facts = os.fstat(folder)
        self._mount = mount_of(folder)

    @contextmanager
    def parent(self, path: str, *, to_look: bool = False) -> Iterator[tuple[int, str]]:
        """Hold open the folder that a path's last name is in, and give that name. Raises OSError (EXDEV: a mount)."""
        *above, name = names_of(path)
        if not above:
            yield self.fd, name
            return
        with hostfs.descended(self.fd, above) as at:
            if os.fstat(at).st_dev != self.facts.st_dev or not (to_look or mount_of(at) == self._mount):
                raise OSError(errno.EXDEV, "another file system is mounted there")
            yield at, name

    def look(self, path: str) -> os.stat_result | None:
        """Return what has a path; None where nothing has, or where what is above is no folder. Raises OSError."""
        try:
            with self.parent(path, to_look=True) as (at, name):
                return hostfs.look(name, at)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link above: what it leads to has another path
                return None
            raise

    def names_in(self, path: str) -> list[str]:
        """Return the names in a folder."""
        with self.parent(path) as (at, name):
            return names_in(name, at)

    def set_mode(self, path: str, ino: int, mode: int) -> bool:
        """Give a file or folder permission bits, if it is the one with this inode; tell whether it is.

        It needs no right to read it, and follows no link: `fchmod` takes no O_PATH descriptor, its name in /proc does.
        """
        with self.parent(path) as (at, name):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            found = os.fstat(fd)
            if found.st_ino != ino or stat.S_ISLNK(found.st_mode):
                return False
            if mount_of(fd) != self._mount:
                raise OSError(errno.EXDEV, "another file system is mounted there")
            os.chmod(f"/proc/self/fd/{fd}", mode & 0o777)
            return True
        finally:
            os.close(fd)


def names_in(name: str, at: int) -> list[str]:
    """Return the names in a folder that is in an open one."""
    fd = hostfs.open_folder(name, at)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def facts_of(name: str, at: int) -> Facts | None:
    """Return what has a name in an open folder, None where nothing has."""
    found = hostfs.look(name, at)
    return None if found is None else Facts.of(found)


def mount_of(fd: int) -> str:
    """Return the number of the mount that a descriptor is on. Raises OSError where the kernel does not say."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return line
    raise OSError(errno.ENOSYS, "/proc does not tell the number of a mount")
