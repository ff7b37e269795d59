"""Web sockets into a sandbox: a terminal, and a connection to a port inside.

Bytes are binary messages; text messages are JSON control messages. Backpressure applies: while the client does not
read, no more is read from the sandbox, which blocks. A client that does not read for `SEND_S`, or whose key becomes
invalid, is disconnected, and a terminal's process ends with its client.
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
from cloche.wire.problems import Refused
from cloche.wire.sockets import GOING_AWAY, BadMessage, read_object

from ..sandbox_use import Running
from ..sockets import carry

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
    """Start a command on a new terminal, by default a shell, and pass bytes in both directions.

    `{"resize": [rows, columns]}` sets its size. At its end `{"exitCode": …, "status": …}` is sent, then the close.
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
    async def resize(message: dict[str, Any]) -> None:
        size = message.get("resize")
        if not isinstance(size, list) or len(size) != 2:
            raise BadMessage('send {"resize": [rows, columns]}')
        await process.resize(*size)

    await _receive_all(websocket, process.write, resize)


@router.websocket("/ports/{port}")
async def connect(websocket: WebSocket, port: int, use: Running) -> None:
    """Connect to a server on loopback inside; pass bytes both ways. `{"end": true}` closes the client's half."""
    try:
        connection = await use.sandbox.connect(port)
    except OSError as error:
        raise Refused(409, "connection-refused", str(error)) from error
    async with connection:
        await websocket.accept()
        await carry(websocket, _send_all(websocket, connection.read), _take_bytes(websocket, connection))


async def _take_bytes(websocket: WebSocket, connection: AsyncConnection) -> None:
    async def end(message: dict[str, Any]) -> None:
        if message != {"end": True}:
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
    """Write received messages, as fast as the sandbox accepts them, until the client disconnects."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", GOING_AWAY))
        if (data := message.get("bytes")) is not None:
            with suppress(BrokenPipeError):  # it reads no more; its output may still arrive
                await write(data)
            continue
        await take(read_object(message["text"].encode()))
