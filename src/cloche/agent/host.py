"""The host itself: a command without a sandbox, and the operator's folders behind /memory and /configs.

A command has a time-out and no other limit. Only tier 4 has it, after a human approved and confirmed the call.

`Roots` opens every path one name at a time, by descriptor: links are not followed, `..` is refused. So no file outside
of a root is opened, even while the folder is being changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Self

from cloche import hostfs
from cloche.config.keys import Settings
from cloche.core.errors import (
    BackendUnavailable,
    InvalidRequest,
    SandboxFileError,
    SandboxFileNotFound,
    SandboxFileRefused,
    SandboxFileTooLarge,
    StartFailed,
)
from cloche.core.events import HeadTail
from cloche.core.limits import Limits
from cloche.core.result import KillCause, Observed, Result, Status, Usage, decide

CHUNK_BYTES = 65_536
DRAIN_S = 0.5
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "bash": ("-c",), "sh": ("-c",), "cmd": ("/c",), "powershell": ("-NoProfile", "-NonInteractive", "-Command"),
}  # fmt: skip
MOUNTS = ("/memory", "/configs")
MOST_LISTED = 10_000
MOST_FOLDERS, MOST_NAMES = 20_000, 100_000  # that are walked, and that are read in one of them
MOST_DEPTH = 64  # folders within folders


async def run_on_host(shell: str, command: str, limits: Limits) -> Result:
    """Run `command` by `shell` in the caller's own folder and environment, and return its outcome.

    At its time-out, or when the call is cancelled, its whole process group is killed. Raises BackendUnavailable,
    InvalidRequest for an argument that no process can have, StartFailed.
    """
    path = shutil.which(shell)
    if path is None:
        raise BackendUnavailable(f"this host has no {shell}.", remedy="Name another shell.")
    started = time.monotonic()
    process = await _started(path, *_ARGUMENTS[shell], command)
    outputs = [HeadTail(limits.output_bytes), HeadTail(limits.output_bytes)]
    streams = zip((process.stdout, process.stderr), outputs, strict=True)
    reading = [asyncio.ensure_future(_read(stream, into)) for stream, into in streams if stream is not None]
    timed_out = False
    try:
        await asyncio.wait_for(process.wait(), limits.timeout_s)
    except TimeoutError:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.wait(reading, timeout=DRAIN_S)
        for thread in reading:
            thread.cancel()
    return _result(process.returncode or 0, outputs, time.monotonic() - started, timed_out=timed_out)


async def _started(*argv: str) -> asyncio.subprocess.Process:
    """Start a process; cancelled meanwhile, with all that it may have started itself by then."""
    starting = asyncio.ensure_future(_start(*argv))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starting.result().pid, signal.SIGKILL)
            await starting.result().wait()
        raise


async def _start(*argv: str) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except ValueError as error:  # a NUL, or half of a character pair
        raise InvalidRequest(f"the command cannot be passed to a process: {error}") from None
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise InvalidRequest("the command is too long for a process; put it into a file in parts") from None
        raise StartFailed(f"the command could not be started: {error.strerror}", errno=error.errno) from error


async def _read(stream: asyncio.StreamReader, into: HeadTail) -> None:
    while data := await stream.read(CHUNK_BYTES):
        into.add(data)


def _result(code: int, outputs: list[HeadTail], duration: float, *, timed_out: bool) -> Result:
    out, err = outputs[0].joined(), outputs[1].joined()
    cause = KillCause.TIMEOUT if timed_out else None
    observed = Observed(exit_code=code if code >= 0 else None, signal=-code if code < 0 else None, cause=cause)
    verdict = decide(observed)
    return Result(
        out.decode("utf-8", "replace"),
        err.decode("utf-8", "replace"),
        verdict.exit_code,
        duration,
        status=verdict.status,
        timed_out=verdict.status is Status.TIMEOUT,
        truncated=any(output.is_truncated for output in outputs),
        usage=Usage(wall_s=duration),
        stdout_bytes=out,
        stderr_bytes=err,
        meta={"backend": "host"},
    )


class Roots:
    """Hold host folders by the names that a model knows them by. Raises InvalidRequest for a folder that is not there.

    `folders` maps `/memory` and `/configs`, or one of them, to folders of the host.
    """

    def __init__(self, folders: Mapping[str, str | os.PathLike[str]]):
        for name, folder in folders.items():
            if name not in MOUNTS:
                raise InvalidRequest(f"roots: {name!r} is none of: {', '.join(MOUNTS)}")
            if not os.path.isdir(folder):
                raise InvalidRequest(f"roots: {name}: {os.fspath(folder)!r} is not a folder; make it first")
        self._folders = {name: os.path.realpath(folder) for name, folder in folders.items()}

    @classmethod
    def configured(cls, settings: Settings) -> Self:
        """Return the folders that the configuration names. Raises InvalidRequest, with who named it, for one that is
        not there.
        """
        for root, folder in settings.roots.items():
            if not os.path.isdir(folder):
                by = settings.origins[f"roots.{root}"]
                raise InvalidRequest(
                    f"roots.{root} ({by}) is {folder!r}, which is not a folder; make it, or write none"
                )
        return cls({f"/{root}": folder for root, folder in settings.roots.items()})

    @staticmethod
    def has(path: str) -> bool:
        """Tell whether a path is one of these, whether or not its folder was given."""
        return any(path == mount or path.startswith(f"{mount}/") for mount in MOUNTS)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file. Raises the SandboxFile errors."""
        with self._parent(path) as (folder, name):
            fd, facts = hostfs.open_regular(name, folder)
            with open(fd, "rb") as file:
                if facts.st_nlink > 1:  # its other name may be outside of the root
                    raise SandboxFileRefused(f"{path} is a hard link, and is not read", path=path)
                data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileTooLarge(f"{path} has more than {max_bytes} bytes", path=path)
        return data

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its folders: whole or not at all. Raises the SandboxFile errors."""
        with self._parent(path, mode=0o755) as (folder, name):
            existing = hostfs.look(name, folder)
            if existing is not None and not stat.S_ISREG(existing.st_mode):
                raise SandboxFileRefused(f"{path} is not a regular file, and is not replaced", path=path)
            permissions = None if existing is None else existing.st_mode & 0o777
            hostfs.replace(folder, name, data, mode=0o644 if permissions is None else 0o600, permissions=permissions)

    def list_files(self, path: str) -> tuple[str, ...]:
        """Return the regular files below a folder, as a model names them, sorted. Raises the SandboxFile errors."""
        mount, names = self._split(path)
        fd = self._descend(path, mount, names)
        try:
            paths = _walk(fd, "/".join([mount, *names]), MOST_DEPTH - len(names), set())
            return tuple(sorted(islice(paths, MOST_LISTED)))
        except OSError as error:
            raise _error_for_model(error, path) from error
        finally:
            os.close(fd)

    def _split(self, path: str) -> tuple[str, list[str]]:
        mount = next(mount for mount in MOUNTS if path == mount or path.startswith(f"{mount}/"))
        names = [name for name in path[len(mount) :].split("/") if name not in ("", ".")]
        if ".." in names or "\0" in path:
            raise SandboxFileRefused(f"{path!r}: '..' is not followed", path=path)
        if len(names) > MOST_DEPTH:
            raise SandboxFileRefused(f"a path has at most {MOST_DEPTH} parts, not {len(names)}", path=path)
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise SandboxFileRefused(f"{path!r} is not a name that a file can have", path=path) from None
        return mount, names

    def _descend(self, path: str, mount: str, names: list[str], *, mode: int | None = None) -> int:
        """Return a descriptor of the folder at `names`; with a `mode`, missing folders are made."""
        if mount not in self._folders:
            raise SandboxFileNotFound(f"{mount} has no folder here; the operator configures one", path=path)
        try:
            root = hostfs.open_folder(self._folders[mount])
        except OSError:
            raise SandboxFileNotFound(f"the folder of {mount} cannot be opened any more", path=path) from None
        try:
            return hostfs.descend(root, names, mode=mode)
        except OSError as error:
            raise _error_for_model(error, path) from error
        finally:
            os.close(root)

    @contextmanager
    def _parent(self, path: str, *, mode: int | None = None) -> Iterator[tuple[int, str]]:
        """Hold the folder that a file is in, and the file's name."""
        mount, names = self._split(path)
        if not names:
            raise SandboxFileRefused(f"{path} is a folder", path=path)
        fd = self._descend(path, mount, names[:-1], mode=mode)
        try:
            yield fd, names[-1]
        except OSError as error:
            raise (error if isinstance(error, SandboxFileError) else _error_for_model(error, path)) from error
        finally:
            os.close(fd)


