"""Calls of a client's functions by programs here, passed on to the client, who checks, runs and answers them.

Theory of operation: bytes pass, in two streams of a call of the wire, and nothing of them is read here. What the frames
in them mean is between the program and the client: neither can make this side keep a number, a name or an argument. At
most a window of each stream is held, and what one read of the program's pipe gives: while the client takes no calls,
the program's pipe fills; while the program takes no answers, the client is granted no more. When either side has ended,
so have the calls: the program is told that there are no answers any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from pydantic import Field

from cloche.core.functions import CallTransport, OpenCalls, functions_of_client, offering
from cloche.execution.sandbox import AsyncSandbox
from cloche.execution.tools import check_offers
from cloche.init import wire

from .calls import Call, CallRequest
from .exec_options import WireModel, Word
from .problems import Refused

MOST_TOOLS = 500
MOST_UNSENT = 1 << 18  # bytes of calls that the client has not taken
Names = Annotated[list[Word], Field(max_length=MOST_TOOLS)]


class OffersTools(WireModel):
    """The names of the client's functions that may be called; the calls and their answers are streams of the call."""

    tools: Names = Field(default_factory=list)

    async def record(self, request: CallRequest) -> None:
        """Record the names in the audit log, if there are any, before a program starts. Raises AuditFailed."""
        if self.tools:
            await request.service.record("sandbox", what="tools", tools=self.tools)

    def check(self, sandbox: AsyncSandbox) -> None:
        """Raise BackendUnavailable if there are names, and programs in an open sandbox cannot call."""
        if self.tools:
            check_offers(sandbox._require_open())


class RelayedCalls:
    """Hold the calls of one program until the client takes them; see core.functions.OpenCalls."""

    is_running = False  # no function runs here

    def __init__(self, transport: CallTransport):
        self.transport = transport
        self._unsent, self._arrived, self.is_over = bytearray(), asyncio.Event(), False

    def receive(self, data: bytes) -> None:
        """Take bytes of the program, and let it wait while there are many."""
        if not self.is_over:
            self._unsent += data
            self._arrived.set()
            self.transport.pause(len(self._unsent) > MOST_UNSENT)

    async def take(self) -> bytes:
        """Wait for bytes and return them; nothing once the program has ended."""
        while not self._unsent and not self.is_over:
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._unsent)
        self._unsent.clear()
        if not self.is_over:
            self.transport.pause(False)
        return data

    async def answer(self, data: bytes) -> None:
        """Pass answers to the program, at its pace."""
        self.transport.send(data)
        if self.transport.is_full:
            await self.transport.drain()

    def resume(self) -> None:
        """Do nothing: `answer` waits until there is room."""

    def renew(self) -> None:
        """Be the guest of the session whose cell begins. The client counts."""
        relay = functions_of_client()
        if isinstance(relay, Relay):
            relay.use(self)

    def follow(self, _: OpenCalls) -> None:
        """Do nothing: the client counts."""

    def notes(self) -> dict[str, Any]:
        """Return nothing: the client counts."""
        return {}

    def hang_up(self) -> None:
        """Pass nothing more, and say so to the program."""
        if not self.is_over:
            self.transport.hang_up()
            self.end()

    def end(self) -> None:
        """Pass nothing more."""
        self.is_over = True
        self._unsent.clear()
        self._arrived.set()

    async def close(self) -> None:
        """Pass nothing more."""
        self.end()


class Relay:
    """Offer a client's functions to one program, or one session; see core.functions.OfferedFunctions.

    A session's guest changes with a fork or a rollback: the new one has the calls from its first cell on.
    """

    def __init__(self, names: Sequence[str]):
        self.names = names
        self._guest: RelayedCalls | None = None
        self._is_carrying = self._is_over = False
        self._changed = asyncio.Event()

    def serve(self, transport: CallTransport) -> RelayedCalls:
        """Serve a guest: the first one now, another one once a cell runs in it."""
        guest = RelayedCalls(transport)
        if self._guest is None:
            self.use(guest)
        return guest

    def use(self, guest: RelayedCalls) -> None:
        """Pass on the calls of this guest, and of no earlier one."""
        if self._guest is guest:
            return
        if self._guest is not None:
            self._guest.hang_up()
        self._guest = guest
        self._changed.set()
        if self._is_over:
            guest.hang_up()

    async def carry(self, call: Call) -> None:
        """Pass calls and answers over a call of the wire, until the guest ends or another one takes its place.

        Raises Refused (409) meanwhile, and once the client has ended it.
        """
        if self._is_carrying or self._is_over:
            raise Refused(409, "followed", "the calls of this session are carried already, or were carried to an end")
        self._is_carrying = True
        try:
            while self._guest is None or self._guest.is_over:
                self._changed.clear()
                await self._changed.wait()
            await self._pass(call, self._guest)
        except BaseException:
            self.end()
            raise
        finally:
            self._is_carrying = False

    async def _pass(self, call: Call, guest: RelayedCalls) -> None:
        passing = [asyncio.ensure_future(_pass_calls(call, guest)), asyncio.ensure_future(_pass_answers(call, guest))]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
        if not guest.is_over:  # the client has ended it, or reads nothing
            self.end()

    def end(self) -> None:
        """Answer nobody any longer."""
        self._is_over = True
        if self._guest is not None:
            self._guest.hang_up()


async def _pass_calls(call: Call, guest: RelayedCalls) -> None:
    while data := await guest.take():
        await call.send(wire.HOST_CALLS, data)


async def _pass_answers(call: Call, guest: RelayedCalls) -> None:
    async for data in call.pieces(wire.HOST_ANSWERS):
        await guest.answer(data)


@asynccontextmanager
async def relaying(call: Call, names: Sequence[str]) -> AsyncIterator[None]:
    """Let the program that the body starts call the functions of the client, if it has named some."""
    if not names:
        yield
        return
    relay = Relay(names)
    carrying = asyncio.ensure_future(relay.carry(call))
    try:
        with offering(relay):
            yield
    finally:
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
        relay.end()
