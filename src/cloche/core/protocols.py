"""The protocols between backends and the layers above: those of every backend, and the optional ones.

Each optional ability has a protocol (`Supports...`), never a flag; those for packages are in `layers`. `Capabilities`
describes a backend on this host: measured, with reasons and remedies.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from .enforcement import Control, Enforcement, Level, LevelSource, Measure, NetworkMode
from .events import Sink
from .file_protocols import SupportsPaths
from .limits import Limits
from .policy import Policy
from .processes import FileChange, ListeningPort, ProcessInfo, ProcessKey, ProcessRequest
from .record import dataclass, field
from .request import PLAIN_CELL, CellOptions, InputFile, Request, WorkspaceContainer
from .result import KillCause, Result

if TYPE_CHECKING:
    from .network import NetworkRules
    from .remote import RemoteAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Describe the strongest sandbox of a backend on this host, or the one of the requested level.

    `controls` holds one measure per control at that level, with the network off; `networks` lists the other network
    modes. `reason` says why the level is not higher and `remedy` has the next step in one line. `not_live` says why no
    sandbox lives there; it is empty where they do. `not_users` says the same of a sandbox with several users;
    `names_accounts` tells whether its account can be named. A `claimed` level is a provider's statement about its own.
    """

    backend: str
    available: bool
    level: Level = Level.NONE
    controls: Mapping[Control, Measure] = field(default_factory=dict)
    reason: str = ""
    remedy: str = ""
    networks: tuple[NetworkMode, ...] = ("off",)
    level_source: LevelSource = "measured"
    not_live: str = ""
    not_users: str = "its sandboxes have one user"
    names_accounts: bool = False

    def as_enforcement(self) -> Enforcement:
        """Return the enforcement that a run would report, before anything was hit."""
        return Enforcement(level=self.level, controls=self.controls, level_source=self.level_source)

    def as_dict(self) -> dict[str, object]:
        """Return plain data, ready for JSON."""
        rows = {str(control): measure.as_dict() for control, measure in self.controls.items()}
        return {
            "backend": self.backend, "available": self.available, "level": str(self.level),
            "level_source": self.level_source, "controls": rows, "reason": self.reason, "remedy": self.remedy,
            "networks": list(self.networks), "not_live": self.not_live,
        }  # fmt: skip


@runtime_checkable
class CodeSandbox(Protocol):
    """Run code synchronously (R1)."""

    def execute(self, code: str, language: str = "python", timeout: int = 30) -> Result:
        """Run `code` and return its result; `timeout` is in seconds of wall clock."""
        ...


