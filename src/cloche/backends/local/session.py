"""A live session of the local backend: an interpreter with its own jail, in the workspace of its sandbox.

A session is one long run with the same helper, reaper, walls and limits. Added are a link, on which the interpreter
receives cells, and cloning: checkpoints, rollbacks and forks (`fork_tree`). Processes of sessions in a workspace are
stopped while its files are read, and resumed afterwards (`LocalSession.halted`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.events import Sink
from cloche.core.functions import OfferedFunctions
from cloche.core.limits import Limits
from cloche.core.loops import become_task, finish
from cloche.core.protocols import OpenSandbox
from cloche.core.result import KillCause, Observed
from cloche.core.suppressed import suppress_logged

from ..cell_outputs import Printed
from ..saved_files import Changes
from ..session import Session, SessionEnd, SessionLink
from ..session_languages import ControlMessage
from .font_cache import seems_to_draw
from .fork_tree import ORIGIN, ForkTree, Node
from .helper_link import HelperConnection
from .plan import LocalSessionProgram
from .run_report import observed, usage
from .streams import SessionPipes
from .workspace import Workspace

if TYPE_CHECKING:
    from cloche.jail.messages import Spec

log = logging.getLogger("cloche.jail")
Attend = Callable[[Callable[[str, Mapping[str, Any]], None]], Coroutine[Any, Any, dict[str, Any]]]

END_TIMEOUT_S = 0.3
LINK_LOST_TIMEOUT_S = 5.0  # between a closed link and the reported end: the reaper may be delayed
ACK_TIMEOUT_S = 10.0  # for a helper to acknowledge a request
HALT_TIMEOUT_S = 1.0  # to wait for the stop of all processes; after it, the files are read in any case
_NONE = Changes()


class LocalSessionOwner(OpenSandbox, Protocol):
    """Be the sandbox whose workspace a session uses."""

    @property
    def workspace(self) -> Workspace: ...

    @property
    def functions(self) -> OfferedFunctions | None:
        """Return the caller's functions that its guests may call."""
        ...

    def move_to(self, workspace: Workspace) -> None:
        """Switch to the workspace of the interpreter in which a session continues."""
        ...

    def alone(self, session: LocalSession) -> AbstractAsyncContextManager[None]:
        """Block runs meanwhile. Raises InvalidRequest if another session works in the same files."""
        ...

    def copy_for_fork(self, workspace: Workspace) -> LocalSessionOwner:
        """Return the sandbox of a fork: same rules and identity, separate workspace."""
        ...

    def hold(self, session: LocalSession) -> None:
        """Register a session, to be closed with the sandbox at the latest."""
        ...

    async def changes(self, timeout_s: float) -> Changes:
        """Return the changes of a cell that had `timeout_s`; none if the files are gone."""
        ...

    async def font_file(self, env: Mapping[str, str]) -> tuple[str, str] | None:
        """Return path and text of matplotlib's list of fonts; None if there is no list, or matplotlib looks
        elsewhere.
        """
        ...

    async def close(self) -> None:
        """Kill and remove everything."""
        ...


