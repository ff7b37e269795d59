"""What a sandbox has changed in its view of a host folder, listed, taken, and put back into another sandbox.

Nothing here compares with the host, so paths below `.git` belong to it: a guest's commits and its index.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from cloche.core.changes import CHANGES
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass
from cloche.init.names import pack, unpack_text

from .git_inside import in_threads
from .host_folder import MOST_ENTRIES, _finished

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

    def changes_stream(
        self,
        root: str,
        *,
        since: int | None,
        max_bytes: int,
        max_entries: int,
        skip: Sequence[str],
        note_answer: Callable[[Mapping[str, Any]], None],
        base: int | None,
        pauses: bool,
    ) -> AsyncGenerator[bytes]: ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Hold an earlier snapshot, the time on the sandbox's clock before it, and the paths that it lacks."""

    snapshot: Snapshot
    before_ns: int
    skip: frozenset[str] = frozenset()


@asynccontextmanager
async def taken(
    sandbox: AsyncSandbox, *, into: str, max_bytes: int, skip: Collection[str] = (), base: Base | None = None
) -> AsyncIterator[Base]:
    """Yield the changes at one moment, less the paths of `skip`, stored in files without a name in the folder `into`.

    They are read twice: what has changed since `base` while the sandbox goes on, then what has changed in that time,
    for which all processes are stopped. Each reading takes `max_bytes` of contents at most; further files have a
    problem. A base that lacks other paths than `skip` is not used.
    """
    if base is not None and not base.skip <= frozenset(skip):
        base = None
    began_ns = await _clock(sandbox)
    first: Base | None = None
    with suppress(InvalidRequest):  # it was moved about while it was read; all of it is read once more
        snapshot = await _read(sandbox, into, max_bytes, skip, base, pauses=False)
        first = Base(snapshot=snapshot, before_ns=began_ns)
    try:
        before_ns = await _clock(sandbox)
        snapshot = await _read(sandbox, into, max_bytes, skip, first or base, pauses=True)
        try:
            yield Base(snapshot=snapshot, before_ns=before_ns, skip=frozenset(skip))
        finally:
            snapshot.close()
    finally:
        if first is not None:
            first.snapshot.close()


async def _clock(sandbox: AsyncSandbox) -> int:
    moment = (await sandbox._require_live("the sandbox's clock").ask("clock")).get("ns")
    return moment if isinstance(moment, int) and moment > 0 else 0


async def _read(
    sandbox: AsyncSandbox, into: str, max_bytes: int, skip: Collection[str], base: Base | None, *, pauses: bool
) -> Snapshot:
    from cloche.workspace.snapshot import SnapshotReader

    answer = dict[str, Any]()
    reader = SnapshotReader(
        into, max_bytes=max_bytes, entries=MOST_ENTRIES, base=base.snapshot if base is not None else None
    )
    stream = _files_of(sandbox).changes_stream(
        CHANGES, since=None, max_bytes=max_bytes, max_entries=MOST_ENTRIES, skip=tuple(skip), note_answer=answer.update,
        base=base.before_ns if base is not None else None, pauses=pauses,
    )  # fmt: skip
    try:
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                await _finished(partial(reader.feed, piece))
        return await _finished(partial(reader.finish, answer))
    except ValueError as error:
        raise InvalidRequest(f"the sandbox's report of its changes is invalid: {error}") from error
    finally:
        reader.close()


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


def count_changes(open_folder: OpenFolder, snapshot: Snapshot) -> int:
    """Return how many paths differ from the host's now; git's own files count as one, where a reference has moved."""
    from cloche.workspace.compare import compare
    from cloche.workspace.host_files import HostTree

    folder = open_folder.folder
    comparison = compare(snapshot, open_folder.fd, hidden={*folder.hidden, *folder.left_out})
    with HostTree(open_folder.fd) as tree:
        has_moved = any(_has_moved(tree, path, entry, snapshot) for path, entry in snapshot.entries.items())
    return len(comparison.changes) + has_moved


def _has_moved(tree: HostTree, path: bytes, entry: SnapshotEntry, snapshot: Snapshot) -> bool:
    if entry.kind not in ("file", "removed") or not path.startswith(_REFERENCES):
        return False
    try:
        host = b"".join(tree.read(path)) if _look(tree, path) is not None else None
    except OSError:
        return True
    return host != (b"".join(snapshot.read(entry)) if entry.kind == "file" else None)


_REFERENCES = (b".git/refs/", b".git/HEAD", b".git/packed-refs")
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
