"""All writable folders of a sandbox as one archive, and back into another sandbox: the files of a snapshot.

The archive is that of `archive`, with owners, all permission bits, hard links, and extended attributes of users
(`SCHILY.xattr.NAME` in a POSIX extended header, as GNU tar and libarchive write them). Names begin at the root. Only
one file system is entered for each folder, so that mounts are left out; so are sockets, pipes and devices, which are
counted with what cannot be read. Restoring also removes what the archive does not name.
"""

from __future__ import annotations

import errno
import os
import stat

from .archive import BLOCK, DIRECTORY, EXTENDED, HARD_LINK, ArchiveMember, Members, Packing, Unpacking, block_of, header
from .content import CHUNK, CONTENT_IN, OPEN, Refusal, natural, write_all
from .folders import remove_tree
from .names import unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MOST_ENTRIES = 250_000
MOST_ATTRIBUTES = 60_000  # bytes of one file's: their header has 64 KiB
ATTRIBUTE = b"SCHILY.xattr."
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
OF_USERS = "user."
ZEROS = bytes(CHUNK)
# Of each sandbox itself: its network and its interpreter. They are neither saved nor removed.
OWN = frozenset({
    "etc/resolv.conf", "etc/hosts", "etc/hostname", "etc/cloche", ".venv/pyvenv.cfg", ".venv/bin/python",
    ".venv/bin/python3", ".venv/bin/pip", ".venv/bin/pip3",
})  # fmt: skip


def save(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Send the folders `paths` as an archive: `most` bytes and `entries` at the most. `path` is the root."""
    saving = _Saving(natural(order, "most", None), path)
    max_entries = natural(order, "entries", MOST_ENTRIES) or 0
    for top in _tops(order):
        for name, state in _tree(top, saving):
            saving.entries += 1
            if saving.entries > max_entries:
                raise Refusal("too_large", f"there are more than {max_entries} files", path)
            saving.save(name, state)
    saving.finish()
    return {"count": saving.entries, "bytes": saving.count, "skipped": saving.skipped}


def restore(path: str, order: dict[str, Any]) -> dict[str, Any]:
    """Put an archive of `save` into the folders `paths`, and remove what it does not have. `path` is the root.

    What lies elsewhere is left out and counted: a sandbox with one user has no `/etc` of its own.
    """
    tops = _tops(order)
    restoring = _Restoring(path, tops)
    max_entries = natural(order, "entries", MOST_ENTRIES) or 0
    for member in Members(CONTENT_IN):
        if len(restoring.names) + restoring.skipped >= max_entries:
            raise Refusal("too_large", f"the snapshot has more than {max_entries} files", path)
        restoring.extract(member)
    for top in tops:
        restoring.remove_others(top)
    restoring.finish()
    return {"count": len(restoring.names), "skipped": restoring.skipped}


def _tops(order: dict[str, Any]) -> list[str]:
    """Return the existing folders of an order, less those within another one."""
    names = sorted({os.fsdecode(unpack(packed)).strip("/") for packed in order["paths"]})
    tops: list[str] = []
    for name in names:
        if os.path.isdir(f"/{name}") and not any(f"{name}/".startswith(f"{top}/") for top in tops):
            tops.append(name)
    return tops


def _tree(top: str, saving: _Saving) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the state of a folder and of all below it on the same file system, folders first."""
    first = os.lstat(f"/{top}")
    left = [(top, first)]
    while left:
        name, state = left.pop()
        yield name, state
        if not stat.S_ISDIR(state.st_mode):
            continue
        try:
            names = sorted(os.listdir(f"/{name}"), reverse=True)
        except OSError:
            saving.skipped += 1
            continue
        for entry in names:
            try:
                below = os.lstat(f"/{name}/{entry}")
            except OSError:
                saving.skipped += 1
                continue
            if below.st_dev == first.st_dev and f"{name}/{entry}" not in OWN:
                left.append((f"{name}/{entry}", below))


class _Saving(Packing):
    """Write members with all that can be restored."""

    def __init__(self, max_bytes: int | None, path: str):
        super().__init__(max_bytes, path)
        self.entries = 0
        self.linked: dict[int, bytes] = {}  # the first name of a file with several, by its inode

    def save(self, name: str, state: os.stat_result) -> None:
        path, packed = f"/{name}", os.fsencode(name)
        if stat.S_ISDIR(state.st_mode):
            self._put_attributes(path)
            self._put(header(packed + b"/", DIRECTORY, state))
        elif not stat.S_ISREG(state.st_mode):
            self.add(path, packed)
        elif state.st_nlink > 1 and state.st_ino in self.linked:
            self._put(header(packed, HARD_LINK, state, link=self.linked[state.st_ino]))
        else:
            self._save_file(path, packed)

    def _save_file(self, path: str, name: bytes) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | OPEN)
        except OSError:
            self.skipped += 1
            return
        try:
            self._put_attributes(fd)
            self._add_file(fd, name)
            state = os.fstat(fd)
            if state.st_nlink > 1:
                self.linked[state.st_ino] = name
        finally:
            os.close(fd)

    def _put_attributes(self, file: str | int) -> None:
        """Write the header with the attributes of an open file or of a folder, if it has any."""
        try:
            names = [name for name in os.listxattr(file) if name.startswith(OF_USERS)]
            records = b"".join(_record(ATTRIBUTE + os.fsencode(name), os.getxattr(file, name)) for name in names)
        except OSError:
            return
        if len(records) > MOST_ATTRIBUTES:
            self.skipped += 1
        elif records:
            block = block_of(b"././@PaxHeader", EXTENDED, 0o644, (0, 0), len(records), 0, b"")
            self._put(block + records + bytes(-len(records) % BLOCK))


