"""Web sockets of the service: carried until a task or the key's validity ends, and closed with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from cloche.core.errors import ClocheError

from .auth import find_caller
from .bodies import BodyBounds, parse
from .problems import Refused

LOOK_EVERY_S = 5.0  # between two checks of the key
CLOSE_S = 5.0  # for a client to receive the close
GOING_AWAY, INVALID_DATA, NOT_ALLOWED, FAILED = 1001, 1007, 1008, 1011  # codes of RFC 6455
MOST_REASON = 100


class BadMessage(Exception):
    """Report an invalid message."""


def read_object(data: bytes, name: str = "text") -> dict[str, Any]:
    """Return the JSON object of a message, bounded before it is parsed. Raises BadMessage, which calls it `name`."""
    try:
        BodyBounds().feed(data)
        message = parse(data)
    except Refused as error:
        raise BadMessage(f"{name} must be JSON; send bytes as binary messages: {error.detail}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"{name} must be a JSON object")
    return message


async def carry(websocket: WebSocket, *works: Coroutine[Any, Any, None], scope: str | None = "run") -> None:
    """Run `works` until the first of them ends, then close the web socket with a code for the reason.

    An invalid key, or one without `scope`, ends it as well.
    """
    tasks = [asyncio.ensure_future(work) for work in (*works, _watch_key(websocket, scope))]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    error = next((error for task in finished if (error := task.exception()) is not None), None)
    code, reason = _close_of(error)
    with suppress(RuntimeError, WebSocketDisconnect, TimeoutError):  # it is closed already, or not read
        async with asyncio.timeout(CLOSE_S):
            await websocket.close(code, reason)


async def _watch_key(websocket: WebSocket, scope: str | None) -> None:
    """Raise Refused as soon as the key or cookie is invalid."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        caller = await find_caller(websocket)
        if scope is not None:
            caller.require(scope)


def _close_of(error: BaseException | None) -> tuple[int, str]:
    if isinstance(error, BadMessage | UnicodeDecodeError):
        code = INVALID_DATA
    elif isinstance(error, Refused):
        code = NOT_ALLOWED
    elif isinstance(error, WebSocketDisconnect | TimeoutError):
        code = GOING_AWAY
    else:
        code = 1000 if error is None else FAILED
    is_ours = isinstance(error, BadMessage | Refused | ClocheError)
    return code, str(error).encode()[:MOST_REASON].decode(errors="ignore") if is_ours else ""
