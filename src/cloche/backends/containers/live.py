"""A sandbox of containers that lives: one container for all its processes, and init's wire over its standard streams.

The first process inside is `inside/live.py`. `LinkTransport` carries the wire of `init` between an event loop and a
container's streams, which threads read and write. Backends define a few methods that make the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cloche.core.enforcement import Enforcement
from cloche.core.errors import StartFailed
from cloche.core.events import Sink, discard
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.result import Result
from cloche.egress.windows import SharedNetwork

from ..init_link import InitLink
from ..layout import with_startup
from ..live import LiveSandbox
from ..live_files import FILE_MODE
from ..live_process import LiveProcess
from ..live_runs import LiveRun, argv_of, run_to_end, streams_of, with_files
from ..live_session import LiveProgram, LiveSession, open_live_session
from ..network import network_rules
from ..results import run_notes
from .container import ByteReceiver, Container, ContainerWire, boot_message
from .program import (
    NOFILE,
    STARTUP_FOLDER,
    TEMPORARY,
    WORKSPACE,
    Program,
    SessionProgram,
    program_with_calls,
    session_with_calls,
)
from .run import observed_by_guest

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

    from ..secrets import ContainerSecrets

log = logging.getLogger("cloche.containers")
MOST_UNSENT, FEW_UNSENT = 1 << 20, 1 << 18  # bytes queued for a container: high and low water marks of writing
MOST_UNREAD = 1 << 20  # bytes received from a container and not yet processed by the loop
PIECE_BYTES = 1 << 18  # maximum of one write
HOME = "/home/sandbox"

C = TypeVar("C", bound=Container[Any])


class LinkTransport(asyncio.Transport):
    """Carry bytes between an event loop and a container's standard streams. Call `write` and `abort` in the loop."""

    def __init__(self, protocol: asyncio.Protocol):
        super().__init__()
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._turn = threading.Condition()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = self._unread_bytes = 0
        self._is_paused = self._is_reading_paused = self._is_closing = False

    def begin(self, wire: ContainerWire) -> None:
        """Call the protocol's `connection_made`, and start the thread that writes to `wire`."""
        self._wire = wire
        self._protocol.connection_made(self)
        threading.Thread(target=self._write, name="cloche-container-writer", daemon=True).start()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue bytes for sending."""
        with self._turn:
            if self._is_closing:
                return
            self._unsent.append(bytes(data))
            self._unsent_bytes += len(data)
            self._turn.notify_all()
        if self._unsent_bytes > MOST_UNSENT and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        """Stop passing on data, except data already posted to the loop."""
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        """Continue to pass on data."""
        with self._turn:
            self._is_reading_paused = False
            self._turn.notify_all()

    def is_closing(self) -> bool:
        """Return whether the transport is closing."""
        return self._is_closing

    def abort(self) -> None:
        """Close the container's standard input, which ends the container. Unsent data is dropped."""
        with self._turn:
            is_first, self._is_closing = not self._is_closing, True
            self._unsent.clear()
            self._turn.notify_all()
        if is_first:  # in a thread, because a blocked writer may hold the wire's lock
            threading.Thread(target=self._shut_down, name="cloche-container-end", daemon=True).start()

    def close(self) -> None:
        """Call `abort`."""
        self.abort()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.shutdown()

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _write(self) -> None:
        try:
            while (data := self._next()) is not None:
                self._wire.send(data)
                self._note_sent(len(data))
        except OSError as error:
            log.debug("a container takes nothing more: %s", error)
            self._shut_down()

    def _next(self) -> bytes | None:
        """Wait for data to send and return it; None when the transport is closing."""
        with self._turn:
            self._turn.wait_for(lambda: self._unsent or self._is_closing)
            pieces = []
            size = 0
            while self._unsent and size < PIECE_BYTES:
                pieces.append(self._unsent.popleft())
                size += len(pieces[-1])
            return b"".join(pieces) if pieces else None

    def _note_sent(self, count: int) -> None:
        with self._turn:
            self._unsent_bytes -= count
            is_low = self._unsent_bytes < FEW_UNSENT
        if is_low:
            self._post(self._resume)

    def _resume(self) -> None:
        if self._is_paused and self._unsent_bytes < FEW_UNSENT:
            self._is_paused = False
            self._protocol.resume_writing()

    def take_end(self, error: Exception | None) -> None:
        """Note that nothing more is received. Called in the container's reading thread."""
        with self._turn:
            self._is_closing = True
            self._turn.notify_all()
        self._post(self._protocol.connection_lost, error)

    def take(self, piece: bytes) -> None:
        """Post a piece to the loop, once the loop has processed most of the earlier ones.

        Called in the container's reading thread.
        """
        with self._turn:
            self._turn.wait_for(
                lambda: (self._unread_bytes < MOST_UNREAD and not self._is_reading_paused) or self._is_closing
            )
            if self._is_closing:
                return
            self._unread_bytes += len(piece)
        self._post(self._receive, piece)

    def _receive(self, piece: bytes) -> None:
        self._protocol.data_received(piece)
        with self._turn:
            self._unread_bytes -= len(piece)
            self._turn.notify_all()