def _error_for_model(error: OSError, path: str) -> SandboxFileError:
    """Return the error for the model, without any path of the host."""
    if isinstance(error, hostfs.NotRegular):
        return SandboxFileRefused(f"{path} is not a regular file", path=path)
    if isinstance(error, FileNotFoundError):
        return SandboxFileNotFound(f"there is no {path}", path=path)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return SandboxFileRefused(f"{path} leads through a link or a file, which is not followed", path=path)
    return SandboxFileRefused(f"{path}: {error.strerror}", path=path)


def _walk(fd: int, shown_path: str, depth: int, visited: set[tuple[int, int]]) -> Iterator[str]:
    """Yield the files below a folder, each folder once: it may be moved about meanwhile."""
    facts = os.fstat(fd)
    if (facts.st_dev, facts.st_ino) in visited or len(visited) >= MOST_FOLDERS:
        return
    visited.add((facts.st_dev, facts.st_ino))
    with os.scandir(fd) as entries:
        listed = sorted(islice(entries, MOST_NAMES), key=lambda entry: entry.name)
    for entry in listed:
        if entry.is_file(follow_symlinks=False):
            yield f"{shown_path}/{entry.name}"
        elif depth > 0 and entry.is_dir(follow_symlinks=False):
            with suppress(OSError), hostfs.descended(fd, (entry.name,)) as below:  # or it is gone meanwhile, or a link
                yield from _walk(below, f"{shown_path}/{entry.name}", depth - 1, visited)
