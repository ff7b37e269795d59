"""Convert arguments as callers write them (files, stdin, argv, env) into the values of a Request.

Files: a mapping gives the sandbox's path for each content; `bytes` and `str` are the content itself, and a path object
(`pathlib.Path`) names a host file or directory to copy. A list contains host paths, as text or path objects, which keep
their last name. Directories are copied recursively; links that lead out of them, and entries that are neither file nor
directory, are left out and listed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, cast

from cloche.core.errors import InvalidRequest
from cloche.core.limits import format_size
from cloche.core.record import dataclass
from cloche.core.request import InputFile

Content = bytes | bytearray | memoryview | str | os.PathLike[str] | InputFile  # an InputFile has its own mode
Files = Mapping[str, Content] | Sequence[str | os.PathLike[str]]

_CONTENT = (bytes, bytearray, memoryview, str, os.PathLike, InputFile)

MOST_WALKED = 200_000  # far above the limit of files: folders may be moved during the walk
MOST_IN_MEMORY = 16 << 20  # bytes of host files; more are copied to a file where the backend sends them as a stream
_COPIED_AT_ONCE = 1 << 20
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # open(2): O_NONBLOCK does not wait for a FIFO's writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files to give, and the host paths below given directories that were left out."""

    files: tuple[InputFile, ...] = ()
    left_out: tuple[str, ...] = ()


class _Copies:
    """Copy large host files into one unnamed file, and return their content as views of its mapping.

    It is a copy because nobody else can shorten it: reading beyond the end of a mapped file is fatal (SIGBUS). Its
    blocks are allocated by writing, so a full disk is an error there.
    """

    def __init__(self, max_bytes: int):
        import mmap
        import tempfile

        from cloche.hostfs import temporary_folder

        folder = temporary_folder()
        self._file = tempfile.TemporaryFile(prefix="cloche-", dir=folder, buffering=0)  # noqa: SIM115 - see `close`
        os.ftruncate(self._file.fileno(), max_bytes)
        self._view = memoryview(mmap.mmap(self._file.fileno(), max_bytes, access=mmap.ACCESS_READ))
        self._size = 0

    def close(self) -> None:
        """Close the file; its mapping, and so the views, remain."""
        self._file.close()

    def add(self, source: BinaryIO, size: int) -> bytes:
        """Return at most `size` bytes of a file, as a view."""
        begin = self._size
        while size and (piece := source.read(min(size, _COPIED_AT_ONCE))):
            self._write(piece)
            self._size, size = self._size + len(piece), size - len(piece)
        return cast("bytes", self._view[begin : self._size])

    def _write(self, piece: bytes) -> None:
        from cloche.hostfs import write_whole

        try:
            write_whole(self._file.fileno(), piece)
        except OSError as error:
            raise InvalidRequest(
                f"files: they cannot be copied to the folder for temporary files: {error.strerror}; make room, or "
                "name another folder in TMPDIR"
            ) from error


@dataclass(slots=True)
class _Budget:
    """Limit what is read, so that a huge tree is refused before it is in memory."""

    bytes_left: int
    files_left: int
    max_bytes: int
    maps: bool = False
    in_memory: int = 0
    copies: _Copies | None = None

    def spend(self, size: int, *, source: str) -> None:
        self.bytes_left -= size
        self.files_left -= 1
        if self.bytes_left < 0:
            limit = format_size(self.max_bytes)
            raise InvalidRequest(
                f"files: up to {source!r} they exceed the workspace's {limit}; raise disk or give fewer"
            )
        if self.files_left < 0:
            raise InvalidRequest(f"files: {source!r} is one file too many for the workspace; pass fewer files")

    def read(self, source: BinaryIO, size: int) -> bytes:
        """Return the content of a host file that was accounted: in memory, or as a view of a copy on disk."""
        self.in_memory += size
        if not self.maps or self.in_memory <= MOST_IN_MEMORY:
            return source.read(size)
        self.in_memory -= size
        if self.copies is None:
            self.copies = _Copies(self.max_bytes)
        return self.copies.add(source, size)


def gather_files(files: Files | None, *, max_bytes: int, max_files: int = 32_768, maps: bool = False) -> Inputs:
    """Read `files` into memory, within limits. Raises InvalidRequest naming the offending file.

    With `maps`, host files beyond `MOST_IN_MEMORY` are copied to a file, and their data is a memoryview of it.
    """
    budget = _Budget(bytes_left=max_bytes, files_left=max_files, max_bytes=max_bytes, maps=maps)
    try:
        return _gather(files, budget)
    finally:
        if budget.copies is not None:
            budget.copies.close()


