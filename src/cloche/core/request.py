"""What to run: code in a language, or a command, with its files; and the container that an agent works in."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence

from .errors import InvalidRequest
from .languages import PROGRAM_FILES
from .limits import KIB, MIB, parse_duration
from .record import dataclass, field

MAX_STDIN_BYTES = 50 * MIB
MAX_ARGV_BYTES = MIB + 4 * KIB  # 1 MiB of content, with a program and its options
MAX_ONE_ARGUMENT_BYTES = 128 * KIB - 1  # the kernel's MAX_ARG_STRLEN, its final NUL included
MAX_PATTERNS, MAX_PATTERN_CHARS = 32, 1024
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """Give the sandbox a file: `path` relative to /workspace (or absolute below it), its bytes and mode bits."""

    path: str
    data: bytes = field(repr=False)
    mode: int = 0o644

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", workspace_path(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """Say how one cell of a session runs.

    `env` has variables for this cell alone, `cwd` the folder that it begins in, which stays. With `is_notebook` it
    answers as a notebook's kernel does: the traceback of an error is in the result instead of on standard error, the
    value is displayed before the cell's figures, and lists, tables and figures are displayed as data, too.
    """

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    is_notebook: bool = False

    def as_fields(self) -> dict[str, object]:
        """Return what a message to a driver says of them: nothing for a plain cell."""
        fields = {"env": dict(self.env), "cwd": self.cwd, "is_notebook": self.is_notebook}
        return {name: value for name, value in fields.items() if value}


PLAIN_CELL = CellOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Describe one run.

    With `code`, `argv` holds the program's arguments; without it, `argv` is the whole command. `timeout_s` replaces
    the sandbox's own time-out for this run. `env` is the guest's whole environment besides a fixed minimum.
    `source_path` says where the code is in the workspace, if not in a file of Cloche's own, which no listing shows;
    that may be one of `files`, with the same content, which then stays as it is. `collect` has patterns of the files
    that a result shall have, where it does not have all that were changed.
    """

    code: str | None = None
    language: str = "python"
    argv: tuple[str, ...] = ()
    stdin: bytes = field(default=b"", repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: tuple[InputFile, ...] = ()
    timeout_s: float | None = None
    source_path: str | None = None
    collect: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", tuple(self.argv))
        object.__setattr__(self, "files", tuple(self.files))
        if self.code is None and not self.argv:
            raise InvalidRequest("nothing to run: give code, or a command in argv")
        if self.source_path is not None:
            object.__setattr__(self, "source_path", workspace_path(self.source_path))
        if self.timeout_s is not None:
            object.__setattr__(self, "timeout_s", parse_duration(self.timeout_s, name="timeout"))
        if self.argv:
            check_argv(self.argv)
        if self.env:
            check_env(self.env)
        if len(self.stdin) > MAX_STDIN_BYTES:
            raise InvalidRequest(
                f"stdin: {len(self.stdin)} bytes exceed the limit of {MAX_STDIN_BYTES}; pass a file instead"
            )
        if self.files:
            _check_unique(self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgramFile(InputFile):
    """Hold the code under a name of Cloche's own, which no other file may have."""

    def __post_init__(self) -> None:
        """Leave the path as it is."""


def source_of(request: Request, *, language: str, file_name: str) -> tuple[str, tuple[InputFile, ...]]:
    """Return where the code of a request goes, and all files, the code among them.

    `file_name` is where code in this language goes by itself. Raises InvalidRequest where another file lies at the
    request's `source_path`.
    """
    data = (request.code or "").encode("utf-8", "surrogatepass")
    if request.source_path is None:
        return file_name, (*request.files, _ProgramFile(path=file_name, data=data))
    path = request.source_path
    same = next((file for file in request.files if file.path == path), None)
    if same is None:
        return path, (*request.files, InputFile(path=path, data=data))
    if same.data != data:
        raise InvalidRequest(
            f"file {path!r} has the name of the file for the {language} code itself; choose another name"
        )
    return path, request.files


def workspace_path(path: str) -> str:
    """Return `path` relative to /workspace, normalised.

    Raises InvalidRequest when it would leave the workspace, or is the name of the program itself.
    """
    inside = path
    if "/" in path or "\0" in path or path in ("", ".", ".."):  # hardly ever: nearly all are bare names
        inside = posixpath.relpath(path, "/workspace") if path.startswith("/") else posixpath.normpath(path)
        if "\0" in path or inside in ("", ".", "..") or inside.startswith("../"):
            raise InvalidRequest(f"file {path!r} is not a path below /workspace")
    if inside in PROGRAM_FILES:
        raise InvalidRequest(f"file {path!r} has the name under which Cloche runs a program; choose another one")
    return inside


def read_patterns(patterns: object) -> tuple[str, ...]:
    """Return patterns of files, relative to /workspace. Raises InvalidRequest for invalid ones."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise InvalidRequest(f"collect: {patterns!r} is not a list of patterns; give one such as ['*.csv', 'out/**']")
    if len(patterns) > MAX_PATTERNS:
        raise InvalidRequest(
            f"collect: {len(patterns)} patterns are more than {MAX_PATTERNS}; `**` matches any folders"
        )
    return tuple(map(_read_pattern, patterns))


def _read_pattern(pattern: object) -> str:
    text = pattern if isinstance(pattern, str) else ""
    text = text.removeprefix("/workspace/").removeprefix("./")
    if not text or text.startswith("/") or ".." in text.split("/") or len(text) > MAX_PATTERN_CHARS or "\0" in text:
        raise InvalidRequest(
            f"collect: {pattern!r} is not a pattern of files below /workspace; give text such as '*.csv' or 'out/**'"
        )
    _encoded(text, what="collect")
    return text


def check_argv(argv: tuple[str, ...]) -> None:
    """Raise InvalidRequest for arguments that the kernel would not take, or that are more than is passed on."""
    sizes = [len(_encoded(argument, what="argv")) + 1 for argument in argv]
    if sum(sizes) > MAX_ARGV_BYTES:
        raise InvalidRequest(f"argv: {sum(sizes)} bytes exceed the limit of {MAX_ARGV_BYTES}; use stdin or a file")
    if max(sizes) > MAX_ONE_ARGUMENT_BYTES:
        raise InvalidRequest(f"argv: one argument exceeds {MAX_ONE_ARGUMENT_BYTES} bytes; use stdin or a file")


def check_env(env: Mapping[str, str]) -> None:
    """Raise InvalidRequest for an invalid environment."""
    for name, value in env.items():
        if not name or "=" in name:
            raise InvalidRequest(f"env: {name!r} is not a variable's name")
        _encoded(name, what="env")
        _encoded(value, what=f"env {name}")


def _encoded(text: str, *, what: str) -> bytes:
    """Return the bytes the kernel will see, or raise InvalidRequest for a NUL or a lone surrogate."""
    if "\0" in text:
        raise InvalidRequest(f"{what}: {text!r} must be text without NUL characters")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what}: {text!r} cannot be encoded as UTF-8") from error


def _check_unique(files: tuple[InputFile, ...]) -> None:
    paths: set[str] = set()
    for file in files:
        if file.path in paths:
            raise InvalidRequest(f"file {file.path!r} is given twice")
        paths.add(file.path)
    for file in files:
        if "/" in file.path and (above := next((p for p in _parents(file.path) if p in paths), None)) is not None:
            raise InvalidRequest(f"file {above!r} cannot also be the folder of file {file.path!r}")


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceContainer:
    """Describe an agent's container; nothing in it can be taken for an option of docker's.

    `folders` are host folders by their place inside, `/workspace` among them; `user` and `group` are the ids that it
    runs as. `env` has a variable's value, or None for the one that it has wherever docker is called. `runtime` is
    empty for the daemon's default.
    """

    image: str
    command: tuple[str, ...] = ()
    folders: Mapping[str, str]
    user: int
    group: int
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    name: str = ""
    runtime: str = ""
    has_terminal: bool = False

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            raise InvalidRequest(f"image: {self.image!r} is not the name of an image")
        if self.name and not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"name: {self.name!r} is not the name of a container")
        for folder in self.folders.values():
            if not os.path.isabs(folder) or os.path.normpath(folder).strip("/") == "" or "\0" in folder:
                raise InvalidRequest(f"workspace: {folder!r} is not a folder to show to an agent; name one below /")
        if self.user < 1 or self.group < 1:
            raise InvalidRequest(
                f"user: an agent does not run as root ({self.user}:{self.group}); name a user who may write to the "
                "agent's folder, or change its owner (chown)"
            )
        for variable in self.env:
            if not variable or "=" in variable or "\0" in f"{variable}{self.env[variable]}":
                raise InvalidRequest(f"env: {variable!r} is not a variable's name, or its value has a NUL")
