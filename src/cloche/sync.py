"""The blocking API: `run`, `Sandbox`, `Session` and `get_sandbox`, the calls of `execution` without an event loop.

All of them work from any thread, from 50 at once, and inside a running event loop. Callbacks run in the calling thread.
Ctrl-C ends the run, waits until everything it started is killed, and is then raised. Methods are made from those of the
asynchronous classes (`_method`); how a call waits is in `blocking.calls`.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

from .audit.log import Audit
from .blocking import calls
from .config.options import SandboxOptions
from .config.settings import given_options, load_settings
from .core.limits import Limits
from .core.policy import Policy
from .core.processes import FileChange
from .core.protocols import CodeSandbox, OpenStream
from .core.result import Result
from .execution.grading import acheck
from .execution.held import Holder, close_left
from .execution.history import HistoryEntry
from .execution.inputs import Files
from .execution.naming import Duration
from .execution.network import AsyncNetwork
from .execution.paths import AsyncWatch
from .execution.ports import AsyncConnection, AsyncForward
from .execution.prepare import prepare
from .execution.processes import AsyncProcess
from .execution.sandbox import AsyncSandbox, AsyncSession
from .sync_run import blocking, run, wait_for

if TYPE_CHECKING:
    from .agent.approval import Approver
    from .core.network import NetworkRules
    from .core.secrets import GivenSecrets
    from .execution.tools import ToolsArgument
    from .functions.tool import ToolLimits

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


def _method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
    attribute: str,
    *,
    eager_without: Sequence[str] | None = None,
) -> Callable[Concatenate[Any, P], T]:
    """Return `function` as a blocking method; `attribute` of its instance holds the object that it awaits.

    `eager_without` names keywords: a call without them, and without callbacks, hardly ever waits.
    """
    name = function.__name__

    @functools.wraps(function)
    def call_and_wait(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:  # noqa: ANN401 - the class with the method
        is_eager = eager_without is not None and not any(map(kwargs.get, eager_without))
        awaited: Callable[..., Coroutine[Any, Any, T]] = getattr(getattr(self, attribute), name)
        return wait_for(awaited, args, kwargs, is_eager=is_eager)

    call_and_wait.__qualname__ = f"{''.join(map(str.capitalize, attribute.split('_')))}.{name}"
    call_and_wait.__module__ = __name__
    return call_and_wait


def _making(
    method: Callable[Concatenate[Any, P], T], twin: Callable[[T], U], name: str
) -> Callable[Concatenate[Any, P], U]:
    """Return a blocking method that wraps the return value of another one in its blocking twin, a class called
    `name`.
    """

    @functools.wraps(method)
    def call_and_make(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> U:  # noqa: ANN401 - the class with the method
        return twin(method(self, *args, **kwargs))

    call_and_make.__annotations__ = {**method.__annotations__, "return": name}
    call_and_make.__signature__ = inspect.signature(method).replace(return_annotation=name)  # type: ignore[attr-defined]
    return call_and_make


atexit.register(close_left)  # registered after the hook of `calls`, so it runs before it (atexit is last in, first out)


class ByteStream:
    """Read one stream of a process, piece by piece; unread output makes the process wait."""

    def __init__(self, stream: OpenStream) -> None:
        self._byte_stream = stream

    read = _method(OpenStream.read, "_byte_stream")
    read_all = _method(OpenStream.read_all, "_byte_stream")

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.read():
            yield piece


class _Closing:
    """Close at the end of a block, except in a forked child, which does not own the object."""

    _pid: int

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid == os.getpid():
            cast("Any", self).close()


class Process:
    """Hold one process of a live sandbox; the blocking twin of AsyncProcess.

    with sandbox.start(["python3", "-m", "http.server", "8000"]) as server:
        for piece in server.stderr:
            ...
    """

    def __init__(self, process: AsyncProcess) -> None:
        self._process, self._pid = process, os.getpid()
        self.stdout, self.stderr = ByteStream(process.stdout), ByteStream(process.stderr)

    @property
    def id(self) -> str:
        """Return the id that `Sandbox.process` takes; it is never reused in this sandbox."""
        return self._process.id

    @property
    def pid(self) -> int:
        """Return its process id inside the sandbox."""
        return self._process.pid

    @property
    def is_terminal(self) -> bool:
        """Tell whether it has a terminal."""
        return self._process.is_terminal

    @property
    def has_input(self) -> bool:
        """Tell whether it still reads its standard input, if it was found with `reads=False`."""
        return self._process.has_input

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid == os.getpid():  # a forked child must not end it
            calls.call(lambda: self._process.__aexit__(kind, error, trace))

    write = _method(AsyncProcess.write, "_process")
    close_stdin = _method(AsyncProcess.close_stdin, "_process")
    signal = _method(AsyncProcess.signal, "_process")
    resize = _method(AsyncProcess.resize, "_process")
    wait = _method(AsyncProcess.wait, "_process")
    kill = _method(AsyncProcess.kill, "_process")
    detach = _method(AsyncProcess.detach, "_process")
    close = _method(AsyncProcess.close, "_process")


class Watch(_Closing):
    """Report the changes in a watched folder or file; the blocking twin of AsyncWatch.

    with sandbox.watch("/workspace", recursive=True) as changes:
        for change in changes:
            ...
    """

    def __init__(self, watch: AsyncWatch) -> None:
        self._watch, self._pid = watch, os.getpid()

    def __iter__(self) -> Iterator[FileChange]:
        while (change := self.next()) is not None:
            yield change

    next = _method(AsyncWatch.next, "_watch")
    so_far = _method(AsyncWatch.so_far, "_watch")
    close = _method(AsyncWatch.close, "_watch")


class Connection(_Closing):
    """Hold a TCP connection to a server in a sandbox; the blocking twin of AsyncConnection."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection, self._pid = connection, os.getpid()

    read = _method(AsyncConnection.read, "_connection")
    write = _method(AsyncConnection.write, "_connection")
    end = _method(AsyncConnection.end, "_connection")
    close = _method(AsyncConnection.close, "_connection")


