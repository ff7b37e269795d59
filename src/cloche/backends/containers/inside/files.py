"""The workspace as seen by the first process of a container: files are received, listed and sent.

The guest may have left any kind of entry, so nothing is opened by a path: folders are walked by descriptors, without
following links. Beside a session the guest may change files during a walk; walks are therefore bounded, and a file is
sent with the length that it had when it was opened.
"""

from __future__ import annotations

import itertools
import os
import stat
import tarfile
import time

from .link import CHUNK, DATA, DONE, CallerLink, FrameWriter, OutgoingData

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

WORKSPACE = "/workspace"
MAX_FILES, MAX_DEPTH = 10_000, 64
MAX_ENTRIES, MAX_PATH_CHARS = 200_000, 8 << 20  # several times a workspace's content at the default limits
UNSEEN = {"time", "entries", "access"}  # reasons for which further files may exist
WALK_S = 5.0
ENOSPC, EDQUOT, ELOOP = 28, 122, 40
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
TEXT: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names that are not UTF-8 are preserved


class FileRequestRefused(Exception):
    """Raised for a request about files. `kind` is `refused`, `not_found`, `too_large` or `full`."""

    def __init__(self, kind: str, path: str, why: str):
        super().__init__(why)
        self.kind, self.path, self.why = kind, path, why


