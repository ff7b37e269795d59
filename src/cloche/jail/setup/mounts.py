"""The guest's file tree, as a list of small values that say which system calls make them. Nothing is done here.

Theory of operation: a new user namespace cannot reach a private home once it runs under another identity, and cannot
create files on its own tmpfs before it does. So every bind source is first opened as a detached copy of its mount, with
the caller's identity (`Bind.opening`); then the identity is switched; then the tree is built below a tmpfs from those
descriptors (`calls`), and `pivot` makes it the root. Paths of targets are relative to the new root, which is the
working directory while the tree is built.
"""

from __future__ import annotations

import os
import stat

from ..steps import EEXIST, EINVAL, ENOENT, make
from ..syscalls import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    AT_RECURSIVE,
    FSCONFIG_CMD_CREATE,
    FSCONFIG_SET_STRING,
    FSMOUNT_CLOEXEC,
    FSOPEN_CLOEXEC,
    MNT_DETACH,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MOVE_MOUNT_F_EMPTY_PATH,
    MOVE_MOUNT_T_EMPTY_PATH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    OPEN_TREE_CLOEXEC,
    OPEN_TREE_CLONE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Protocol

    from ..steps import Call

if TYPE_CHECKING:

    class Mount(Protocol):
        """Return the calls that make a mount below the new root, which is the working directory, and describe it."""

        def calls(self) -> list[Call]: ...
        def describe(self) -> str: ...


EPERM, EACCES, ENOTDIR, EROFS, ELOOP = 1, 13, 20, 30, 40
O_PATH = 0x200000
AT_REMOVEDIR = 0x200
_WAY = O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
RESOLVE_NO_LINKS = 0x02 | 0x04  # neither those of /proc nor any other
READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
# Any directory that surely exists serves to attach the new root before it becomes one.
STAGE = "/proc"
_CREATE = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC


class Bind:
    """Show a file or directory of the host, read-only, at `target`.

    `register` holds its detached mount once it is open; `is_given` if another process opened it.
    """

    __slots__ = ("attributes", "is_directory", "is_given", "register", "source", "target")

    def __init__(self, source: str, target: str, attributes: int = READ_ONLY, register: str = ""):
        self.source, self.target, self.attributes = source, target, attributes
        self.register, self.is_given = register or f"bind {target}", bool(register)
        self.is_directory = os.path.isdir(source)

    def opening(self) -> list[Call]:
        """Take a detached copy of the source with the identity the process has then, unless one is handed in."""
        recursive = AT_RECURSIVE if self.is_directory else 0
        opened = open_tree(self.source, self.register, recursive=self.is_directory)
        return [
            *([] if self.is_given else [opened]),
            make("mount_setattr", self.register, b"", AT_EMPTY_PATH | recursive, mount_attr(self.attributes), 32),
        ]

    def calls(self) -> list[Call]:
        return [
            *_make_mount_point(self.target, is_directory=self.is_directory),
            move_mount(self.register, self.target),
            make("close", self.register),
        ]

    def describe(self) -> str:
        how = "read-only" if self.attributes & MOUNT_ATTR_RDONLY else "for writing"
        return f"bind {self.source} {how} at /{self.target}"


class Inner(Bind):
    """Show one in a mount that belongs to the guest, which may have left anything there: no link is followed."""

    __slots__ = ()

    def calls(self) -> list[Call]:
        return _placed(self, self.target)


class Device(Bind):
    """Show one harmless device node of the host."""

    __slots__ = ()

    def __init__(self, name: str):
        super().__init__(f"/dev/{name}", f"dev/{name}", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)

    def describe(self) -> str:
        return f"device {self.source}"


class Attach:
    """Put a mount that was kept from an earlier run of the same sandbox at `target`."""

    __slots__ = ("register", "target")

    def __init__(self, register: str, target: str):
        self.register, self.target = register, target

    def calls(self) -> list[Call]:
        return [*_make_mount_point(self.target, is_directory=True), move_mount(self.register, self.target)]

    def describe(self) -> str:
        return f"attach the sandbox's own /{self.target}"