class Forward(_Closing):
    """Forward a port of this machine to one of a sandbox; the blocking twin of AsyncForward."""

    def __init__(self, forward: AsyncForward) -> None:
        self._forward, self._pid = forward, os.getpid()

    @property
    def port(self) -> int:
        """Return the sandbox's port."""
        return self._forward.port

    @property
    def host_port(self) -> int:
        """Return the port on this machine, at 127.0.0.1."""
        return self._forward.host_port

    close = _method(AsyncForward.close, "_forward")


class Network:
    """Change and watch the network of a live sandbox; the blocking twin of AsyncNetwork.

    sandbox.network.allow("files.example.org")
    sandbox.network.traffic()
    """

    def __init__(self, network: AsyncNetwork) -> None:
        self._network = network

    @property
    def rules(self) -> NetworkRules:
        """Return the rules now in force."""
        return self._network.rules

    def ask(self, decide: Callable[[str, int], bool]) -> None:
        """Let a function decide whether a host and port may be reached; it runs in a separate thread. See
        `AsyncNetwork.ask`.
        """

        async def decide_in_thread(host: str, port: int) -> bool:
            return await calls.in_own_thread(lambda target: decide(*target), (host, port))

        self._network.ask(decide_in_thread)

    allow = _method(AsyncNetwork.allow, "_network")
    deny = _method(AsyncNetwork.deny, "_network")
    replace = _method(AsyncNetwork.replace, "_network")
    traffic = _method(AsyncNetwork.traffic, "_network")


