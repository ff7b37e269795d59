"""The files of a hostile workspace, found and hashed by descriptors, within bounds.

Theory of operation: each folder is opened relative to its parent's descriptor, and each name is examined before it is
opened. So no link is followed, and no FIFO or device is opened. A replacement between the examination and the opening
is detected by fstat(2), and opening never blocks. Every bound is checked before memory is used. The result has each
omission with its reason: as an entry for a single name, as a reason for an ended walk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from time import monotonic

from cloche import hostfs
from cloche.workspace.mounts import mount_at, mount_of

from ..core.record import dataclass, field
from .workspace_entries import MOST_PATH_BYTES, Entry, is_excluded

MIB = 1 << 20
CHUNK_BYTES = MIB
MOST_TRIES = 2  # to read a file that changes during the read
# Why a walk ended early; the remainder is unknown. `depth` and `bytes` only leave out single entries.
ENDED_BY = frozenset({"entries", "names", "time"})
_OTHER_KINDS = {
    stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip
_SWAPPED = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)  # errors of a name replaced after its examination


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkBounds:
    """The bounds of a walk: names of any kind, bytes of their paths, depth of folders, bytes hashed."""

    entries: int = 50_000
    name_bytes: int = 16 * MIB
    depth: int = 64
    total_bytes: int = 1024 * MIB
    file_bytes: int = 10 * MIB


BOUNDS = WalkBounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeItem:
    """One name below a folder. `folder`, the descriptor of its folder, is open until the next item is requested.

    Without a `state` it was not examined, or is a folder that was not entered; `skipped` says why.
    """

    path: bytes
    name: str
    folder: int
    state: os.stat_result | None = None
    skipped: str = ""
    is_excluded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The whole content of a file at one moment."""

    data: bytes
    sha256: str
    mode: int


@dataclass(slots=True, kw_only=True)
class WorkspaceTree:
    """The result of a walk: entries by path, excluded paths, bytes hashed, and the reasons why it is partial."""

    entries: list[Entry] = field(default_factory=list)
    excluded: list[bytes] = field(default_factory=list)
    bytes: int = 0
    partial: set[str] = field(default_factory=set)


