"""Pydantic AI: `ClocheWorkspace`, the capability that gives runs a sandbox as their workspace, and its backend.

    agent = Agent(model, capabilities=[ClocheWorkspace(memory="1g")])
    first = await agent.run("Install what you need.")
    again = await agent.run("Go on.", workspace=first.workspace.ref)

Needs `cloche[pydantic-ai]`. A sandbox lives until `close`, or until the program ends, and is found by its reference
in the same process.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable
from cloche.core.processes import FileInfo
from cloche.core.result import Result, Status

from .environment import GONE, OUTPUT_BYTES, WORKING_DIR, Environment, Operation

try:
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        SupportsCommands,
        SupportsFilesystem,
        SupportsRealpath,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
except ImportError as error:
    raise BackendUnavailable(
        "The workspace needs the package pydantic-ai-slim, 2.55 or later.",
        remedy='Install it with "pip install cloche[pydantic-ai]".',
    ) from error

T = TypeVar("T")
PROVIDER = "cloche"
NO_TIME_LIMIT_S = 366 * 24 * 3600.0
MOST_BYTES = 100 << 20  # of a file that is read whole

_open: dict[str, Environment] = {}  # by the id of their references


class ClocheBackend(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """Be one sandbox: a new one at the first use, or with `ref` one that is open in this process.

    Takes the keywords of `cloche.Sandbox`.
    """

    def __init__(self, *, ref: WorkspaceRef | None = None, **options: Unpack[SandboxOptions]):
        self._ref = ref
        self._environment = Environment(**options) if ref is None else None

    @property
    def ref(self) -> WorkspaceRef | None:
        """Return the reference: None until there is a sandbox."""
        return self._ref

    async def close(self) -> None:
        """Kill and remove everything in it, for good: also for other holders of its reference."""
        environment = self._found()
        _open.pop(environment.id, None)
        await environment.close()

    async def working_dir(self) -> str:
        """Return where commands start, and have the sandbox opened."""
        await self._use(_nothing)
        return WORKING_DIR

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> CommandResult:
        """Run a command; a program that is missing ends with 127."""
        arguments = _words(command, is_shell=shell)
        limit = NO_TIME_LIMIT_S if timeout is None else timeout
        result = await self._use(lambda sandbox: sandbox.exec(**arguments, cwd=WORKING_DIR, env=env, timeout=limit))
        _check(result)
        return CommandResult(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    async def read_bytes(self, path: str) -> bytes:
        """Return a file of at most 100 MiB."""
        return await self._use(lambda sandbox: sandbox.read_file(path, max_bytes=MOST_BYTES))

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, with the folders above it; a link stays one."""
        await self._use(lambda sandbox: sandbox.write_file(path, data))

    async def stat(self, path: str) -> FileEntry:
        """Describe the file at a path, or the target of a link there."""
        info = await self._use(lambda sandbox: sandbox.stat(path))
        if info.type == "link" and not info.leads_to:
            raise FileNotFoundError(f"{path}: it is a link to nothing")
        return _entry(info, path)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        """Describe the files in a folder, by name."""
        rows = await self._use(lambda sandbox: sandbox.list_dir(path))
        return [_entry(row, posixpath.join(path, row.name)) for row in rows]

    async def make_dir(self, path: str) -> None:
        """Make a folder, with those above it; one that is there is no error."""
        await self._use(lambda sandbox: sandbox.make_dir(path, parents=True))

    async def remove(self, path: str) -> None:
        """Remove a file or a link, or a folder with all that is in it."""
        folder, name = posixpath.split(posixpath.normpath(path))
        target = posixpath.join(await self.realpath(folder), name)
        if f"{WORKING_DIR}/".startswith(f"{target.rstrip('/')}/"):
            raise ValueError(f"{path}: the working directory and what is above it cannot be removed")
        await self._use(lambda sandbox: sandbox.remove(path, recursive=True))

    async def exists(self, path: str) -> bool:
        """Tell whether something is there, or where a link there leads."""
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def realpath(self, path: str) -> str:
        """Follow every link of a path; a missing part stays as it is written."""
        result = await self._use(lambda sandbox: sandbox.exec(["realpath", "-mz", "--", path], cwd="/"))
        if result.exit_code != 0:
            raise OSError(f"{path}: {result.stderr.strip()}")
        return result.stdout.rstrip("\0")

    async def _use(self, operation: Operation[T]) -> T:
        environment = self._found()
        if self._ref is None:  # known before anything can fail
            self._ref = WorkspaceRef(provider=PROVIDER, id=environment.id)
            _open[environment.id] = environment
        try:
            return await environment.use(operation)
        except GONE as error:
            raise WorkspaceUnavailableError(str(error)) from error

    def _found(self) -> Environment:
        if self._environment is None:
            self._environment = _open.get(self._ref.id) if self._ref and self._ref.provider == PROVIDER else None
        if self._environment is None:
            raise WorkspaceUnavailableError(
                f"no sandbox {self._ref} is open in this process; start without a reference"
            )
        return self._environment


class ClocheWorkspace(AbstractCapability[Any]):
    """Give runs a sandbox as their workspace: each a new one, unless it has the reference of one opened before.

    Takes the keywords of `cloche.Sandbox`.
    """

    id = "cloche_workspace"

    def __init__(self, **options: Unpack[SandboxOptions]):
        self._options = options

    def get_workspace(self, ctx: Any, *, ref: WorkspaceRef | None) -> WorkspaceBackend | None:
        """Return the backend for a reference, a new one for None; a reference of another provider is not ours."""
        if ref is None:
            return ClocheBackend(**self._options)
        return ClocheBackend(ref=ref) if ref.provider == PROVIDER else None


def _words(command: WorkspaceCommand, *, is_shell: bool) -> dict[str, Any]:
    if isinstance(command, str) != is_shell:
        raise TypeError("a string needs shell=True, and a list of words shell=False")
    return {"shell": command} if isinstance(command, str) else {"argv": list(command)}


def _check(result: Result) -> None:
    """Raise what Pydantic AI wants raised in place of a result."""
    if result.status is Status.TIMEOUT:
        raise WorkspaceTimeoutError(
            "the command was killed as it was over its time-out", stdout=result.stdout, stderr=result.stderr
        )
    if result.truncated or result.status is Status.OUTPUT_LIMIT:
        raise WorkspaceOutputLimitError(
            "the command wrote more than is kept; write to a file and read parts of it",
            limit=OUTPUT_BYTES, stdout=result.stdout, stderr=result.stderr,
        )  # fmt: skip


def _entry(info: FileInfo, path: str) -> FileEntry:
    size = info.size if info.type == "file" else None
    return FileEntry(name=posixpath.basename(path), path=path, is_dir=info.is_directory, size=size)


async def _nothing(_: object) -> None:
    """Have the sandbox opened."""