class Sandbox:
    """Open a sandbox for several runs; the blocking twin of AsyncSandbox, with the same keywords.

    with Sandbox(preset="standard") as sandbox:
        sandbox.write_file("in.csv", data)
        result = sandbox.run("...")

    Without a block: `sandbox = Sandbox().open()`, and `sandbox.close()` at the end.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        files: Files | None = None,
        live: bool | None = None,
        name: str | None = None,
        keep: Duration | None = None,
        lifetime: Duration | None = None,
        idle: Duration | None = None,
        at_end: str | None = None,
        workspace: str | os.PathLike[str] | None = None,
        workspace_at: str | None = None,
        workspace_disk: int | str | None = None,
        workspace_hide: Sequence[str] | None = None,
        workspace_read: Sequence[str | os.PathLike[str]] | None = None,
        snapshot: str | os.PathLike[str] | None = None,
        tools: ToolsArgument | None = None,
        tool_limits: ToolLimits | None = None,
        approve: Approver | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        self._sandbox = AsyncSandbox(
            env=env, files=files, live=live, name=name, keep=keep, lifetime=lifetime, idle=idle, at_end=at_end,
            workspace=workspace, workspace_at=workspace_at, workspace_disk=workspace_disk,
            workspace_hide=workspace_hide, workspace_read=workspace_read, snapshot=snapshot, tools=tools,
            tool_limits=tool_limits, approve=approve, **options,
        )  # fmt: skip
        self._pid = os.getpid()

    @classmethod
    def attach(cls, name: str, *, env: Mapping[str, str] | None = None, secrets: GivenSecrets | None = None) -> Self:
        """Return a sandbox of this user that is kept under a name; see `AsyncSandbox.attach`."""
        return cls.of(AsyncSandbox.attach(name, env=env, secrets=secrets))

    @property
    def name(self) -> str | None:
        """Return its name; None without one."""
        return self._sandbox.name

    @classmethod
    def of(cls, sandbox: AsyncSandbox) -> Self:
        """Return a blocking Sandbox for an open AsyncSandbox, which its opener will close."""
        blocking = cls.__new__(cls)
        blocking._sandbox, blocking._pid = sandbox, os.getpid()
        return blocking

    @property
    def limits(self) -> Limits:
        """Return the limits of each run."""
        return self._sandbox.limits

    @property
    def policy(self) -> Policy:
        """Return the policy of each run."""
        return self._sandbox.policy

    @property
    def backend(self) -> str:
        """Return the backend's name."""
        return self._sandbox.backend

    @property
    def is_live(self) -> bool:
        """Tell whether it is one machine for its whole life; otherwise runs take turns. See `AsyncSandbox`."""
        return self._sandbox.is_live

    @property
    def notes(self) -> Mapping[str, Any]:
        """Return the entries of results' meta about the choice of the backend: `choice` of `auto`, `fallback`."""
        return self._sandbox.notes

    @property
    def audit(self) -> Audit | None:
        """Return the audit log of its runs; None if auditing is off."""
        return self._sandbox.audit

    @property
    def network(self) -> Network:
        """Return the network of a live sandbox; see `AsyncSandbox.network`."""
        return Network(self._sandbox.network)

    def open(self) -> Self:
        """Open it without a block, and return it: for a notebook, or an object that owns a sandbox.

        `close` ends it. So does the end of the interpreter, and garbage collection of this object, with a
        ResourceWarning. Its sessions keep it alive, its processes do not. Raises InvalidRequest if it is open already,
        and the exceptions of entering a block.
        """
        holder = Holder(self._sandbox, run_at_exit=calls.call)
        try:
            calls.call(holder.open)
            self._pid = os.getpid()
            return self
        except BaseException:  # Ctrl-C included, which may come just after it was opened
            calls.call(holder.abandon)
            raise

    def close(self) -> None:
        """Close it now, as leaving the block does, even inside the block; a closed sandbox stays closed."""
        if self._pid != os.getpid():  # a forked child has neither the task nor the loop
            return
        holder = self._sandbox._holder
        try:
            calls.call(self._sandbox.close)
        except BaseException:  # Ctrl-C included, which may come before it begins to close
            if holder is not None:
                calls.call(holder.abandon)
            raise

    def __enter__(self) -> Self:
        was_open = self._sandbox._holder is not None
        try:
            if self._sandbox._in_block or not was_open:
                self.open()
            self._sandbox._in_block = True
            return self
        except BaseException:  # as above
            if not was_open:
                self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    run = _method(AsyncSandbox.run, "_sandbox")
    read_file = _method(AsyncSandbox.read_file, "_sandbox")
    write_file = _method(AsyncSandbox.write_file, "_sandbox")
    list_files = _method(AsyncSandbox.list_files, "_sandbox")
    append_file = _method(AsyncSandbox.append_file, "_sandbox")
    snapshot = _method(AsyncSandbox.snapshot, "_sandbox")
    list_dir = _method(AsyncSandbox.list_dir, "_sandbox")
    stat = _method(AsyncSandbox.stat, "_sandbox")
    exists = _method(AsyncSandbox.exists, "_sandbox")
    make_dir = _method(AsyncSandbox.make_dir, "_sandbox")
    move = _method(AsyncSandbox.move, "_sandbox")
    remove = _method(AsyncSandbox.remove, "_sandbox")
    install = _method(AsyncSandbox.install, "_sandbox")
    watch = _making(_method(AsyncSandbox.watch, "_sandbox"), Watch, "Watch")
    upload = _method(AsyncSandbox.upload, "_sandbox")
    download = _method(AsyncSandbox.download, "_sandbox")
    exec = _method(AsyncSandbox.exec, "_sandbox")
    start = _making(_method(AsyncSandbox.start, "_sandbox"), Process, "Process")
    terminal = _making(_method(AsyncSandbox.terminal, "_sandbox"), Process, "Process")
    process = _making(_method(AsyncSandbox.process, "_sandbox"), Process, "Process")
    processes = _method(AsyncSandbox.processes, "_sandbox")
    connect = _making(_method(AsyncSandbox.connect, "_sandbox"), Connection, "Connection")
    forward = _making(_method(AsyncSandbox.forward, "_sandbox"), Forward, "Forward")
    ports = _method(AsyncSandbox.ports, "_sandbox")
    logs = _method(AsyncSandbox.logs, "_sandbox")
    kill = _method(AsyncSandbox.kill, "_sandbox")
    pause = _method(AsyncSandbox.pause, "_sandbox")
    resume = _method(AsyncSandbox.resume, "_sandbox")
    keep = _method(AsyncSandbox.keep, "_sandbox")
    set_lifetime = _method(AsyncSandbox.set_lifetime, "_sandbox")
    diff = _method(AsyncSandbox.diff, "_sandbox")
    changes = _method(AsyncSandbox.changes, "_sandbox")
    commit = _method(AsyncSandbox.commit, "_sandbox")
    discard = _method(AsyncSandbox.discard, "_sandbox")
    try_commit = _method(AsyncSandbox.try_commit, "_sandbox")
    save_changes = _method(AsyncSandbox.save_changes, "_sandbox")
    commits_inside = _method(AsyncSandbox.commits_inside, "_sandbox")
    take_commits = _method(AsyncSandbox.take_commits, "_sandbox")
    share = _method(AsyncSandbox.share, "_sandbox")

    def session(
        self,
        language: str = "python",
        *,
        env: Mapping[str, str] | None = None,
        idle_timeout: float | str | None = None,
        checkpoints: bool = False,
        timeout: float | str | None = None,
    ) -> Session:
        """Start an interpreter that keeps its state between runs; see `AsyncSandbox.session`."""
        session = calls.call(
            lambda: self._sandbox.session(
                language, env=env, idle_timeout=idle_timeout, checkpoints=checkpoints, timeout=timeout
            )
        )
        return Session(session, self if session.sandbox is self._sandbox else Sandbox.of(session.sandbox))