def open_folder(folder: str, *, make: bool = False) -> int:
    """Open a folder of the workspace one component at a time, without following links."""
    folder_fd = os.open(WORKSPACE, FOLDER)
    for name in folder.split("/") if folder else ():
        try:
            if make:
                try:
                    os.mkdir(name, dir_fd=folder_fd)
                except FileExistsError:
                    pass
            # Old versions of gVisor follow a link despite O_NOFOLLOW, so it is checked first; no guest runs now.
            if stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
                raise OSError(ELOOP, os.strerror(ELOOP))
            next_fd = os.open(name, FOLDER, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
        folder_fd = next_fd
    return folder_fd


def open_file(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file of the workspace for reading."""
    folder, _, name = path.rpartition("/")
    folder_fd = open_folder(folder)
    try:
        return open_file_in(folder_fd, name, path)
    finally:
        os.close(folder_fd)


def open_file_in(folder_fd: int, name: str, path: str) -> tuple[int, os.stat_result]:
    """Open a regular file of a folder for reading."""
    fd = os.open(name, FILE, dir_fd=folder_fd)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        os.close(fd)
        raise FileRequestRefused("refused", path, "it is not a regular file of the workspace")
    return fd, state


class WorkspaceWalk:
    """Visit the regular files of the workspace depth first, and each folder once, even if it is moved during the walk.

    Only the folders on the path to the current one are open. Time, entries, depth and the total length of paths are
    bounded; `reasons` says which bound was reached, by the names in the caller's `saved_files.REASONS`.
    """

    def __init__(self, seconds: float):
        self.until = time.monotonic() + seconds
        self.left, self.chars, self.skipped = MAX_ENTRIES, MAX_PATH_CHARS, 0
        self.visited: set[int] = set()
        self.reasons: set[str] = set()

    def skip(self, reason: str = "") -> None:
        """Count a skipped entry. `reason` is "" for entries that are always skipped, such as links."""
        self.skipped += 1
        if reason:
            self.reasons.add(reason)

    def files(self) -> Iterator[tuple[int, str, str, os.stat_result]]:
        """Yield folder descriptor, name, path and stat result of each file. The time of the consumer does not count."""
        stack: list[tuple[int, Any, str]] = []
        try:
            self._enter(stack, WORKSPACE, None, "")
            while stack:
                folder_fd, entries, prefix = stack[-1]
                entry = next(entries, None)
                if entry is None:
                    stack.pop()
                    entries.close()
                    os.close(folder_fd)
                    continue
                if self.left <= 0 or time.monotonic() >= self.until:
                    self.skip("entries" if self.left <= 0 else "time")
                    return
                self.left -= 1
                try:
                    state = os.stat(entry.name, dir_fd=folder_fd, follow_symlinks=False)
                except OSError:
                    self.skip("access")
                    continue
                if stat.S_ISREG(state.st_mode):
                    path = prefix + entry.name
                    self.chars -= len(path)
                    if self.chars < 0:
                        self.skip("paths")
                        continue
                    handed = time.monotonic()
                    yield folder_fd, entry.name, path, state
                    self.until += time.monotonic() - handed
                elif not stat.S_ISDIR(state.st_mode):
                    self.skip()
                elif len(stack) > MAX_DEPTH:
                    self.skip("depth")
                elif state.st_ino not in self.visited:
                    # Old versions of gVisor follow a link despite O_NOFOLLOW, so the type was checked first.
                    self._enter(stack, entry.name, folder_fd, f"{prefix}{entry.name}/")
        finally:
            for folder_fd, entries, _ in stack:
                entries.close()
                os.close(folder_fd)

    def _enter(self, stack: list[tuple[int, Any, str]], name: str, parent: int | None, prefix: str) -> None:
        """Open a folder, unless it was visited before, possibly under another path."""
        try:
            folder_fd = os.open(name, FOLDER, dir_fd=parent)
        except OSError:
            self.skip("access")
            return
        number = os.fstat(folder_fd).st_ino
        if number in self.visited:
            os.close(folder_fd)
            return
        self.visited.add(number)
        stack.append((folder_fd, os.scandir(folder_fd), prefix))


def identity(state: os.stat_result) -> tuple[int, int, int]:
    """Return a key that changes whenever the file changes."""
    return state.st_ino, state.st_ctime_ns, state.st_size


def file_states(walk: WorkspaceWalk | None = None) -> dict[str, tuple[int, int, int]]:
    """Return the identity of every regular file. A guest cannot set it (it contains the ctime)."""
    return {path: identity(state) for _, _, path, state in (walk or WorkspaceWalk(WALK_S)).files()}


def take_files(incoming: Any) -> None:
    """Unpack an archive of regular files into the workspace."""
    with tarfile.open(fileobj=incoming, mode="r|", **TEXT) as archive:
        for member in archive:
            source = archive.extractfile(member)
            try:
                place_file(member.name, member.mode, source)
            except OSError as error:
                kind = "full" if error.errno in (ENOSPC, EDQUOT) else "refused"
                raise FileRequestRefused(kind, member.name, os.strerror(error.errno or 0)) from error


def place_file(path: str, mode: int, source: Any) -> None:
    """Write a temporary file, then rename it, so that a link at the target is replaced and not followed."""
    folder, _, name = path.rpartition("/")
    folder_fd = open_folder(folder, make=True)
    temporary = f".{os.urandom(8).hex()}.cloche"
    try:
        fd = os.open(temporary, NEW, 0o600, dir_fd=folder_fd)
        try:
            try:
                while data := source.read(CHUNK):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                os.fchmod(fd, mode & 0o777)
            finally:
                os.close(fd)  # also if the disk is full: an open file keeps its blocks
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            os.unlink(temporary, dir_fd=folder_fd)
            raise
    finally:
        os.close(folder_fd)


def hand_files(
    caller: FrameWriter, before: dict[str, tuple[int, int, int]], max_bytes: int, seconds: float = WALK_S
) -> None:
    """Send new and changed files as an archive; then the counts of skipped files, and the paths of removed ones."""
    walk, bytes_left = WorkspaceWalk(seconds), max_bytes
    seen_paths: set[str] = set()
    archive: tarfile.TarFile | None = None
    for folder_fd, name, path, state in walk.files():
        if len(seen_paths) >= MAX_FILES or state.st_size > bytes_left:
            walk.skip("files" if len(seen_paths) >= MAX_FILES else "bytes")
            continue
        seen_paths.add(path)
        if before.get(path) == identity(state):
            continue
        try:
            fd, now = open_file_in(folder_fd, name, path)
        except (OSError, FileRequestRefused):
            walk.skip("access")
            continue
        if now.st_size > bytes_left:
            os.close(fd)
            walk.skip("bytes")
            continue
        if archive is None:
            out: Any = OutgoingData(caller)
            archive = tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT, **TEXT)  # noqa: SIM115 - see below
        bytes_left -= now.st_size
        member = tarfile.TarInfo(path)
        member.size, member.mode = now.st_size, now.st_mode & 0o777
        with open(fd, "rb") as file:
            content: Any = Exactly(file)
            archive.addfile(member, content)
    if archive is not None:
        archive.close()
    # A path may also be missing because the walk ended early; the caller then forgets its hash.
    gone_bytes = hand_names(caller, [path for path in before if path not in seen_paths])
    caller.send_json(DONE, skipped=walk.skipped, partial=sorted(walk.reasons), gone_bytes=gone_bytes)


def hand_names(caller: FrameWriter, paths: list[str]) -> int:
    """Send paths as data, then the end of all data; return the number of bytes."""
    data = b"\0".join(map(os.fsencode, paths))
    OutgoingData(caller).write(data)
    caller.send(DATA)
    return len(data)


class Exactly:
    """Read exactly the requested bytes of a file, even if it shrinks meanwhile: missing bytes read as zeros."""

    def __init__(self, file: Any):
        self.file = file

    def read(self, size: int) -> bytes:
        data: bytes = self.file.read(size)
        return data.ljust(size, b"\0")


class Seen:
    """Remember the states of the files at the last look."""

    def __init__(self) -> None:
        self.files = file_states()

    def renew(self, seconds: float) -> dict[str, tuple[int, int, int]]:
        """Look at the files, and return their states at the last look.

        A file that changes between the look and its transfer is sent again after the next look.
        """
        walk = WorkspaceWalk(seconds)
        before, self.files = self.files, file_states(walk)
        if walk.reasons & UNSEEN:
            self._keep(before)
        return before

    def _keep(self, before: dict[str, tuple[int, int, int]]) -> None:
        """Keep the states of files that this look did not reach, so that the next does not report them as new.

        Their number and length are bounded. A forgotten file is at worst reported as changed once more.
        """
        room = MAX_PATH_CHARS - sum(map(len, self.files))
        for path, state in itertools.islice(before.items(), MAX_FILES):
            if path not in self.files:
                room -= len(path)
                if room < 0:
                    return
                self.files[path] = state


def hand_file(caller: CallerLink, path: str, max_bytes: int) -> None:
    """Send one file."""
    try:
        fd, _ = open_file(path)
    except FileNotFoundError:
        raise FileRequestRefused("not_found", path, "there is no such file") from None
    with open(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FileRequestRefused("too_large", path, f"it is larger than {max_bytes} bytes")
    OutgoingData(caller).write(data)
    caller.send(DATA)
    caller.send_json(DONE)


def list_files(caller: CallerLink) -> None:
    """Send the paths of all files. A list that would be incomplete is refused."""
    walk = WorkspaceWalk(WALK_S)
    states = file_states(walk)
    if why := walk.reasons & {"time", "entries", "paths"}:
        raise FileRequestRefused("too_large", WORKSPACE, f"there is too much to list it ({', '.join(sorted(why))})")
    hand_names(caller, sorted(states))
    caller.send_json(DONE)


def remove_file(name: str) -> None:
    """Remove a file at the top of the workspace, unless the guest replaced it by a folder."""
    try:
        os.unlink(f"{WORKSPACE}/{name}")
    except OSError:
        pass  # the guest replaced it


def prepare_workspace() -> None:
    """Restore the mode of the workspace folder, which a guest may have changed."""
    try:
        os.chmod(WORKSPACE, 0o700)
    except OSError:
        pass  # it belongs to another user and is world-writable
