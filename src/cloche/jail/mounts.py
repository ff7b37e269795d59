"""The guest's file tree, as a list of small values that mount themselves.

The dance: a new user namespace cannot reach a private home once it runs under another identity, and cannot create
files on its own tmpfs before it does. So every bind source is first opened as a detached copy of its mount, with
the caller's identity (`Bind.open`); then the identity is switched; then the tree is built below a tmpfs from those
descriptors (`apply`), and `pivot` makes it the root. Paths in `apply` are relative to the new root, which is the
working directory while the tree is built.
"""

from __future__ import annotations

import os

from .syscalls import (
    MNT_DETACH,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    mount,
    mount_setattr,
    move_mount,
    open_tree,
    pivot_root,
    umount2,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Protocol

    class Mount(Protocol):
        """Be applied below the new root, which is the working directory, and say what that does."""

        def apply(self) -> None: ...
        def describe(self) -> str: ...


READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
# Any directory that surely exists serves to attach the new root before it becomes one.
STAGE = "/proc"


class Bind:
    """Show a file or directory of the host, read-only, at `target`."""

    __slots__ = ("attributes", "fd", "is_directory", "source", "target")

    def __init__(self, source: str, target: str, attributes: int = READ_ONLY, fd: int = -1):
        self.source, self.target, self.attributes, self.fd = source, target, attributes, fd
        self.is_directory = True

    def open(self) -> None:
        """Take a detached copy of the source with the identity the process has now, unless one was handed in."""
        self.is_directory = os.path.isdir(self.source)
        if self.fd < 0:
            self.fd = open_tree(self.source, recursive=self.is_directory)
        mount_setattr(self.fd, attr_set=self.attributes, recursive=self.is_directory)

    def apply(self) -> None:
        _make_place(self.target, is_directory=self.is_directory)
        move_mount(self.fd, self.target)
        os.close(self.fd)

    def describe(self) -> str:
        return f"bind {self.source} read-only at /{self.target}"


class Device(Bind):
    """Show one harmless device node of the host."""

    __slots__ = ()

    def __init__(self, name: str):
        super().__init__(f"/dev/{name}", f"dev/{name}", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)

    def describe(self) -> str:
        return f"device {self.source}"


class Attach:
    """Put a mount that was kept from an earlier run of the same sandbox at `target`."""

    __slots__ = ("fd", "target")

    def __init__(self, fd: int, target: str):
        self.fd, self.target = fd, target

    def apply(self) -> None:
        _make_place(self.target, is_directory=True)
        move_mount(self.fd, self.target)

    def describe(self) -> str:
        return f"attach the sandbox's own /{self.target}"


class Tmpfs:
    """Mount an empty, bounded file system of memory at `target`."""

    __slots__ = ("inodes", "mode", "size_bytes", "target")

    def __init__(self, target: str, size_bytes: int, inodes: int, mode: str = "0755"):
        self.target, self.size_bytes, self.inodes, self.mode = target, size_bytes, inodes, mode

    def apply(self) -> None:
        _make_place(self.target, is_directory=True)
        data = f"size={self.size_bytes},nr_inodes={self.inodes},mode={self.mode}"
        mount("tmpfs", self.target, "tmpfs", MS_NOSUID | MS_NODEV, data)

    def describe(self) -> str:
        return f"tmpfs of {self.size_bytes} bytes and {self.inodes} inodes at /{self.target}"


class Symlink:
    """Make a symbolic link."""

    __slots__ = ("points_to", "target")

    def __init__(self, points_to: str, target: str):
        self.points_to, self.target = points_to, target

    def apply(self) -> None:
        _make_place(os.path.dirname(self.target), is_directory=True)
        os.symlink(self.points_to, self.target)

    def describe(self) -> str:
        return f"link /{self.target} to {self.points_to}"


class Text:
    """Write a synthetic file."""

    __slots__ = ("content", "target")

    def __init__(self, target: str, content: str):
        self.target, self.content = target, content

    def apply(self) -> None:
        _make_place(self.target, is_directory=False)
        with open(self.target, "w", encoding="utf-8") as file:
            file.write(self.content)

    def describe(self) -> str:
        return f"write /{self.target}"


class Proc:
    """Mount this process namespace's own /proc, read-only, and cover what tells of the host."""

    __slots__ = ("masked",)

    def __init__(self, masked: Sequence[str]):
        self.masked = masked

    def apply(self) -> None:
        _make_place("proc", is_directory=True)
        mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
        for name in self.masked:
            self._cover(f"proc/{name}")

    def _cover(self, path: str) -> None:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0,nr_inodes=1,mode=0555")
        elif os.path.lexists(path):
            mount("dev/null", path, "", MS_BIND)

    def describe(self) -> str:
        return f"own /proc, read-only, without {', '.join(self.masked)}"


KINDS: dict[str, Any] = {
    "bind": Bind,
    "device": Device,
    "attach": Attach,
    "tmpfs": Tmpfs,
    "symlink": Symlink,
    "text": Text,
    "proc": Proc,
}


def from_rows(rows: Iterable[Sequence[Any]]) -> list[Mount]:
    """Build the values from the plain tuples of a spec: kind, then the constructor's arguments."""
    return [KINDS[kind](*arguments) for kind, *arguments in rows]


def stage_root(inodes: int = 4096) -> None:
    """Attach the tmpfs that becomes the root, and make it the working directory."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={inodes},mode=0755")
    os.chdir(STAGE)


def pivot() -> None:
    """Make the working directory the root, let go of the old one, and close the new one for writing."""
    pivot_root(".", ".")
    umount2(".", MNT_DETACH)
    os.chdir("/")
    mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_place(path: str, *, is_directory: bool) -> None:
    """Make the mount point, with its parents."""
    folder = path if is_directory else os.path.dirname(path)
    if folder:
        os.makedirs(folder, mode=0o755, exist_ok=True)
    if not is_directory and not os.path.lexists(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
