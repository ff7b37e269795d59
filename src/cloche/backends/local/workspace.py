"""A workspace as its owner holds it: a mount that the next jail attaches, and what is known of the files in it.

Files are looked at after everything there was killed or stopped. The guest chose the names and may have left links,
fifos, devices or a million files; beside a session it may still be at work. So nothing is ever opened by a path:
folders are walked by descriptors, depth first, each of them once however it is moved about, links are not followed,
only regular files of the workspace's own file system are read, and time, entries, depth, number, size and the length of
all paths are bounded. Paths are made for files alone, not for folders.

A run's files stay readable after its sandbox is gone, for as long as somebody holds the result. Whatever keeps them has
no name in any file system, so nothing is left behind however the caller ends.
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
    Slice,
    Source,
    Until,
    changed_since,
    copy_out,
    in_thread,
    time_for_files,
)
from ..subordinate_ids import Show, make_seen

MAX_FILES, MAX_DEPTH = 10_000, 64
MAX_ENTRIES = 200_000  # several times what a workspace holds at the default limits
MAX_PATH_CHARS = 8 << 20  # of all paths together; and what is remembered of them has no more bytes than that
LOOKS_EVERY = 32  # entries, at the clock
UNSEEN = frozenset({"time", "entries", "access"})  # why nobody knows what else is there
FEW_FILES = 4
SMALL_BYTES, SMALL_FILES, SMALL_S = 512 * 1024, 128, 0.02
Halted = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Remember a file as it was: its identity as the kernel keeps it (which no guest can set), and its hash."""

    inode: int
    changed_ns: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Hold what a walk found: every file as known now, the records of new and changed ones, and what was skipped.

    `known` has paths as bytes: as text, one character outside of the BMP makes each of a path's take four. `partial`
    says why files may be missing: those of `hostfs.REASONS`.
    """

    known: Mapping[bytes, Known]
    changed: tuple[FileRecord, ...]
    skipped: int
    partial: frozenset[str] = frozenset()


class Copies(Protocol):
    """Take the content of changed files while it is read."""

    def begin(self, path: str) -> None: ...
    def write(self, data: bytes, /) -> None: ...
    def forget(self, path: str) -> None: ...


def collect(
    root_fd: int,
    before: Mapping[bytes, Known],
    given: Mapping[str, bytes],
    *,
    max_bytes: int,
    until: Until,
    max_entries: int = MAX_ENTRIES,
    copies: Copies | None = None,
) -> Collection:
    """Walk the workspace. `given` maps the input files to their content: unchanged ones are not reported."""
    walk = _Walk(until, max_entries)
    known: dict[bytes, Known] = {}
    left_out: dict[bytes, Known] = {}
    changed: list[FileRecord] = []
    left, chars = max_bytes, 0
    with closing(walk.files(root_fd)) as files:
        for here, name, path, state in files:
            chars += len(path)
            key, found = os.fsencode(path), None
            old = before.get(key)
            if len(known) >= MAX_FILES or chars > MAX_PATH_CHARS or state.st_size > left:
                walk.skip("files" if len(known) >= MAX_FILES else "paths" if chars > MAX_PATH_CHARS else "bytes")
            elif old is not None and _is_same(old, state):
                known[key] = old
                continue
            else:
                found = _read(here, name, path, walk, left, copies)
            if found is None:
                if old is not None:
                    left_out[key] = old
                continue
            known[key] = found
            left -= found.size
            if found.sha256 != (_digest_of(given.get(path)) or (old.sha256 if old is not None else None)):
                changed.append(FileRecord(path=path, size=found.size, sha256=found.sha256))
            elif copies is not None:
                copies.forget(path)
    _keep_known(known, before if walk.reasons & UNSEEN else left_out)
    changed.sort(key=lambda record: record.path)
    return Collection(known=known, changed=tuple(changed), skipped=walk.skipped, partial=frozenset(walk.reasons))


def is_as_given(root_fd: int, given: Mapping[str, bytes], *, entries: int) -> bool:
    """Tell whether a workspace of so many `entries`, its root among them, holds the given files and nothing else."""
    if entries != len(given) + 1 or len(given) > FEW_FILES:
        return False
    try:
        for path, data in given.items():
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


def _read(here: int, name: str, path: str, walk: _Walk, max_bytes: int, copies: Copies | None) -> Known | None:
    """Return a file as it is now, perhaps with a copy made of it; None where it cannot be read to its end."""
    try:
        fd, state = hostfs.open_regular(name, here)  # which looks once more: another file may have taken its place
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
        found = _digest(fd, state.st_size, walk, copies)
        if found is None:
            if copies is not None:
                copies.forget(path)
            return None
        size, digest = found
        return Known(inode=state.st_ino, changed_ns=state.st_ctime_ns, size=size, sha256=digest)
    finally:
        os.close(fd)


def _digest(fd: int, size: int, walk: _Walk, copies: Copies | None) -> tuple[int, str] | None:
    """Return how much of a file there was, at most `size`, and its hash; None when the time was over before."""
    digest, left = hashlib.sha256(), size
    try:
        while left > 0 and (data := os.read(fd, min(CHUNK_BYTES, left))):
            if walk.is_over():
                walk.skip("time")
                return None
            digest.update(data)
            left -= len(data)
            if copies is not None:
                copies.write(data)
    except OSError:
        walk.skip("access")
        return None
    return size - left, digest.hexdigest()


def _is_same(old: Known, now: os.stat_result) -> bool:
    return old.inode == now.st_ino and old.changed_ns == now.st_ctime_ns and old.size == now.st_size


def _digest_of(given: bytes | None) -> str | None:
    return hashlib.sha256(given).hexdigest() if given is not None else None


def _keep_known(known: dict[bytes, Known], before: Mapping[bytes, Known]) -> None:
    """Remember what was not reached this time, so that it does not seem new the next time: the latest that have room.

    What is forgotten is at worst reported as changed once more.
    """
    room = MAX_PATH_CHARS - sum(map(len, known)) if before else 0
    for path, old in before.items():
        if path in known:
            continue
        room -= len(path)
        if room < 0 or len(known) >= MAX_FILES:
            return
        known[path] = old


class _Folder:
    """Hold a folder open, and how far it has been read."""

    __slots__ = ("depth", "entries", "fd", "prefix")

    def __init__(self, fd: int, prefix: str, depth: int):
        self.fd, self.prefix, self.depth = fd, prefix, depth
        self.entries = os.scandir(fd)

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


class _Walk:
    """Visit the files of a workspace, and count what is left out.

    Nothing but the folders on the way to the current one is held, and the numbers of those that were visited.
    """

    def __init__(self, until: Until, max_entries: int):
        self._until, self._left = until, max_entries
        self._visited: set[int] = set()
        self._is_ended = False
        self.device = -1
        self.skipped = 0
        self.reasons: set[str] = set()

    def skip(self, reason: str = "") -> None:
        """Count what is left out; without a reason where it would be left out in any case: a link, say."""
        self.skipped += 1
        if reason:
            self.reasons.add(reason)

    def is_over(self) -> bool:
        """Tell whether there is no more time."""
        return self._until.is_over()

    def files(self, root_fd: int, prefix: str = "") -> Generator[tuple[int, str, str, os.stat_result]]:
        """Yield the folder, the name, the path and the state of each regular file below."""
        stack: list[_Folder] = []
        try:
            self._enter(stack, ".", root_fd, prefix, prefix.count("/"))
            while stack:
                here = stack[-1]
                try:
                    yield from self._files_of(here, stack)
                except OSError:
                    self.skip("access")
                if self._is_ended:
                    return
                if stack[-1] is here:
                    stack.pop().close()
        finally:
            for folder in stack:
                folder.close()

    def _files_of(self, here: _Folder, stack: list[_Folder]) -> Generator[tuple[int, str, str, os.stat_result]]:
        """Yield the files of a folder up to the next folder in it, which is then on the stack, or to its end."""
        for entry in here.entries:
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
                path = here.prefix + entry.name
                if path not in PROGRAM_FILES:
                    yield here.fd, entry.name, path, state
            elif kind != stat.S_IFDIR:
                self.skip()
            elif here.depth >= MAX_DEPTH:
                self.skip("depth")
            elif state.st_ino not in self._visited:
                self._enter(stack, entry.name, here.fd, f"{here.prefix}{entry.name}/", here.depth + 1)
                if stack[-1] is not here:
                    return

    def _enter(self, stack: list[_Folder], name: str, parent: int, prefix: str, depth: int) -> None:
        """Open a folder, unless it was visited before: it may have been moved on meanwhile."""
        try:
            fd = hostfs.open_folder(name, parent)
        except OSError:
            self.skip("access")
            return
        try:
            state = os.fstat(fd)
            if self.device < 0:
                self.device = state.st_dev
            if state.st_dev == self.device and state.st_ino not in self._visited:  # what is mounted is ours
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
        with hostfs.descended(root_fd, folders) as here:
            fd, state = hostfs.open_regular(name, here)
    except hostfs.NotRegular:
        raise refusal from None
    if state.st_dev != os.fstat(root_fd).st_dev:
        os.close(fd)
        raise refusal
    return fd


def read_regular(root_fd: int, path: str, *, max_bytes: int) -> bytes:
    """Return a file of the workspace. Raises the SandboxFile errors."""
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

    Raises SandboxFileTooLarge where there is too much below it: some of the paths would look like all of them.
    """
    top = "" if path in (".", "", "/workspace") else workspace_path(path)
    try:
        fd = hostfs.descend(root_fd, top.split("/") if top else ())
    except OSError:
        return ()
    walk, found, chars = _Walk(until, MAX_ENTRIES), [], 0
    walk.device = os.fstat(root_fd).st_dev
    try:
        with closing(walk.files(fd, f"{top}/" if top else "")) as files:
            for _, _, inside, _ in files:
                chars += len(inside)
                if chars > MAX_PATH_CHARS:
                    walk.skip("paths")
                    break
                found.append(inside)
    finally:
        os.close(fd)
    if why := walk.reasons & {"time", "entries", "paths"}:
        text = f"there is too much below {path!r} to list it ({', '.join(sorted(why))}); list a folder below it"
        raise SandboxFileTooLarge(text, path=path)
    return tuple(sorted(found))