def _gather(files: Files | None, budget: _Budget) -> Inputs:
    gathered: list[InputFile] = []
    left_out: list[str] = []
    for path, content in _pairs(files):
        if isinstance(content, os.PathLike):
            gathered.extend(_copy(path, os.fspath(content), budget, left_out))
        elif isinstance(content, InputFile):
            budget.spend(len(content.data), source=path)
            gathered.append(content)
        else:
            data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else bytes(content)
            budget.spend(len(data), source=path)
            gathered.append(InputFile(path=path, data=data))
    return Inputs(files=tuple(gathered), left_out=tuple(left_out))


def has_host_files(files: Files | None) -> bool:
    """Tell whether `gather_files` would read the host's disk."""
    return any(isinstance(content, os.PathLike) for _, content in _pairs(files))


def _pairs(files: object) -> Iterator[tuple[str, Content]]:
    if files is None:
        return
    if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable):
        raise InvalidRequest(f"files: {files!r} is neither a mapping nor a list; put a single path in a list")
    if isinstance(files, Mapping):
        for name, content in files.items():
            if not isinstance(name, str) or not isinstance(content, _CONTENT):
                kind = type(content).__name__
                raise InvalidRequest(f"files: {name!r} must map a name to bytes, text or a path object, not {kind}")
            yield name, content
        return
    for source in files:
        if not isinstance(source, str | os.PathLike):
            raise InvalidRequest(f"files: {source!r} in a list must be a host path; use a mapping to give content")
        text = os.fspath(source)
        yield os.path.basename(os.path.abspath(text)), _HostPath(text)


@dataclass(frozen=True, slots=True)
class _HostPath:
    """Mark text from a list as a path."""

    text: str

    def __fspath__(self) -> str:
        return self.text


def _copy(path: str, source: str, budget: _Budget, left_out: list[str]) -> Iterator[InputFile]:
    try:
        if os.path.isdir(source):
            yield from _copy_directory(path, source, budget, left_out)
            return
        file = _read(path, source, budget)
    except OSError as error:
        raise InvalidRequest(f"files: cannot read {source!r}: {error.strerror}") from error
    if file is None:
        raise InvalidRequest(f"files: {source!r} is neither a regular file nor a directory")
    yield file


def _copy_directory(path: str, source: str, budget: _Budget, left_out: list[str]) -> Iterator[InputFile]:
    root = os.path.realpath(source)
    walked = 0
    for folder, folders, names in os.walk(root, onerror=_raise):
        walked += 1 + len(names)
        if walked > MOST_WALKED:
            raise InvalidRequest(f"files: {source!r} has more than {MOST_WALKED} files and folders; pass a part of it")
        folders.sort()
        for name in sorted([*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))]):
            host = os.path.join(folder, name)
            inside = (
                os.path.join(path, os.path.relpath(host, root))
                if path not in ("", ".")
                else os.path.relpath(host, root)
            )
            file = _read(inside, host, budget, root) if _stays_below(host, root) else None
            if file is None:
                left_out.append(host)
            else:
                yield file


def _stays_below(host: str, root: str) -> bool:
    """Tell whether `host`, with its links resolved, lies in the directory that the caller named."""
    return os.path.realpath(host).startswith(root.rstrip("/") + "/")


def _read(path: str, host: str, budget: _Budget, root: str = "") -> InputFile | None:
    """Read one file; None if it is not regular (a dangling link included), or not below `root`."""
    try:
        fd = os.open(host, _OPEN_FLAGS)
    except FileNotFoundError:
        if os.path.islink(host):
            return None
        raise
    with open(fd, "rb") as opened:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            return None
        if root and not _stays_below(f"/proc/self/fd/{fd}", root):
            return None  # replaced by a link since it was checked
        budget.spend(facts.st_size, source=host)
        data = budget.read(opened, facts.st_size)
    return InputFile(path=path, data=data, mode=0o755 if facts.st_mode & 0o100 else 0o644)


def _raise(error: OSError) -> None:
    raise error


def read_stdin(value: object) -> bytes:
    """Return standard input as bytes; text is encoded as UTF-8, None is empty."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidRequest(f"stdin: give bytes or text, not {type(value).__name__}")


def read_argv(arguments: Iterable[object]) -> tuple[str, ...]:
    """Return arguments as text; path objects are allowed, a bare string is not."""
    if isinstance(arguments, str | bytes):
        raise InvalidRequest(f"argv: {arguments!r} is one string; give a list of words")
    checked = []
    for argument in arguments:
        if not isinstance(argument, str | os.PathLike):
            raise InvalidRequest(f"argv: {argument!r} must be text, not {type(argument).__name__}")
        checked.append(os.fsdecode(argument))
    return tuple(checked)


def read_env(env: object) -> dict[str, str]:
    """Return the guest's variables. Raises InvalidRequest naming the one that is not text."""
    pairs = {} if env is None else env
    if not isinstance(pairs, Mapping):
        raise InvalidRequest(f"env: give a mapping of names to values, not {type(env).__name__}")
    for name, value in pairs.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidRequest(f"env: {name!r} must map text to text, not {type(value).__name__}")
    return dict(pairs)
