"""A workspace as its owner holds it: a mount that the next jail attaches, and a record of the files in it.

Files are read only after every process in the workspace was killed or stopped. The guest chose the names and may have
left links, FIFOs, devices or a million files; a live session may still be changing the tree. So no file is opened by a
path. The walk descends by descriptors, depth first, and enters each folder once, even if the folder is moved during the
walk. It does not follow links and reads only regular files of the workspace's own file system. Time, number of entries,
depth, number and size of files and the total length of paths are bounded. Paths are built for files only, not for
folders.

The files of a run stay readable after its sandbox is closed, as long as the result exists. The descriptor that keeps
them has no name in any file system, so the kernel frees them however the caller ends.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, closing, contextmanager, nullcontext
from typing import Any, BinaryIO, Protocol

from cloche import hostfs
from cloche.core.errors import OutcomeUnknown, SandboxFileNotFound, SandboxFileRefused, SandboxFileTooLarge
from cloche.core.languages import PROGRAM_FILES
from cloche.core.limits import Limits
from cloche.core.record import dataclass
from cloche.core.request import workspace_path
from cloche.core.result import FileRecord, SaveFiles
from cloche.jail.messages import Run
from cloche.jail.work_folder import open_as_owner

from ..saved_files import (
    CHUNK_BYTES,
    MOST_S,
    Changes,
    ContentSource,
    Slice,
    Until,
    changed_since,
    copy_out,
    in_thread,
    time_for_files,
)
from ..subordinate_ids import Show, make_seen

MAX_FILES, MAX_DEPTH = 10_000, 64
MAX_ENTRIES = 200_000  # several times the number of files that the default limits allow
MAX_PATH_CHARS = 8 << 20  # of all paths together; the remembered paths have at most as many bytes
LOOKS_EVERY = 32  # the clock is checked once per this many entries
UNSEEN = frozenset({"time", "entries", "access"})  # reasons that leave an unknown part of the tree unseen
FEW_FILES = 4
SMALL_BYTES, SMALL_FILES, SMALL_S = 512 * 1024, 128, 0.02
Halted = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Record a file's identity (inode, size and ctime, which a guest cannot set) and its hash."""

    inode: int
    changed_ns: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Hold the outcome of a walk: all known files, records of new and changed ones, and the number of skipped entries.

    The keys of `known` are paths as bytes: in a `str`, one character outside the BMP makes every character take four
    bytes (PEP 393). `partial` holds the reasons why files may be missing, out of `hostfs.REASONS`.
    """

    known: Mapping[bytes, Known]
    changed: tuple[FileRecord, ...]
    skipped: int
    partial: frozenset[str] = frozenset()


class Copies(Protocol):
    """Receive the content of changed files while they are hashed."""

    def begin(self, path: str) -> None: ...
    def write(self, data: bytes, /) -> None: ...
    def forget(self, path: str) -> None: ...


def collect(
    root_fd: int,
    before: Mapping[bytes, Known],
    inputs: Mapping[str, bytes],
    *,
    max_bytes: int,
    until: Until,
    max_entries: int = MAX_ENTRIES,
    copies: Copies | None = None,
) -> Collection:
    """Walk the workspace. `inputs` maps input files to their content; unchanged inputs are not reported."""
    walk = _Walk(until, max_entries)
    remembered: dict[bytes, Known] = {}
    left_out: dict[bytes, Known] = {}
    changed: list[FileRecord] = []
    bytes_left, chars = max_bytes, 0
    with closing(walk.files(root_fd)) as files:
        for folder_fd, name, path, state in files:
            chars += len(path)
            key, current = os.fsencode(path), None
            old = before.get(key)
            if len(remembered) >= MAX_FILES or chars > MAX_PATH_CHARS or state.st_size > bytes_left:
                walk.skip("files" if len(remembered) >= MAX_FILES else "paths" if chars > MAX_PATH_CHARS else "bytes")
            elif old is not None and _is_same(old, state):
                remembered[key] = old
                continue
            else:
                current = _read(folder_fd, name, path, walk, bytes_left, copies)
            if current is None:
                if old is not None:
                    left_out[key] = old
                continue
            remembered[key] = current
            bytes_left -= current.size
            if current.sha256 != (_digest_of(inputs.get(path)) or (old.sha256 if old is not None else None)):
                changed.append(FileRecord(path=path, size=current.size, sha256=current.sha256))
            elif copies is not None:
                copies.forget(path)
    _keep_known(remembered, before if walk.reasons & UNSEEN else left_out)
    changed.sort(key=lambda record: record.path)
    return Collection(known=remembered, changed=tuple(changed), skipped=walk.skipped, partial=frozenset(walk.reasons))


def is_as_given(root_fd: int, inputs: Mapping[str, bytes], *, entries: int) -> bool:
    """Tell whether a workspace with `entries` inodes, its root included, holds exactly the input files."""
    if entries != len(inputs) + 1 or len(inputs) > FEW_FILES:
        return False
    try:
        for path, data in inputs.items():
            if "/" in path or not _is_given(root_fd, path, data):
                return False
    except (OSError, SandboxFileRefused):
        return False
    return True


def _is_given(root_fd: int, name: str, content: bytes) -> bool:
    fd, state = hostfs.open_regular(name, root_fd)
    try:
        if state.st_size != len(content) or len(content) > CHUNK_BYTES:
            return False
        return os.read(fd, len(content) + 1) == content
    finally:
        os.close(fd)


def _read(folder_fd: int, name: str, path: str, walk: _Walk, max_bytes: int, copies: Copies | None) -> Known | None:
    """Return a file's current record, copying the content if requested; None if it cannot be read to its end."""
    try:
        # Checks again: the guest may have replaced the file since the stat.
        fd, state = hostfs.open_regular(name, folder_fd)
    except OSError:
        walk.skip("access")
        return None
    try:
        if state.st_dev != walk.device:
            walk.skip("access")
            return None
        if state.st_size > max_bytes:
            walk.skip("bytes")
            return None
        if copies is not None:
            copies.begin(path)
        read = _digest(fd, state.st_size, walk, copies)
        if read is None:
            if copies is not None:
                copies.forget(path)
            return None
        size, digest = read
        return Known(inode=state.st_ino, changed_ns=state.st_ctime_ns, size=size, sha256=digest)
    finally:
        os.close(fd)


