r"""A backend that runs nothing and answers from a script, for tests of code that uses Cloche.

Give it the results of the runs, and inspect the requests:

    backend = FakeBackend([Result("4\n", "", 0, 0.01), StartFailed("no room")])
    assert cloche.run("print(2 + 2)", backend=backend).stdout == "4\n"
    assert backend.requests[0].code == "print(2 + 2)"
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from cloche.core.enforcement import Control, Level, Measure, State, shortfalls
from cloche.core.errors import BackendUnavailable, InternalError, SandboxFileNotFound, SandboxFileTooLarge
from cloche.core.events import Sink, Started, discard
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.record import dataclass, field, replace
from cloche.core.request import InputFile, Request, workspace_path
from cloche.core.result import Result
from cloche.execution.run import report_output

Answer = Result | Exception | Callable[[Request], Result]

_EVERYTHING = {control: Measure(state=State.ENFORCED, mechanism="script") for control in Control}


@dataclass(slots=True, kw_only=True)
class FakeSandbox:
    """One open sandbox: a dict as its workspace, and the backend's script for its runs."""

    backend: FakeBackend
    policy: Policy
    limits: Limits
    workspace: dict[str, bytes] = field(default_factory=dict)
    is_open: bool = True

    async def run(self, request: Request) -> Result:
        """Return or raise the script's next answer."""
        return await self.run_streaming(request, discard)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Return the next answer, and report its output to `sink`, one chunk per stream."""
        await self.write_files(request.files)
        result = self.backend.answer(request)
        sink(Started())
        report_output(result, sink)
        return result

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return the data written to `path`."""
        inside = workspace_path(path)
        if inside not in self.workspace:
            raise SandboxFileNotFound(f"the sandbox has no file {path!r}", path=path)
        if len(self.workspace[inside]) > max_bytes:
            raise SandboxFileTooLarge(f"{path!r} exceeds max_bytes={max_bytes}", path=path)
        return self.workspace[inside]

    async def write_file(self, path: str, data: bytes) -> None:
        """Store `data` under `path`."""
        self.workspace[workspace_path(path)] = bytes(data)

    async def write_files(self, files: Sequence[InputFile]) -> None:
        """Store all of `files`."""
        for file in files:
            await self.write_file(file.path, file.data)

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of all files below `path`, relative to the workspace."""
        folder = posixpath.normpath(path)
        return tuple(sorted(p for p in self.workspace if folder == "." or p.startswith(folder + "/")))


class FakeBackend:
    """Answer each run with the next item of `script`: a Result, an exception to raise, or a function of the request.

    `requests` lists the requests, `sandboxes` the opened sandboxes with their policy and limits. Everything counts as
    enforced at `level`, except the controls in `absent`, so that `require` can be tested, too. An exhausted script
    raises InternalError.
    """

    name = "fake"

    def __init__(
        self, script: Iterable[Answer] = (), *, level: Level = Level.JAIL, absent: Iterable[Control] = ()
    ) -> None:
        self.requests: list[Request] = []
        self.sandboxes: list[FakeSandbox] = []
        self._script = iter(script)
        absent_controls = {control: Measure(state=State.ABSENT, reason="the script says so") for control in absent}
        self._capabilities = Capabilities(
            backend="fake", available=True, level=level, controls={**_EVERYTHING, **absent_controls}
        )

    def capabilities(self) -> Capabilities:
        """Return the capabilities given by the constructor."""
        return self._capabilities

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[FakeSandbox]:
        """Open a sandbox that answers from the script. Raises BackendUnavailable like any backend."""
        missing = shortfalls(
            self._capabilities.as_enforcement(),
            level=policy.require_level,
            controls=policy.require_controls,
            best_effort=policy.best_effort,
        )
        if missing:
            raise BackendUnavailable(f"backend 'fake': {'; '.join(missing)}")
        sandbox = FakeSandbox(backend=self, policy=policy, limits=limits)
        self.sandboxes.append(sandbox)
        try:
            yield sandbox
        finally:
            sandbox.is_open = False

    def answer(self, request: Request) -> Result:
        """Record `request` and return or raise the script's next item."""
        self.requests.append(request)
        try:
            answer = next(self._script)
        except StopIteration:
            raise InternalError(f"the fake backend's script has no answer to request {len(self.requests)}") from None
        if isinstance(answer, Exception):
            raise answer
        result = answer(request) if callable(answer) else answer
        return replace(result, enforcement=self._capabilities.as_enforcement(), meta=dict(result.meta))
