"""Web sockets of the service: carried until a task or the key's validity ends, and closed with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from cloche.wire.sockets import GOING_AWAY, close_of, run_first

from .auth import find_caller

LOOK_EVERY_S = 5.0  # between two checks of the key
CLOSE_S = 5.0  # for a client to receive the close


async def carry(websocket: WebSocket, *works: Coroutine[Any, Any, None], scope: str | None = "run") -> None:
    """Run `works` until the first of them ends, then close the web socket with a code for the reason.

    An invalid key, or one without `scope`, ends it as well.
    """
    await close(websocket, await run_first(*works, watch_key(websocket, scope)))


async def close(websocket: WebSocket, error: BaseException | None) -> None:
    """Close a web socket with a code and a reason for the error that ends it."""
    code, reason = (GOING_AWAY, "") if isinstance(error, WebSocketDisconnect) else close_of(error)
    with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):  # it is closed already, or not read
        async with asyncio.timeout(CLOSE_S):
            await websocket.close(code, reason)


async def watch_key(websocket: WebSocket, scope: str | None) -> None:
    """Raise Refused as soon as the key or cookie is invalid."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        caller = await find_caller(websocket)
        if scope is not None:
            caller.require(scope)