def _digest(fd: int, size: int, walk: _Walk, copies: Copies | None) -> tuple[int, str] | None:
    """Return the number of bytes read, at most `size`, and their hash; None if the time ran out."""
    digest, bytes_left = hashlib.sha256(), size
    try:
        while bytes_left > 0 and (data := os.read(fd, min(CHUNK_BYTES, bytes_left))):
            if walk.is_over():
                walk.skip("time")
                return None
            digest.update(data)
            bytes_left -= len(data)
            if copies is not None:
                copies.write(data)
    except OSError:
        walk.skip("access")
        return None
    return size - bytes_left, digest.hexdigest()


def _is_same(old: Known, now: os.stat_result) -> bool:
    return old.inode == now.st_ino and old.changed_ns == now.st_ctime_ns and old.size == now.st_size


def _digest_of(content: bytes | None) -> str | None:
    return hashlib.sha256(content).hexdigest() if content is not None else None


def _keep_known(remembered: dict[bytes, Known], before: Mapping[bytes, Known]) -> None:
    """Carry over the records of files that this walk did not reach, as far as they fit.

    Without them, unchanged files would be reported as new by the next walk. A record that does not fit costs at most
    one such false report.
    """
    room = MAX_PATH_CHARS - sum(map(len, remembered)) if before else 0
    for path, old in before.items():
        if path in remembered:
            continue
        room -= len(path)
        if room < 0 or len(remembered) >= MAX_FILES:
            return
        remembered[path] = old