def keep_mount(workspace_fd: int, records: tuple[FileRecord, ...]) -> SaveFiles:
    """Keep a tmpfs workspace by a descriptor: without a mount point it lives exactly as long as that."""
    return _KeptMount(os.dup(workspace_fd), records).save


class _KeptMount:
    def __init__(self, fd: int, records: tuple[FileRecord, ...]):
        self._fd, self._records = fd, records
        weakref.finalize(self, os.close, fd)

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[Source]:
        try:
            fd = open_regular(self._fd, record.path)
        except FileNotFoundError as error:
            raise SandboxFileNotFound(
                f"{record.path!r} is no longer in the workspace: what ran there since has removed it; save the files "
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
    """Keep copies of the files of a workspace that is a folder of the host, which goes away: in one unnamed file.

    They are taken while the files are read for their hashes, so that what is kept is what the result says.
    """

    def __init__(self) -> None:
        import tempfile

        folder = hostfs.temporary_folder()
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the result
        weakref.finalize(self, self._file.close)  # dropping a result is no leak, so nobody shall be warned of one
        self._records: tuple[FileRecord, ...] = ()
        self._offsets: dict[str, int] = {}

    def begin(self, path: str) -> None:
        """Begin with the next file."""
        self._offsets[path] = self._file.tell()

    def write(self, data: bytes, /) -> None:
        """Take more of it."""
        self._file.write(data)

    def forget(self, path: str) -> None:
        """Keep nothing of the last file."""
        self._file.seek(self._offsets.pop(path))
        self._file.truncate()

    def saver(self, records: tuple[FileRecord, ...]) -> SaveFiles:
        """Return what `Result.save` needs."""
        self._file.flush()
        self._records = records
        return self.save

    def save(self, directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Copy the files into a folder; see Result.save."""
        return copy_out(self._open, directory, self._records)

    @contextmanager
    def _open(self, record: FileRecord) -> Iterator[Source]:
        yield Slice(self._file.fileno(), self._offsets[record.path])


class Workspace:
    """Hold a workspace. `folder` is where it is below level jail; at that level it is empty, and a mount is handed in.

    A mount can be attached once. Whoever attaches it hands back another one of the same files.
    """

    def __init__(self, limits: Limits, folder: str, show: Show | None = None):
        """Take `show` where the guest's id is one that we cannot be: what makes its files ours in a second mount."""
        self._max_bytes, self._folder, self._show = limits.disk_bytes, folder, show
        self._shown, self._is_shown, self.fd = -1, False, -1
        self._known: dict[bytes, Known] = {}
        self._program = ""  # the file of the last one, which lies there until the next run
        self.has_owner = False  # a sandbox that drops it at its own end, or when it moves to another one
        self.has_node = False  # an interpreter that may go on in it

    def copy_for_fork(self) -> Workspace:
        """Return the holder of a copy that is still to be made, of which the same is known."""
        found = Workspace.__new__(Workspace)
        found._max_bytes, found._folder, found._known = self._max_bytes, self._folder, dict(self._known)
        found._program, found._show = self._program, self._show
        found._shown = found.fd = -1
        found._is_shown = found.has_owner = found.has_node = False
        return found

    def take(self, fds: Sequence[int]) -> None:
        """Hold the mount that came along in place of the one before; a folder is opened once.

        The mount by which we see the files comes with the first of each file system.
        """
        fresh, *shown = fds or (-1,)
        if fresh >= 0 and self._show is not None and not self._hold_shown(fresh, shown):
            os.close(fresh)  # of a guest that failed before there was anything in it
            self.drop()
            return
        if fresh < 0 and self.fd < 0 and self._folder:
            fresh = open_as_owner(self._folder)
        if fresh >= 0:
            self._drop_mount()
            self.fd = fresh

    def _hold_shown(self, fresh: int, shown: Sequence[int]) -> bool:
        """Tell whether we can see what is in a mount: by what came along, or by what we have of the same files."""
        if shown:
            self._drop_shown()
            self._shown = shown[0]
        return self._shown >= 0 and os.fstat(self._shown).st_dev == os.fstat(fresh).st_dev

    async def _seen(self) -> int:
        """Return what the files are to be looked at by. Raises OutcomeUnknown where they cannot be shown to us."""
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
                    f"what ran has run, and its files cannot be seen: {error.strerror or error}"
                ) from error
            self._is_shown = True
        return self._shown

    def clear_for(self, run: Run) -> None:
        """Have a run that is about to be sent remove the program of the one before it, unless it replaces that."""
        before, self._program = self._program, next((path for path, _, _ in run.files if path in PROGRAM_FILES), "")
        if before != self._program:
            run.leftover = before

    def drop_unless_needed(self) -> None:
        """Let go of it when neither a sandbox nor an interpreter needs it."""
        if not (self.has_owner or self.has_node):
            self.drop()

    def drop(self) -> None:
        """Let go of it."""
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
        """Drop it and what is known of it: another one takes its place."""
        self.drop()
        self._known.clear()

    def is_untouched(self) -> bool:
        """Tell, cheaply, that no file is there and none is known."""
        if self._folder or self.fd < 0 or self._known:
            return False
        state = os.fstatvfs(self.fd)
        return state.f_files - state.f_ffree <= 1

    async def collected(
        self, given: Mapping[str, bytes], *, timeout_s: float, halted: Halted = nullcontext, is_last: bool = False
    ) -> Changes:
        """Look at the files after what had `timeout_s`; after the last run nothing needs to be known.

        Where there are many, that is done in a thread, with what still runs there `halted`.
        """
        if is_last and not self._known and self._is_as_given(given):
            return Changes()
        seen = await self._seen()
        if (few := self._collect_few(seen, given)) is not None:
            return self._changes(few, seen)
        until, copies = Until(time_for_files(timeout_s)), KeptCopies() if self._folder else None
        fd, known = os.dup(seen), self._known  # of our own: a sandbox that is closed closes its own

        def look() -> Collection:
            return collect(fd, known, given, max_bytes=self._max_bytes, until=until, copies=copies)

        try:
            async with halted():
                found = await in_thread(until, look)
            return self._changes(found, fd, copies)
        finally:
            os.close(fd)

    def _changes(self, found: Collection, fd: int, copies: KeptCopies | None = None) -> Changes:
        """Take note of what was found, and keep what `Result.save` needs as long as the result lives."""
        self._known = dict(found.known)
        save = None
        if found.changed:
            save = keep_mount(fd, found.changed) if copies is None else copies.saver(found.changed)
        return Changes(records=found.changed, skipped=found.skipped, partial=found.partial, save=save)

    async def paths(self, path: str, *, halted: Halted) -> tuple[str, ...]:
        """Return the paths of the files below `path`. Raises SandboxFileTooLarge where there are too many."""
        until, fd = Until(MOST_S), os.dup(await self._seen())
        try:
            async with halted():
                return await in_thread(until, lambda: list_paths(fd, path, until))
        finally:
            os.close(fd)

    async def changes(self, order: dict[str, Any], into: int, *, halted: Halted) -> dict[str, Any]:
        """Write the frames of all that is there to a descriptor, see `init.changes`; return the answer."""
        from cloche.init.changes import walk

        fd = hostfs.open_folder(".", await self._seen())
        try:
            async with halted():
                return await in_thread(Until(MOST_S), lambda: walk(fd, order, into))
        finally:
            os.close(fd)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file. Raises the SandboxFile errors."""
        fd = os.dup(await self._seen())  # of our own, as above
        try:
            return await in_thread(Until(MOST_S), lambda: read_regular(fd, path, max_bytes=max_bytes))
        finally:
            os.close(fd)

    def _is_as_given(self, given: Mapping[str, bytes]) -> bool:
        if self._folder:
            with os.scandir(self.fd) as there:  # no more than it takes to know that there is more than was given
                entries = 1 + sum(1 for _ in itertools.islice(there, len(given) + 1))
        else:
            entries = (state := os.fstatvfs(self.fd)).f_files - state.f_ffree
        return is_as_given(self.fd, given, entries=entries)

    def _collect_few(self, seen: int, given: Mapping[str, bytes]) -> Collection | None:
        """Look at the files here and now, where that takes less time than handing the work to a thread; else None."""
        state = os.fstatvfs(self.fd)
        stored = (state.f_blocks - state.f_bfree) * state.f_frsize
        if self._folder or stored >= SMALL_BYTES or state.f_files - state.f_ffree >= SMALL_FILES:
            return None
        # What still runs may add to it meanwhile; and what takes no room may say to be of any size.
        found = collect(seen, self._known, given, max_bytes=SMALL_BYTES, until=Until(SMALL_S), max_entries=SMALL_FILES)
        return None if found.partial & {"time", "entries", "bytes"} else found

    def stored_bytes(self) -> int:
        """Return the bytes that are stored, found or not."""
        state = os.fstatvfs(self.fd)
        return (state.f_blocks - state.f_bfree) * state.f_frsize
