"""Put the files of a workspace back as a snapshot has them, where somebody else may replace any name at any moment.

Theory of operation: the document is checked whole before anything is written. What there is to do for a file is decided
by `_decide`, of what is on the disk and what is kept. A file is written beside and renamed, in a folder that was opened
through no link: a killed restoration leaves a temporary file at most, and its manifest says that it is not complete.
What the snapshot does not know is touched by `prune` alone; what it excluded or skipped, by nothing.
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
from .workspace_tree import BOUNDS, Bounds, Content, Found, OutOfTime, Unread, Walk, read_file

_MOST_LOOKED_AT = Bounds(entries=200_000)
_WORDS = {
    errno.ENOSPC: "no-space", errno.EDQUOT: "no-space", errno.EACCES: "permission", errno.EPERM: "permission",
    errno.EROFS: "read-only", errno.EISDIR: "is-a-folder", errno.ENOTEMPTY: "is-a-folder",
    errno.ENAMETOOLONG: "name-too-long",
}  # fmt: skip
Result = dict[str, Any]


class _Refused(Exception):
    """Report why one name is left as it is."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """Be what is restored where. `blobs` None: no content is kept. `deadline` is of `time.monotonic`."""

    snapshot: str
    root: int
    entries: Sequence[Entry]
    excluded: Sequence[bytes]
    blobs: BlobFolder | None
    is_pruned: bool = False
    is_manifest_only: bool = False
    deadline: float | None = None


def restore(asked: Restoration) -> list[Result]:
    """Restore the files, write the manifest, and return `{"path", "result"}` for each.

    Results are `restored`, `unchanged`, `excluded`, `skipped:<why>`, and `removed` where it was asked to prune. Raises
    InvalidRequest, RecordsFailed.
    """
    _write_manifest(asked, None)
    results = list(_results(asked))
    _write_manifest(asked, results)
    return results


def _results(asked: Restoration) -> Iterator[Result]:
    if asked.is_pruned:
        yield from _prune(asked)
    for entry in sorted(asked.entries, key=lambda entry: (entry.link is not None, entry.path)):  # links last
        yield {**named(entry.path), "result": _restore_one(asked, entry)}
    for path in asked.excluded:
        yield {**named(path), "result": "excluded"}


def _restore_one(asked: Restoration, entry: Entry) -> str:
    if is_excluded(entry.path):
        return "excluded"
    try:
        if entry.skipped is not None:
            raise _Refused(entry.skipped)
        if asked.deadline is not None and monotonic() >= asked.deadline:
            raise _Refused("time")
        return _restore_link(asked, entry) if entry.link is not None else _restore_file(asked, entry)
    except _Refused as refused:
        return f"skipped:{refused.reason}"
    except OutOfTime:
        return "skipped:time"
    except OSError as error:
        return f"skipped:{_WORDS.get(error.errno or 0, errno.errorcode.get(error.errno or 0, 'failed').lower())}"


def _restore_file(asked: Restoration, entry: Entry) -> str:
    *above, name = _names(entry)
    present = _present(asked, above, name, entry)
    is_same = present is not None and present.sha256 == entry.sha256
    mode = (entry.mode or 0) & PERMISSIONS
    if present is not None and is_same and present.mode & PERMISSIONS == mode:
        return "unchanged"
    if asked.is_manifest_only:
        raise _Refused("manifest-only")
    data = present.data if present is not None and is_same else _kept(asked.blobs, entry)
    with _folder(asked.root, above) as at:
        # A new file even where only the mode differs: the old one may have another name elsewhere.
        hostfs.replace(at, name, data, mode=0o600, permissions=mode)
    return "restored"


def _restore_link(asked: Restoration, entry: Entry) -> str:
    *above, name = _names(entry)
    target = os.fsdecode(entry.link or b"")
    if not stays_inside(os.fsdecode(entry.path), target):
        raise _Refused("leads-out")
    with suppress(FileNotFoundError), _folder(asked.root, above, makes=False) as at:
        state = hostfs.look(name, at)
        if state is not None and stat.S_ISLNK(state.st_mode) and os.readlink(name, dir_fd=at) == target:
            return "unchanged"
    if asked.is_manifest_only:
        raise _Refused("manifest-only")
    with _folder(asked.root, above) as at:
        beside = f".{os.getpid()}-{os.urandom(6).hex()}.cloche"
        os.symlink(target, beside, dir_fd=at)
        try:
            os.rename(beside, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            os.unlink(beside, dir_fd=at)
            raise
    return "restored"


def _present(asked: Restoration, above: Sequence[str], name: str, entry: Entry) -> Content | None:
    """Return the file that has the path, None where another file, a link or nothing has. Raises _Refused, OutOfTime."""
    try:
        with _folder(asked.root, above, makes=False) as at:
            state = hostfs.look(name, at)
            if state is not None and stat.S_ISDIR(state.st_mode):
                raise _Refused("is-a-folder")
            if state is None or not stat.S_ISREG(state.st_mode) or state.st_size != entry.size:
                return None
            return read_file(name, at, BOUNDS.file_bytes, asked.deadline)
    except (FileNotFoundError, Unread):
        return None


def _kept(blobs: BlobFolder | None, entry: Entry) -> bytes:
    try:
        data = blobs.read(entry.sha256 or "") if blobs is not None else None
    except Damaged:
        raise _Refused("content-damaged") from None
    if data is None:
        raise _Refused("content-not-kept" if blobs is None else "content-missing")
    return data


@contextmanager
def _folder(root: int, above: Sequence[str], *, makes: bool = True) -> Iterator[int]:
    """Hold the folder of a path open, made where it `makes` folders. Raises _Refused for a link in between."""
    try:
        at = hostfs.descend(root, above, mode=0o777 if makes else None)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _Refused(_obstacle(root, above)) from None
        raise
    try:
        yield at
    finally:
        os.close(at)


def _obstacle(root: int, above: Sequence[str]) -> str:
    """Return the word for what stands where a folder is needed."""
    for depth, name in enumerate(above):
        with suppress(OSError), hostfs.descended(root, above[:depth]) as at:
            state = hostfs.look(name, at)
            if state is not None and stat.S_ISLNK(state.st_mode):
                return "link"
    return "not-a-folder"


def _prune(asked: Restoration) -> Iterator[Result]:
    """Remove what the snapshot does not know, and folders that become empty by that."""
    known = {entry.path for entry in asked.entries}
    left_alone = {entry.path for entry in asked.entries if entry.skipped is not None} | set(asked.excluded)
    emptied: set[bytes] = set()
    walk = Walk(asked.root, _MOST_LOOKED_AT, asked.deadline)
    with closing(iter(walk)) as names:
        for found in names:
            if found.state is None or found.path in known or not left_alone.isdisjoint(prefixes(found.path)):
                continue
            result = _remove(found)
            if result == "removed":
                emptied.add(found.path.rpartition(b"/")[0])
            yield {**named(found.path), "result": result}
    for folder in sorted(emptied - {b""}, key=len, reverse=True):
        _remove_empty(asked.root, folder)
    for reason in sorted(walk.partial):
        yield {"path": ".", "result": f"skipped:prune-{reason}"}


def _remove(found: Found) -> str:
    try:
        os.unlink(found.name, dir_fd=found.at)
    except FileNotFoundError:
        return "removed"
    except OSError as error:
        return f"skipped:{_WORDS.get(error.errno or 0, 'failed')}"
    return "removed"


def _remove_empty(root: int, folder: bytes) -> None:
    names = os.fsdecode(folder).split("/")
    while names:
        try:
            with hostfs.descended(root, names[:-1]) as at:
                os.rmdir(names[-1], dir_fd=at)
        except OSError:  # there is still something in it, or it has gone
            return
        names.pop()


def prefixes(path: bytes) -> list[bytes]:
    """Return a path and those of the folders above it."""
    parts = path.split(b"/")
    return [b"/".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _names(entry: Entry) -> list[str]:
    return os.fsdecode(entry.path).split("/")


def _write_manifest(asked: Restoration, results: list[Result] | None) -> None:
    """Write the manifest: without results before anything is done, so that what is killed is seen to be incomplete."""
    document = {
        "version": 1, "snapshot": asked.snapshot, "restoredAt": now(), "isComplete": results is not None,
        "prune": asked.is_pruned, "manifestOnly": asked.is_manifest_only, "results": results or [],
    }  # fmt: skip
    data = json.dumps(document, indent=2).encode() + b"\n"
    try:
        hostfs.replace(asked.root, RESTORE_MANIFEST, data)
    except OSError as error:
        raise InvalidRequest(
            f"{RESTORE_MANIFEST} cannot be written: {error.strerror}; make room for it in the workspace"
        ) from error