def _record(name: bytes, value: bytes) -> bytes:
    """Return `LENGTH NAME=VALUE` and a line feed; the length counts its own digits."""
    rest = len(name) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, name, value)


class _Restoring(Unpacking):
    """Extract members with their owners, permissions and attributes."""

    def __init__(self, top: str, tops: list[str]):
        super().__init__(top)
        self.inside = tuple(os.fsencode(f"{name}/") for name in tops)
        self.names: set[bytes] = set()
        self.skipped = 0
        self.is_root = os.geteuid() == 0
        self.restored: list[tuple[bytes, ArchiveMember]] = []  # folders, which get theirs last

    def extract(self, member: ArchiveMember) -> None:
        name = self._checked(member.name)
        if not (name + b"/").startswith(self.inside):
            self.skipped += 1
            return
        self.names.add(name)
        if member.kind == DIRECTORY:
            self._within_rights(self._make_folder, name)
            self.restored.append((name, member))
            return
        self._within_rights(self._replace, member, name)

    def _make_folder(self, name: bytes) -> None:
        path = f"/{os.fsdecode(name)}"
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
            os.unlink(path)
        self._folder(name)

    def _replace(self, member: ArchiveMember, name: bytes) -> None:
        try:
            super().extract(member)
        except IsADirectoryError:  # in the way of a link
            remove_tree(f"/{os.fsdecode(name)}")
            super().extract(member)

    def _within_rights(self, action: Callable[..., object], *arguments: Any) -> None:
        """Do it; count what a sandbox with one user may not restore: folders that its start has made."""
        try:
            action(*arguments)
        except PermissionError:
            if self.is_root:
                raise
            self.skipped += 1

    def _place(self, member: ArchiveMember, name: bytes, folder_fd: int) -> None:
        """Write a file, its runs of zeros as holes. It gets its name at once: nobody uses the sandbox yet."""
        fd = self._created(name, folder_fd)
        try:
            while data := member.read():
                if data == ZEROS[: len(data)]:
                    os.lseek(fd, len(data), os.SEEK_CUR)
                else:
                    write_all(fd, data)
            os.ftruncate(fd, member.size)
            self._describe(fd, member)
        finally:
            os.close(fd)

    def _created(self, name: bytes, folder_fd: int) -> int:
        """Return a new file, in place of whatever has its name."""
        try:
            return os.open(name, NEW, 0o600, dir_fd=folder_fd)
        except FileExistsError:
            if stat.S_ISDIR(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
                remove_tree(f"/proc/self/fd/{folder_fd}/{os.fsdecode(name)}")
            else:
                os.unlink(name, dir_fd=folder_fd)
            return os.open(name, NEW, 0o600, dir_fd=folder_fd)

    def _place_link(self, member: ArchiveMember, name: bytes, folder_fd: int) -> None:
        super()._place_link(member, name, folder_fd)
        if self.is_root:
            os.chown(name, *member.owner, dir_fd=folder_fd, follow_symlinks=False)

    def _describe(self, fd: int, member: ArchiveMember) -> None:
        """Give an open file its owner, attributes, permissions and time: a change of the owner takes bits away."""
        if self.is_root:
            os.fchown(fd, *member.owner)
        for name, value in member.fields.items():
            if name.startswith(ATTRIBUTE + OF_USERS.encode()):
                try:
                    os.setxattr(fd, name[len(ATTRIBUTE) :], value)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EPERM):
                        raise
        os.fchmod(fd, member.bits)
        seconds = min(member.mtime, 1 << 33)
        os.utime(fd, (seconds, seconds))

    def remove_others(self, top: str) -> None:
        """Remove what is below a folder of the same file system, and has no name in the archive."""
        first = os.lstat(f"/{top}").st_dev
        left = [top]
        while left:
            folder = left.pop()
            for entry in os.listdir(f"/{folder}"):
                name = f"{folder}/{entry}"
                state = os.lstat(f"/{name}")
                if state.st_dev != first or name in OWN:
                    continue
                is_named = os.fsencode(name) in self.names
                if is_named and stat.S_ISDIR(state.st_mode):
                    left.append(name)
                elif not is_named:
                    _remove(f"/{name}", state)

    def finish(self) -> None:
        for name, member in reversed(self.restored):
            self._within_rights(self._describe_folder, name, member)

    def _describe_folder(self, name: bytes, member: ArchiveMember) -> None:
        self._describe(self._folder(name), member)


def _remove(path: str, state: os.stat_result) -> None:
    try:
        if stat.S_ISDIR(state.st_mode):
            remove_tree(path)
        else:
            os.unlink(path)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EPERM, errno.EACCES, errno.EROFS):
            raise  # a mount stays, and what belongs to another user
