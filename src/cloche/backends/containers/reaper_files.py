"""The workspace as the first process of a container sees it: files come in, are looked at, and go out.

The guest left what it liked, so nothing is opened by a path: folders are walked one name at a time, through no link.
Beside a session it may still be at work: then walks end, and a file is as long as it was when it was looked at.
"""

from __future__ import annotations

import os
import stat
import tarfile

from .reaper_link import CHUNK, DATA, DONE, Caller, Outgoing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

WORKSPACE = "/workspace"
MAX_FILES, MAX_DEPTH = 10_000, 64
MAX_WALKED = 200_000  # many times what a workspace holds: who moves folders about shall not keep us
ENOSPC, EDQUOT, ELOOP = 28, 122, 40
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
TEXT: Any = {"encoding": "utf-8", "errors": "surrogateescape"}  # names that are no text come through as they are


class Refused(Exception):
    """Say why a request about files was not done: one of `refused`, `not_found`, `too_large`, `full`."""

    def __init__(self, kind: str, path: str, why: str):
        super().__init__(why)
        self.kind, self.path, self.why = kind, path, why


def open_folder(folder: str, *, make: bool = False) -> int:
    """Open a folder of the workspace one name at a time, through no link."""
    here = os.open(WORKSPACE, FOLDER)
    for name in folder.split("/") if folder else ():
        try:
            if make:
                try:
                    os.mkdir(name, dir_fd=here)
                except FileExistsError:
                    pass
            # Old versions of gVisor follow a link all the same, so it is looked at first; the guest is dead.
            if stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                raise OSError(ELOOP, os.strerror(ELOOP))
            there = os.open(name, FOLDER, dir_fd=here)
        finally:
            os.close(here)
        here = there
    return here


def open_file(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file of the workspace for reading."""
    folder, _, name = path.rpartition("/")
    here = open_folder(folder)
    try:
        fd = os.open(name, FILE, dir_fd=here)
    finally:
        os.close(here)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        os.close(fd)
        raise Refused("refused", path, "it is not a regular file of the workspace")
    return fd, state


def walk() -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield every entry that is no folder, with its state; None for what cannot be looked at or lies too deep."""
    pending, walked = [""], 0
    while pending:
        folder = pending.pop()
        if walked > MAX_WALKED:
            yield folder, None
            return
        try:
            here = open_folder(folder)
        except OSError:
            yield folder, None
            continue
        try:
            names = sorted(os.listdir(here))
            walked += len(names) + 1
            for name in names:
                path = f"{folder}/{name}" if folder else name
                try:
                    state = os.stat(name, dir_fd=here, follow_symlinks=False)
                except OSError:
                    yield path, None
                    continue
                if not stat.S_ISDIR(state.st_mode):
                    yield path, state
                elif path.count("/") < MAX_DEPTH:
                    pending.append(path)
                else:
                    yield path, None
        finally:
            os.close(here)


def identity(state: os.stat_result) -> tuple[int, int, int]:
    """Return what tells a file as it is from the same one changed."""
    return state.st_ino, state.st_ctime_ns, state.st_size


def survey() -> dict[str, tuple[int, int, int]]:
    """Return every regular file's identity, which no guest can set."""
    return {path: identity(state) for path, state in walk() if state is not None and stat.S_ISREG(state.st_mode)}


def take_files(incoming: Any) -> None:
    """Unpack an archive of regular files into the workspace."""
    with tarfile.open(fileobj=incoming, mode="r|", **TEXT) as archive:
        for member in archive:
            source = archive.extractfile(member)
            try:
                place_file(member.name, member.mode, source)
            except OSError as error:
                kind = "full" if error.errno in (ENOSPC, EDQUOT) else "refused"
                raise Refused(kind, member.name, os.strerror(error.errno or 0)) from error


def place_file(path: str, mode: int, source: Any) -> None:
    """Write beside, then rename over, so that a link in the way is replaced and not followed."""
    folder, _, name = path.rpartition("/")
    here = open_folder(folder, make=True)
    temporary = f".{os.urandom(8).hex()}.cloche"
    try:
        fd = os.open(temporary, NEW, 0o600, dir_fd=here)
        try:
            try:
                while data := source.read(CHUNK):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                os.fchmod(fd, mode & 0o777)
            finally:
                os.close(fd)  # also where the disk is full: what is open keeps its room
            os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            os.unlink(temporary, dir_fd=here)
            raise
    finally:
        os.close(here)


def hand_files(caller: Caller, before: dict[str, tuple[int, int, int]], max_bytes: int) -> None:
    """Send what is new or changed as an archive; then what was skipped, and what is gone."""
    skipped, left, count, seen = 0, max_bytes, 0, set()
    archive: tarfile.TarFile | None = None
    for path, state in walk():
        if state is None or not stat.S_ISREG(state.st_mode) or count >= MAX_FILES or state.st_size > left:
            skipped += 1
            continue
        count += 1
        seen.add(path)
        if before.get(path) == identity(state):
            continue
        try:
            fd, now = open_file(path)
        except (OSError, Refused):
            skipped += 1
            continue
        if now.st_size > left:
            os.close(fd)
            skipped += 1
            continue
        if archive is None:
            out: Any = Outgoing(caller)
            archive = tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT, **TEXT)  # noqa: SIM115 - see below
        left -= now.st_size
        member = tarfile.TarInfo(path)
        member.size, member.mode = now.st_size, now.st_mode & 0o777
        with open(fd, "rb") as file:
            content: Any = Exactly(file)
            archive.addfile(member, content)
    if archive is not None:
        archive.close()
    caller.say(DATA)
    caller.say_json(DONE, skipped=skipped, gone=[path for path in before if path not in seen])


class Exactly:
    """Read as much of a file as is asked for, whatever happens to it meanwhile: what is gone is nought."""

    def __init__(self, file: Any):
        self.file = file

    def read(self, size: int) -> bytes:
        data: bytes = self.file.read(size)
        return data.ljust(size, b"\0")


class Seen:
    """Remember how the files were when they were looked at last."""

    def __init__(self, caller: Caller):
        self.caller = caller
        self.files: dict[str, tuple[int, int, int]] = {}

    def hand(self, max_bytes: int) -> None:
        """Send what has changed since. What changes meanwhile is sent once more the next time."""
        before, self.files = self.files, survey()
        hand_files(self.caller, before, max_bytes)


def hand_file(caller: Caller, path: str, max_bytes: int) -> None:
    """Hand back one file."""
    try:
        fd, _ = open_file(path)
    except FileNotFoundError:
        raise Refused("not_found", path, "there is no such file") from None
    with open(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise Refused("too_large", path, f"it is larger than {max_bytes} bytes")
    Outgoing(caller).write(data)
    caller.say(DATA)
    caller.say_json(DONE)


def list_files(caller: Caller) -> None:
    """Say which files there are."""
    caller.say_json(DONE, paths=sorted(survey()))


def prepare_workspace() -> None:
    """Undo what a guest may have done to the folder itself."""
    try:
        os.chmod(WORKSPACE, 0o700)
    except OSError:
        pass  # it is another's, who lets everybody in