class Session(_Closing):
    """Run cells in one interpreter that keeps its state; the blocking twin of AsyncSession.

    with Sandbox() as sandbox:
        session = sandbox.session()
        session.run("x = 20")
        result = session.run("x + 1")
    """

    def __init__(self, session: AsyncSession, sandbox: Sandbox) -> None:
        self._session, self._sandbox, self._pid = session, sandbox, os.getpid()

    @property
    def sandbox(self) -> Sandbox:
        """Return the sandbox whose workspace this session uses."""
        return self._sandbox

    @property
    def language(self) -> str:
        """Return the language of the cells."""
        return self._session.language

    @property
    def runtime(self) -> str:
        """Return the engine's name and version, as the engine reports them."""
        return self._session.runtime

    @property
    def is_alive(self) -> bool:
        """Tell whether the next run will find the state of the last one."""
        return self._session.is_alive

    @property
    def why_ended(self) -> str:
        """Return the reason why the next run will not find the state of the last one, as far as known; empty if it
        will.
        """
        return self._session.why_ended

    @property
    def history(self) -> tuple[HistoryEntry, ...]:
        """Return the cells that were run, oldest first: the last thousand, of four million characters at most."""
        return self._session.history

    run = _method(AsyncSession.run, "_session", eager_without=("out", "autofix"))
    install = _method(AsyncSession.install, "_session")
    interrupt = _method(AsyncSession.interrupt, "_session")
    checkpoint = _method(AsyncSession.checkpoint, "_session")
    rollback = _method(AsyncSession.rollback, "_session")
    restart = _method(AsyncSession.restart, "_session")
    end = _method(AsyncSession.end, "_session")
    close = _method(AsyncSession.close, "_session")
    read_file = _method(AsyncSession.read_file, "_session")
    write_file = _method(AsyncSession.write_file, "_session")

    def fork(self, count: int = 1) -> list[Session]:
        """Return `count` sessions that begin in this one's state; see `AsyncSession.fork`."""
        forks = calls.call(lambda: self._session.fork(count))
        return [Session(fork, Sandbox.of(fork.sandbox)) for fork in forks]


