"""A session of a sandbox whose runs take turns: a process of `init` in a container of its own.

The container is one like those for runs, warm or not, with the same workspace. Its first process is told to serve the
wire of `init` from then on (`Container.hand_over`). After the session's end the container may still hold the workspace,
whose files are then reached over that wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cloche.core.enforcement import Enforcement
from cloche.core.errors import StartFailed
from cloche.core.events import Sink
from cloche.core.limits import Limits
from cloche.core.loops import become_task, finish
from cloche.core.result import KillCause, Observed

from ..archive import Spool
from ..cell_outputs import Printed
from ..init_link import InitLink, Operation
from ..live import LiveSandbox
from ..live_session import STREAMS, LiveTransport
from ..saved_files import time_for_files
from ..session import SessionEnd
from .container import Container
from .live import LinkTransport, await_greeting, end_by_guest
from .program import NOFILE, WORKSPACE, SessionProgram
from .run import ANSWER_S, GIVE_UP_S, GUEST_KILL_S, KillTimer

GONE_S = GIVE_UP_S + 1.0  # for an interpreter to end after its container was killed


class SessionOwner(Protocol):
    """The sandbox that holds a session's workspace."""

    def take_back(self, container: Container[Any]) -> None:
        """Take over the container of an ended session."""
        ...


class SessionContainer(LiveSandbox):
    """One container that holds a session, and its files."""

    def __init__(self, container: Container[Any], limits: Limits, enforcement: Enforcement, in_memory: Sequence[str]):
        super().__init__(limits, enforcement)
        self.container, self._in_memory = container, in_memory

    async def _start(self) -> InitLink:
        """Have the container's first process become `init`. Raises StartFailed, and kills the container then."""
        container, link = self.container, InitLink()
        transport = LinkTransport(link)
        try:
            await finish(asyncio.to_thread(container.hand_over, transport, self._settings()))
            transport.begin(container.wire)
            await await_greeting(link, container)
        except OSError as error:
            why = f"the {container.label} was lost before the session began{container.last_output()}"
            raise StartFailed(why, step="session") from error
        except StartFailed:
            await finish(asyncio.to_thread(container.kill))
            raise
        return link

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"memory_bytes": self.limits.memory_bytes, "in_memory": list(self._in_memory)}
        settings |= {"places": [], "nofile": NOFILE, "is_looked_at": True, "blocks": self.container.shares_streams}
        return settings

    async def open_transport(self, owner: SessionOwner, program: SessionProgram) -> ContainerTransport:
        """Have `init` start an interpreter. Nothing is started if this raises, also if it is cancelled."""
        link = await finish(self.connected())
        channel = link.open("start", waits=True, **program.order(program.env), streams=STREAMS)
        return ContainerTransport(self, owner, channel, program)

    async def changed_files(self, timeout_s: float) -> tuple[Spool, Mapping[str, Any]]:
        """Return the files that changed since the last call, after a cell with a limit of `timeout_s`.

        Raises TimeoutError if the container does not answer, SandboxFileError, OutcomeUnknown, ValueError.
        """
        await become_task()
        max_bytes, walk_s = self.limits.disk_bytes, time_for_files(timeout_s)
        spool = Spool(max_bytes)
        async with (
            asyncio.timeout(ANSWER_S),
            self._operation("look", WORKSPACE, timeout_s=ANSWER_S, most=max_bytes, walk_s=walk_s) as operation,
        ):
            while piece := await operation.incoming.read():
                spool.add(piece)
            return spool, await operation.answer()


class ContainerTransport(LiveTransport):
    """Carry one interpreter in a container; see backends.session.SessionTransport.

    If the first process does not end it in time, the container is killed.
    """

    def __init__(
        self, session_container: SessionContainer, owner: SessionOwner, channel: Operation, program: SessionProgram
    ):
        container = session_container.container
        super().__init__(channel, session_container.limits, program.new_codec(), slowness=container.slowness)
        self._container, self._owner = container, owner
        self._is_in_cell = False
        self._process.on_loss = lambda: end_by_guest(container)
        self._kill_timer = KillTimer(container, lambda: None)
        self.late_s = GUEST_KILL_S + GONE_S

    @property
    def end(self) -> asyncio.Future[dict[str, Any]] | None:
        # A caller whose loop runs only during its calls learns here that the container ended between two cells.
        if self._container.is_lost and not self._is_in_cell:
            self.link.lose(f"the {self._container.label} is gone")
        return super().end

    def begin(self, sink: Sink) -> None:
        self._is_in_cell = True
        super().begin(sink)

    def collect(self, *, is_up_to_date: bool = False) -> Printed:
        self._is_in_cell = False
        return super().collect(is_up_to_date=is_up_to_date)

    def kill(self, cause: KillCause) -> None:
        super().kill(cause)
        if self._end is None or not self._end.done():
            self._kill_timer.kill(cause)

    async def observe_end(self, cause: KillCause | None) -> SessionEnd:
        end, container = await super().observe_end(cause), self._container
        if not end.lost:
            return end
        why = f"the {container.label} is gone, for an unknown reason{container.last_output()}"
        return SessionEnd(observed=end.observed, lost=container.why_lost() if container.is_given_up else why)

    def known_end(self) -> Observed | str:
        end, container = super().known_end(), self._container
        return f"its {container.label} is gone" if isinstance(end, str) and container.is_lost else end

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._kill_timer.close()
            self._owner.take_back(self._container)
