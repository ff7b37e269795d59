"""The protocols between backends and everything above them: what each backend offers, and what some offer besides.

Each optional ability is a protocol of its own (`Supports...`), never a flag. `Capabilities` says what a backend can do
on this host: measured, with reasons and remedies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from .enforcement import Control, Enforcement, Level, Measure
from .events import Sink
from .limits import Limits
from .policy import NetworkMode, Policy
from .request import InputFile, Request, WorkspaceContainer
from .result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Describe the strongest sandbox a backend can give here, or the one of a level that was asked for.

    `controls` holds one measure per control at that level, with the network off; `networks` lists what else the network
    can be. `reason` says why the level is not higher and `remedy` says in one line what to do about it.
    """

    backend: str
    available: bool
    level: Level = Level.NONE
    controls: Mapping[Control, Measure] = field(default_factory=dict)
    reason: str = ""
    remedy: str = ""
    networks: tuple[NetworkMode, ...] = ("off",)

    def as_enforcement(self) -> Enforcement:
        """Return the enforcement that a run would report, before anything was hit."""
        return Enforcement(level=self.level, controls=self.controls)

    def as_dict(self) -> dict[str, object]:
        """Return plain data, ready for JSON."""
        rows = {str(control): measure.as_dict() for control, measure in self.controls.items()}
        return {
            "backend": self.backend,
            "available": self.available,
            "level": str(self.level),
            "controls": rows,
            "reason": self.reason,
            "remedy": self.remedy,
            "networks": list(self.networks),
        }


@runtime_checkable
class CodeSandbox(Protocol):
    """Run code synchronously (R1)."""

    def execute(self, code: str, language: str = "python", timeout: int = 30) -> Result:
        """Run `code` and return what came of it; `timeout` is in seconds of wall clock."""
        ...


class OpenSandbox(Protocol):
    """Offer a workspace that lives: every run is a fresh process in the same /workspace."""

    async def run(self, request: Request) -> Result:
        """Run code or a command, one at a time, and return what came of it."""
        ...

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file of the workspace. Raises the SandboxFile errors."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace, with its folders. Raises the SandboxFile errors."""
        ...


class Backend(Protocol):
    """Give sandboxes of one kind.

    A class with `starts_eagerly = True` in its own body calls `core.loops.become_task` where it needs a task.
    """

    name: str

    def capabilities(self) -> Capabilities:
        """Return what this host can give; measured once, then cached."""
        ...

    def open(self, policy: Policy, limits: Limits) -> AbstractAsyncContextManager[OpenSandbox]:
        """Open a sandbox. Raises BackendUnavailable when the policy asks for more than this host can give."""
        ...


@runtime_checkable
class SupportsStreaming(Protocol):
    """Report events while the code runs."""

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run like `run`, handing `Started` and `OutputChunk` events to `sink` as they happen."""
        ...


class OpenSession(Protocol):
    """Offer an interpreter that lives: every run finds what the ones before it left in memory."""

    @property
    def runtime(self) -> str:
        """Name the engine with its version."""
        ...

    @property
    def is_alive(self) -> bool:
        """Tell whether it can still run anything."""
        ...

    @property
    def why_ended(self) -> str:
        """Say how it ended, as far as that is known; empty while it lives."""
        ...

    async def run(self, code: str, *, timeout_s: float, sink: Sink) -> Result:
        """Run one cell. What outlives the time-out is interrupted, and its state kept if it lets itself be."""
        ...

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does; without one, do nothing."""
        ...

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        ...


