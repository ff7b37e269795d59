"""Connections kept between calls: as many as the calls of an event loop and account need.

An idle connection is closed after a while, and all connections of a loop are closed when it ends. A connection that has
been silent is pinged before it is used, so that a call is rarely sent over a dead one.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.loops import become_task
from cloche.core.remote import LOST_S, RemoteAccount

from ..remote.failures import Failure, RemoteUnavailable
from .problems import error_of, is_lease_over, late, lost, node_lost
from .wire import Call, CallRefused, LinkLost, TakeData, TakeEvent, Wire

IDLE_S = 45.0
MOST_WIRES = 8  # connections of one account in one loop
AGAIN_S, LONGEST_WAIT_S = 0.2, 3.0  # default and maximum delay before a second attempt to connect
ANSWER_S = 60.0  # time-out of calls that are carried out at once
SLOW_S = 0.5  # to connect, after which the fleet is asked whether the node is lost
LEAST_WHY_S = 0.2  # for the reason of a lost node, which the fleet may know already
# Failures that may be temporary.
_PASSING = (Failure.NO_NETWORK, Failure.RATE_LIMITED, Failure.SERVER)


class _Connections:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self._wires: dict[RemoteAccount, list[Wire]] = {}
        self._turns: dict[RemoteAccount, asyncio.Lock] = {}
        self._closings: dict[Wire, asyncio.TimerHandle] = {}
        self._end: AsyncGenerator[None] | None = None

    async def wire(self, account: RemoteAccount) -> Wire:
        """Return a connection that accepts another call. Raises BackendUnavailable."""
        wire = await self._free(account)
        if wire is not None:
            return wire
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
                f"backend {account.provider!r}: {MOST_WIRES} connections to {account.host} carry the maximum number of "
                "calls.",
                remedy="End processes, watches and connections to ports that are no longer used.",
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
        wire.on_idle = self._close_later
        return wire

    def close(self, account: RemoteAccount) -> None:
        """Close the connections of an account, with their calls."""
        self._turns.pop(account, None)
        for wire in self._wires.pop(account, []):
            wire.close()

    def _close_later(self, wire: Wire) -> None:
        """Close an idle connection after a while, and remove a lost one."""
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
        """Close all connections when the loop shuts down its asynchronous generators, this one included."""
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
    """Begin a call over a kept or new connection. Raises BackendUnavailable, InvalidRequest, NodeLost."""
    try:
        wire = await _connected_or_lost(account)
    except RemoteUnavailable as error:
        if account.place is not None:
            why = await _why_lost(account, LOST_S)
            if why or (account.place.is_over is not None and await account.place.is_over()):
                raise node_lost(account.place, why or "it does not answer any longer") from error
        raise
    return await begin_on(wire, account, verb, fields, on_event=on_event, on_data=on_data)


async def _connected_or_lost(account: RemoteAccount) -> Wire:
    """Return a connection. A fleet that knows that the node is lost is believed while it does not answer."""
    if account.place is None or account.place.why_lost is None:
        return await connected(account)
    await become_task()
    connecting = asyncio.ensure_future(connected(account))
    works: list[asyncio.Future[Any]] = [connecting]
    try:
        await asyncio.wait((connecting,), timeout=SLOW_S)
        if not connecting.done():
            asking = asyncio.ensure_future(_why_lost(account, account.open_s))
            works.append(asking)
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done() and (why := asking.result()):
                raise node_lost(account.place, why)
        return await connecting
    finally:
        for work in works:
            work.cancel()


async def connected(account: RemoteAccount) -> Wire:
    """Return a kept or new connection that accepts another call. Raises BackendUnavailable."""
    await become_task()
    loop = asyncio.get_running_loop()
    connections = _of_loops.get(loop)
    if connections is None:
        connections = _of_loops[loop] = _Connections()
    return await connections.wire(account)


def disconnect(account: RemoteAccount) -> None:
    """Close the connections of an account in this event loop."""
    if (connections := _of_loops.get(asyncio.get_running_loop())) is not None:
        connections.close(account)


async def begin_on(
    wire: Wire,
    account: RemoteAccount,
    verb: str,
    fields: Mapping[str, Any],
    *,
    on_event: TakeEvent | None = None,
    on_data: TakeData | None = None,
) -> Call:
    """Begin a call over one connection, with the credential of the account's lease. Raises InvalidRequest."""
    credential = None if account.place is None else account.place.credential
    try:
        return await wire.begin(verb, fields, credential=credential, on_event=on_event, on_data=on_data)
    except ValueError as error:
        raise InvalidRequest(
            f"the data of this call is too large or not JSON in UTF-8 ({error}); write files instead"
        ) from error


async def outcome(
    call: Call,
    account: RemoteAccount,
    action: str,
    *,
    timeout_s: float | None,
    path: str | None = None,
    where: str = "",
) -> dict[str, Any]:
    """Wait for the end of a call and return its result. Raises ClocheError, OSError for a connection refused inside."""
    try:
        result = await call.result(timeout_s)
    except CallRefused as refused:
        why = await _why_lost(account, LEAST_WHY_S) if is_lease_over(refused) else ""
        raise error_of(refused, account, path=path, why=why) from refused
    except LinkLost as error:
        why = await _why_lost(account, max(LOST_S - error.silent_s, LEAST_WHY_S))
        raise lost(error, account, action, where, why=why) from error
    except TimeoutError as error:
        raise late(account, action, where) from error
    if not isinstance(result, dict):
        raise lost(LinkLost(Failure.BAD_ANSWER, Failure.BAD_ANSWER.sentence), account, action, where)
    return result


async def _why_lost(account: RemoteAccount, wait_s: float) -> str:
    ask_why = None if account.place is None else account.place.why_lost
    return "" if ask_why is None else await ask_why(wait_s)


async def ask(
    account: RemoteAccount,
    verb: str,
    fields: Mapping[str, Any],
    *,
    timeout_s: float = ANSWER_S,
    path: str | None = None,
    where: str = "",
) -> dict[str, Any]:
    """Make a call that has only a result, and return it."""
    call = await begin(account, verb, fields)
    return await outcome(call, account, f"{verb} was done", timeout_s=timeout_s, path=path, where=where)
