"""Restore the files of a workspace snapshot, while a hostile process may replace any name at any moment.

Theory of operation: the whole document is checked before anything is written. For each file, the content on the disk
and the stored content decide what to do. A file is written to a temporary name and renamed, in a folder opened without
following links. A killed restoration leaves at most a temporary file, and its manifest shows that it is incomplete.
Files that the snapshot does not have are touched only by `prune`; those that it excluded or skipped are never touched.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from time import monotonic
from typing import Any

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass
from cloche.execution.folders import stays_inside

from .blobs import BlobFolder, Damaged
from .ids import now
from .workspace_entries import PERMISSIONS, RESTORE_MANIFEST, Entry, is_excluded, named
from .workspace_tree import BOUNDS, Content, OutOfTime, TreeItem, TreeWalk, Unread, WalkBounds, read_file

_MOST_LOOKED_AT = WalkBounds(entries=200_000)
_WORDS = {
    errno.ENOSPC: "no-space", errno.EDQUOT: "no-space", errno.EACCES: "permission", errno.EPERM: "permission",
    errno.EROFS: "read-only", errno.EISDIR: "is-a-folder", errno.ENOTEMPTY: "is-a-folder",
    errno.ENAMETOOLONG: "name-too-long",
}  # fmt: skip
Result = dict[str, Any]


class _Refused(Exception):
    """Report why one name is left unchanged."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """The parameters of a restoration. `blobs` is absent without stored contents. `deadline` is of `time.monotonic`."""

    snapshot: str
    root: int
    entries: Sequence[Entry]
    excluded: Sequence[bytes]
    blobs: BlobFolder | None
    is_pruned: bool = False
    is_manifest_only: bool = False
    deadline: float | None = None


def restore(restoration: Restoration) -> list[Result]:
    """Restore the files, write the manifest, and return `{"path", "result"}` for each.

    Results are `restored`, `unchanged`, `excluded`, `skipped:<why>`, and `removed` with `is_pruned`. Raises
    InvalidRequest, RecordsFailed.
    """
    _write_manifest(restoration, None)
    results = list(_results(restoration))
    _write_manifest(restoration, results)
    return results


def _results(restoration: Restoration) -> Iterator[Result]:
    if restoration.is_pruned:
        yield from _prune(restoration)
    for entry in sorted(restoration.entries, key=lambda entry: (entry.link is not None, entry.path)):  # links last
        yield {**named(entry.path), "result": _restore_one(restoration, entry)}
    for path in restoration.excluded:
        yield {**named(path), "result": "excluded"}


def _restore_one(restoration: Restoration, entry: Entry) -> str:
    if is_excluded(entry.path):
        return "excluded"
    try:
        if entry.skipped is not None:
            raise _Refused(entry.skipped)
        if restoration.deadline is not None and monotonic() >= restoration.deadline:
            raise _Refused("time")
        return _restore_link(restoration, entry) if entry.link is not None else _restore_file(restoration, entry)
    except _Refused as refused:
        return f"skipped:{refused.reason}"
    except OutOfTime:
        return "skipped:time"
    except OSError as error:
        return f"skipped:{_WORDS.get(error.errno or 0, errno.errorcode.get(error.errno or 0, 'failed').lower())}"


def _restore_file(restoration: Restoration, entry: Entry) -> str:
    *above, name = _names(entry)
    present = _present(restoration, above, name, entry)
    is_same = present is not None and present.sha256 == entry.sha256
    mode = (entry.mode or 0) & PERMISSIONS
    if present is not None and is_same and present.mode & PERMISSIONS == mode:
        return "unchanged"
    if restoration.is_manifest_only:
        raise _Refused("manifest-only")
    data = present.data if present is not None and is_same else _content_of(restoration.blobs, entry)
    with _folder(restoration.root, above) as folder:
        # A new file even if only the mode differs: the old one may have other hard links.
        hostfs.replace(folder, name, data, mode=0o600, permissions=mode)
    return "restored"


def _restore_link(restoration: Restoration, entry: Entry) -> str:
    *above, name = _names(entry)
    target = os.fsdecode(entry.link or b"")
    if not stays_inside(os.fsdecode(entry.path), target):
        raise _Refused("leads-out")
    with suppress(FileNotFoundError), _folder(restoration.root, above, makes=False) as folder:
        state = hostfs.look(name, folder)
        if state is not None and stat.S_ISLNK(state.st_mode) and os.readlink(name, dir_fd=folder) == target:
            return "unchanged"
    if restoration.is_manifest_only:
        raise _Refused("manifest-only")
    with _folder(restoration.root, above) as folder:
        beside = f".{os.getpid()}-{os.urandom(6).hex()}.cloche"
        os.symlink(target, beside, dir_fd=folder)
        try:
            os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(beside, dir_fd=folder)
            raise
    return "restored"


def _present(restoration: Restoration, above: Sequence[str], name: str, entry: Entry) -> Content | None:
    """Return the regular file of the entry's size at its path, or None. Raises _Refused, OutOfTime."""
    try:
        with _folder(restoration.root, above, makes=False) as folder:
            state = hostfs.look(name, folder)
            if state is not None and stat.S_ISDIR(state.st_mode):
                raise _Refused("is-a-folder")
            if state is None or not stat.S_ISREG(state.st_mode) or state.st_size != entry.size:
                return None
            return read_file(name, folder, BOUNDS.file_bytes, restoration.deadline)
    except (FileNotFoundError, Unread):
        return None


