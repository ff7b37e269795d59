"""A live session of the local backend: an interpreter in a jail of its own, in the workspace of its sandbox.

It is one long run: the same helper, reaper, walls and limits; what is added is a link on which the interpreter is
given cells, and that it can be cloned: checkpoints, rollbacks, forks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable, InvalidRequest, StartFailed
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, Verdict, decide
from cloche.core.result import Usage

from ..drivers import Word
from ..living import LivingSession, as_lost
from ..noting import noted
from ..saving import Changes
from .connection import Connection
from .dialogue import Dialogue
from .family import ORIGIN, Family, Node
from .fonts import seems_to_draw
from .reports import finish, observed, usage

if TYPE_CHECKING:
    from cloche.jail.spec import Spec

    from .sandbox import LocalOpenSandbox
    from .session_program import SessionProgram

log = logging.getLogger("cloche.local")
Attend = Callable[[Callable[[str, Mapping[str, Any]], None]], Coroutine[Any, Any, dict[str, Any]]]

LAST_WORDS_S = 0.3
LINKLESS_S = 5.0  # for who has closed its link to be gone: its end is told by a reaper that may be kept waiting
NOTED_S = 10.0  # for a helper to say that it has done what it was told
HALTED_S = 1.0  # for it to say that all stands still; then the files are looked at all the same
FOR_EVER_S = 1e9
_NONE = Changes()


class LocalSession(LivingSession):
    """Run one cell at a time; see core.protocols.OpenSession."""

    def __init__(self, sandbox: LocalOpenSandbox, program: SessionProgram, limits: Limits):
        super().__init__(program.language.name, program.interrupt, limits)
        self._sandbox, self._program = sandbox, program
        self._family: Family | None = None
        self._node = Node(ORIGIN, None, self._new_dialogue(), sandbox.workspace, is_fork=False)
        self._node.is_runner = True
        self._checkpoints: dict[str, Node] = {}
        self._was_given_fonts = False

    def _new_dialogue(self) -> Dialogue:
        return Dialogue(self._limits, self._program.new_codec(), self._on_flood)

    @property
    def _exchange(self) -> Dialogue:
        return self._node.dialogue

    @property
    def _end(self) -> asyncio.Future[dict[str, Any]] | None:
        return self._family.end if self._family is not None else None

    async def open(self, connection: Connection, spec: Spec, send: Callable[[list[int]], None], attend: Attend) -> None:
        """Send the run that the session is, with `send`, and wait until the interpreter says that it is ready."""
        family = Family(connection, spec, self._node, self._program.run.binds)
        send(self._exchange.guest_ends())
        self._family = family  # whose end can be waited for, now that there will be one
        self._exchange.close_guest_ends()
        family.end = asyncio.ensure_future(attend(family.hear))
        await self._await_ready(family.end)
        if spec.level == "jail" and self._sandbox.workspace.fd < 0:
            await self._await_workspace(family)

    async def _await_workspace(self, family: Family) -> None:
        """Wait for the helper's word with the workspace, which the interpreter's own may overtake.

        Whoever started beside us without it would make another one.
        """
        try:
            await asyncio.wait_for(family.connection.ask("echo"), NOTED_S)
        except (OSError, TimeoutError) as error:
            raise StartFailed(f"the helper does not answer: {error}", step="helper") from error

    async def _prepare(self, code: str) -> None:
        if self._has_signalled and self._family is not None:
            await self._await_signals(self._family)
        if self._node.reserve is not None:
            await self._go_on()
        if self._was_given_fonts or self._program.run.python is None:
            return
        if seems_to_draw(code.encode("utf-8", "surrogatepass")):  # what is no text is for the interpreter to refuse
            await self._give_fonts()

    async def _give_fonts(self) -> None:
        """Have the interpreter keep the list of fonts that matplotlib would make there."""
        self._was_given_fonts = True
        found = await self._sandbox.font_file(self._program.run.env)
        sending = self._exchange.keep(*found) if found is not None else None
        if sending is not None:
            with noted(log, "the interpreter does not read what it is asked, as its cell will show", TimeoutError):
                await asyncio.wait_for(sending, NOTED_S)

    async def _await_signals(self, family: Family) -> None:
        """Wait until the helper, which takes words in order, has sent what the last cell was to hear."""
        with noted(log, "a session's helper does not answer, as its next cell will show", OSError, TimeoutError):
            await asyncio.wait_for(family.connection.ask("echo"), NOTED_S)

    async def _go_on(self) -> None:
        """Go on where this session goes on after a fork."""
        if self._family is not None and self._node.reserve is not None:
            self._stand_at(await finish(self._family.go_on(self._node)))

    def _stand_at(self, node: Node) -> None:
        self._node = node
        node.is_runner = True
        self._sandbox.move_to(node.workspace)

    async def _stop(self) -> None:
        """End the interpreter, and wait until the kernel's word on it is there."""
        family = self._family
        if family is None:
            return
        if self._node.number != ORIGIN:
            if self._cause is None:  # it has ended by itself; the helper says what it knows
                await asyncio.wait([family.end], timeout=LAST_WORDS_S)
            self._node.is_runner = False
            await family.prune()
            return
        if self._cause is not None:
            family.connection.kill(self._cause)
        elif not family.end.done():
            await asyncio.wait([family.end], timeout=LINKLESS_S)
            family.connection.kill(KillCause.CANCELLED)  # its link is gone, and it lives: nobody can use it
        with noted(log, "how a session ended, which its verdict says", Exception):
            await finish(family.end)

    def _tell(self, tag: str, **body: bool | int) -> None:
        if self._family is not None:
            self._family.connection.tell(tag, **body)

    def _set_pace(self, *, is_busy: bool) -> None:
        self._tell("pace", is_busy=is_busy)

    def _signal(self, word: Word) -> None:
        tag, body = word
        self._tell(tag, node=self._node.number, **body)

    def _kill(self) -> None:
        """Kill the interpreter; its end is heard on its link."""
        if self._family is None:
            return
        if self._node.number == ORIGIN:
            self._family.connection.kill(self._cause or KillCause.CANCELLED)
        else:
            self._family.kill(self._node)

    async def checkpoint(self, name: str) -> None:
        """Remember memory and workspace under `name`; see core.protocols.SupportsFork."""
        async with self._turn:
            family = self._forkable()
            await finish(self._checkpoint(family, name))

    async def _checkpoint(self, family: Family, name: str) -> None:
        await self._go_on()
        node = self._node
        async with self._sandbox.alone(self):
            clone = await family.clone(node, self._new_dialogue)
        node.is_runner, node.is_held = False, True
        replaced = self._checkpoints.pop(name, None)
        self._checkpoints[name] = node
        self._stand_at(clone)
        if replaced is not None and replaced not in self._checkpoints.values():
            replaced.is_held = False
            await family.prune()

    async def rollback(self, name: str) -> None:
        """Go back to a checkpoint, which stays; see core.protocols.SupportsFork."""
        async with self._turn:
            family, node = self._forkable(needs_life=False), self._checkpoints.get(name)
            if node is None:
                have = ", ".join(self._checkpoints) or "none"
                raise InvalidRequest(f"there is no checkpoint {name!r} in this session; there is: {have}")
            if node.dialogue.lost.done():
                raise InvalidRequest(f"the checkpoint {name!r} was lost: its process has ended")
            if family.others_below(node, self._node):
                raise InvalidRequest(
                    f"a fork that was made after the checkpoint {name!r} is still open; close it first"
                )
            await finish(self._go_back(family, node, name))

    async def _go_back(self, family: Family, node: Node, name: str) -> None:
        async with self._sandbox.alone(self):
            for other in [other for other in self._checkpoints if _is_after(self._checkpoints, other, name)]:
                self._checkpoints.pop(other).is_held = False
            self._node.is_runner = False
            await family.prune()
            clone = await family.clone(node, self._new_dialogue)
            self._verdict = None
            self._stand_at(clone)

    async def fork(self, count: int) -> list[LocalSession]:
        """Return sessions that begin as this one is; see core.protocols.SupportsFork."""
        async with self._turn:
            family = self._forkable()
            forking = asyncio.ensure_future(self._fork(family, count))
            try:
                return await finish(forking)
            except asyncio.CancelledError:
                if not forking.cancelled() and forking.exception() is None:
                    for fork in forking.result():  # nobody else knows of them
                        await finish(fork.sandbox.close())
                raise

    async def _fork(self, family: Family, count: int) -> list[LocalSession]:
        await self._go_on()
        async with self._sandbox.alone(self):
            forks = await family.fork(self._node, self._new_dialogue, count)
        return [self._twin(family, fork) for fork in forks]

    def _twin(self, family: Family, node: Node) -> LocalSession:
        """Return the session that goes on in a fork."""
        session = LocalSession.__new__(LocalSession)
        vars(session).update(vars(self))
        session._sandbox = self._sandbox.twin(session, node.workspace)
        session._checkpoints, session._turn, session._request_id = {}, asyncio.Lock(), 0
        session.is_closed = session._is_running = False
        node.dialogue.on_flood = session._on_flood
        session._stand_at(node)
        session.start = "forked"
        family.members += 1
        return session

    def _forkable(self, *, needs_life: bool = True) -> Family:
        """Return the family. Raises where this session cannot be cloned."""
        if not self._program.is_forkable:
            raise BackendUnavailable(
                f"a {self._program.language.name} session has no checkpoints and no forks; Python's have"
            )
        if self._family is None or not self._sandbox.can_fork:
            raise BackendUnavailable(
                "checkpoints and forks need level jail and a writable /tmp; this sandbox has not both"
            )
        if needs_life and not self.is_alive:
            raise InvalidRequest(f"this session has ended{self._why()}; roll it back, restart it, or open another one")
        return self._family

    async def close(self) -> None:
        """Kill and remove everything, for good."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._family is None:
            self._node.close()
            return
        await finish(self._family.leave([self._node, *self._checkpoints.values()]))

    @property
    def sandbox(self) -> LocalOpenSandbox:
        """Return the sandbox in whose workspace it works; a fork's is its own."""
        return self._sandbox

    def _known_end(self) -> Verdict | None:
        ended = self._ended()
        return self._last_verdict(observed(ended)) if ended else None

    async def _judge_end(self) -> tuple[Verdict, Usage | None]:
        ended = self._ended()
        if not ended:
            return self._verdict_of_node(), None
        return self._last_verdict(observed(ended)), usage(ended)

    def _ended(self) -> dict[str, Any]:
        end = self._end
        if end is None or not end.done() or end.cancelled() or end.exception() is not None:
            return {}
        return end.result()

    def _verdict_of_node(self) -> Verdict:
        """Judge a cell that ended a clone: pid 1 around it is the guest's, so the code is the guest's word."""
        status = self._exchange.wait_status
        cause = KillCause.OUT_OF_MEMORY if self._node.is_exceeded else self._cause
        seen = Observed(
            exit_code=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            cause=cause,
            oom_kills=self._node.counters.get("oom_kills", 0),
        )
        return as_lost(decide(seen))

    async def _changes(self, timeout_s: float) -> Changes:
        if self._sandbox.workspace.is_untouched():
            return _NONE
        return await self._sandbox.changes(timeout_s)

    @contextlib.asynccontextmanager
    async def halted(self) -> AsyncIterator[None]:
        """Stop all that it runs, its interpreter too, as far as that can be done soon; then have it go on."""
        family, node = self._family, self._node.number
        if family is None or family.end.done():
            yield
            return
        try:
            with noted(log, "a session that has ended runs nothing", OSError, TimeoutError):
                await asyncio.wait_for(family.connection.ask("halt", node=node), HALTED_S)
            yield
        finally:
            family.connection.tell("resume", id=0, node=node)

    def _enforcement(self, hits: Mapping[str, int]) -> Enforcement:
        return self._sandbox.enforcement_with(hits)

    def _place(self) -> Mapping[str, Any]:
        return {"backend": "local", "level": str(self._sandbox.level)}


def _is_after(checkpoints: Mapping[str, Node], name: str, other: str) -> bool:
    """Tell whether checkpoint `name` was made after `other`, on the way that led on from there."""
    above: Node | None = checkpoints[name].parent
    while above is not None and above is not checkpoints[other]:
        above = above.parent
    return above is not None
