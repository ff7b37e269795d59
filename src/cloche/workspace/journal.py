"""The journal of a commit to a host folder, stored where neither the guest nor a checkout can write.

Theory of operation: in the user's state folder, `workspaces/` (owned by the user, mode 0700) has a lock for each host
folder and, while a commit is running, a journal (mode 0600). Both are named by the folder's device and inode. A journal
is written to a temporary file, synced and renamed, so a reader sees a complete one or none. It contains only relative
names, and has these states:

    intent    the stage's name is decided; the stage may exist, and is empty
    staging   the stage exists, with this inode; files are being written into it; nothing else has changed
    applying  the steps are known; any of them may have been done
    done      all steps were done and synced; the stage, with the host's old files, is to be removed
    undone    all steps are undone; the stage is to be removed

`recover.py` handles each state.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

from cloche import hostfs
from cloche.core.errors import WorkspaceFailed
from cloche.core.record import dataclass, fields, replace

FOLDER = "workspaces"
PATIENCE_S = 30.0
_VERSION = 1
_MOST_BYTES = 1 << 30  # per journal
_POLL_S = 0.02
State = Literal["intent", "staging", "applying", "done", "undone"]
_STATES = ("intent", "staging", "applying", "done", "undone")
Action = Literal["put", "take", "chmod"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """The `os.stat` fields that identify a file and its version; `is_same` compares them."""

    ino: int
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> FileFacts:
        """Return the facts of one file, folder or link."""
        return cls(
            ino=facts.st_ino, mode=facts.st_mode, size=facts.st_size, mtime_ns=facts.st_mtime_ns,
            ctime_ns=facts.st_ctime_ns,
        )  # fmt: skip

    @property
    def is_folder(self) -> bool:
        """Tell whether it is a folder, whose size and times change with its contents."""
        return stat.S_ISDIR(self.mode)

    def is_same(self, second: FileFacts | None, *, with_ctime: bool) -> bool:
        """Compare two looks at a path: folders by inode and mode, other files by size and times as well.

        A rename may update the change time, so pass `with_ctime=False` after one.
        """
        if second is None or (self.ino, self.mode) != (second.ino, second.mode):
            return False
        if self.is_folder:
            return True
        ours, theirs = (self.size, self.mtime_ns), (second.size, second.mtime_ns)
        return ours == theirs and (not with_ctime or self.ctime_ns == second.ctime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStep:
    """One operation on a path, and the facts of the file expected there before (`was`, None if the path does not
    exist).

    `put` exchanges the path with the staged file `slot` (facts `new`), which afterwards holds the old file. `take`
    moves the path to `slot`. `chmod` sets permission bits. So each step can be undone from the stage.
    """

    do: Action
    path: str
    was: FileFacts | None = None
    slot: str = ""
    new: FileFacts | None = None
    mode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The record of one commit. `boot` is the kernel's boot ID, since device numbers are only valid for one boot."""

    state: State
    path: str
    dev: int
    ino: int
    boot: str
    stage: str
    stage_ino: int = 0
    steps: tuple[CommitStep, ...] = ()

    def is_of(self, folder: os.stat_result) -> bool:
        """Tell whether an open folder is the one that the journal is about."""
        return self.ino == folder.st_ino and (self.dev == folder.st_dev or self.boot != boot_id())


def boot_id() -> str:
    """Return the kernel's boot ID; empty if it cannot be read."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def key_of(folder: os.stat_result) -> str:
    """Return the name of a folder's lock and journal."""
    return f"{folder.st_dev:x}-{folder.st_ino:x}"


@contextmanager
def open_records(state: str) -> Iterator[int]:
    """Hold open the folder of locks and journals, which is created if missing. Raises WorkspaceFailed."""
    try:
        os.makedirs(state, mode=0o700, exist_ok=True)
        above = hostfs.open_folder(state, follows_link=True)
        try:
            hostfs.make_folder(FOLDER, above, 0o700)
            records_fd = hostfs.open_folder(FOLDER, above)
        finally:
            os.close(above)
    except OSError as error:
        raise WorkspaceFailed(f"{state}/{FOLDER} cannot be used: {error.strerror}") from error
    try:
        facts = os.fstat(records_fd)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise WorkspaceFailed(f"{state}/{FOLDER} must be yours alone: chown it to you and chmod 700")
        yield records_fd
    finally:
        os.close(records_fd)


@contextmanager
def locked(records_fd: int, key: str, patience_s: float = PATIENCE_S) -> Iterator[bool]:
    """Hold the lock of one host folder; yield False if another process still holds it after `patience_s`."""
    fd = os.open(f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=records_fd)
    try:
        yield _lock(fd, patience_s)
    finally:
        os.close(fd)