class _Folder:
    __slots__ = ("depth", "entries", "fd", "prefix")

    def __init__(self, fd: int, prefix: str, depth: int):
        self.fd, self.prefix, self.depth = fd, prefix, depth
        self.entries = os.scandir(fd)

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


class _Walk:
    """Visit the regular files of a workspace and count the entries that are left out.

    It holds only the folders on the way to the current one, and the inode numbers of all visited folders.
    """

    def __init__(self, until: Until, max_entries: int):
        self._until, self._left = until, max_entries
        self._visited: set[int] = set()
        self._is_ended = False
        self.device = -1
        self.skipped = 0
        self.reasons: set[str] = set()

    def skip(self, reason: str = "") -> None:
        """Count a skipped entry. `reason` is empty for entries that are never collected, such as links."""
        self.skipped += 1
        if reason:
            self.reasons.add(reason)

    def is_over(self) -> bool:
        return self._until.is_over()

    def files(self, root_fd: int, prefix: str = "") -> Generator[tuple[int, str, str, os.stat_result]]:
        """Yield descriptor of the folder, name, path and `stat` of each regular file below."""
        stack: list[_Folder] = []
        try:
            self._enter(stack, ".", root_fd, prefix, prefix.count("/"))
            while stack:
                current = stack[-1]
                try:
                    yield from self._files_of(current, stack)
                except OSError:
                    self.skip("access")
                if self._is_ended:
                    return
                if stack[-1] is current:
                    stack.pop().close()
        finally:
            for folder in stack:
                folder.close()

    def _files_of(self, current: _Folder, stack: list[_Folder]) -> Generator[tuple[int, str, str, os.stat_result]]:
        """Yield a folder's files until a subfolder was pushed on the stack, or to the folder's end."""
        for entry in current.entries:
            self._left -= 1
            if self._left < 0 or (self._left % LOOKS_EVERY == 0 and self.is_over()):
                self.skip("entries" if self._left < 0 else "time")
                self._is_ended = True
                return
            try:
                state = entry.stat(follow_symlinks=False)
            except OSError:
                self.skip("access")
                continue
            kind = stat.S_IFMT(state.st_mode)
            if kind == stat.S_IFREG:
                path = current.prefix + entry.name
                if path not in PROGRAM_FILES:
                    yield current.fd, entry.name, path, state
            elif kind != stat.S_IFDIR:
                self.skip()
            elif current.depth >= MAX_DEPTH:
                self.skip("depth")
            elif state.st_ino not in self._visited:
                self._enter(stack, entry.name, current.fd, f"{current.prefix}{entry.name}/", current.depth + 1)
                if stack[-1] is not current:
                    return

    def _enter(self, stack: list[_Folder], name: str, parent: int, prefix: str, depth: int) -> None:
        """Open a folder unless it was visited before: the guest may have moved it during the walk."""
        try:
            fd = hostfs.open_folder(name, parent)
        except OSError:
            self.skip("access")
            return
        try:
            state = os.fstat(fd)
            if self.device < 0:
                self.device = state.st_dev
            # Skip mount points, which Cloche made.
            if state.st_dev == self.device and state.st_ino not in self._visited:
                self._visited.add(state.st_ino)
                stack.append(_Folder(fd, prefix, depth))
                fd = -1
        finally:
            if fd >= 0:
                os.close(fd)


def open_regular(root_fd: int, path: str) -> int:
    """Open a regular file below the root for reading. Raises OSError or SandboxFileRefused."""
    *folders, name = path.split("/")
    refusal = SandboxFileRefused(f"{path!r} is not a regular file of the workspace", path=path)
    try:
        with hostfs.descended(root_fd, folders) as folder_fd:
            fd, state = hostfs.open_regular(name, folder_fd)
    except hostfs.NotRegular:
        raise refusal from None
    if state.st_dev != os.fstat(root_fd).st_dev:
        os.close(fd)
        raise refusal
    return fd