class BackendSandbox:
    """Run each `execute` in a throwaway sandbox of one backend (R1's protocol)."""

    fixed_backend: str | None = None

    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        self._options: SandboxOptions = {**options}
        if self.fixed_backend is not None:
            self._options["backend"] = self.fixed_backend
        prepare(**self._options)  # a missing backend is an error now, not at the first run

    def execute(
        self,
        code: str,
        language: str = "python",
        timeout: float = 30,
        *,
        files: Files | None = None,
        out: str | PathLike[str] | None = None,
    ) -> Result:
        """Run `code` and return its result; `timeout` is in seconds of wall clock."""
        options: SandboxOptions = {**self._options, "timeout": timeout}
        return run(code, language=language, files=files, out=out, **options)


class LocalSandbox(BackendSandbox):
    """Run code in the native jail of this host."""

    fixed_backend = "local"


class DockerSandbox(BackendSandbox):
    """Run code in throwaway containers."""

    fixed_backend = "docker"


class E2BSandbox(BackendSandbox):
    """Run code at E2B."""

    fixed_backend = "e2b"


_CLASSES = {face.fixed_backend: face for face in (LocalSandbox, DockerSandbox, E2BSandbox)}


def get_sandbox(name: str | None = None, /, **options: Unpack[SandboxOptions]) -> CodeSandbox:
    """Return the sandbox that the settings choose: `name`, else SANDBOX_TYPE (environment or .env), else local.

    Raises InvalidRequest for an unknown name, and BackendUnavailable with the remedy for a backend that does not work
    here.
    """
    if name is not None:
        options["backend"] = name
    chosen = options.get("backend")
    if chosen is None or isinstance(chosen, str):
        chosen = options["backend"] = load_settings(given_options(options)).backend
    sandbox_class = _CLASSES.get(chosen, BackendSandbox) if isinstance(chosen, str) else BackendSandbox
    return sandbox_class(**options)


check = blocking(acheck, name="check", module=__name__, runs_anywhere=True)