class LocalTransport:
    """Carry a session's interpreter in a jail, and its successors after rollbacks; see
    backends.session.SessionTransport.

    `node` is the interpreter in which the session runs, `checkpoints` are those to which it can roll back.
    """

    slowness = 1.0

    def __init__(self, owner: LocalSessionOwner, program: LocalSessionProgram, limits: Limits):
        self.owner, self._program, self._limits = owner, program, limits
        self.on_flood: Callable[[], None] = lambda: None
        self.fork_tree: ForkTree | None = None
        self.node = Node(ORIGIN, None, self.new_pipes(), owner.workspace, is_fork=False)
        self.node.is_runner = True
        self.checkpoints: dict[str, Node] = {}
        self._was_given_fonts = False

    def new_pipes(self) -> SessionPipes:
        """Return pipes for a further interpreter of this session."""
        return SessionPipes(self._limits, self._program.new_codec(), self._flood, self.owner.functions)

    def _flood(self) -> None:
        self.on_flood()

    def start(
        self, connection: HelperConnection, spec: Spec, send: Callable[[list[int]], None], attend: Attend
    ) -> asyncio.Future[dict[str, Any]]:
        """Send the session's run with `send`, and return the future of its end."""
        fork_tree = ForkTree(connection, spec, self.node, self._limits.timeout_s, self._program.run.binds)
        send(self.node.pipes.guest_ends())
        self.fork_tree = fork_tree  # set only now: from here on its end can be awaited
        self.node.pipes.close_guest_ends()
        fork_tree.end = asyncio.ensure_future(attend(fork_tree.on_message))
        return fork_tree.end

    async def await_workspace(self) -> None:
        """Wait until the helper's message with the workspace has arrived. Raises StartFailed.

        The interpreter's first answer may overtake that message; a run started in between would make another workspace.
        """
        fork_tree = self.fork_tree
        if fork_tree is None or fork_tree.spec.level != "jail" or self.owner.workspace.fd >= 0:
            return
        await become_task()  # asyncio.timeout needs a task
        try:
            # Until Python 3.12, `wait_for` drops a cancellation that comes in the turn in which its task ends.
            async with asyncio.timeout(ACK_TIMEOUT_S):
                await fork_tree.connection.ask("echo")
        except (OSError, TimeoutError) as error:
            raise StartFailed(f"the helper does not answer: {error}", step="helper") from error

    def fork(self, owner: LocalSessionOwner, node: Node) -> LocalTransport:
        """Return the transport of a fork's session."""
        fork = copy.copy(self)
        fork.owner, fork.checkpoints = owner, {}
        node.pipes.link.on_flood = fork._flood
        fork.stand_at(node)
        return fork

    @property
    def link(self) -> SessionLink:
        return self.node.pipes.link

    @property
    def end(self) -> asyncio.Future[dict[str, Any]] | None:
        return self.fork_tree.end if self.fork_tree is not None else None

    async def prepare(self, code: str, *, was_signalled: bool) -> None:
        if was_signalled and self.fork_tree is not None:
            await self._await_signals(self.fork_tree)
        if self.node.spare is not None:
            await self.go_on()
        if self._was_given_fonts or self._program.run.python is None:
            return
        if seems_to_draw(code.encode("utf-8", "surrogatepass")):  # the interpreter refuses lone surrogates
            await self._give_fonts()

    async def _give_fonts(self) -> None:
        self._was_given_fonts = True
        fonts = await self.owner.font_file(self._program.run.env)
        sending = self.node.pipes.keep(*fonts) if fonts is not None else None
        if sending is not None:
            await become_task()
            with suppress_logged(
                log, "the interpreter does not read its input; its cell will report that", TimeoutError
            ):
                async with asyncio.timeout(ACK_TIMEOUT_S):
                    await sending

    async def _await_signals(self, fork_tree: ForkTree) -> None:
        """Wait until the helper, which handles messages in order, has sent the last cell's signals."""
        await become_task()
        with suppress_logged(
            log, "a session's helper does not answer; its next cell will report that", OSError, TimeoutError
        ):
            async with asyncio.timeout(ACK_TIMEOUT_S):
                await fork_tree.connection.ask("echo")

    async def go_on(self) -> None:
        """Move to the node in which this session continues after a fork."""
        if self.fork_tree is not None and self.node.spare is not None:
            self.stand_at(await finish(self.fork_tree.go_on(self.node)))

    def stand_at(self, node: Node) -> None:
        """Switch to another interpreter and its workspace."""
        self.node = node
        node.is_runner = True
        self.owner.move_to(node.workspace)

    def begin(self, sink: Sink) -> None:
        self.node.pipes.begin(sink)
        if self.node.pipes.calls is not None:
            self.node.pipes.calls.calls.renew()

    def call_notes(self) -> Mapping[str, Any]:
        return self.node.pipes.calls.calls.notes() if self.node.pipes.calls is not None else {}

    def send(self, data: bytes) -> Awaitable[None] | None:
        return self.node.pipes.send(data)

    def collect(self, *, is_up_to_date: bool = False) -> Printed:
        return self.node.pipes.collect(is_up_to_date=is_up_to_date)

    def send_control(self, control: ControlMessage) -> None:
        tag, body = control
        if self.fork_tree is not None:
            self.fork_tree.connection.notify(tag, node=self.node.number, **body)

    def kill(self, cause: KillCause) -> None:
        """Kill the interpreter; its link reports the end of a clone."""
        if self.fork_tree is None:
            return
        if self.node.number == ORIGIN:
            self.fork_tree.connection.kill(cause)
        else:
            self.fork_tree.kill(self.node)

    async def stop(self, cause: KillCause | None) -> None:
        """End the interpreter and wait for the report of its end."""
        fork_tree = self.fork_tree
        if fork_tree is None:
            return
        if self.node.number != ORIGIN:
            if cause is None:  # it has ended by itself; the helper reports the facts
                await asyncio.wait([fork_tree.end], timeout=END_TIMEOUT_S)
            self.node.is_runner = False
            await fork_tree.prune()
            return
        if cause is not None:
            fork_tree.connection.kill(cause)
        elif not fork_tree.end.done():
            await asyncio.wait([fork_tree.end], timeout=LINK_LOST_TIMEOUT_S)
            fork_tree.connection.kill(KillCause.CANCELLED)  # it lives without a link, so it cannot be used
        with suppress_logged(log, "how a session ended, which its verdict says", Exception):
            await finish(fork_tree.end)

    async def observe_end(self, cause: KillCause | None) -> SessionEnd:  # noqa: ARG002 - the helper says it
        await self.node.pipes.drain()
        ended = self._ended()
        if ended:
            return SessionEnd(observed=observed(ended), usage=usage(ended))
        return SessionEnd(observed=self._observed_of_node())

    def known_end(self) -> Observed | str:
        ended = self._ended()
        return observed(ended) if ended else ""

    def _ended(self) -> dict[str, Any]:
        end = self.end
        if end is None or not end.done() or end.cancelled() or end.exception() is not None:
            return {}
        return end.result()

    def _observed_of_node(self) -> Observed:
        """Return how a clone ended. Its pid 1 belongs to the guest, so the exit code is the guest's claim."""
        status = self.node.pipes.wait_status
        return Observed(
            exit_code=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            cause=KillCause.OUT_OF_MEMORY if self.node.is_exceeded else None,
            oom_kills=self.node.counters.get("oom_kills", 0),
        )

    async def changes(self, timeout_s: float) -> Changes:
        if self.owner.workspace.is_untouched():
            return _NONE
        return await self.owner.changes(timeout_s)

    async def close(self) -> None:
        if self.fork_tree is None:
            self.node.close()
        else:
            await self.fork_tree.close_session([self.node, *self.checkpoints.values()])


