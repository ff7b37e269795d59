"""Web sockets: their messages, and the code and reason with which one is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from cloche.core.errors import ClocheError

from .bodies import BodyBounds, parse
from .problems import Refused

GOING_AWAY, INVALID_DATA, NOT_ALLOWED, FAILED = 1001, 1007, 1008, 1011  # codes of RFC 6455
MOST_REASON = 100


class Disconnected(Exception):
    """Raised when the client has disconnected."""


class MessageSocket(Protocol):
    """Carry whole messages to and from a client."""

    async def receive(self) -> bytes | str:
        """Wait for a message. Raises Disconnected."""
        ...

    async def send(self, message: bytes | str, /) -> None:
        """Send a message, at the pace of the client. Raises Disconnected."""


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


async def run_first(*works: Coroutine[Any, Any, None]) -> BaseException | None:
    """Run `works` until the first of them ends, cancel the others, and return its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next((error for task in finished if (error := task.exception()) is not None), None)


def close_of(error: BaseException | None) -> tuple[int, str]:
    """Return the code and the reason with which an error closes a web socket."""
    if isinstance(error, BadMessage | UnicodeDecodeError):
        code = INVALID_DATA
    elif isinstance(error, Refused):
        code = NOT_ALLOWED
    elif isinstance(error, Disconnected | TimeoutError):
        code = GOING_AWAY
    else:
        code = 1000 if error is None else FAILED
    is_ours = isinstance(error, BadMessage | Refused | ClocheError)
    return code, str(error).encode()[:MOST_REASON].decode(errors="ignore") if is_ours else ""