def read_regular(root_fd: int, path: str, *, max_bytes: int) -> bytes:
    """Return the content of a file of the workspace. Raises the SandboxFile errors."""
    inside = workspace_path(path)
    try:
        fd = open_regular(root_fd, inside)
    except FileNotFoundError:
        raise SandboxFileNotFound(f"no file {path!r} in the workspace", path=path) from None
    except SandboxFileRefused:
        raise
    except OSError as error:
        raise SandboxFileRefused(
            f"cannot read {path!r}: {error.strerror}; links are not followed", path=path
        ) from error
    with open(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SandboxFileTooLarge(f"{path!r} is larger than max_bytes={max_bytes}", path=path)
    return data


def list_paths(root_fd: int, path: str, until: Until) -> tuple[str, ...]:
    """Return the paths of the regular files below `path`, relative to the workspace, sorted.

    Raises SandboxFileTooLarge if a bound is exceeded, because a partial list would look complete.
    """
    top = "" if path in (".", "", "/workspace") else workspace_path(path)
    try:
        fd = hostfs.descend(root_fd, top.split("/") if top else ())
    except OSError:
        return ()
    walk, paths, chars = _Walk(until, MAX_ENTRIES), [], 0
    walk.device = os.fstat(root_fd).st_dev
    try:
        with closing(walk.files(fd, f"{top}/" if top else "")) as files:
            for _, _, inside, _ in files:
                chars += len(inside)
                if chars > MAX_PATH_CHARS:
                    walk.skip("paths")
                    break
                paths.append(inside)
    finally:
        os.close(fd)
    if why := walk.reasons & {"time", "entries", "paths"}:
        text = f"{path!r} has too many entries to list ({', '.join(sorted(why))}); list a folder below it"
        raise SandboxFileTooLarge(text, path=path)
    return tuple(sorted(paths))


def keep_mount(workspace_fd: int, records: tuple[FileRecord, ...]) -> SaveFiles:
    """Keep a tmpfs workspace by a descriptor: a detached mount lives exactly as long as its descriptor."""
    return _KeptMount(os.dup(workspace_fd), records).save


class _KeptMount:
    def __init__(self, fd: int, records: tuple[FileRecord, ...]):
        self._fd, self._records = fd, records
        weakref.finalize(self, os.close, fd)

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[ContentSource]:
        try:
            fd = open_regular(self._fd, record.path)
        except FileNotFoundError as error:
            raise SandboxFileNotFound(
                f"{record.path!r} is no longer in the workspace: a later run there removed it; save the files "
                "of a cell before the next one, or pass out=DIR to the cell",
                path=record.path,
            ) from error
        except SandboxFileRefused as error:
            raise changed_since(record) from error
        except OSError as error:
            raise changed_since(record) from error
        with open(fd, "rb") as file:
            yield file


class KeptCopies:
    """Keep copies of files in one unnamed temporary file, for a workspace that is a folder of the host and is removed.

    Content is copied while it is read for hashing, so the copies match the hashes of the result.
    """

    def __init__(self) -> None:
        import tempfile

        folder = hostfs.temporary_folder()
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the result
        weakref.finalize(self, self._file.close)  # a dropped result is no leak: avoid tempfile's ResourceWarning
        self._records: tuple[FileRecord, ...] = ()
        self._offsets: dict[str, int] = {}

    def begin(self, path: str) -> None:
        self._offsets[path] = self._file.tell()

    def write(self, data: bytes, /) -> None:
        self._file.write(data)

    def forget(self, path: str) -> None:
        """Drop the copy of the file that was written last."""
        self._file.seek(self._offsets.pop(path))
        self._file.truncate()

    def saver(self, records: tuple[FileRecord, ...]) -> SaveFiles:
        """Return the function that `Result.save` calls."""
        self._file.flush()
        self._records = records
        return self.save

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[ContentSource]:
        yield Slice(self._file.fileno(), self._offsets[record.path])


class Workspace:
    """Hold a workspace: below level jail a `folder` of the host, at level jail a mount, with an empty `folder`.

    A mount can be attached only once. The helper or guest that attaches it returns another mount of the same files.
    """

    def __init__(self, limits: Limits, folder: str, show: Show | None = None):
        """Take `show` where the guest's id is not ours to take: it maps the files to this user."""
        self._max_bytes, self._folder, self._show = limits.disk_bytes, folder, show
        self._shown, self._is_shown, self.fd = -1, False, -1
        self._known: dict[bytes, Known] = {}
        self._program = ""  # the last run's program file, which stays until the next run
        self.has_owner = False  # a sandbox, which drops it when it ends or moves to another workspace
        self.has_node = False  # an interpreter that may continue in it

    def copy_for_fork(self) -> Workspace:
        """Return a holder for a copy of the files, to be made later, with the same known records."""
        copied = Workspace.__new__(Workspace)
        copied._max_bytes, copied._folder, copied._known = self._max_bytes, self._folder, dict(self._known)
        copied._program, copied._show = self._program, self._show
        copied._shown = copied.fd = -1
        copied._is_shown = copied.has_owner = copied.has_node = False
        return copied

    def take(self, fds: Sequence[int]) -> None:
        """Hold the received mount in place of the previous one; a folder of the host is opened once.

        The second mount, which shows the files as this user's, is sent with the first mount of each file system.
        """
        fresh, *shown = fds or (-1,)
        if fresh >= 0 and self._show is not None and not self._hold_shown(fresh, shown):
            os.close(fresh)  # of a guest that failed before it wrote anything
            self.drop()
            return
        if fresh < 0 and self.fd < 0 and self._folder:
            fresh = open_as_owner(self._folder)
        if fresh >= 0:
            self._drop_mount()
            self.fd = fresh

    def _hold_shown(self, fresh: int, shown: Sequence[int]) -> bool:
        """Hold a second mount if one was sent; tell whether the second mount shows the files of `fresh`."""
        if shown:
            self._drop_shown()
            self._shown = shown[0]
        return self._shown >= 0 and os.fstat(self._shown).st_dev == os.fstat(fresh).st_dev

    async def _view_fd(self) -> int:
        """Return the descriptor to read files through. Raises OutcomeUnknown if the files cannot be shown."""
        if self._show is None or self.fd < 0:
            return self.fd
        if not self._is_shown:
            shown = self._shown
            try:
                await make_seen(self._show, shown)
                if self._shown != shown:
                    raise OSError(errno.EBADF, "the sandbox was closed meanwhile")
            except OSError as error:
                raise OutcomeUnknown(
                    f"the code has run, but its files cannot be read: {error.strerror or error}"
                ) from error
            self._is_shown = True
        return self._shown

    def clear_for(self, run: Run) -> None:
        """Make the next run remove the previous run's program file, unless it replaces that file."""
        before, self._program = self._program, next((path for path, _, _ in run.files if path in PROGRAM_FILES), "")
        if before != self._program:
            run.leftover = before

    def drop_unless_needed(self) -> None:
        """Close the descriptors if neither a sandbox nor an interpreter uses them."""
        if not (self.has_owner or self.has_node):
            self.drop()

    def drop(self) -> None:
        self._drop_mount()
        self._drop_shown()

    def _drop_mount(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _drop_shown(self) -> None:
        if self._shown >= 0:
            os.close(self._shown)
        self._shown, self._is_shown = -1, False

    def forget(self) -> None:
        """Close the descriptors and drop all records, before another workspace takes its place."""
        self.drop()
        self._known.clear()

    def is_untouched(self) -> bool:
        """Tell whether the workspace is certainly empty and nothing is recorded, by one `fstatvfs` call."""
        if self._folder or self.fd < 0 or self._known:
            return False
        state = os.fstatvfs(self.fd)
        return state.f_files - state.f_ffree <= 1

    async def collected(
        self, inputs: Mapping[str, bytes], *, timeout_s: float, halted: Halted = nullcontext, is_last: bool = False
    ) -> Changes:
        """Return the changes of a run that had `timeout_s`; after the last run, records are not kept up.

        A larger workspace is walked in a thread while `halted` stops the processes that still run in it.
        """
        if is_last and not self._known and self._is_as_given(inputs):
            return Changes()
        view_fd = await self._view_fd()
        if (few := self._collect_few(view_fd, inputs)) is not None:
            return self._changes(few, view_fd)
        until, copies = Until(time_for_files(timeout_s)), KeptCopies() if self._folder else None
        fd, before = os.dup(view_fd), self._known  # a duplicate, because closing the sandbox closes the original

        def look() -> Collection:
            return collect(fd, before, inputs, max_bytes=self._max_bytes, until=until, copies=copies)

        try:
            async with halted():
                collection = await in_thread(until, look)
            return self._changes(collection, fd, copies)
        finally:
            os.close(fd)

    def _changes(self, collection: Collection, fd: int, copies: KeptCopies | None = None) -> Changes:
        """Record the outcome of a walk, and keep the files for `Result.save` if any changed."""
        self._known = dict(collection.known)
        save = None
        if collection.changed:
            save = keep_mount(fd, collection.changed) if copies is None else copies.saver(collection.changed)
        return Changes(records=collection.changed, skipped=collection.skipped, partial=collection.partial, save=save)

    async def paths(self, path: str, *, halted: Halted) -> tuple[str, ...]:
        until, fd = Until(MOST_S), os.dup(await self._view_fd())
        try:
            async with halted():
                return await in_thread(until, lambda: list_paths(fd, path, until))
        finally:
            os.close(fd)

    async def changes(self, order: dict[str, Any], into: int, *, halted: Halted) -> dict[str, Any]:
        """Write frames of the whole workspace to the descriptor `into`, see `init.changes`; return the answer."""
        from cloche.init.changes import walk

        fd = hostfs.open_folder(".", await self._view_fd())
        try:
            async with halted():
                return await in_thread(Until(MOST_S), lambda: walk(fd, order, into))
        finally:
            os.close(fd)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        fd = os.dup(await self._view_fd())  # a duplicate, as above
        try:
            return await in_thread(Until(MOST_S), lambda: read_regular(fd, path, max_bytes=max_bytes))
        finally:
            os.close(fd)

    def _is_as_given(self, inputs: Mapping[str, bytes]) -> bool:
        if self._folder:
            with os.scandir(self.fd) as scan:  # stops at the first entry too many
                entries = 1 + sum(1 for _ in itertools.islice(scan, len(inputs) + 1))
        else:
            entries = (state := os.fstatvfs(self.fd)).f_files - state.f_ffree
        return is_as_given(self.fd, inputs, entries=entries)

    def _collect_few(self, view_fd: int, inputs: Mapping[str, bytes]) -> Collection | None:
        """Walk a small workspace in the calling thread, where that is faster; else return None."""
        state = os.fstatvfs(self.fd)
        stored = (state.f_blocks - state.f_bfree) * state.f_frsize
        if self._folder or stored >= SMALL_BYTES or state.f_files - state.f_ffree >= SMALL_FILES:
            return None
        # Running processes may add files meanwhile, and a sparse file may claim any size: hence the bounds.
        collection = collect(
            view_fd, self._known, inputs, max_bytes=SMALL_BYTES, until=Until(SMALL_S), max_entries=SMALL_FILES
        )
        return None if collection.partial & {"time", "entries", "bytes"} else collection

    def stored_bytes(self) -> int:
        """Return the bytes stored in the workspace, whether or not a walk found them."""
        state = os.fstatvfs(self.fd)
        return (state.f_blocks - state.f_bfree) * state.f_frsize