class Tmpfs:
    """Mount an empty, bounded file system of memory at `target`."""

    __slots__ = ("inodes", "mode", "size_bytes", "target")

    def __init__(self, target: str, size_bytes: int, inodes: int, mode: str = "0755"):
        self.target, self.size_bytes, self.inodes, self.mode = target, size_bytes, inodes, mode

    def calls(self) -> list[Call]:
        data = f"size={self.size_bytes},nr_inodes={self.inodes},mode={self.mode}"
        mounting = mount("tmpfs", self.target, "tmpfs", MS_NOSUID | MS_NODEV, data)
        return [*_make_mount_point(self.target, is_directory=True), mounting]

    def describe(self) -> str:
        return f"tmpfs of {self.size_bytes} bytes and {self.inodes} inodes at /{self.target}"


class Upper:
    """Mount one bounded file system of memory, and show a folder of it at each target.

    `folders` has target, mode and owner. The targets share the bound.
    """

    __slots__ = ("folders", "inodes", "size_bytes")

    STAGE = ".upper"

    def __init__(self, size_bytes: int, inodes: int, folders: Sequence[tuple[str, int, int]]):
        self.size_bytes, self.inodes, self.folders = size_bytes, inodes, folders

    def calls(self) -> list[Call]:
        stage = Tmpfs(self.STAGE, self.size_bytes, self.inodes).calls()
        shown = [call for folder in self.folders for call in self._showing(*folder)]
        removing = [
            make("umount2", os.fsencode(self.STAGE), MNT_DETACH),
            make("unlinkat", AT_FDCWD, os.fsencode(self.STAGE), AT_REMOVEDIR),
        ]
        return [*stage, *shown, *removing]

    def _showing(self, target: str, mode: int, owner: int) -> list[Call]:
        folder = f"{self.STAGE}/{target.replace('/', '-')}"
        return [
            make("mkdirat", AT_FDCWD, os.fsencode(folder), 0o700),
            make("openat", AT_FDCWD, os.fsencode(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, keep="upper"),
            make("fchownat", "upper", b"", owner, owner, AT_EMPTY_PATH),
            make("fchmod", "upper", mode),
            make("close", "upper"),
            *_make_mount_point(target, is_directory=True),
            mount(folder, target, "", MS_BIND),
        ]

    def describe(self) -> str:
        targets = ", ".join(f"/{target}" for target, *_ in self.folders)
        return f"tmpfs of {self.size_bytes} bytes and {self.inodes} inodes, shown at {targets}"


class Overlay(Bind):
    """Show a folder of the host at `target` copy-on-write: writes go to a bounded file system of memory.

    `masked` are paths of it that are hidden: a layer between has a whiteout for each, and the folders above them, as
    rows of path, mode and time of change (ns). The folder itself can be reached by no other path. The upper layer is
    shown, read-only, at `changes`; without that path the overlay is read-only.

    A second folder may be shown at a path in the first one, `inner`, which is a folder of the layer then, even if the
    first has another file there. Writes to it go to the same file system: `is_inner` marks the second.
    """

    __slots__ = (
        "changes", "inner", "inodes", "is_inner", "masked", "mode", "owner", "shown_folders", "size_bytes", "stage",
    )  # fmt: skip

    def __init__(
        self,
        source: str,
        target: str,
        *,
        number: int,
        changes: str,
        size_bytes: int,
        inodes: int,
        mode: int,
        owner: int,
        folders: Sequence[tuple[str, int, int]] = (),
        masked: Sequence[str] = (),
        register: str = "",
        inner: str = "",
        is_inner: bool = False,
    ):
        super().__init__(source, target, register=register)
        self.inner, self.is_inner = inner, is_inner
        self.changes, self.size_bytes, self.inodes, self.mode, self.owner = changes, size_bytes, inodes, mode, owner
        self.shown_folders, self.masked = folders, masked
        self.stage = f".overlay{number}"

    def calls(self) -> list[Call]:
        layers = f"{self.stage}/inner-" if self.is_inner else f"{self.stage}/"
        upper, mask, work, lower = (f"{layers}{name}" for name in ("upper", "mask", "work", "lower"))
        data, flags = f"userxattr,lowerdir={mask}:{lower}", MS_NOSUID | MS_NODEV
        if self.changes:
            data += f",upperdir={upper},workdir={work}"
        else:
            flags |= MS_RDONLY
        stage = Tmpfs(self.stage, self.size_bytes, self.inodes, "0700").calls()
        return [
            *([] if self.is_inner else stage),
            *self._folder(upper, self.mode),
            *(self._folder(f"{upper}/{self.inner}", 0o755) if self.inner else []),
            *self._folder(mask, self.mode),
            *(make("mkdirat", AT_FDCWD, os.fsencode(path), 0o700) for path in (work, lower)),
            *(call for path, mode, _ in self.shown_folders if path for call in self._folder(f"{mask}/{path}", mode)),
            *(make("mknodat", AT_FDCWD, os.fsencode(f"{mask}/{path}"), stat.S_IFCHR, 0) for path in self.masked),
            *(
                make("utimensat", AT_FDCWD, os.fsencode(f"{mask}/{path}"), _times(changed_ns), 0)
                for path, _, changed_ns in reversed(self.shown_folders)
            ),
            move_mount(self.register, lower),
            make("close", self.register),
            *([] if self.is_inner else _make_mount_point(self.target, is_directory=True)),
            mount("overlay", self.target, "overlay", flags, data),
            *self._show_changes(upper),
            make("umount2", os.fsencode(lower), MNT_DETACH),
            *([] if self.inner else self._unstaging()),
        ]

    def _unstaging(self) -> list[Call]:
        return [
            make("umount2", os.fsencode(self.stage), MNT_DETACH),
            make("unlinkat", AT_FDCWD, os.fsencode(self.stage), AT_REMOVEDIR),
        ]

    def _show_changes(self, upper: str) -> list[Call]:
        if not self.changes:
            return []
        return [
            *([] if self.is_inner else _make_mount_point(self.changes, is_directory=True)),
            mount(upper, self.changes, "", MS_BIND),
            mount("none", self.changes, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC),
        ]

    def _folder(self, path: str, mode: int) -> list[Call]:
        name = os.fsencode(path)
        return [
            make("mkdirat", AT_FDCWD, name, 0o700),
            make("openat", AT_FDCWD, name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, keep="layer"),
            make("fchownat", "layer", b"", self.owner, self.owner, AT_EMPTY_PATH),
            make("fchmod", "layer", mode),
            make("close", "layer"),
        ]

    def describe(self) -> str:
        return (
            f"overlay of {self.source} at /{self.target}, without {len(self.masked)} hidden paths, with "
            f"{self.size_bytes} bytes to write"
        )


def _times(changed_ns: int) -> bytes:
    """Return two `struct timespec`: of access and of change."""
    time_spec = b"".join(number.to_bytes(8, "little", signed=True) for number in divmod(changed_ns, 10**9))
    return time_spec * 2


class Terminals:
    """Mount the pseudo-terminals of this sandbox alone."""

    __slots__ = ()

    def calls(self) -> list[Call]:
        flags = MS_NOSUID | MS_NOEXEC
        return [
            *_make_mount_point("dev/pts", is_directory=True),
            mount("devpts", "dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=0620,max=64"),
            make("symlinkat", b"pts/ptmx", AT_FDCWD, b"dev/ptmx"),
        ]

    def describe(self) -> str:
        return "pseudo-terminals of its own at /dev/pts"


class Symlink:
    """Make a symbolic link."""

    __slots__ = ("points_to", "target")

    def __init__(self, points_to: str, target: str):
        self.points_to, self.target = points_to, target

    def calls(self) -> list[Call]:
        link = make("symlinkat", os.fsencode(self.points_to), AT_FDCWD, os.fsencode(self.target))
        return [*_make_mount_point(os.path.dirname(self.target), is_directory=True), link]

    def describe(self) -> str:
        return f"link /{self.target} to {self.points_to}"


class Text:
    """Write a synthetic file."""

    __slots__ = ("content", "mode", "target")

    def __init__(self, target: str, content: str, mode: int = 0o644):
        self.target, self.content, self.mode = target, content, mode

    def calls(self) -> list[Call]:
        return [
            *_make_mount_point(os.path.dirname(self.target), is_directory=True),
            make("openat", AT_FDCWD, os.fsencode(self.target), _CREATE, self.mode, keep="text"),
            make("write", "text", self.content.encode()),
            make("close", "text"),
        ]

    def describe(self) -> str:
        return f"write /{self.target}"


class Proc:
    """Mount this process namespace's own /proc, read-only, and cover files with facts about the host."""

    __slots__ = ("masked",)

    def __init__(self, masked: Sequence[str]):
        self.masked = masked

    def calls(self) -> list[Call]:
        mounting = mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
        return [*_make_mount_point("proc", is_directory=True), mounting, *self.covers()]

    def covers(self) -> list[Call]:
        """Cover the masked paths of the /proc that is mounted in the working directory."""
        return [_cover(f"proc/{name}") for name in self.masked]

    def describe(self) -> str:
        return f"own /proc, read-only, without {', '.join(self.masked)}"


def _cover(path: str, *more_excused: int) -> Call:
    """Cover a path with a mount of the host's file type; a missing path needs no cover.

    `more_excused` are further errors that are no failure.
    """
    excuse = (ENOENT, *more_excused)
    if os.path.isdir(f"/{path}"):
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        return mount("tmpfs", path, "tmpfs", flags, "size=0,nr_inodes=1,mode=0555", excuse=excuse)
    return mount("dev/null", path, "", MS_BIND, excuse=excuse)


class Cover:
    """Cover a shown file or folder with an empty one, unless no process inside can reach it anyway."""

    __slots__ = ("target",)

    def __init__(self, target: str):
        self.target = target

    def calls(self) -> list[Call]:
        return [_cover(self.target, EACCES)]

    def describe(self) -> str:
        return f"cover /{self.target}"


class ShownText:
    """Write a synthetic file of any size, and show it read-only at each path, also over a file that is shown there.

    A `register` keeps it open for writing: what it begins with is known later.
    """

    __slots__ = ("content", "over", "register", "target")

    STAGE = ".shown"

    def __init__(self, target: str, content: str, over: Sequence[str] = (), register: str = ""):
        self.target, self.content, self.over, self.register = target, content, over, register

    def calls(self) -> list[Call]:
        staged, data = f"{self.STAGE}/file", self.content.encode()
        read_only = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        return [
            *Tmpfs(self.STAGE, len(data) + (1 << 16), 16).calls(),
            *Text(staged, self.content).calls(),
            *(self._kept() if self.register else ()),
            mount("none", self.STAGE, "", read_only),  # and so is every further mount of it
            *_make_mount_point(self.target, is_directory=False),
            mount(staged, self.target, "", MS_BIND),
            *(mount(staged, path, "", MS_BIND, excuse=(ENOENT, ENOTDIR, EACCES)) for path in self.over),
            make("umount2", os.fsencode(self.STAGE), MNT_DETACH),
            make("unlinkat", AT_FDCWD, os.fsencode(self.STAGE), AT_REMOVEDIR),
        ]

    def _kept(self) -> list[Call]:
        """Open the file in a mount that is attached nowhere, since those that are shown cannot be written to."""
        return [
            open_tree(self.STAGE, "shown", recursive=False),
            make("openat", "shown", b"file", os.O_WRONLY | os.O_CLOEXEC, 0, keep=self.register),
            make("close", "shown"),
        ]

    def describe(self) -> str:
        return f"write /{self.target}, and show it at {len(self.over)} other paths"


KINDS: dict[str, Any] = {
    "bind": Bind,
    "device": Device,
    "attach": Attach,
    "tmpfs": Tmpfs,
    "symlink": Symlink,
    "terminals": Terminals,
    "text": Text,
    "shown text": ShownText,
    "upper": Upper,
    "overlay": Overlay,
    "proc": Proc,
}


def from_rows(rows: Iterable[Sequence[Any]]) -> list[Mount]:
    """Build the values from the plain tuples of a spec: kind, then the constructor's arguments; last, those by name."""
    return [_from_row(*row) for row in rows]


def _from_row(kind: str, *arguments: Any) -> Mount:  # noqa: ANN401 - each kind has its own
    named = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    new_mount: Mount = KINDS[kind](*(arguments[:-1] if named else arguments), **named)
    return new_mount


def stage_root(inodes: int = 4096) -> list[Call]:
    """Attach the tmpfs that becomes the root, and make it the working directory."""
    return [
        mount("none", "/", "", MS_REC | MS_PRIVATE),
        mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, f"size=1m,nr_inodes={inodes},mode=0755"),
        chdir(STAGE),
    ]


