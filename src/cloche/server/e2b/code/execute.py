"""`POST /execute`: run a cell; its lines are sent as they come, in one response.

A client that disconnects has its cell interrupted. A sandbox that is paused or ends breaks the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche.core.events import Event
from cloche.core.loops import finish
from cloche.records.tables import DEFAULT_PROJECT
from cloche.wire.attachments import Attachment
from cloche.wire.uses import Use

from .. import states
from ..calls import Call, Readers, Row, e2b_id, row_id
from ..envd.connect import NO_BUFFER
from ..errors import Dropped, E2BError
from .contexts import Context, contexts_of, language_of, refusal
from .results import END, KEEPALIVE, CellLines, encode_line, error_line

KEEPALIVE_S = 5.0
TOGETHER_S = 0.05  # in which printed text is collected for one line
MOST_TOGETHER, MOST_WAITING = 64 << 10, 1 << 20  # characters of it, also for a client that does not read
PAUSE_LOOK_S = 0.1
LOST_S, NOTED_S = 0.5, 5.0  # for the end of a sandbox to follow its interpreter's, and to be noted
log = logging.getLogger("cloche.service")
_START = {
    "type": "http.response.start", "status": 200,
    "headers": [
        (b"content-type", b"application/x-ndjson"),
        *((name.lower().encode(), value.encode()) for name, value in NO_BUFFER.items()),
    ],
}  # fmt: skip


class Cell(BaseModel):
    """A cell to run, in a context or in the default one of a language."""

    model_config = ConfigDict(extra="ignore")

    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


async def execute(call: Call) -> Response:
    """Run a cell."""
    call.check_token()
    cell: Cell = await call.body(Cell)
    if cell.context_id and cell.language:
        raise E2BError(400, "Only one of context_id or language can be provided")
    async with AsyncExitStack() as stack:
        use = await stack.enter_async_context(call.use())
        contexts = await contexts_of(call, use)
        context = contexts.get(cell.context_id) if cell.context_id else contexts.default(language_of(cell.language))
        readers = call.e2b.readers(e2b_id(use.held.id))
        has_ended = partial(_has_ended, call)
        return CellStream(
            use=use, context=context, cell=cell, readers=readers, stack=stack.pop_all(), has_ended=has_ended
        )
    raise AssertionError


class CellStream(Response):
    """Send the lines of a cell while it runs."""

    def __init__(
        self, *, use: Use, context: Context, cell: Cell, readers: Readers, stack: AsyncExitStack,
        has_ended: Callable[[], Awaitable[bool]],
    ) -> None:  # fmt: skip
        super().__init__()
        self._has_ended = has_ended
        self._use, self._context, self._cell, self._readers, self._stack = use, context, cell, readers, stack
        self._lines, self._wake = CellLines(), asyncio.Event()
        self._is_holding = False
        self._together: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        del scope
        async with self._stack:
            with self._readers.reading() as cut:
                await self._serve(receive, send, cut)

    async def _serve(self, receive: Receive, send: Send, cut: asyncio.Future[str]) -> None:
        running, gone = asyncio.ensure_future(self._run()), asyncio.ensure_future(_until_gone(receive))
        for future in (running, gone, cut):
            future.add_done_callback(lambda _: self._wake.set())
        try:
            await send(_START)
            await self._send_lines(send, running, gone, cut)
        finally:
            gone.cancel()
            self._hold(is_held=False)
            if cut.done():
                _abandon(running, self._use.held)
            elif not running.done():
                running.cancel()
                await finish(asyncio.wait([running]))

    async def _send_lines(
        self, send: Send, running: asyncio.Future[None], gone: asyncio.Future[None], cut: asyncio.Future[str]
    ) -> None:
        while not running.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._wake.wait()
            if cut.done():
                raise Dropped("the sandbox was paused, or has ended")
            if gone.done():
                return
            if not self._wake.is_set():
                self._lines.add(KEEPALIVE)
            self._wake.clear()
            if not running.done() and (data := self._lines.take_all()):
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._hold(is_held=False)
        if cut.done() or (self._lines.is_lost and await self._is_over(cut)):
            raise Dropped("the sandbox has ended")
        await send({"type": "http.response.body", "body": self._lines.take_all() + encode_line(END)})

    async def _is_over(self, cut: asyncio.Future[str]) -> bool:
        """Tell whether the sandbox has ended with the interpreter, once its row says so: clients ask for that next."""
        lost = self._use.held.lost
        await asyncio.wait([lost, cut], timeout=LOST_S, return_when=asyncio.FIRST_COMPLETED)
        until = asyncio.get_running_loop().time() + NOTED_S
        while lost.done() and not cut.done() and asyncio.get_running_loop().time() < until:
            if await self._has_ended():
                return True
            await asyncio.wait([cut], timeout=PAUSE_LOOK_S)
        return lost.done() or cut.done()

    async def _run(self) -> None:
        context = self._context
        try:
            async with context.turn:
                await context.begin(self._use)
                number = context.executions + bool(self._cell.code.strip())
                self._lines.add({"type": "number_of_executions", "execution_count": number})
                result = await context.run(self._cell.code, self._cell.env_vars, self._take)
            self._lines.end(result, context.language)
        except Exception as error:
            name, text = refusal(error)
            if name == "InternalError":
                log.exception("a cell failed")
            self._lines.add(error_line(name, text))
        finally:
            if self._together is not None:
                self._together.cancel()

    def _hold(self, *, is_held: bool) -> None:
        """Have the cell wait while its client does not read, or go on."""
        if is_held != self._is_holding and self._context.held is not None:
            self._is_holding = is_held
            self._context.held.hold_output(is_held=is_held)

    def _take(self, event: Event) -> None:
        if self._lines.text_size > MOST_WAITING:
            self._hold(is_held=True)
        if self._lines.take(event) or self._lines.text_size > MOST_TOGETHER:
            self._wake.set()
        elif self._lines.has_any and self._together is None:
            self._together = asyncio.get_running_loop().call_later(TOGETHER_S, self._wake_later)

    def _wake_later(self) -> None:
        self._together = None
        self._wake.set()


async def _has_ended(call: Call) -> bool:
    assert call.target is not None  # noqa: S101 - routes of ports have one
    facts = await call.service.sandboxes.look(row_id(call.target.sandbox_id), DEFAULT_PROJECT)
    return states.state_of(facts) != states.RUNNING


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _abandon(running: asyncio.Future[None], held: Attachment) -> None:
    """Interrupt a cell whose client was cut off, once its sandbox runs again: while it is paused, nothing answers."""

    async def interrupt() -> None:
        while held.is_paused and not running.done():
            await asyncio.wait([running], timeout=PAUSE_LOOK_S)
        running.cancel()

    _abandoned.add(task := asyncio.ensure_future(interrupt()))
    task.add_done_callback(_abandoned.discard)


_abandoned: set[asyncio.Task[None]] = set()
ROWS = (Row(method="POST", path="/execute", handler=execute),)
