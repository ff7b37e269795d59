"""Web sockets into a sandbox: a terminal, and a connection to a port inside.

Bytes are binary messages; text messages are JSON, for what is no bytes. Who does not read is not read for: nothing more
is taken from the sandbox meanwhile, which then waits. Who does not read for minutes, or whose key holds no more, is
let go, and with a terminal's client goes its process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, WebSocket, WebSocketDisconnect

from cloche.execution.ports import AsyncConnection
from cloche.execution.processes import AsyncProcess

from ..problems import Refused
from ..sandbox_use import Running
from ..sockets import GOING_AWAY, BadMessage, carry, read_object

router = APIRouter(prefix="/api/sandboxes/{sandbox_id}")
SEND_S = 300.0
READ_BYTES = 1 << 16


@router.websocket("/terminal")
async def terminal(
    websocket: WebSocket,
    use: Running,
    rows: Annotated[int, Query(ge=1, le=4096)] = 24,
    columns: Annotated[int, Query(ge=1, le=4096)] = 80,
    command: Annotated[list[str] | None, Query(max_length=256)] = None,
    cwd: Annotated[str | None, Query(max_length=4096)] = None,
    user: Annotated[str | None, Query(max_length=64)] = None,
    timeout: Annotated[str | None, Query(max_length=32)] = None,  # noqa: ASYNC109 - of the process
) -> None:
    """Start a command with a terminal of its own, a shell if none is named, and pass bytes on both ways.

    `{"resize": [rows, columns]}` sets its size. At its end `{"exitCode": …, "status": …}` comes, then the close.
    """
    process = await use.sandbox.terminal(command, rows=rows, columns=columns, cwd=cwd, user=user, timeout=timeout)
    async with process:
        await websocket.accept()

        async def outward() -> None:
            await _send_all(websocket, process.stdout.read)
            result = await process.wait()
            await _send(websocket.send_text(json.dumps({"exitCode": result.exit_code, "status": str(result.status)})))

        await carry(websocket, outward(), _take_keys(websocket, process))


async def _take_keys(websocket: WebSocket, process: AsyncProcess) -> None:
    async def resize(said: dict[str, Any]) -> None:
        size = said.get("resize")
        if not isinstance(size, list) or len(size) != 2:
            raise BadMessage('send {"resize": [rows, columns]}')
        await process.resize(*size)

    await _receive_all(websocket, process.write, resize)


@router.websocket("/ports/{port}")
async def connect(websocket: WebSocket, port: int, use: Running) -> None:
    """Connect to a server on loopback inside, and pass bytes on both ways; `{"end": true}` ends our half."""
    try:
        connection = await use.sandbox.connect(port)
    except OSError as error:
        raise Refused(409, "connection-refused", str(error)) from error
    async with connection:
        await websocket.accept()
        await carry(websocket, _send_all(websocket, connection.read), _take_bytes(websocket, connection))


async def _take_bytes(websocket: WebSocket, connection: AsyncConnection) -> None:
    async def end(said: dict[str, Any]) -> None:
        if said != {"end": True}:
            raise BadMessage('send {"end": true}')
        await connection.end()

    await _receive_all(websocket, connection.write, end)


async def _send_all(websocket: WebSocket, read: Callable[[int], Awaitable[bytes]]) -> None:
    while data := await read(READ_BYTES):
        await _send(websocket.send_bytes(data))


async def _send(sending: Awaitable[None]) -> None:
    async with asyncio.timeout(SEND_S):
        await sending


async def _receive_all(
    websocket: WebSocket,
    write: Callable[[bytes], Awaitable[object]],
    take: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Pass on what comes, as fast as it is taken, until the client goes."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", GOING_AWAY))
        if (data := message.get("bytes")) is not None:
            with suppress(BrokenPipeError):  # it takes no more; what it sends may still come
                await write(data)
            continue
        await take(read_object(message["text"].encode()))