def pivot() -> list[Call]:
    """Make the working directory the root, unmount the old one, and close the new one for writing."""
    return [
        make("pivot_root", b".", b"."),
        make("umount2", b".", MNT_DETACH),
        chdir("/"),
        mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV),
    ]


def mount(source: str, target: str, kind: str, flags: int, data: str = "", *, excuse: tuple[int, ...] = ()) -> Call:
    """Return a mount of the old kind; `excuse` names the errors that are no failure."""
    paths = (os.fsencode(source), os.fsencode(target))
    return make("mount", *paths, kind.encode(), flags, data.encode() or None, excuse=excuse)


def detached_tmpfs(register: str, size_bytes: int, inodes: int, mode: str) -> list[Call]:
    """Keep a new, bounded file system of memory that is attached nowhere yet."""
    settings = {"size": str(size_bytes), "nr_inodes": str(inodes), "mode": mode}
    return _detached("tmpfs", settings, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, register)


def detached_proc(register: str) -> list[Call]:
    """Keep a new, read-only /proc of the process namespace one is in, attached nowhere yet."""
    return _detached("proc", {}, READ_ONLY | MOUNT_ATTR_NOEXEC, register)


def process_counter(register: str) -> list[Call]:
    """Keep open, for writing, the file with the last pid of this namespace; skipped where that is refused.

    It is reached by a separate /proc that is attached nowhere: the visible one is read-only.
    """
    flags, refused = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, (EPERM, ENOENT, EACCES, EINVAL)
    return [
        make("fsopen", b"proc", FSOPEN_CLOEXEC, keep="context"),
        make("fsconfig", "context", FSCONFIG_CMD_CREATE, None, None, 0, excuse=refused),
        make("fsmount", "context", FSMOUNT_CLOEXEC, flags, keep="proc", excuse=refused),
        make("close", "context"),
        make("openat", "proc", b"sys/kernel/ns_last_pid", os.O_RDWR | os.O_CLOEXEC, 0, keep=register, excuse=refused),
        make("close", "proc"),
    ]