class LocalSession(Session):
    """Run one cell at a time, with checkpoints and forks; see core.protocols.SupportsFork.

    `can_fork` says that its sandbox has namespaces, and a /tmp that a clone may write to.
    """

    def __init__(
        self,
        transport: LocalTransport,
        program: LocalSessionProgram,
        limits: Limits,
        *,
        enforcement: Enforcement,
        can_fork: bool,
    ):
        super().__init__(
            transport, transport.changes, language=program.language.name, interrupt=program.interrupt, limits=limits,
            enforcement=enforcement, notes={"backend": "local"},
        )  # fmt: skip
        self._local, self._program, self._limits = transport, program, limits
        self.call_notes = transport.call_notes
        self._can_fork = can_fork

    @property
    def sandbox(self) -> LocalSessionOwner:
        return self._local.owner

    @property
    def fork_tree(self) -> ForkTree | None:
        """Return the session's tree of clones with its helper; None before the start."""
        return self._local.fork_tree

    async def open(
        self, connection: HelperConnection, spec: Spec, send: Callable[[list[int]], None], attend: Attend
    ) -> None:
        """Send the session's run with `send`, and wait until the interpreter is ready."""
        await self.await_ready(self._local.start(connection, spec, send, attend))
        await self._local.await_workspace()

    async def checkpoint(self, name: str) -> None:
        """Save memory and workspace under `name`; see core.protocols.SupportsFork."""
        async with self._turn:
            fork_tree = self._forkable()
            await finish(self._checkpoint(fork_tree, name))

    async def _checkpoint(self, fork_tree: ForkTree, name: str) -> None:
        local, checkpoints = self._local, self._local.checkpoints
        await local.go_on()
        node = local.node
        async with local.owner.alone(self):
            clone = await fork_tree.clone(node, local.new_pipes)
        node.is_runner, node.is_held = False, True
        replaced = checkpoints.pop(name, None)
        checkpoints[name] = node
        local.stand_at(clone)
        if replaced is not None and replaced not in checkpoints.values():
            replaced.is_held = False
            await fork_tree.prune()

    async def rollback(self, name: str) -> None:
        """Return to a checkpoint, which is kept; see core.protocols.SupportsFork."""
        async with self._turn:
            fork_tree, node = self._forkable(needs_life=False), self._local.checkpoints.get(name)
            if node is None:
                have = ", ".join(self._local.checkpoints) or "none"
                raise InvalidRequest(f"there is no checkpoint {name!r} in this session; there is: {have}")
            if node.pipes.link.lost.done():
                raise InvalidRequest(f"the checkpoint {name!r} was lost: its process has ended")
            if fork_tree.others_below(node, self._local.node):
                raise InvalidRequest(
                    f"a fork that was made after the checkpoint {name!r} is still open; close it first"
                )
            await finish(self._roll_back(fork_tree, node, name))

    async def _roll_back(self, fork_tree: ForkTree, node: Node, name: str) -> None:
        local, checkpoints = self._local, self._local.checkpoints
        async with local.owner.alone(self):
            for later_name in [later_name for later_name in checkpoints if _is_after(checkpoints, later_name, name)]:
                checkpoints.pop(later_name).is_held = False
            local.node.is_runner = False
            await fork_tree.prune()
            clone = await fork_tree.clone(node, local.new_pipes)
            self._verdict = None
            local.stand_at(clone)

    async def fork(self, count: int) -> list[LocalSession]:
        """Return sessions that begin in this one's state; see core.protocols.SupportsFork."""
        async with self._turn:
            fork_tree = self._forkable()
            forking = asyncio.ensure_future(self._fork(fork_tree, count))
            try:
                return await finish(forking)
            except asyncio.CancelledError:
                if not forking.cancelled() and forking.exception() is None:
                    for fork in forking.result():  # no other reference to them exists
                        await finish(fork.sandbox.close())
                raise

    async def _fork(self, fork_tree: ForkTree, count: int) -> list[LocalSession]:
        await self._local.go_on()
        async with self._local.owner.alone(self):
            forks = await fork_tree.fork(self._local.node, self._local.new_pipes, count)
        return [self._session_of_fork(fork_tree, fork) for fork in forks]

    def _session_of_fork(self, fork_tree: ForkTree, node: Node) -> LocalSession:
        owner = self._local.owner.copy_for_fork(node.workspace)
        session = LocalSession(
            self._local.fork(owner, node), self._program, self._limits, enforcement=self._enforcement,
            can_fork=self._can_fork,
        )  # fmt: skip
        session.runtime, session.start, session._has_signalled = self.runtime, "forked", self._has_signalled
        if self.network is not None:
            session.network, session.owns_network = self.network.share(), True
        owner.hold(session)
        fork_tree.members += 1
        return session

    def _forkable(self, *, needs_life: bool = True) -> ForkTree:
        """Return the fork tree. Raises InvalidRequest if this session cannot be cloned."""
        if not self._program.is_forkable:
            raise BackendUnavailable(self._program.why_no_forks())
        if self.fork_tree is None or not self._can_fork:
            raise BackendUnavailable(
                "checkpoints and forks need level jail and a writable /tmp, which this sandbox lacks"
            )
        if needs_life and not self.is_alive:
            raise InvalidRequest(f"this session has ended{self._why()}; roll it back, restart it, or open another one")
        return self.fork_tree

    @contextlib.asynccontextmanager
    async def halted(self) -> AsyncIterator[None]:
        """Stop all its processes, the interpreter included, if that is possible soon; resume them afterwards."""
        fork_tree, node = self.fork_tree, self._local.node.number
        if fork_tree is None or fork_tree.end.done():
            yield
            return
        await become_task()  # asyncio.timeout needs a task
        try:
            with suppress_logged(log, "a session that has ended runs nothing", OSError, TimeoutError):
                async with asyncio.timeout(HALT_TIMEOUT_S):
                    await fork_tree.connection.ask("halt", node=node)
            yield
        finally:
            fork_tree.connection.notify("resume", id=0, node=node)


def _is_after(checkpoints: Mapping[str, Node], name: str, candidate: str) -> bool:
    """Tell whether checkpoint `name` was made after `candidate`, on the same branch."""
    above: Node | None = checkpoints[name].parent
    while above is not None and above is not checkpoints[candidate]:
        above = above.parent
    return above is not None