class OpenSandbox(Protocol):
    """Offer a workspace that stays between runs: every run is a fresh process in the same /workspace."""

    async def run(self, request: Request) -> Result:
        """Run code or a command, one at a time, and return its result."""
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
    """Offer an interpreter that stays between runs: every run finds the memory that earlier runs left."""

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

    async def run(self, code: str, *, timeout_s: float, sink: Sink, options: CellOptions = PLAIN_CELL) -> Result:
        """Run one cell. What outlives the time-out is interrupted, and its state kept if it lets itself be."""
        ...

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does; without one, do nothing."""
        ...

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        ...


@runtime_checkable
class SupportsNetwork(Protocol):
    """Be a live sandbox and whose network is served by the egress process, by rules that can be changed."""

    @property
    def network_rules(self) -> NetworkRules:
        """Return what decides now."""
        ...

    async def change_network(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Decide by further rules, beside those of other callers, and close connections that the rules do not allow."""
        ...

    async def replace_network(
        self, *, mode: NetworkMode, allow: Sequence[str] = (), deny: Sequence[str] = (),
        headers: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:  # fmt: skip
        """Decide by these rules alone, and close connections that they do not allow."""
        ...

    def decide_network(self, decide: Callable[[str, int], Awaitable[bool | None]]) -> None:
        """Set the function that decides about hosts and ports without a rule, where the policy asks."""
        ...

    async def network_traffic(self) -> Sequence[Mapping[str, Any]]:
        """Return the carried and refused connections since it was opened, in rows; see `Result.meta`."""
        ...


@runtime_checkable
class SupportsCollecting(Protocol):
    """Be a session whose results have only the requested files, because others change files at the same time."""

    async def run_collecting(
        self, code: str, *, timeout_s: float, sink: Sink, collect: tuple[str, ...], options: CellOptions = PLAIN_CELL
    ) -> Result:
        """Run one cell; the files are those that match one of the patterns and have changed meanwhile."""
        ...


@runtime_checkable
class SupportsFork(Protocol):
    """Go back in time, and go on in several ways: memory and workspace together.

    All raise BackendUnavailable where this session cannot, and InvalidRequest with the obstacle: a running thread or
    process, a file open for writing, a socket, shared memory, a timer. Then nothing has changed.
    """

    @property
    def sandbox(self) -> OpenSandbox:
        """Return the sandbox of its workspace; a fork has one of its own."""
        ...

    async def checkpoint(self, name: str) -> None:
        """Store memory and workspace under `name`; an earlier checkpoint of that name is replaced."""
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


class ForkableSession(OpenSession, SupportsFork, Protocol):
    """Offer an interpreter that stays between runs and can be cloned."""


@runtime_checkable
class SupportsSessionsApart(Protocol):
    """Be a sandbox whose sessions share all of it, and open apart from it those that can be cloned."""

    async def open_session_apart(self, language: str, env: Mapping[str, str]) -> ForkableSession:
        """Start an interpreter with checkpoints and forks in a new sandbox, which shares nothing with this one.

        It begins with a copy of the workspace, and is the session's `sandbox`, see SupportsFork; the caller closes it
        with the session. Raises BackendUnavailable, and the SandboxFile errors where the files cannot be copied.
        """
        ...


@runtime_checkable
class SupportsSessionNames(Protocol):
    """Be a backend whose sandboxes keep interpreters alive, and say so before one is opened."""

    def session_languages(self) -> tuple[str, ...]:
        """Return the languages that may have sessions; a missing program is an error when a session is opened."""
        ...


@runtime_checkable
class SupportsLanguageNames(Protocol):
    """Be a backend that knows before a run which languages can run in it."""

    def languages(self) -> tuple[str, ...]:
        """Return the languages whose programs are all present."""
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
class SupportsAccount(Protocol):
    """Be a backend that sends code to a provider on other machines. Every one of those is.

    Runs are counted against what `account` returns, and recorded with it.
    """

    def account(self) -> RemoteAccount | None:
        """Return the account that code is sent with, None before one is given."""
        ...

    def with_account(self, account: RemoteAccount) -> Self:
        """Return the same backend for an account."""
        ...


@runtime_checkable
class SupportsCheck(Protocol):
    """Check for the backend's needs before anything is settled."""

    def check(self) -> None:
        """Raise BackendUnavailable with the missing part and the next step."""
        ...


@runtime_checkable
class SupportsLevels(Protocol):
    """Give sandboxes at other levels than the strongest, too."""

    def capabilities_at(self, level: Level) -> Capabilities:
        """Return what this host can give at exactly this level; unavailable, with the reason, where it cannot."""
        ...


@runtime_checkable
class SupportsReadiness(Protocol):
    """Run code whose image or machine may have to be fetched first."""

    def why_not_ready(self) -> str:
        """Name the missing part and how to fetch it; empty when a run can start."""
        ...


@runtime_checkable
class SupportsBuilding(Protocol):
    """Run in an image that is built on this machine."""

    def build_image(self, packages: Sequence[str]) -> str:
        """Build it, with `packages` besides the usual ones, and use it from now on; return a line that names it.

        Raises BackendUnavailable for a missing program, StartFailed for a package that cannot be fetched.
        """
        ...


@runtime_checkable
class SupportsWorkspaceContainers(Protocol):
    """Start containers that an agent works in, with folders of the host."""

    def workspace_arguments(self, container: WorkspaceContainer, policy: Policy, limits: Limits) -> list[str]:
        """Return the argument list that starts one. Raises BackendUnavailable for unsupported options."""
        ...


@runtime_checkable
class SupportsGarbageCollection(Protocol):
    """Find what processes that died left behind, outside of this process's reach."""

    def collect_garbage(self) -> Sequence[str]:
        """Remove it, and return a line for each thing. Raises BackendUnavailable."""
        ...


class OpenStream(Protocol):
    """Give the bytes of one stream; while they are not read, the writer waits."""

    async def read(self, most: int = 1 << 16) -> bytes:
        """Return the next bytes, `most` at the most, as soon as there are any; empty at the end."""
        ...

    async def read_all(self, most: int) -> bytes:
        """Return all that comes until the end, or as soon as it is more than `most` bytes."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the stream, in pieces of any size."""
        ...


class OpenProcess(Protocol):
    """Hold one process of a live sandbox. Methods that are not awaited return before they have an effect."""

    id: str
    pid: int

    @property
    def stdout(self) -> OpenStream:
        """Return its standard output; of a process with a terminal, all that it writes there."""
        ...

    @property
    def stderr(self) -> OpenStream:
        """Return its standard error."""
        ...

    async def write(self, data: bytes) -> bool:
        """Write to its standard input, as fast as it reads; False where it reads no more."""
        ...

    def close_stdin(self) -> None:
        """End its standard input; on a terminal, say so as Ctrl-D does."""
        ...

    def signal(self, number: int, to: str = "process") -> None:
        """Send a signal to the process, to its `group`, or to its whole `tree`."""
        ...

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        ...

    def kill(self, cause: KillCause | None = None) -> None:
        """Kill all that belongs to it."""
        ...

    def detach(self) -> None:
        """Let it go on without a client."""
        ...

    async def result(self, *, takes_output: bool = True) -> Result:
        """Wait for its end and return its result; `takes_output` reads streams without a reader into it.

        Raises StartFailed, OutcomeUnknown, Detached.
        """
        ...

    async def close(self) -> None:
        """Kill it, unless it has ended or was detached, and wait until that is reported."""
        ...


@runtime_checkable
class SupportsProcesses(Protocol):
    """Start any number of processes in a live sandbox."""

    async def start_process(self, request: ProcessRequest, sink: Sink | None = None) -> OpenProcess:
        """Start a process. Its output goes to `sink`, as events, and to its result; without one, it is to be read."""
        ...

    async def attach_process(self, key: ProcessKey, sink: Sink | None = None) -> OpenProcess:
        """Return a process that runs or has ended lately. Raises InvalidRequest for an unknown one."""
        ...

    async def control_process(self, key: ProcessKey) -> OpenProcess:
        """Return one that runs, whose output stays with its reader. Raises InvalidRequest for an unknown one."""
        ...

    async def list_processes(self) -> Sequence[ProcessInfo]:
        """Return what runs, and what ended a while ago."""
        ...


@runtime_checkable
class SupportsWatch(Protocol):
    """Tell of changes to files."""

    def watch_path(
        self, path: str, *, recursive: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterable[FileChange]]:
        """Watch a folder, or a file, from when this is entered until it is left; see FileChange."""
        ...


class OpenConnection(Protocol):
    """Hold a TCP connection to a server in a live sandbox."""

    async def read(self, most: int = 1 << 16) -> bytes:
        """Return the next bytes as soon as there are any; empty at the end."""
        ...

    async def write(self, data: bytes) -> bool:
        """Send all of `data`, as fast as the server takes it; False where it is gone."""
        ...

    def end(self) -> None:
        """Send the end of the stream; the server's answer may still be read."""
        ...

    def close(self) -> None:
        """Close it."""
        ...

    async def wait_closed(self) -> None:
        """Wait until either side has closed it."""
        ...


@runtime_checkable
class SupportsPorts(Protocol):
    """Reach servers in a live sandbox."""

    async def connect(self, port: int) -> OpenConnection:
        """Return a connection to a server on loopback inside. Raises OSError, as a socket would."""
        ...

    async def list_ports(self) -> Sequence[ListeningPort]:
        """Return who listens inside."""
        ...


class OpenLiveSandbox(OpenSandbox, SupportsProcesses, SupportsPaths, SupportsPorts, Protocol):
    """Offer a live sandbox: any number of runs and processes at once, in one file system and one network."""

    async def ask(self, op: str, **arguments: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON
        """Do one of `init.wire`'s operations that answer with one event, or none. Raises InvalidRequest."""
        ...

    async def read_output(self, name: str) -> tuple[bytes, bytes]:
        """Return the kept output of a process, by its id, and keep it. Raises InvalidRequest."""
        ...

    async def kill(self) -> None:
        """End the sandbox for all its callers, and wait until nothing of it is left."""
        ...


@runtime_checkable
class SupportsLive(Protocol):
    """Be a backend that gives live sandboxes."""

    def open_live(self, policy: Policy, limits: Limits) -> AbstractAsyncContextManager[OpenLiveSandbox]:
        """Open one. Raises BackendUnavailable, as it is entered, where this host or the policy's level gives none."""
        ...


class Keeping(Protocol):
    """Take over a sandbox that shall outlive its caller, unless it `ends_with_caller`; see `cloche.keeper.attach`."""

    ends_with_caller: bool

    async def begin(self) -> None:
        """Take the name, and make ready. Raises ClocheError."""
        ...

    async def take(
        self, init: socket.socket, held: Mapping[str, int], groups: Sequence[str], said: Mapping[str, Any]
    ) -> socket.socket:
        """Take init's socket with its unread greeting, and the descriptors that keep the sandbox alive.

        Return a connection that replaces them. `groups` are folders of its control group, to be removed where its
        helper could not; `said` are facts that are known only now. Raises StartFailed.
        """
        ...

    def join_network(self) -> socket.socket:
        """Return a link to the process that serves its network. Blocks. Raises OutcomeUnknown."""
        ...

    def abandon(self) -> None:
        """Undo a start that was not finished."""
        ...


@runtime_checkable
class SupportsNames(Protocol):
    """Be a backend whose live sandboxes may have a name, which other callers find them by."""

    def open_kept(
        self, policy: Policy, limits: Limits, keeping: Keeping
    ) -> AbstractAsyncContextManager[OpenLiveSandbox]:
        """Open one and hand it over. It is there when that is entered; leaving it lets go of it."""
        ...

    def attach_live(
        self,
        policy: Policy,
        limits: Limits,
        enforcement: Enforcement,
        connect: Callable[[], Awaitable[socket.socket]],
        check_greeting: Callable[[Mapping[str, Any]], None],
        join_network: Callable[[], socket.socket],
    ) -> AbstractAsyncContextManager[OpenLiveSandbox]:
        """Come back into one that was opened this way, by a connection to its keeper.

        `check_greeting` raises OutcomeUnknown where another sandbox answers; that one is sent no request.
        `join_network` blocks, and returns a link to the process that serves its network; it raises OutcomeUnknown where
        that is gone.
        """
        ...
