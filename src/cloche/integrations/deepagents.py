"""LangChain deepagents: `Cloche`, a backend with commands, and the provider `cloche` of the command line `dcode`.

    with Cloche(memory="1g") as backend:
        agent = create_deep_agent(model, backend=backend)
        reply = agent.invoke({"messages": [("user", "Which Python is this?")]})

Needs `cloche[deepagents]`; `dcode --sandbox cloche` finds the provider by its entry point.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, Unpack

from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable, SandboxFileError
from cloche.core.result import Result, Status
from cloche.execution.sandbox import AsyncSandbox

from .environment import WORKING_DIR, Environment, Operation

try:
    from deepagents.backends.protocol import (
        FILE_NOT_FOUND,
        INVALID_PATH,
        IS_DIRECTORY,
        PERMISSION_DENIED,
        ExecuteResponse,
        FileDownloadResponse,
        FileUploadResponse,
    )
    from deepagents.backends.sandbox import BaseSandbox
except ImportError as error:
    raise BackendUnavailable(
        "The backend needs the package deepagents, 0.6 or later.",
        remedy='Install it with "pip install cloche[deepagents]".',
    ) from error

TIMED_OUT = 124  # as the program `timeout` has it
TIMEOUT_S = 30 * 60.0  # of a command, where nobody says
MOST_BYTES = 100 << 20  # of a file that is downloaded
FILE_ERRORS: tuple[tuple[type[OSError], str], ...] = (
    (FileNotFoundError, FILE_NOT_FOUND),
    (NotADirectoryError, INVALID_PATH),
    (IsADirectoryError, IS_DIRECTORY),
    (PermissionError, PERMISSION_DENIED),
)


class Cloche(BaseSandbox):
    """Be a sandbox for one agent: opened at the first use, closed by `close` or with the program.

    Takes the keywords of `cloche.Sandbox`; `timeout` is the default for commands.
    """

    def __init__(self, **options: Unpack[SandboxOptions]):
        self._environment = Environment(**{"timeout": TIMEOUT_S, **options})  # type: ignore[arg-type]  # a TypedDict

    @property
    def id(self) -> str:
        """Return the sandbox's name, which no other one has."""
        return self._environment.id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill and remove everything in it, for good."""
        self._environment.close_and_wait()

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a line of shell; the output is both streams in the order of their writing."""
        return _response(self._environment.use_and_wait(_shell(command, timeout)))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:  # noqa: ASYNC109
        """Do as `execute` does, without a thread."""
        return _response(await self._environment.use(_shell(command, timeout)))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, with the folders above them."""
        return self._environment.use_and_wait(_upload(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Do as `upload_files` does, without a thread."""
        return await self._environment.use(_upload(files))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files of at most 100 MiB."""
        return self._environment.use_and_wait(_download(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Do as `download_files` does, without a thread."""
        return await self._environment.use(_download(paths))


def _shell(command: str, timeout: int | None) -> Operation[Result]:
    argv = ["/bin/sh", "-c", 'exec 2>&1; exec /bin/sh -c "$1"', "sh", command]
    return lambda sandbox: sandbox.exec(argv, timeout=timeout or None)


def _response(result: Result) -> ExecuteResponse:
    is_late = result.status is Status.TIMEOUT
    output = f"{result.stdout}{result.stderr}"
    return ExecuteResponse(
        output=f"{output}\nThe command was killed as it was over its time-out." if is_late else output,
        exit_code=TIMED_OUT if is_late else result.exit_code,
        truncated=result.truncated,
    )


def _upload(files: list[tuple[str, bytes]]) -> Operation[list[FileUploadResponse]]:
    async def upload(sandbox: AsyncSandbox) -> list[FileUploadResponse]:
        return [
            FileUploadResponse(path=path, error=(await _tried(path, sandbox.write_file, data))[1])
            for path, data in files
        ]

    return upload


def _download(paths: list[str]) -> Operation[list[FileDownloadResponse]]:
    async def download(sandbox: AsyncSandbox) -> list[FileDownloadResponse]:
        responses = []
        for path in paths:
            content, error = await _tried(path, lambda path: sandbox.read_file(path, max_bytes=MOST_BYTES))
            responses.append(FileDownloadResponse(path=path, content=content, error=error))
        return responses

    return download


async def _tried(path: str, operation: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Return the result of an operation on a file, and the word for its failure."""
    if not path.startswith("/") or "\0" in path:
        return None, INVALID_PATH
    try:
        return await operation(path, *arguments), None
    except SandboxFileError as error:
        return None, next((reason for kind, reason in FILE_ERRORS if isinstance(error, kind)), str(error))


try:
    from deepagents_code.integrations.sandbox_provider import (
        SandboxNotFoundError,
        SandboxProvider,
        SandboxProviderMetadata,
    )
except ImportError:
    pass  # the library is here without its command line
else:
    _open: dict[str, Cloche] = {}

    class ClocheProvider(SandboxProvider):
        """Open sandboxes for `dcode`; they end with it."""

        @property
        def metadata(self) -> SandboxProviderMetadata:
            """Say where an agent works, and that sandboxes of an earlier start cannot be had again."""
            return SandboxProviderMetadata(name="cloche", working_dir=WORKING_DIR, supports_sandbox_id=False)

        def get_or_create(self, *, sandbox_id: str | None = None, **options: Any) -> Cloche:
            """Return an open sandbox by its id, or a new one; `options` are the keywords of `cloche.Sandbox`."""
            if sandbox_id is None:
                sandbox = Cloche(**options)
                return _open.setdefault(sandbox.id, sandbox)
            if sandbox_id not in _open:
                raise SandboxNotFoundError(f"there is no sandbox {sandbox_id!r} in this process; open another one")
            return _open[sandbox_id]

        def delete(self, *, sandbox_id: str, **_: Any) -> None:
            """Close a sandbox; one that is not there is no error."""
            sandbox = _open.pop(sandbox_id, None)
            if sandbox is not None:
                sandbox.close()