def writable_proc(register: str) -> list[Call]:
    """Keep a /proc of this process namespace that is attached nowhere, for pid 1 alone; nothing where it is refused."""
    flags, refused = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, (EPERM, ENOENT, EACCES, EINVAL)
    return [
        make("fsopen", b"proc", FSOPEN_CLOEXEC, keep="context"),
        make("fsconfig", "context", FSCONFIG_CMD_CREATE, None, None, 0, excuse=refused),
        make("fsmount", "context", FSMOUNT_CLOEXEC, flags, keep=register, excuse=refused),
        make("close", "context"),
    ]


def _detached(kind: str, settings: dict[str, str], attributes: int, register: str) -> list[Call]:
    return [
        make("fsopen", kind.encode(), FSOPEN_CLOEXEC, keep="context"),
        *(
            make("fsconfig", "context", FSCONFIG_SET_STRING, name.encode(), value.encode(), 0)
            for name, value in settings.items()
        ),
        make("fsconfig", "context", FSCONFIG_CMD_CREATE, None, None, 0),
        make("fsmount", "context", FSMOUNT_CLOEXEC, attributes, keep=register),
        make("close", "context"),
    ]


def opened_again(bind: Bind) -> list[Call]:
    """Keep a copy of a bind that is attached."""
    return [open_tree(bind.source, bind.register, recursive=bind.is_directory)]


