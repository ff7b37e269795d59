"""A live session in a container: an interpreter in a container of its own, with the workspace of its sandbox.

It is one long run: the same first process, walls and limits; what is added is a link on which the interpreter is given
cells. What ends it leaves the container, which then holds the workspace like that of any run; unless the container
itself is what has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.core.outcome import KillCause, Observed, Verdict
from cloche.core.result import Usage

from ..drivers import Word
from ..living import LivingSession
from ..noting import noted
from ..saving import Changes
from ..waiting import finish
from .container import Container
from .ending import GIVE_UP_S, SETTLE_S, Ending
from .hearing import Hearing
from .results import observed_end, reported_end
from .session_program import SessionProgram

if TYPE_CHECKING:
    from .sessions import SessionSandbox

LINKLESS_S = 1.0  # for an interpreter without a link to end by itself
GONE_S = GIVE_UP_S + 1.0  # for what was killed with its container to be gone
log = logging.getLogger("cloche.containers")


class ContainerSession(LivingSession):
    """Run one cell at a time; see core.protocols.OpenSession."""

    def __init__(
        self,
        sandbox: SessionSandbox[Any, Any],
        container: Container[Any],
        program: SessionProgram,
        limits: Limits,
        *,
        enforcement: Enforcement,
        notes: Mapping[str, Any],
    ):
        super().__init__(program.language.name, program.interrupt, limits)
        self.container, self.start = container, str(notes["start"])
        self._slowness = container.slowness
        self._sandbox, self._program = sandbox, program
        self._enforced, self._notes = enforcement, notes
        self._hearing = Hearing(limits, program.new_codec(), self._on_flood, container)
        self._ending = Ending(container)
        self._hearing.end.add_done_callback(lambda _: self._ending.close())
        self._is_started = False
        self._lost = ""

    async def open(self) -> None:
        """Start the interpreter, and wait until it is ready. Raises StartFailed."""
        self.container.listen(self._hearing)
        try:
            await finish(asyncio.to_thread(self.container.order, self._program.order(self._limits)))
        except OSError as error:
            why = f"the {self.container.what} was lost before the session began{self.container.last_words()}"
            raise StartFailed(why, step="session") from error
        self._is_started = True
        await self._await_ready(self._hearing.end)

    @property
    def _exchange(self) -> Hearing:
        return self._hearing

    @property
    def _end(self) -> asyncio.Future[None] | None:
        return self._hearing.end if self._is_started else None

    async def _prepare(self, code: str) -> None:
        """Do nothing: what runs one cell can run the next."""

    def _set_pace(self, *, is_busy: bool) -> None:
        with noted(log, "the container is gone, as its session will say", OSError):
            self.container.heed("pace", is_busy=is_busy)

    def _signal(self, word: Word) -> None:
        tag, body = word
        with noted(log, "the container is gone, as its session will say", OSError):
            self.container.heed(tag, **body)

    def _kill(self) -> None:
        if not self._hearing.end.done():
            self._ending.kill(self._cause or KillCause.CANCELLED)

    async def _stop(self) -> None:
        end = self._hearing.end
        if self._cause is None and not end.done():
            await asyncio.wait([end], timeout=LINKLESS_S)
        self._kill()  # its link is gone, and should it live: nobody can use it
        await finish(asyncio.wait([end], timeout=SETTLE_S + GONE_S))

    async def _judge_end(self) -> tuple[Verdict, Usage | None]:
        found = await observed_end(self.container, self._hearing.report, self._cause)
        if found is None:
            is_gone, what = not self.container.is_given_up, self.container.what
            said = f"the {what} is gone, and nobody said why{self.container.last_words()}"
            self._lost = said if is_gone else self.container.why_lost()
            return self._last_verdict(Observed()), None
        return self._last_verdict(found.observed), found.usage

    def _known_end(self) -> Verdict | None:
        report = self._hearing.report
        return self._last_verdict(reported_end(report).observed) if report is not None else None

    def _why(self) -> str:
        why = super()._why()
        return why or (f" (its {self.container.what} is gone)" if self.container.is_lost else "")

    async def _changes(self, timeout_s: float) -> Changes:
        return await self._sandbox.changes_in(self.container, timeout_s)

    def _enforcement(self, hits: Mapping[str, int]) -> Enforcement:
        return dataclasses.replace(self._enforced, hits=hits) if hits else self._enforced

    def _place(self) -> Mapping[str, Any]:
        place = {**self._notes, "level": str(self._enforced.level)}
        return {**place, "lost": self._lost} if self._lost else place

    async def close(self) -> None:
        """Kill everything of it, for good; the sandbox keeps the files."""
        if self.is_closed:
            return
        self.is_closed = True
        await finish(self._close())

    async def _close(self) -> None:
        try:
            if self._is_started:
                self._cause = self._cause or KillCause.CANCELLED
                self._kill()
                await asyncio.wait([self._hearing.end], timeout=SETTLE_S + GONE_S)
        finally:
            self._ending.close()
            self.container.listen(None)
            self._sandbox.take_back(self)