@runtime_checkable
class SupportsFork(Protocol):
    """Go back in time, and go on in several ways: memory and workspace together.

    All raise BackendUnavailable where this session cannot, and InvalidRequest naming what stands in the way: a
    running thread or process, a file open for writing, a socket, shared memory, a timer. Then nothing has changed.
    """

    @property
    def sandbox(self) -> OpenSandbox:
        """Return the sandbox in whose workspace it works; a fork's is its own."""
        ...

    async def checkpoint(self, name: str) -> None:
        """Remember everything under `name`, in place of what had that name before."""
        ...

    async def rollback(self, name: str) -> None:
        """Go back to a checkpoint, which stays; those that were made after it are gone."""
        ...

    async def fork(self, count: int) -> Sequence[OpenSession]:
        """Return `count` sessions that begin as this one is, and are independent of it and of each other."""
        ...


@runtime_checkable
class SupportsSessions(Protocol):
    """Keep interpreters alive between runs."""

    async def open_session(self, language: str, env: Mapping[str, str]) -> OpenSession:
        """Start an interpreter in this sandbox's workspace. Raises BackendUnavailable for a language without one."""
        ...


@runtime_checkable
class SupportsSessionNames(Protocol):
    """Be a backend whose sandboxes keep interpreters alive, and say so before one is opened."""

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that may have sessions; what is missing in a sandbox is an error when one is opened."""
        ...


@runtime_checkable
class SupportsLanguageNames(Protocol):
    """Be a backend that knows before a run which languages can run in it."""

    def languages(self) -> tuple[str, ...]:
        """Return the languages for which all is here that runs them."""
        ...


@runtime_checkable
class SupportsBatchFiles(Protocol):
    """Write many files at once."""

    async def write_files(self, files: Sequence[InputFile]) -> None:
        """Create or replace all of `files`."""
        ...


@runtime_checkable
class SupportsPool(Protocol):
    """Keep a pool of prepared sandboxes between runs."""

    def drain(self) -> None:
        """Empty the pool, and wait until all of it is gone; the next run starts cold."""
        ...


@runtime_checkable
class SupportsSingleRun(Protocol):
    """Prepare for the end while the only run is still being reported."""

    def expect_single_run(self) -> None:
        """Say that the next run is the last one, so that clearing up may begin as soon as it has ended."""
        ...


@runtime_checkable
class SupportsImages(Protocol):
    """Run in container images that can be chosen."""

    def with_images(self, images: Mapping[str, str]) -> Backend:
        """Return the same backend with other images by language; `*` stands for any other language."""
        ...


@runtime_checkable
class SupportsCheck(Protocol):
    """Look, before anything is settled, whether what the backend needs is there."""

    def check(self) -> None:
        """Raise BackendUnavailable, saying what is missing and what to do."""
        ...


@runtime_checkable
class SupportsLevels(Protocol):
    """Give sandboxes at other levels than the strongest, too."""

    def capabilities_at(self, level: Level) -> Capabilities:
        """Return what this host can give at exactly this level; unavailable, with the reason, where it cannot."""
        ...


@runtime_checkable
class SupportsReadiness(Protocol):
    """Run what may have to be fetched first."""

    def why_not_ready(self) -> str:
        """Say what is not here yet and how to fetch it; empty when a run can start."""
        ...


@runtime_checkable
class SupportsBuilding(Protocol):
    """Run in an image that is built on this machine."""

    def build_image(self, packages: Sequence[str]) -> str:
        """Build it, with `packages` besides the usual ones, and use it from now on; return a line that names it.

        Raises BackendUnavailable for a program that is missing, StartFailed for what could not be had.
        """
        ...


@runtime_checkable
class SupportsWorkspaceContainers(Protocol):
    """Start containers that an agent works in, with folders of the host."""

    def workspace_arguments(self, wanted: WorkspaceContainer, policy: Policy, limits: Limits) -> list[str]:
        """Return the argument list that starts one. Raises BackendUnavailable for what it cannot have."""
        ...


@runtime_checkable
class SupportsGarbageCollection(Protocol):
    """Find what processes that died left behind, outside of this process's reach."""

    def collect_garbage(self) -> Sequence[str]:
        """Remove it, and return a line for each thing. Raises BackendUnavailable."""
        ...
