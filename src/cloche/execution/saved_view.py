"""What a sandbox has changed in its view of a host folder, listed, taken, and put back into another sandbox.

Nothing here compares with the host, so paths below `.git` belong to it: a guest's commits and its index.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

from cloche.core.changes import CHANGES
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass
from cloche.init.names import pack, unpack_text

from .git_inside import in_threads
from .host_folder import _finished

if TYPE_CHECKING:
    from cloche.workspace.host_files import HostTree
    from cloche.workspace.snapshot import Snapshot, SnapshotEntry

    from .open_folder import OpenFolder
    from .sandbox import AsyncSandbox

MOST_LISTED, MOST_LISTED_BYTES = 250_000, 64 << 20
REMOVED_AT_ONCE = 4000  # paths of one operation, within the largest frame
MOST_NAMES_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Hold the bytes of each changed file by its path. Two equal `mark`s mean that nothing has changed in between.

    `is_cut`: there are more files.
    """

    mark: str
    sizes: dict[str, int]
    is_cut: bool = False


def folder_of(sandbox: AsyncSandbox) -> OpenFolder:
    """Return the folder of a sandbox with a view. Raises InvalidRequest."""
    open_folder = sandbox._require_folder()
    if open_folder.folder.copied_ns:
        raise InvalidRequest("this sandbox has a copy of its folder; only the changes in a view can be saved")
    return open_folder


class _ViewFiles(Protocol):
    """Do operations of `init.files`, as every live sandbox with a view does."""

    async def file(
        self,
        do: str,
        path: str,
        *,
        max_bytes: int = 0,
        **arguments: Any,  # noqa: ANN401 - any JSON
    ) -> tuple[Mapping[str, Any], bytes]: ...

    async def unpack_path(self, path: str, archive: AsyncIterator[bytes]) -> None: ...


def _files_of(sandbox: AsyncSandbox) -> _ViewFiles:
    return cast("_ViewFiles", sandbox._require_live("the changes in a view"))


async def listed(sandbox: AsyncSandbox, *, skip: Sequence[str] = ()) -> Listing:
    """List the changed files while the sandbox goes on, less the paths of `skip` and what is below."""
    folder_of(sandbox)
    skipped = [pack(os.fsencode(path)) for path in skip]
    answer, data = await _files_of(sandbox).file(
        "changes", CHANGES, max_bytes=MOST_LISTED_BYTES, lists=True, entries=MOST_LISTED, skip=skipped
    )
    try:
        sizes = await _finished(lambda: _read_sizes(data))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest("the sandbox's list of its changes is invalid") from error
    return Listing(mark=str(answer.get("mark"))[:64], sizes=sizes, is_cut=bool(answer.get("too_many")))


def _read_sizes(data: bytes) -> dict[str, int]:
    sizes, offset = {}, 0
    while offset < len(data):
        end = offset + 4 + int.from_bytes(data[offset : offset + 4], "big")
        row = json.loads(data[offset + 4 : end])
        sizes[unpack_text(row["path"])] = max(0, int(row["size"]))
        offset = end
    return sizes


async def ignored(sandbox: AsyncSandbox) -> tuple[str, ...]:
    """Return the paths that git inside ignores, folders without what is below; none if git cannot tell."""
    at = folder_of(sandbox).folder.at
    command = ["git", "-C", at, "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z"]
    result = await sandbox.exec(command, timeout="20s")
    paths = result.stdout[:MOST_NAMES_BYTES].split("\0")[:-1] if result.ok else []
    return tuple(path.rstrip("/") for path in paths if path.strip("/") and not path.startswith("/"))


@asynccontextmanager
async def taken(sandbox: AsyncSandbox, *, into: str, skip: Sequence[str] = ()) -> AsyncIterator[Snapshot]:
    """Yield the changes at one moment, for which all processes are stopped, less the paths of `skip`."""
    async with sandbox._snapshot(folder_of(sandbox), into=into, skip=skip) as snapshot:
        yield snapshot


