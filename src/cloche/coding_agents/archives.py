"""Archives of what an agent has changed in its view of a folder, from which another sandbox goes on.

    saved/00000012.saved    magic, lengths, a head and the host's marks as JSON, a stream of `init/changes.py`
    saved/settled           the number of the last archive whose changes were committed or discarded

Nothing but the view is in an archive. It is bounded: if all does not fit, what git ignores is left out first, then the
largest files, and the head names them. The processes of the sandbox are stopped while the changes are read, and at no
other time. A file is written beside, and gets its name when it is complete and on the disk.

All contents are the guest's: they are read again by the reader of every snapshot, and go nowhere but into a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.loops import finish
from cloche.core.record import dataclass, field, replace
from cloche.execution.sandbox import AsyncSandbox
from cloche.execution.saved_view import (
    Base,
    Listing,
    count_changes,
    folder_of,
    host_marks,
    ignored,
    listed,
    mark_of,
    note_conflicts,
    put_back,
    taken,
)
from cloche.workspace.host_files import HostTree
from cloche.workspace.snapshot import PROBLEMS, Snapshot, SnapshotReader, write_snapshot

from .places import AgentPlace

if TYPE_CHECKING:
    from cloche.execution.open_folder import OpenFolder

log = logging.getLogger("cloche.agents")
MAGIC = b"cloche archive 1\n"
SUFFIX, SETTLED = ".saved", "settled"
MOST_BYTES = 256 << 20  # of all files in one archive
KEPT = 4  # archives of one agent and project
MOST_HEAD_BYTES, MOST_MARKS_BYTES = 8 << 20, 256 << 20
MOST_NAMED, MOST_NAME_CHARS = 1000, 512  # of paths that were left out
PIECE_BYTES = 1 << 20
IGNORED = "git ignores it, and all together is larger than an archive may be"
LARGE = "all together is larger than an archive may be"
TOO_LARGE = PROBLEMS["too_large"]  # of what has grown while it was read: it is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Describe an archive: when it was saved (seconds since 1970), of which folder, and why.

    `files` is how many paths it has, `size` the bytes of their contents. `changes` counts those that differ from the
    host's, git's own files as one where a branch has moved; without any there is nothing to restore. `left_out` has
    reasons by path, and `left_out_count` counts all of them. `mark` is that of `Listing`.
    """

    path: str
    saved_at: float
    folder: str
    reason: str = ""
    files: int = 0
    changes: int = 0
    size: int = 0
    mark: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    left_out_count: int = 0

    @property
    def age_s(self) -> float:
        """Return the seconds since it was saved."""
        return max(0.0, time.time() - self.saved_at)

    @property
    def number(self) -> int:
        """Return its number; later ones have higher numbers."""
        return int(os.path.basename(self.path).removesuffix(SUFFIX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Report what was restored: the archive, and the paths that the host has changed since that sandbox began.

    The restored version is in the sandbox, the host's own is untouched, and a diff shows conflicts at these paths.
    """

    archive: Archive
    changed_on_host: tuple[str, ...] = ()


def left_out_of(sizes: Mapping[str, int], ignored_paths: Sequence[str], most_bytes: int = MOST_BYTES) -> dict[str, str]:
    """Return what is left out so that the rest fits, with reasons: what git ignores first, the largest first."""
    over = sum(sizes.values()) - most_bytes
    below = dict.fromkeys(ignored_paths, 0)
    rest = {}
    for path, size in sizes.items():
        above = next((folder for folder in _above(path) if folder in below), None)
        if above is None:
            rest[path] = size
        else:
            below[above] += size
    reasons: dict[str, str] = {}
    for candidates, reason in ((below, IGNORED), (rest, LARGE)):
        for path, size in sorted(candidates.items(), key=lambda item: -item[1]):
            if over <= 0:
                return reasons
            if size:
                reasons[path], over = reason, over - size
    return reasons


def _above(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[:count]) for count in range(len(names), 0, -1)]


async def save(
    sandbox: AsyncSandbox, place: AgentPlace, *, reason: str, last_mark: str = "", most_bytes: int = MOST_BYTES
) -> Archive | None:
    """Save what an agent has changed in its view once; see `Saver.save`."""
    with Saver(place, last_mark=last_mark, most_bytes=most_bytes) as saver:
        return await saver.save(sandbox, reason=reason)


class Saver:
    """Save what an agent has changed in its view, again and again; what was saved before is not read another time.

    `last_mark` is that of the last archive of the same sandbox.
    """

    def __init__(self, place: AgentPlace, *, last_mark: str = "", most_bytes: int = MOST_BYTES):
        self._place, self._mark, self._most_bytes = place, last_mark, most_bytes
        self._base: Base | None = None
        self._previous: Base | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep(None)
        self._keep(None)

    def _keep(self, base: Base | None) -> None:
        if self._previous is not None:
            self._previous.snapshot.close()
        self._previous, self._base = self._base, base

    @property
    def snapshots(self) -> tuple[Snapshot | None, Snapshot | None]:
        """Return what was saved the time before last, and last, both until the next save; None for what is unknown."""
        before, after = (base.snapshot if base is not None else None for base in (self._previous, self._base))
        return before, after

    async def save(self, sandbox: AsyncSandbox, *, reason: str) -> Archive | None:
        """Save it; return None if nothing has changed since the last time.

        Raises InvalidRequest without a view or for too long names, OSError if the disk is full, and the errors of a
        lost sandbox.
        """
        listing = await listed(sandbox)
        if self._mark and listing.mark == self._mark:
            return None
        left_out = await _choose(sandbox, listing, self._most_bytes)
        folder = self._place.saved
        os.makedirs(folder, mode=0o700, exist_ok=True)
        most_bytes = self._most_bytes
        async with taken(sandbox, into=folder, max_bytes=most_bytes, skip=tuple(left_out), base=self._base) as now:
            open_folder = folder_of(sandbox)
            about: dict[str, Any] = {
                "saved_at": time.time(),
                "folder": open_folder.folder.path,
                "reason": reason,
                "mark": listing.mark,
            }
            if now.snapshot.is_partial:
                left_out["."] = "there are more changes than a diff may have"
            marks, about["changes"] = await finish(asyncio.to_thread(_against_host, open_folder, now.snapshot))
            archive, written = await finish(asyncio.to_thread(_write, folder, now.snapshot, about, left_out, marks))
            self._keep(replace(now, snapshot=written) if TOO_LARGE not in left_out.values() else None)
        self._mark = listing.mark
        return archive


def _against_host(open_folder: OpenFolder, snapshot: Snapshot) -> tuple[dict[str, str], int]:
    return host_marks(open_folder, snapshot), count_changes(open_folder, snapshot)


async def _choose(sandbox: AsyncSandbox, listing: Listing, most_bytes: int) -> dict[str, str]:
    if sum(listing.sizes.values()) <= most_bytes and not listing.is_cut:
        return {}
    paths = await ignored(sandbox)
    if listing.is_cut:  # of a folder such as node_modules
        listing = await listed(sandbox, skip=paths)
        return {**dict.fromkeys(paths, IGNORED), **left_out_of(listing.sizes, (), most_bytes)}
    return left_out_of(listing.sizes, paths, most_bytes)


def _write(
    folder: str, snapshot: Snapshot, about: Mapping[str, Any], left_out: dict[str, str], marks: Mapping[str, str]
) -> tuple[Archive, Snapshot]:
    files = size = 0
    for path, entry in snapshot.entries.items():
        if entry.problem or entry.kind == "other":
            left_out[os.fsdecode(path)] = entry.problem or "it is neither a file, a folder nor a link"
        else:
            files, size = files + 1, size + entry.size
    named = {path[:MOST_NAME_CHARS]: reason for path, reason in sorted(left_out.items())[:MOST_NAMED]}
    head = {**about, "files": files, "size": size, "left_out": named, "left_out_count": len(left_out)}
    parts = [json.dumps(part).encode() for part in (head, marks)]
    if len(parts[0]) > MOST_HEAD_BYTES or len(parts[1]) > MOST_MARKS_BYTES:  # an archive that could not be read again
        raise InvalidRequest("the names of the changed files are too long for an archive")
    with _opened(folder) as folder_fd:
        name, written = _put(folder_fd, parts, snapshot)
        _prune(folder_fd)
    return Archive(path=f"{folder}/{name}", **head), written


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    fd = hostfs.open_folder(folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _put(folder_fd: int, parts: Sequence[bytes], snapshot: Snapshot) -> tuple[str, Snapshot]:
    """Write an archive to the disk under the next free number; return its name, and the snapshot as it is there."""
    with hostfs.new_file(folder_fd, 0o600) as (beside, file), file:
        file.write(MAGIC + b"".join(len(part).to_bytes(8, "big") for part in parts) + b"".join(parts))
        written = write_snapshot(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
        number = max(_numbers(folder_fd), default=0) + 1
        while True:
            name = f"{number:08d}{SUFFIX}"
            try:
                os.link(beside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except FileExistsError:  # of another process that saves now
                number += 1
            else:
                break
    os.unlink(beside, dir_fd=folder_fd)
    os.fsync(folder_fd)
    return name, written


def _numbers(folder: int | str) -> list[int]:
    names = (name.removesuffix(SUFFIX) for name in os.listdir(folder) if name.endswith(SUFFIX))
    return sorted(int(name) for name in names if name.isdigit())


def _prune(folder_fd: int) -> None:
    for number in _numbers(folder_fd)[:-KEPT]:
        with suppress(FileNotFoundError):  # another process has done so meanwhile
            os.unlink(f"{number:08d}{SUFFIX}", dir_fd=folder_fd)
    for name in os.listdir(folder_fd):  # of a process that was killed while it wrote
        if name.endswith(".cloche") and os.stat(name, dir_fd=folder_fd).st_mtime < time.time() - 3600:
            os.unlink(name, dir_fd=folder_fd)


def archives(place: AgentPlace) -> tuple[Archive, ...]:
    """Return the archives of an agent and project, the newest first; damaged ones are passed over."""
    folder = place.saved
    try:
        numbers = _numbers(folder)
    except FileNotFoundError:
        return ()
    found = []
    for number in reversed(numbers):
        path = f"{folder}/{number:08d}{SUFFIX}"
        try:
            with open(path, "rb") as file:
                found.append(_read_head(path, file)[0])
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the archive %s cannot be read: %s", path, error)
    return tuple(found)


def pending_archive(place: AgentPlace) -> Archive | None:
    """Return the newest archive if its changes were neither committed nor discarded; None if there is none."""
    newest = next(iter(archives(place)), None)
    return newest if newest is not None and newest.changes and newest.number > _settled(place.saved) else None


def settle(place: AgentPlace) -> None:
    """Note that the newest archive needs no restoring: what it has was committed or discarded. The file stays."""
    newest = next(iter(archives(place)), None)
    if newest is not None:
        with _opened(place.saved) as folder_fd:
            hostfs.replace(folder_fd, SETTLED, str(newest.number).encode(), mode=0o600, permissions=0o600)


def _settled(folder: str) -> int:
    try:
        with open(f"{folder}/{SETTLED}", "rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 0


def _read_head(path: str, file: BinaryIO) -> tuple[Archive, int]:
    """Return an archive and the length of its marks, which come next. Raises ValueError."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it is no archive, or of another version")
    sizes = [int.from_bytes(file.read(8), "big") for _ in range(2)]
    if sizes[0] > MOST_HEAD_BYTES or sizes[1] > MOST_MARKS_BYTES:
        raise ValueError("its head is too large")
    return Archive(path=path, **json.loads(file.read(sizes[0]))), sizes[1]


async def restore(sandbox: AsyncSandbox, archive: Archive) -> Restored:
    """Make an archive's changes in a sandbox with a view of the same folder, before anything else runs in it.

    Where the host has changed a file since, the archive's version is in the sandbox, and each diff shows a conflict.
    Raises InvalidRequest for another folder or a damaged archive, and the SandboxFile errors.
    """
    open_folder = folder_of(sandbox)
    if open_folder.folder.path != archive.folder:
        raise InvalidRequest(f"this archive is of {archive.folder}, and the sandbox has {open_folder.folder.path}")
    snapshot, marks = await finish(asyncio.to_thread(lambda: read_archive(archive)))
    try:
        changed = await finish(asyncio.to_thread(lambda: _changed(open_folder.fd, marks)))
        note_conflicts(sandbox, changed)  # before, so that nothing is ever shown without
        await put_back(sandbox, snapshot)
    finally:
        snapshot.close()
    return Restored(archive=archive, changed_on_host=changed)


def read_archive(archive: Archive) -> tuple[Snapshot, Mapping[str, str]]:
    """Return what an archive has, and the host's marks. Raises InvalidRequest if it is damaged."""
    try:
        with open(archive.path, "rb") as file:
            _, size = _read_head(archive.path, file)
            marks = json.loads(file.read(size))
            reader = SnapshotReader(os.path.dirname(archive.path))
            try:
                while piece := file.read(PIECE_BYTES):
                    reader.feed(piece)
                return reader.finish({"count": archive.files}), marks
            finally:
                reader.close()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"the archive {archive.path} cannot be read: {error}") from error


def _changed(folder_fd: int, marks: Mapping[str, str]) -> tuple[str, ...]:
    with HostTree(folder_fd) as tree:
        return tuple(sorted(path for path, mark in marks.items() if mark_of(tree, os.fsencode(path)) != mark))