class ContainerLiveSandbox(LiveSandbox, ABC, Generic[C]):
    """One container and everything in it; see core.protocols.OpenLiveSandbox."""

    more_homes: tuple[str, ...] = ()  # writable folders besides HOME

    def __init__(self, *, policy: Policy, limits: Limits, enforcement: Enforcement):
        super().__init__(limits, enforcement, has_users=policy.users)
        self._policy = policy
        self._container: C | None = None
        self._secrets: ContainerSecrets | None = None
        self._numbers = itertools.count(1)
        self.writable: tuple[str, ...] = ()  # writable folders, known after the start

    @abstractmethod
    def _make(self, receiver: ByteReceiver) -> C:
        """Start a container, whose output goes to `receiver`. Blocks. Raises StartFailed."""

    def _launch(self, container: C, receiver: ByteReceiver) -> C:
        """Start a container. Blocks. Raises StartFailed; nothing is left then."""
        container.launch(lambda: self._boot(container), receiver)
        return container

    def _boot(self, container: C) -> bytes:
        """Return the first process's input, once the container is created."""
        return boot_message(self._policy.preload, **container.sites(), live=self.live_settings())

    @abstractmethod
    def _build_program(self, request: Request, number: int) -> Program:
        """Return the program of a request; `number` is part of the names of the files that only this program has.

        Blocks.
        """

    @abstractmethod
    def _build_session_program(self, language: str, env: Mapping[str, str]) -> SessionProgram:
        """Return the program of a session. Blocks. Raises BackendUnavailable for a language without sessions here."""

    @abstractmethod
    def _variables(self) -> Mapping[str, str]:
        """Return the variables that every process has, including HOME."""

    @abstractmethod
    def _notes(self) -> dict[str, Any]:
        """Return the container's entries for `meta` of results."""

    def _hasten(self) -> None:
        """Make a running `_make` return soon, if the backend can: its caller was cancelled."""
        return

    def _check_greeting(self, greeting: Mapping[str, Any]) -> None:
        """Raise StartFailed if the first process's greeting does not match the request."""

    def _homes(self) -> tuple[str, ...]:
        """Return the writable folders besides the workspace and those for temporary files."""
        return () if self._policy.user == "nobody" else (HOME, *self.more_homes)

    @abstractmethod
    def _in_memory(self) -> Sequence[str]:
        """Return the file systems whose content the container's kernel counts as shared memory."""

    def live_settings(self) -> dict[str, Any]:
        """Return the settings of the first process."""
        limits, writable = self.limits, (WORKSPACE, *TEMPORARY, *self._homes())
        settings = {"memory_bytes": limits.memory_bytes, "in_memory": list(self._in_memory()), "places": list(writable)}
        return {**settings, "nofile": NOFILE}

    # Its life.

    async def _start(self) -> InitLink:
        link = InitLink()
        transport = LinkTransport(link)
        if self._policy.secrets is not None and self._secrets is None:
            from ..secrets import ContainerSecrets  # needed by some sandboxes only

            self._secrets = await ContainerSecrets.open(self._policy)
        making = asyncio.ensure_future(asyncio.to_thread(self._make, transport))
        try:
            await asyncio.wait([making])
        except asyncio.CancelledError:
            making.add_done_callback(_release_unread)
            self._hasten()
            await finish(asyncio.wait([making]))
            raise
        container = making.result()
        transport.begin(container.wire)
        try:
            greeting = await await_greeting(link, container)
            self._check_greeting(greeting)
        except BaseException:
            link.close()
            container.release()
            raise
        self._container = container
        writable = greeting.get("writable")
        self.writable = tuple(map(str, writable)) if isinstance(writable, list) else ()
        rules = network_rules(self._policy)
        if container.network is not None and rules is not None:
            self.network = SharedNetwork(container.network, rules)
        return link

    async def _fill(self, link: InitLink) -> None:
        """Write the files with placeholders into the home folder."""
        texts = self._secrets.guest.texts if self._secrets is not None else {}
        for path, text in texts.items():
            await self.write_first(link, f"{self.environment({})['HOME']}/{path}", text.encode(), FILE_MODE)

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        self._is_closed = True
        async with self._opening:
            if self.link is not None:
                self.link.close("the sandbox was closed")
            network, self.network = self.network, None
            if network is not None:
                network.close()
            container, self._container = self._container, None
            if container is not None:
                container.release()
            if self._secrets is not None:
                self._secrets.close()

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return a command's whole environment."""
        variables = dict(self._variables())
        if HOME in self.writable or os.path.dirname(HOME) in self.writable:
            variables["HOME"] = HOME
            variables["PATH"] = f"{HOME}/.local/bin:{variables['PATH']}"
        return with_startup({**variables, **env, **self._secret_variables()}, STARTUP_FOLDER)

    def _secret_variables(self) -> Mapping[str, str]:
        return self._secrets.guest.variables if self._secrets is not None else {}

    def _variables_of(self, env: Mapping[str, str], request_variables: Mapping[str, str]) -> dict[str, str]:
        """Return a program's variables: the container's, overridden by `env`, overridden by the request's."""
        request_variables = {
            name: value for name, value in request_variables.items() if name != "PYTHONPATH"
        }  # `env` already contains it, extended
        return {
            **self.environment({}),
            **{name: value for name, value in env.items() if name not in _OWN},
            **request_variables,
            **self._secret_variables(),
        }

    def _rules_to_begin_with(self) -> NetworkRules:
        return network_rules(self._policy) or super()._rules_to_begin_with()

    # Runs.

    async def run(self, request: Request) -> Result:
        """Run code or a command, concurrently with others, and return its result."""
        return await self.run_streaming(request, discard)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run like `run`, and pass `Started` and `OutputChunk` events to `sink` as they happen."""
        timeout_s = request.timeout_s or self.limits.timeout_s
        await self.connected()
        program = await asyncio.to_thread(self._build_program, request, next(self._numbers))
        if self.has_functions:
            program = program_with_calls(program, request.language)

        async def notes(wall_s: float) -> Mapping[str, Any]:
            notes_of_run = run_notes(program.engine, program.version, self.limits, self.enforcement, wall_s)
            return {**notes_of_run, **self._notes(), "start": "cold", "writable": list(self.writable)}

        contents = {file.path: file.data for file in request.files}
        run = LiveRun(order=await self._order(program, request, timeout_s), inputs=contents, notes=notes)
        try:
            return await run_to_end(self, request, run, sink, timeout_s=timeout_s)
        finally:
            self._leftover += [f"{WORKSPACE}/{program.own_file}"] if program.own_file else []

    async def begun(self, process: LiveProcess) -> LiveProcess:
        process.on_loss = self._end_by_guest
        return await super().begun(process)

    async def _end_by_guest(self) -> dict[str, Any] | None:
        container = self._container
        return None if container is None or self._is_closed else await end_by_guest(container)

    async def _order(self, program: Program, request: Request, timeout_s: float) -> dict[str, Any]:
        """Return the order that starts a program. Large files are written first."""
        env = self._variables_of(program.env, request.env)
        order: dict[str, Any] = {"env": env, "timeout_s": timeout_s, "cwd": WORKSPACE}
        order["remove"], order["folders"] = self.take_leftover(), [program.build] if program.build else []
        order["streams"] = streams_of(request, has_report=program.python is not None, calls=self.functions is not None)
        files = [(f"{WORKSPACE}/{file.path}", file.mode & 0o777, file.data) for file in program.files]
        if program.python is None:
            order["argv"] = argv_of(program.commands)
        else:
            source = next((data for path, _, data in files if path == program.python["path"]), None)
            text = {"source": source.decode("utf-8", "surrogateescape")} if source is not None else {}
            order["python"] = {**program.python, **text}
        generated = [(path, 0o644, text.encode()) for path, text in program.generated.items()]
        return await with_files(self, order, [*files, *generated])

    # Sessions.

    async def open_session(self, language: str, env: Mapping[str, str]) -> LiveSession:
        """Start an interpreter that lives in this container; see core.protocols.SupportsSessions."""
        link = await self.connected()
        program = await asyncio.to_thread(self._build_session_program, language, env)
        if self.has_functions:
            program = session_with_calls(program)
        order = program.order(self._variables_of(program.env, env))
        started = LiveProgram(
            language=program.language.name, order=order, new_codec=program.new_codec, interrupt=program.interrupt,
            why_no_forks=f"backend {self.backend!r} has no checkpoints and no forks; Python sessions of backend "
            '"local" have, at level jail',
        )  # fmt: skip
        return await open_live_session(
            self, link, started, self.limits, enforcement=self.enforcement, notes={**self._notes(), "start": "cold"},
            slowness=self._container.slowness if self._container is not None else 1.0,
        )  # fmt: skip


async def await_greeting(link: InitLink, container: Container[Any]) -> Mapping[str, Any]:
    """Return the greeting of the `init` of a container. Raises StartFailed."""
    await asyncio.wait((link.greeting, link.lost), return_when=asyncio.FIRST_COMPLETED, timeout=container.ready_s)
    if not link.greeting.done() or link.greeting.exception() is not None:
        raise StartFailed(f"init in the {container.label} did not get ready{container.last_output()}", step="container")
    return link.greeting.result()


async def end_by_guest(container: Container[Any]) -> dict[str, Any] | None:
    """Return the container's end, if the guest caused it, as the end of one of its processes; else None."""
    end = await observed_by_guest(container)
    if end is None:
        return None
    return {"status": end.signal, "cause": str(end.cause or ""), "pids_hits": end.pids_hits}


def _release_unread(making: asyncio.Future[C]) -> None:
    """Release a container whose caller was cancelled during its start."""
    if not making.cancelled() and making.exception() is None:
        making.result().release()


_OWN = ("HOME", "PATH")  # variables that a sandbox that lives sets itself