async def put_back(sandbox: AsyncSandbox, snapshot: Snapshot) -> None:
    """Make the changes of a snapshot in a sandbox with a view of the same folder. Raises the SandboxFile errors."""
    from cloche.workspace.archive import pack_snapshot
    from cloche.workspace.host_files import HostTree

    open_folder = folder_of(sandbox)
    live, at = _files_of(sandbox), open_folder.folder.at

    def choose() -> tuple[list[SnapshotEntry], list[bytes]]:
        with HostTree(open_folder.fd) as tree:
            return _choose(snapshot, tree)

    entries, removed = await _finished(choose)
    for start in range(0, len(removed), REMOVED_AT_ONCE):
        await live.file("remove_all", at, paths=[*map(pack, removed[start : start + REMOVED_AT_ONCE])])
    await live.unpack_path(at, in_threads(pack_snapshot(snapshot, entries)))


def _choose(snapshot: Snapshot, tree: HostTree) -> tuple[list[SnapshotEntry], list[bytes]]:
    """Return the entries to unpack, and the paths to remove before."""
    entries, removed = [], []
    for path, entry in snapshot.entries.items():
        host = _look(tree, path)
        mode = host.st_mode if host is not None else 0
        if entry.kind == "removed" or (mode and (entry.is_opaque or stat.S_IFMT(mode) != _TYPES.get(entry.kind))):
            removed.append(path)
        is_same_folder = entry.kind == "directory" and mode == stat.S_IFDIR | entry.mode
        if entry.kind in _TYPES and not entry.problem and (entry.is_opaque or not is_same_folder):
            entries.append(entry)
    return entries, removed


_TYPES = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}


def _look(tree: HostTree, path: bytes) -> os.stat_result | None:
    try:
        return tree.look(path)
    except OSError:  # a mount, or too deep
        return None


def host_marks(open_folder: OpenFolder, snapshot: Snapshot) -> dict[str, str]:
    """Return what the host has now at each changed path: an empty text for nothing, and one that differs if it changes.

    It ends with `!` where the host had changed it already since the sandbox was opened, and the sandbox did not know.
    """
    from cloche.workspace.host_files import HostTree

    from .commits import read_committed

    committed, opened_ns = read_committed(open_folder), open_folder.folder.opened_ns
    marks = {}
    with HostTree(open_folder.fd) as tree:
        for path, entry in snapshot.entries.items():
            if entry.kind == "directory" and not entry.is_opaque:
                continue
            host, name = _look(tree, path), os.fsdecode(path)
            is_known = host is None or committed.get(name) == (host.st_ino, host.st_ctime_ns)
            has_changed = host is not None and host.st_ctime_ns >= opened_ns and not is_known
            marks[name] = mark_of(tree, path) + "!" * has_changed
    return marks


MOST_BELOW = 20_000  # paths of a removed folder


def mark_of(tree: HostTree, path: bytes) -> str:
    """Return a text that differs once the host has changed what it has at a path, or below it."""
    state = _look(tree, path)
    if state is None:
        return ""
    own = f"{state.st_ino:x}.{state.st_ctime_ns:x}"
    return f"{own}.{_below(tree, path):x}" if stat.S_ISDIR(state.st_mode) else own


def _below(tree: HostTree, top: bytes) -> int:
    total, folders, left = 0, [top], MOST_BELOW
    while folders and left > 0:
        folder = folders.pop()
        try:
            names = tree.names(folder)
        except OSError:
            continue
        for name, is_folder in names[:left]:
            left -= 1
            state = _look(tree, folder + b"/" + name)
            if state is not None:
                total = (total + hash((state.st_ino, state.st_ctime_ns))) & ((1 << 64) - 1)
                folders += [folder + b"/" + name] * is_folder
    return total


def note_conflicts(sandbox: AsyncSandbox, paths: Collection[str]) -> None:
    """Have each later diff of the sandbox show a conflict at these paths, until one of them is committed."""
    from .commits import note_restored

    note_restored(folder_of(sandbox), paths)