class Unread(Exception):
    """Report a file that could not be read. `reason` is a word for the document."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class OutOfTime(Exception):
    """Report that the deadline has passed."""


class TreeWalk:
    """Iterate over everything below an open folder, by name. Afterwards `partial` has the bounds that were reached."""

    def __init__(self, root: int, bounds: WalkBounds, deadline: float | None):
        self.partial: set[str] = set()
        self._root, self._bounds, self._deadline = root, bounds, deadline
        self._entries = self._name_bytes = 0
        self._device, self._mount = os.fstat(root).st_dev, mount_of(root)

    def __iter__(self) -> Generator[TreeItem, None, None]:
        return self._below(self._root, b"", 1)

    def _below(self, folder: int, above: bytes, depth: int) -> Generator[TreeItem, None, None]:
        for name in self._names(folder):
            path = above + os.fsencode(name)
            if self._is_over(path):
                return
            if is_excluded(path):
                yield TreeItem(path=path, name=name, folder=folder, is_excluded=True)
                continue
            try:
                state = os.stat(name, dir_fd=folder, follow_symlinks=False)
                is_mounted = state.st_dev != self._device or mount_at(name, folder) != self._mount
            except FileNotFoundError:
                continue  # it was removed meanwhile
            except OSError as error:  # such as in a folder that may be listed but not entered
                yield TreeItem(path=path, name=name, folder=folder, skipped=_reason(error))
                continue
            if is_mounted:  # a foreign file system may never answer
                yield TreeItem(path=path, name=name, folder=folder, skipped="other-filesystem")
            elif stat.S_ISDIR(state.st_mode):
                yield from self._folder(name, folder, path, depth)
            else:
                yield TreeItem(path=path, name=name, folder=folder, state=state)

    def _names(self, folder: int) -> list[str]:
        """Return the names in a folder, within the bound of entries, since waiting names take memory, too."""
        names: list[str] = []
        with os.scandir(folder) as items:
            for item in items:
                if self._entries >= self._bounds.entries:
                    self.partial.add("entries")
                    break
                if _is_late(self._deadline):
                    self.partial.add("time")
                    break
                self._entries += 1
                names.append(item.name)
        return sorted(names, key=os.fsencode)

    def _is_over(self, path: bytes) -> bool:
        self._name_bytes += len(path)
        met = {"names": self._name_bytes > self._bounds.name_bytes, "time": _is_late(self._deadline)}
        self.partial |= {reason for reason, is_met in met.items() if is_met}
        return any(met.values())

    def _folder(self, name: str, parent: int, path: bytes, depth: int) -> Iterator[TreeItem]:
        if depth >= self._bounds.depth or len(path) >= MOST_PATH_BYTES:
            self.partial.add("depth")
            yield TreeItem(path=path, name=name, folder=parent, skipped="too-deep")
            return
        try:
            fd = hostfs.open_folder(name, parent)
        except FileNotFoundError:
            return
        except OSError as error:
            yield TreeItem(path=path, name=name, folder=parent, skipped=_reason(error))
            return
        try:
            yield from self._below(fd, path + b"/", depth + 1)
        finally:
            os.close(fd)


def read_tree(
    folder: int,
    *,
    bounds: WalkBounds = BOUNDS,
    deadline: float | None = None,
    keep: Callable[[bytes, str], object] | None = None,
) -> WorkspaceTree:
    """Return the tree below an open folder. `deadline` is of `time.monotonic`; `keep` gets bytes and SHA-256.

    It blocks: in a coroutine use `asyncio.to_thread`. Raises OSError if the folder itself cannot be read, and any error
    of `keep`.
    """
    tree = WorkspaceTree()
    walk = TreeWalk(folder, bounds, deadline)
    with closing(iter(walk)) as names:
        try:
            for item in names:
                _add(tree, item, bounds, deadline, keep)
        except OutOfTime:
            tree.partial.add("time")
    tree.partial |= walk.partial
    return tree


def _add(
    tree: WorkspaceTree,
    item: TreeItem,
    bounds: WalkBounds,
    deadline: float | None,
    keep: Callable[[bytes, str], object] | None,
) -> None:
    if item.is_excluded:
        tree.excluded.append(item.path)
        return
    entry, content = _look_into(item, bounds, deadline, room=bounds.total_bytes - tree.bytes)
    if content is not None:
        tree.bytes += len(content.data)
        if keep is not None:
            keep(content.data, content.sha256)
    if entry.skipped == "too-many-bytes":
        tree.partial.add("bytes")
    tree.entries.append(entry)


def _look_into(
    item: TreeItem, bounds: WalkBounds, deadline: float | None, *, room: int
) -> tuple[Entry, Content | None]:
    """Return the entry of a name, and a file's content, of at most `room` bytes. Raises OutOfTime."""
    state = item.state
    if state is None:
        return Entry(path=item.path, skipped=item.skipped), None
    if stat.S_ISLNK(state.st_mode):
        return _link(item), None
    if (kind := _OTHER_KINDS.get(stat.S_IFMT(state.st_mode))) is not None:
        return Entry(path=item.path, skipped=kind), None
    size = state.st_size
    if room < size <= bounds.file_bytes:
        return Entry(path=item.path, size=size, skipped="too-many-bytes"), None
    try:
        content = read_file(item.name, item.folder, bounds.file_bytes, deadline)
    except Unread as error:
        return Entry(path=item.path, size=size, skipped=error.reason), None
    entry = Entry(path=item.path, size=len(content.data), mode=content.mode, sha256=content.sha256)
    return entry, content


def _link(item: TreeItem) -> Entry:
    try:
        return Entry(path=item.path, link=os.fsencode(os.readlink(item.name, dir_fd=item.folder)))
    except OSError as error:
        return Entry(path=item.path, skipped=_reason(error))


def read_file(name: str, folder: int, max_bytes: int, deadline: float | None = None) -> Content:
    """Return a regular file of an open folder as it was at one moment. Raises Unread, OutOfTime."""
    for _ in range(MOST_TRIES):
        try:
            fd, before = hostfs.open_regular(name, folder)
            with open(fd, "rb", buffering=0) as file:
                if before.st_size > max_bytes:
                    raise Unread(f"too-large:{before.st_size}")
                data = _read_all(fd, max_bytes, deadline)
                after = os.fstat(file.fileno())
        except OSError as error:
            raise Unread(_reason(error)) from error
        if len(data) == after.st_size and _version(before) == _version(after):
            return Content(data=data, sha256=hashlib.sha256(data).hexdigest(), mode=stat.S_IMODE(after.st_mode))
    raise Unread("changed")


def _read_all(fd: int, max_bytes: int, deadline: float | None) -> bytes:
    chunks, size = [], 0
    while size <= max_bytes and (chunk := os.read(fd, CHUNK_BYTES)):
        chunks.append(chunk)
        size += len(chunk)
        if _is_late(deadline):
            raise OutOfTime
    return b"".join(chunks)


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _is_late(deadline: float | None) -> bool:
    return deadline is not None and monotonic() >= deadline


def _reason(error: OSError) -> str:
    """Return the reason word for a file that cannot be opened or read."""
    if isinstance(error, hostfs.NotRegular | FileNotFoundError) or error.errno in _SWAPPED:
        return "changed"
    return "unreadable"
