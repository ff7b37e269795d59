"""Processes and files of a live sandbox: requests and descriptions. Values alone."""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from typing import Literal

from .errors import InvalidRequest
from .record import dataclass, field
from .request import check_argv, check_env
from .result import Status

FileType = Literal["file", "directory", "link", "other"]
MOST_TAG = 256
ProcessKey = Mapping[str, str | int]  # one of `id`, `pid` and `tag`
ByteRange = tuple[int | None, int | None]  # the first and the last byte; without the first, the number from the end
ChangeKind = Literal["created", "changed", "written", "attributes", "removed", "moved", "lost", "over"]


class Detached(InvalidRequest):
    """Report that a process was let go; a client that attaches to it by its id learns of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRequest:
    """Ask for a process: a command `argv`, in `cwd`, with `env` on top of the sandbox's own.

    A `user` of None is the sandbox's own. A `timeout_s` of None lasts as long as the sandbox. `terminal` has rows and
    columns: the process has a terminal in place of pipes. A `kept` process lives on when its client goes. Without
    `has_input` its standard input is empty. By its `tag` it can be found again. Where it is `alone`, it ends when its
    output does, of which processes that it has started may be writers, and its time-out kills none of these; and it
    is started when its program runs: one that cannot be started is an error at once.
    """

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout_s: float | None = None
    terminal: tuple[int, int] | None = None
    kept: bool = False
    has_input: bool = True
    tag: str = ""
    alone: bool = False

    def __post_init__(self) -> None:
        if len(self.tag) > MOST_TAG:
            raise InvalidRequest(f"tag: give text of at most {MOST_TAG} characters")
        if not self.argv:
            raise InvalidRequest("argv: give a list whose first word is a program; use shell= for a shell command")
        check_argv(self.argv)
        check_env(self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Describe a process of a sandbox: its id, its pid inside, its command, seconds since its start, its `tag`.

    A running one that was started as a command has its `argv`, `cwd` and the variables in `env` as they were given; of
    long ones the program alone.
    `exit_code` and `status` are None while it runs. `printed` counts the bytes of its output so far, `is_attached`
    tells whether a client receives it, `is_stopped` whether all in the foreground of its terminal is stopped (Ctrl-Z).
    """

    id: str
    pid: int
    command: str
    age: float
    exit_code: int | None = None
    status: Status | None = None
    printed: int = 0
    is_attached: bool = False
    is_stopped: bool = False
    tag: str = ""
    argv: tuple[str, ...] = ()
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """Describe a file of a sandbox: bytes, permission bits, seconds since 1970 of its last change, owner.

    `owner` and `group` are names as the sandbox's /etc has them, or the ids as text. A link has its `target`, in
    `leads_to` the type of what it leads to in the end, with its permission bits in `target_mode` and its path in
    `real`: all empty if that does not exist. `path` is the absolute path where it was asked for by one. `metadata` are
    texts that were stored with the file, as its extended attributes `user.e2b.KEY`.
    """

    name: str
    type: FileType
    size: int
    mode: int
    mtime: float
    uid: int
    gid: int
    target: str = ""
    leads_to: FileType | None = None
    owner: str = ""
    group: str = ""
    path: str = ""
    real: str = ""
    target_mode: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_directory(self) -> bool:
        """Tell whether it is a directory, or a link to one."""
        return "directory" in (self.type, self.leads_to)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRights:
    """Say with whose rights an operation on files is done, by default the sandbox's own user.

    `owner` gets what is created; `user` must then be root. With `at_home`, relative paths and `~` begin in the home
    folder of the owner or the user, not in /workspace.
    """

    user: str | None = None
    owner: str | None = None
    at_home: bool = False


OWN_RIGHTS = FileRights()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Describe the part of a file that is read: the whole file's absolute path, size and time of change, and the part.

    `count` is None for the whole file, and 0 for a part behind its end.
    """

    path: str
    size: int
    mtime: float
    offset: int = 0
    count: int | None = None


def part_of(info: FileInfo, byte_range: ByteRange | None) -> FilePart:
    """Return the part of a file that a range names."""
    first, last = byte_range or (None, None)
    offset, count = 0, None
    if info.size and first is not None:
        offset, count = first, max(0, min(info.size if last is None else last + 1, info.size) - first)
    elif info.size and last is not None:
        offset, count = max(0, info.size - last), min(info.size, last)
    return FilePart(path=info.path, size=info.size, mtime=info.mtime, offset=offset, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Count the regular files that were copied in or out, their bytes, and the entries left out."""

    files: int
    size: int
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """Describe a change below a watched folder: `path` begins there, and is empty for a watched file.

    A `moved` file has its new path in `target`. `lost` means that some changes are missing; `over` is the last one. An
    exact watch tells `written` and `attributes` (mode, owner, metadata) in place of `changed`, a move out of the folder
    as `moved` without `target`, and on request the file as it was just after the change, in `entry`.
    """

    kind: ChangeKind
    path: str
    target: str = ""
    is_directory: bool = False
    entry: FileInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningPort:
    """Describe a server inside: its TCP port, and the address on which it listens."""

    port: int
    address: str


def signal_number(value: int | str) -> int:
    """Read a signal: a number, or a name with or without SIG. Raises InvalidRequest."""
    if isinstance(value, str) and not value.isdigit():
        name = value.upper()
        signal_number = getattr(signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if isinstance(signal_number, signals.Signals):
            return int(signal_number)
    elif 0 < int(value) < 65:
        return int(value)
    raise InvalidRequest(f"signal: {value!r} is not valid; give a name such as TERM, or a number from 1 to 64")


def shell_argv(line: str) -> tuple[str, ...]:
    """Return the command that runs a line of shell."""
    if not isinstance(line, str):
        raise InvalidRequest(f"shell: {line!r} is not a shell command; give text, or a list as argv")
    return ("/bin/sh", "-c", line)


def no_life_of(backend: str) -> str:
    """Say that a backend gives no live sandboxes."""
    return f"backend {backend!r} has no live sandboxes"
