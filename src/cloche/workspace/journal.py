"""What a commit is about to do to a folder of the host, written down where neither the guest nor a checkout can write.

Theory of operation: in the user's state folder, `workspaces/` (ours, 0700) has for each folder of the host a lock and,
while a commit is under way, a journal (ours, 0600), both named by the folder's device and inode. A journal is written
beside, synced and renamed, so it is read whole or not at all. It has relative names alone, and these states:

    intent    the stage's name; it may be there, and empty
    staging   the stage is there, with this inode; files are written into it; nothing else has changed
    applying  the steps; any of them may have been done
    done      all steps were done and synced; the stage, with the host's old files, is to be removed
    undone    none is done any more; the stage is to be removed

`recover.py` knows what to do for each.
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
_MOST_BYTES = 1 << 30  # of a journal
_POLL_S = 0.02
State = Literal["intent", "staging", "applying", "done", "undone"]
_STATES = ("intent", "staging", "applying", "done", "undone")
Action = Literal["put", "take", "chmod"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Say what has a name, as `os.stat` does. Two are of the same thing where `is_same` says so."""

    ino: int
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, facts: os.stat_result) -> Facts:
        """Return those of one file, folder or link."""
        return cls(
            ino=facts.st_ino, mode=facts.st_mode, size=facts.st_size, mtime_ns=facts.st_mtime_ns,
            ctime_ns=facts.st_ctime_ns,
        )  # fmt: skip

    @property
    def is_folder(self) -> bool:
        """Tell whether it is a folder, whose size and times change with what is in it."""
        return stat.S_ISDIR(self.mode)

    def is_same(self, second: Facts | None, *, with_ctime: bool) -> bool:
        """Tell whether another look found the same: for a folder inode and mode, for others size and times too.

        A rename may set the change time, so after one it says nothing.
        """
        if second is None or (self.ino, self.mode) != (second.ino, second.mode):
            return False
        if self.is_folder:
            return True
        ours, theirs = (self.size, self.mtime_ns), (second.size, second.mtime_ns)
        return ours == theirs and (not with_ctime or self.ctime_ns == second.ctime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Say one thing that is done to a path, and what is expected there before (`was`, None for nothing).

    `put` gives the path to what is staged as `slot` (`new`), which then has what was there. `take` moves what is there
    to `slot`. `chmod` gives it other permission bits. So each is undone from what is in the stage.
    """

    do: Action
    path: str
    was: Facts | None = None
    slot: str = ""
    new: Facts | None = None
    mode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Hold one commit's record. `boot` is the kernel's identity, since device numbers are good for one boot alone."""

    state: State
    path: str
    dev: int
    ino: int
    boot: str
    stage: str
    stage_ino: int = 0
    steps: tuple[Step, ...] = ()

    def is_of(self, folder: os.stat_result) -> bool:
        """Tell whether an open folder is the one meant."""
        return self.ino == folder.st_ino and (self.dev == folder.st_dev or self.boot != boot_id())


def boot_id() -> str:
    """Return the identity of this boot of the kernel, empty where the kernel does not say."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def key_of(folder: os.stat_result) -> str:
    """Return how the lock and the journal of a folder are named."""
    return f"{folder.st_dev:x}-{folder.st_ino:x}"


@contextmanager
def open_records(state: str) -> Iterator[int]:
    """Hold open the folder with locks and journals, made where it is not there. Raises WorkspaceFailed."""
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
    """Hold the lock of one folder of the host; give False where somebody else still had it after that time."""
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
    """Write a journal in place of the one that is there; it is on disk on return."""
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
    os.fsync(records_fd)


def remove_unfinished(records_fd: int, key: str) -> None:
    """Remove a journal that was not written to its end. The caller has the lock."""
    with suppress(FileNotFoundError):
        os.unlink(f"{key}.new", dir_fd=records_fd)


def read(records_fd: int, key: str) -> Journal | None:
    """Return the journal of a folder, None where there is none. Raises WorkspaceFailed for one that is not ours."""
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
        raise WorkspaceFailed(f"the journal {key}.json is refused: it is none of ours") from error


def find(records_fd: int, folder: os.stat_result) -> tuple[str, Journal] | None:
    """Return the name and the journal of an open folder, also one of before a restart that changed device numbers."""
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
    """Return the names of all journals, also of those that were not written to their end."""
    heads = (name.rpartition(".") for name in os.listdir(records_fd))
    return sorted({head for head, _, tail in heads if tail in {"json", "new"}})


def remove(records_fd: int, key: str) -> None:
    """Remove a journal, for good."""
    with suppress(FileNotFoundError):
        os.unlink(f"{key}.json", dir_fd=records_fd)
    os.fsync(records_fd)


def advanced(journal: Journal, state: State, **changes: Any) -> Journal:  # noqa: ANN401 - fields of Journal
    """Return a journal in its next state."""
    return replace(journal, state=state, **changes)


def _plain(value: Journal | Step | Facts) -> dict[str, Any]:
    """Return the fields as JSON has them; `asdict` copies deeply, which takes longer than all the rest."""
    values = {record_field.name: getattr(value, record_field.name) for record_field in fields(value)}
    return {name: _plain(item) if isinstance(item, Facts) else item for name, item in values.items() if name != "steps"}


def _parse(data: Mapping[str, Any]) -> Journal:
    if data["version"] != _VERSION or data["state"] not in _STATES:
        raise ValueError("unknown version or state")
    steps = tuple(
        Step(**{**step, "was": _parse_facts(step["was"]), "new": _parse_facts(step["new"])}) for step in data["steps"]
    )
    for step in steps:
        names_of(step.path)
        if step.do not in {"put", "take", "chmod"} or not (step.slot == "" or is_slot(step.slot)):
            raise ValueError("unknown step")
    if not is_stage(data["stage"]):
        raise ValueError("no name of a stage")
    return Journal(**{**{name: value for name, value in data.items() if name != "version"}, "steps": steps})


def _parse_facts(data: Mapping[str, int] | None) -> Facts | None:
    return None if data is None else Facts(**data)


def names_of(path: str) -> list[str]:
    """Return the names that a relative path is made of. Raises ValueError where it could lead anywhere else."""
    names = path.split("/")
    if any(name in {"", ".", ".."} or "\0" in name for name in names):
        raise ValueError("not a relative path of plain names")
    return names


def is_slot(name: str) -> bool:
    """Tell whether something in a stage has one of our names: n0, n1, …"""
    return name[:1] == "n" and name[1:].isascii() and name[1:].isdigit()


def is_stage(name: str) -> bool:
    """Tell whether a name has the shape of a stage's; whether it is one, the journal alone says."""
    head, _, tail = name.partition("-")
    return head == ".cloche" and len(tail) == 32 and set(tail) <= set("0123456789abcdef")
