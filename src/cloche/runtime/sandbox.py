"""A workspace that lives: every run in it is a fresh process that sees the files of the ones before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack, runtime_checkable

from cloche.core.errors import BackendUnavailable, InternalError, InvalidRequest
from cloche.core.events import Event, Sink
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import (
    OpenSandbox,
    OpenSession,
    SupportsBatchFiles,
    SupportsFork,
    SupportsLanguageNames,
    SupportsSessionNames,
    SupportsSessions,
)
from cloche.core.request import InputFile
from cloche.core.result import Result
from cloche.core.screen import Finding, apply_screen
from cloche.core.units import MIB, parse_duration

from .audit import Audit
from .execute import Job, OnOutput, Prepared, check_language, make_job, make_sink, prepare, run_in
from .fixing import check_fixer, run_fixing
from .inputs import Files, gather_files, read_env
from .options import SandboxOptions
from .recording import Execution, is_wanted, note_fallback, recorded, refusals
from .session import AsyncSession
from .slots import shared_slots
from .streaming import streamed

if TYPE_CHECKING:
    from cloche.core.fixing import Fixer

READ_BYTES = 16 * MIB


@runtime_checkable
class SupportsListing(Protocol):
    """List the workspace."""

    async def list_files(self, path: str = ".") -> Sequence[str]:
        """Return the paths of the files below `path`, relative to the workspace."""
        ...


class AsyncSandbox:
    """Open a sandbox for several runs.

        async with AsyncSandbox(preset="standard") as sandbox:
            await sandbox.write_file("in.csv", data)
            result = await sandbox.run("...")

    Takes the keywords of SandboxOptions; `env` holds for every run, `files` (as in `run`) are there from the
    start. Runs of one sandbox take turns. Leaving the block kills what is left and removes the workspace.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        files: Files | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        self._options = options
        self._env = read_env(env)
        self._files = files
        self._prepared: Prepared = prepare(**options)
        self._stack = AsyncExitStack()
        self._opened: OpenSandbox | None = None
        self._turn = asyncio.Lock()

    @property
    def limits(self) -> Limits:
        """Return the limits that hold for each run."""
        return self._prepared.limits

    @property
    def policy(self) -> Policy:
        """Return the rules that hold for each run."""
        return self._prepared.policy

    @property
    def backend(self) -> str:
        """Return the backend's name."""
        return self._prepared.backend.name

    def hide_package_managers(self) -> None:
        """Show no programs that install packages from the first run on, unless the policy names packages."""
        policy = self.policy.with_changes(package_managers=bool(self.policy.packages))
        self._prepared = replace(self._prepared, policy=policy)

    @property
    def languages(self) -> tuple[str, ...]:
        """Return the languages that the policy allows and that can run here, as far as that is known before a run."""
        backend, allowed = self._prepared.backend, self.policy.languages
        if not isinstance(backend, SupportsLanguageNames):
            return allowed
        here = backend.languages()
        return tuple(name for name in allowed if name in here)

    @property
    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that may have sessions here, as far as that is known before one is opened."""
        backend = self._prepared.backend
        return backend.session_languages() if isinstance(backend, SupportsSessionNames) else ()

    @property
    def notes(self) -> Mapping[str, Any]:
        """Return what results say of how the backend was found: `choice` of `auto`, `fallback`."""
        return self._prepared.notes

    @property
    def audit(self) -> Audit | None:
        """Return the log in which runs are recorded, None where that is off."""
        return self._prepared.audit

    async def __aenter__(self) -> Self:
        if self._opened is not None:
            raise InvalidRequest("this sandbox is already open; make another one")
        note_fallback(self.audit, self.notes)
        async with AsyncExitStack() as on_failure:
            prepared = self._prepared
            opened = await on_failure.enter_async_context(prepared.backend.open(prepared.policy, prepared.limits))
            await _write_all(opened, gather_files(self._files, max_bytes=self.limits.disk_bytes).files)
            self._stack = on_failure.pop_all()
        self._opened = opened
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened = None
        await self._stack.__aexit__(kind, error, trace)

    async def run(
        self,
        code: str | None = None,
        *,
        language: str = "python",
        argv: Sequence[str | PathLike[str]] = (),
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        files: Files | None = None,
        timeout: float | str | None = None,  # noqa: ASYNC109 - the sandbox's, not the caller's
        on_output: OnOutput | None = None,
        on_event: Sink | None = None,
        out: str | PathLike[str] | None = None,
        spill: str | PathLike[str] | None = None,
        autofix: Fixer | None = None,
    ) -> Result:
        """Run `code`, or the command `argv`, as `cloche.run` does, in this sandbox's workspace.

        With `autofix` every round finds the workspace as the failed one left it.
        """
        opened = self._require_open()
        fixer = None if autofix is None else self.checked_fixer(autofix, code)
        job = await make_job(
            self._prepared, code, language=language, argv=argv, stdin=stdin, env={**self._env, **(env or {})},
            files=files, timeout_s=self.timeout_s(timeout) if timeout is not None else None,
        )  # fmt: skip
        sink = make_sink(on_output, on_event)
        if fixer is None:
            return await self._take_turn(opened, job, sink, out, spill)
        return await run_fixing(
            fixer, self._prepared, job, lambda one: self._take_turn(opened, one, sink, spill=spill), out
        )

    def stream(
        self,
        code: str | None = None,
        *,
        language: str = "python",
        argv: Sequence[str | PathLike[str]] = (),
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        files: Files | None = None,
        timeout: float | str | None = None,
    ) -> AsyncIterator[Event]:
        """Run as `run` does and yield Started, OutputChunk, at last Ended. Closing it kills the run."""
        return streamed(
            lambda sink: self.run(
                code, language=language, argv=argv, stdin=stdin, env=env, files=files, timeout=timeout, on_event=sink
            )
        )

    async def read_file(self, path: str, *, max_bytes: int = READ_BYTES) -> bytes:
        """Return a file of the workspace. Raises SandboxFileError, also for one larger than `max_bytes`."""
        return await self._require_open().read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Create or replace a file of the workspace, with its folders; text is written as UTF-8.

        Raises SandboxFileError, and InvalidRequest for a path that leaves the workspace or is a program's own.
        """
        content = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
        await self._require_open().write_file(path, content)

    async def list_files(self, path: str = ".") -> tuple[str, ...]:
        """Return the paths of the files below `path`, relative to the workspace, if the backend can.

        Raises SandboxFileError where there is too much to list it whole.
        """
        opened = self._require_open()
        if not isinstance(opened, SupportsListing):
            raise BackendUnavailable(f"backend {self.backend!r} cannot list files; run a command that lists them")
        return tuple(await opened.list_files(path))

    async def _take_turn(
        self,
        opened: OpenSandbox,
        job: Job,
        sink: Sink | None,
        out: str | PathLike[str] | None = None,
        spill: str | PathLike[str] | None = None,
    ) -> Result:
        async with self._turn, shared_slots().hold():
            return await run_in(opened, self._prepared, job, sink=sink, out=out, spill=spill)

    async def session(
        self,
        language: str = "python",
        *,
        env: Mapping[str, str] | None = None,
        idle_timeout: float | str | None = None,
    ) -> AsyncSession:
        """Start an interpreter that keeps its state between runs, in this sandbox's workspace.

        `language` is python, javascript or bash. `env` comes on top of the sandbox's own. A session that was not used
        for `idle_timeout` (seconds, or text such as `30m`) is ended. It is ended with the sandbox in any case.

        Raises PolicyDenied, InvalidRequest, BackendUnavailable, StartFailed.
        """
        with refusals(self._prepared.settings, language=language):
            name = check_language(self.policy, language)
        variables = {**self._env, **read_env(env)}
        limit = None if idle_timeout is None else parse_duration(idle_timeout, name="idle_timeout")
        opened = await self.open_interpreter(name, variables)
        session = AsyncSession(self, opened, language=name, env=variables, idle_timeout_s=limit)
        self._stack.push_async_callback(session.close)
        return session

    async def open_interpreter(self, language: str, env: Mapping[str, str]) -> OpenSession:
        """Start what a session talks to; `session` is what one usually wants."""
        opened = self._require_open()
        if not isinstance(opened, SupportsSessions):
            raise BackendUnavailable(f"backend {self.backend!r} has no sessions; use run, or another backend")
        return await opened.open_session(language, env)

    def screened(self, code: str, language: str) -> Sequence[Finding]:
        """Return what the screen finds in a session's cell. Raises PolicyDenied."""
        if self.policy.screen == "off":
            return ()
        with refusals(self._prepared.settings, language=language, code=code):
            return apply_screen(self.policy.screen, language, code)

    def run_cell(
        self, run: Callable[[], Awaitable[Result]], code: str, language: str, env: Mapping[str, str], timeout_s: float
    ) -> Awaitable[Result]:
        """Run a session's cell and record it, where anybody wants to know."""
        if not is_wanted(self._prepared.audit):
            return run()
        execution = Execution(
            kind="cell", backend=self.backend, language=language, code=code, env=env, limits=self.limits,
            timeout_s=timeout_s, policy=self.policy,
        )  # fmt: skip
        return recorded(run, self.audit, execution)

    def adopt(self, session: AsyncSession, fork: OpenSession) -> AsyncSession:
        """Return the session of a fork, in a sandbox that closes with this one."""
        if not isinstance(fork, SupportsFork):
            raise InternalError("what was forked cannot say which sandbox it is in")
        twin = AsyncSandbox.__new__(AsyncSandbox)
        twin.__dict__.update(self.__dict__)
        twin._opened, twin._stack, twin._turn = fork.sandbox, AsyncExitStack(), asyncio.Lock()
        found = session.twin(twin, fork)
        closing = getattr(fork.sandbox, "close", None)
        if closing is not None:
            twin._stack.push_async_callback(closing)
        twin._stack.push_async_callback(found.close)
        self._stack.push_async_exit(twin)  # with all that was opened or forked in it
        return found

    def checked_fixer(self, autofix: object, code: str | None) -> Fixer:
        """Return what was given as `autofix`. Raises InvalidRequest, also where a model's code must not run."""
        return check_fixer(autofix, self._prepared, code)

    def timeout_s(self, timeout: float | str | None) -> float:
        """Settle one run's own time-out as settings do: ceilings and the global override hold for it too."""
        if timeout is None:
            return self.limits.timeout_s
        options: SandboxOptions = {**self._options, "timeout": timeout}
        return prepare(**options).limits.timeout_s

    def _require_open(self) -> OpenSandbox:
        if self._opened is None:
            raise InvalidRequest("this sandbox is not open; use it inside its with block")
        return self._opened


async def _write_all(opened: OpenSandbox, files: Sequence[InputFile]) -> None:
    if not files:
        return
    if isinstance(opened, SupportsBatchFiles):
        await opened.write_files(files)
        return
    for file in files:
        await opened.write_file(file.path, file.data)