def placed_again(bind: Bind, owner: int) -> list[Call]:
    """Mount such a copy at the same path, in the mount that covers the bind by now."""
    return _placed(bind, bind.source, owner)


def _placed(bind: Bind, target: str, owner: int = -1) -> list[Call]:
    """Attach a bind in a guest's mount, and make the folders above it, which are the guest's then.

    All components of the path must be folders; a link among them is an error. `owner` owns new folders, -1 for
    ourselves.
    """
    top, *folders, name = target.lstrip("/").split("/")
    start, register = os.fsencode("/" * target.startswith("/") + top), f"way {top}"
    calls = [
        make("mkdirat", AT_FDCWD, start, 0o755, excuse=(EEXIST,)),
        make("openat", AT_FDCWD, start, _WAY, 0, keep=register),
    ]
    opened = [register]
    for folder in folders:
        child_register = f"{register}/{folder}"
        calls.append(make("mkdirat", register, os.fsencode(folder), 0o755, excuse=(EEXIST,)))
        calls.append(make("openat", register, os.fsencode(folder), _WAY, 0, keep=child_register))
        if owner >= 0:
            calls.append(make("fchownat", child_register, b"", owner, owner, AT_EMPTY_PATH, excuse=(EROFS,)))
        register = child_register
        opened.append(child_register)
    point = os.fsencode(name)
    if bind.is_directory:
        calls.append(make("mkdirat", register, point, 0o755, excuse=(EEXIST,)))
        calls.append(make("openat", register, point, _WAY, 0, keep="point"))
    else:
        calls.append(make("mknodat", register, point, stat.S_IFREG | 0o644, 0, excuse=(EEXIST,)))
        calls.append(make("openat", register, point, _WAY & ~os.O_DIRECTORY, 0, keep="point"))
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    calls.append(make("move_mount", bind.register, b"", "point", b"", flags))
    return [*calls, *(make("close", name) for name in ("point", bind.register, *opened))]


