"""Connections that are kept between calls: for each event loop and account as many as its calls need.

One that has no calls is closed after a while, and all of a loop are closed as it ends. Whether one still holds that has
been silent is asked before it is used, so that what is sent over a connection that has long ended is hardly ever lost.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.loops import become_task
from cloche.core.remote import RemoteAccount

from ..remote.failures import Failure, RemoteUnavailable
from .problems import error_of, late, lost
from .wire import Call, CallRefused, LinkLost, TakeData, TakeEvent, Wire

IDLE_S = 45.0
MOST_WIRES = 8  # of one account in one loop
AGAIN_S, LONGEST_WAIT_S = 0.2, 3.0  # before a connection is tried once more, where nothing can have run
ANSWER_S = 60.0  # for what is done at once
# Ways to fail that another attempt may get around.
_PASSING = (Failure.NO_NETWORK, Failure.RATE_LIMITED, Failure.SERVER)


class _Connections:
    """Hold those of one loop."""

    def __init__(self) -> None:
        self._wires: dict[RemoteAccount, list[Wire]] = {}
        self._turns: dict[RemoteAccount, asyncio.Lock] = {}
        self._closings: dict[Wire, asyncio.TimerHandle] = {}
        self._end: AsyncGenerator[None] | None = None

    async def wire(self, account: RemoteAccount) -> Wire:
        """Return one that takes another call. Raises BackendUnavailable."""
        found = await self._free(account)
        if found is not None:
            return found
        async with self._turns.setdefault(account, asyncio.Lock()):
            return await self._free(account) or await self._opened(account)

    async def _free(self, account: RemoteAccount) -> Wire | None:
        for wire in list(self._wires.get(account, ())):
            if not wire.is_lost and len(wire.calls) < wire.most_calls and await wire.is_alive():
                closing = self._closings.pop(wire, None)
                if closing is not None:
                    closing.cancel()
                return wire
        return None

    async def _opened(self, account: RemoteAccount) -> Wire:
        if self._end is None:
            self._end = self._until_loop_ends()
            await anext(self._end)
        wires = self._wires.setdefault(account, [])
        if len(wires) >= MOST_WIRES:
            raise BackendUnavailable(
                f"backend 'cloche': {MOST_WIRES} connections to {account.host} carry as many calls as they may.",
                remedy="End processes, watches and connections to ports that are not used any more.",
            )
        try:
            wire = await _open(account)
        except RemoteUnavailable as error:
            wait_s = AGAIN_S if error.retry_after_s is None else error.retry_after_s
            if error.failure not in _PASSING or wait_s > LONGEST_WAIT_S:
                raise
            await asyncio.sleep(wait_s)
            wire = await _open(account)
        wires.append(wire)
        wire.on_idle = self._rest
        return wire

    def _rest(self, wire: Wire) -> None:
        """Close one without calls after a while, and forget one that was lost."""
        closing = self._closings.pop(wire, None)
        if closing is not None:
            closing.cancel()
        if wire.is_lost:
            wires = self._wires.get(wire.account, [])
            if wire in wires:
                wires.remove(wire)
        else:
            self._closings[wire] = asyncio.get_running_loop().call_later(IDLE_S, wire.close)

    async def _until_loop_ends(self) -> AsyncGenerator[None]:
        """Close all as the loop ends its asynchronous generators, of which this is one."""
        try:
            yield
        finally:
            for wires in list(self._wires.values()):
                for wire in list(wires):
                    wire.close()
            await asyncio.sleep(0)


_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = weakref.WeakKeyDictionary()


async def _open(account: RemoteAccount) -> Wire:
    wire = Wire(account)
    await wire.open()
    return wire


async def begin(
    account: RemoteAccount,
    verb: str,
    fields: Mapping[str, Any],
    *,
    on_event: TakeEvent | None = None,
    on_data: TakeData | None = None,
) -> Call:
    """Begin a call over a connection that is kept, or a new one. Raises BackendUnavailable, InvalidRequest."""
    await become_task()
    loop = asyncio.get_running_loop()
    connections = _of_loops.get(loop)
    if connections is None:
        connections = _of_loops[loop] = _Connections()
    return await begin_on(await connections.wire(account), verb, fields, on_event=on_event, on_data=on_data)


async def begin_on(
    wire: Wire,
    verb: str,
    fields: Mapping[str, Any],
    *,
    on_event: TakeEvent | None = None,
    on_data: TakeData | None = None,
) -> Call:
    """Begin a call over one connection. Raises InvalidRequest."""
    try:
        return await wire.begin(verb, fields, on_event=on_event, on_data=on_data)
    except ValueError as error:
        raise InvalidRequest(
            f"what is sent with this call is too much or no JSON ({error}); write files instead"
        ) from error


async def outcome(
    call: Call, account: RemoteAccount, what: str, *, timeout_s: float | None, path: str | None = None, where: str = ""
) -> dict[str, Any]:
    """Wait for the end of a call and return its result. Raises ClocheError, OSError for a connection refused inside."""
    try:
        found = await call.result(timeout_s)
    except CallRefused as refused:
        raise error_of(refused, account, path=path) from refused
    except LinkLost as error:
        raise lost(error, account, what, where) from error
    except TimeoutError as error:
        raise late(account, what, where) from error
    if not isinstance(found, dict):
        raise lost(LinkLost(Failure.BAD_ANSWER, Failure.BAD_ANSWER.sentence), account, what, where)
    return found


async def ask(
    account: RemoteAccount,
    verb: str,
    fields: Mapping[str, Any],
    *,
    timeout_s: float = ANSWER_S,
    path: str | None = None,
    where: str = "",
) -> dict[str, Any]:
    """Do what has a result and nothing else, and return that."""
    call = await begin(account, verb, fields)
    return await outcome(call, account, f"{verb} was done", timeout_s=timeout_s, path=path, where=where)