def _content_of(blobs: BlobFolder | None, entry: Entry) -> bytes:
    try:
        data = blobs.read(entry.sha256 or "") if blobs is not None else None
    except Damaged:
        raise _Refused("content-damaged") from None
    if data is None:
        raise _Refused("content-not-kept" if blobs is None else "content-missing")
    return data


@contextmanager
def _folder(root: int, above: Sequence[str], *, makes: bool = True) -> Iterator[int]:
    """Yield a descriptor of a path's folder, created if `makes`. Raises _Refused for a link on the way."""
    try:
        folder = hostfs.descend(root, above, mode=0o777 if makes else None)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _Refused(_obstacle(root, above)) from None
        raise
    try:
        yield folder
    finally:
        os.close(folder)


def _obstacle(root: int, above: Sequence[str]) -> str:
    """Return the reason word for the obstacle in place of a folder."""
    for depth, name in enumerate(above):
        with suppress(OSError), hostfs.descended(root, above[:depth]) as folder:
            state = hostfs.look(name, folder)
            if state is not None and stat.S_ISLNK(state.st_mode):
                return "link"
    return "not-a-folder"


def _prune(restoration: Restoration) -> Iterator[Result]:
    snapshot_paths = {entry.path for entry in restoration.entries}
    left_alone = {entry.path for entry in restoration.entries if entry.skipped is not None} | set(restoration.excluded)
    emptied: set[bytes] = set()
    walk = TreeWalk(restoration.root, _MOST_LOOKED_AT, restoration.deadline)
    with closing(iter(walk)) as names:
        for item in names:
            if item.state is None or item.path in snapshot_paths or not left_alone.isdisjoint(prefixes(item.path)):
                continue
            result = _remove(item)
            if result == "removed":
                emptied.add(item.path.rpartition(b"/")[0])
            yield {**named(item.path), "result": result}
    for folder in sorted(emptied - {b""}, key=len, reverse=True):
        _remove_empty(restoration.root, folder)
    for reason in sorted(walk.partial):
        yield {"path": ".", "result": f"skipped:prune-{reason}"}


def _remove(item: TreeItem) -> str:
    try:
        os.unlink(item.name, dir_fd=item.folder)
    except FileNotFoundError:
        return "removed"
    except OSError as error:
        return f"skipped:{_WORDS.get(error.errno or 0, 'failed')}"
    return "removed"


def _remove_empty(root: int, folder: bytes) -> None:
    names = os.fsdecode(folder).split("/")
    while names:
        try:
            with hostfs.descended(root, names[:-1]) as parent:
                os.rmdir(names[-1], dir_fd=parent)
        except OSError:  # it is not empty, or already removed
            return
        names.pop()


def prefixes(path: bytes) -> list[bytes]:
    """Return a path and those of its parent folders."""
    components = path.split(b"/")
    return [b"/".join(components[:length]) for length in range(1, len(components) + 1)]


def _names(entry: Entry) -> list[str]:
    return os.fsdecode(entry.path).split("/")


def _write_manifest(restoration: Restoration, results: list[Result] | None) -> None:
    """Write the manifest, at first without results: so a killed restoration is recognised as incomplete."""
    document = {
        "version": 1, "snapshot": restoration.snapshot, "restoredAt": now(), "isComplete": results is not None,
        "prune": restoration.is_pruned, "manifestOnly": restoration.is_manifest_only, "results": results or [],
    }  # fmt: skip
    data = json.dumps(document, indent=2).encode() + b"\n"
    try:
        hostfs.replace(restoration.root, RESTORE_MANIFEST, data)
    except OSError as error:
        raise InvalidRequest(
            f"{RESTORE_MANIFEST} cannot be written: {error.strerror}; make room for it in the workspace"
        ) from error