def taken_along(path: str, register: str) -> list[Call]:
    """Keep a detached, read-only copy of the mount at a path, through no link; skipped without one.

    The guest may have moved the folders above away, and put others in their place.
    """
    attributes = mount_attr(READ_ONLY)
    return [
        _kept_file(path, "found"),
        make(
            "open_tree", "found", b"", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE | AT_EMPTY_PATH, keep=register
        ),
        make("close", "found"),
        make("mount_setattr", register, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes, len(attributes)),
    ]


def put_down(register: str, path: str) -> list[Call]:
    """Attach the copied mount at the same path, through no link; skipped if the path has gone."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    return [
        _kept_file(path, "found"),
        make("move_mount", register, b"", "found", b"", flags),
        make("close", "found"),
    ]


def _kept_file(path: str, register: str) -> Call:
    """Keep a descriptor of the file at a path, through no link."""
    how = b"".join(number.to_bytes(8, "little") for number in (O_PATH | os.O_CLOEXEC, 0, RESOLVE_NO_LINKS))
    return make("openat2", AT_FDCWD, os.fsencode(path), how, len(how), keep=register, excuse=(ENOENT, ENOTDIR, ELOOP))


def chdir(path: str) -> Call:
    """Change the working directory."""
    return make("chdir", os.fsencode(path))


def open_tree(path: str, register: str, *, recursive: bool) -> Call:
    """Keep a descriptor of a detached copy of the mount at `path`."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return make("open_tree", AT_FDCWD, os.fsencode(path), flags, keep=register)


def move_mount(register: str, target: str) -> Call:
    """Attach a detached mount at `target`."""
    return make("move_mount", register, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)


def mount_attr(attr_set: int, userns_fd: int = 0) -> bytes:
    """Return a `struct mount_attr` that sets attributes and clears none."""
    return b"".join(n.to_bytes(8, "little") for n in (attr_set, 0, 0, userns_fd))


def _make_mount_point(path: str, *, is_directory: bool) -> list[Call]:
    names = path.split("/") if path else []
    folders = names if is_directory else names[:-1]
    steps = [
        make("mkdirat", AT_FDCWD, os.fsencode("/".join(folders[: depth + 1])), 0o755, excuse=(EEXIST,))
        for depth in range(len(folders))
    ]
    if not is_directory:
        steps.append(make("mknodat", AT_FDCWD, os.fsencode(path), stat.S_IFREG | 0o644, 0, excuse=(EEXIST,)))
    return steps