def _lock(fd: int, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)


def write(records_fd: int, key: str, journal: Journal) -> None:
    """Replace a journal; it is on disk on return."""
    data = json.dumps(
        {"version": _VERSION, **_plain(journal), "steps": [_plain(step) for step in journal.steps]}
    ).encode()
    remove_unfinished(records_fd, key)
    beside = f"{key}.new"
    with hostfs.new_file(records_fd, 0o600, name=beside) as (_, file):
        with file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(beside, f"{key}.json", src_dir_fd=records_fd, dst_dir_fd=records_fd)
    # fsync(2): syncing a file does not sync its directory entry.
    os.fsync(records_fd)


def remove_unfinished(records_fd: int, key: str) -> None:
    """Remove a journal whose writing was interrupted. The caller holds the lock."""
    with suppress(FileNotFoundError):
        os.unlink(f"{key}.new", dir_fd=records_fd)


def read(records_fd: int, key: str) -> Journal | None:
    """Return the journal of a folder, None if there is none. Raises WorkspaceFailed for a file that Cloche did not
    write.
    """
    try:
        fd, facts = hostfs.open_regular(f"{key}.json", records_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkspaceFailed(f"the journal {key}.json cannot be read: {error.strerror}") from error
    with open(fd, "rb") as file:
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or facts.st_size > _MOST_BYTES:
            raise WorkspaceFailed(f"the journal {key}.json is refused: it is not this user's alone")
        data = file.read(_MOST_BYTES)
    try:
        return _parse(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkspaceFailed(f"the journal {key}.json is refused: it was not written by Cloche") from error


def find(records_fd: int, folder: os.stat_result) -> tuple[str, Journal] | None:
    """Return name and journal of an open folder, including one from before a reboot that changed the device number."""
    own = key_of(folder)
    if (journal := read(records_fd, own)) is not None:
        return own, journal
    for key in keys(records_fd):
        if key.endswith(f"-{folder.st_ino:x}"):
            journal = read(records_fd, key)
            if journal is not None and journal.is_of(folder):
                return key, journal
    return None


def keys(records_fd: int) -> list[str]:
    """Return the names of all journals, including unfinished ones."""
    heads = (name.rpartition(".") for name in os.listdir(records_fd))
    return sorted({head for head, _, tail in heads if tail in {"json", "new"}})


def remove(records_fd: int, key: str) -> None:
    """Remove a journal durably."""
    with suppress(FileNotFoundError):
        os.unlink(f"{key}.json", dir_fd=records_fd)
    os.fsync(records_fd)


def advanced(journal: Journal, state: State, **changes: Any) -> Journal:  # noqa: ANN401 - fields of Journal
    """Return a journal in its next state."""
    return replace(journal, state=state, **changes)


def _plain(value: Journal | CommitStep | FileFacts) -> dict[str, Any]:
    values = {record_field.name: getattr(value, record_field.name) for record_field in fields(value)}
    return {
        name: _plain(item) if isinstance(item, FileFacts) else item for name, item in values.items() if name != "steps"
    }


def _parse(data: Mapping[str, Any]) -> Journal:
    if data["version"] != _VERSION or data["state"] not in _STATES:
        raise ValueError("unknown version or state")
    steps = tuple(
        CommitStep(**{**step, "was": _parse_facts(step["was"]), "new": _parse_facts(step["new"])})
        for step in data["steps"]
    )
    for step in steps:
        names_of(step.path)
        if step.do not in {"put", "take", "chmod"} or not (step.slot == "" or is_slot(step.slot)):
            raise ValueError("unknown step")
    if not is_stage(data["stage"]):
        raise ValueError("no name of a stage")
    return Journal(**{**{name: value for name, value in data.items() if name != "version"}, "steps": steps})


def _parse_facts(data: Mapping[str, int] | None) -> FileFacts | None:
    return None if data is None else FileFacts(**data)


def names_of(path: str) -> list[str]:
    """Return the components of a relative path. Raises ValueError if it could leave its folder."""
    names = path.split("/")
    if any(name in {"", ".", ".."} or "\0" in name for name in names):
        raise ValueError("not a relative path of plain names")
    return names


def is_slot(name: str) -> bool:
    """Tell whether a name in a stage is one of Cloche's: n0, n1, …"""
    return name[:1] == "n" and name[1:].isascii() and name[1:].isdigit()


def is_stage(name: str) -> bool:
    """Tell whether a name has the form of a stage's. Only the journal says whether it is one."""
    head, _, tail = name.partition("-")
    return head == ".cloche" and len(tail) == 32 and set(tail) <= set("0123456789abcdef")
