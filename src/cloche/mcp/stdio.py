"""Serve one client over standard input and output, on which nothing but the protocol is written.

Standard input is read by a thread that nobody waits for: a read that blocks shall not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, cast

from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server

MOST_LINE_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
TOO_LONG = "{}"  # in place of a line that is too long: no message, and answered as such


async def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve until the client closes its end, or this is cancelled."""
    lines = _Lines(_take_stdin())
    async with stdio_server(stdin=cast("Any", lines)) as (incoming, outgoing):
        lowlevel = server._lowlevel_server  # what `run_stdio_async` runs, with an input of its own
        await lowlevel.run(incoming, outgoing, lowlevel.create_initialization_options())


def _take_stdin() -> int:
    """Return standard input under another number; in its place whoever reads finds nothing."""
    private = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return private


class _Lines:
    """Yield the lines of a descriptor as they come."""

    def __init__(self, fd: int):
        self._fd = fd
        self._queue: asyncio.Queue[str | None] = asyncio.Queue(1)

    def __aiter__(self) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="cloche-mcp-stdin", daemon=True).start()
        return self._taken()

    async def _taken(self) -> AsyncIterator[str]:
        while (line := await self._queue.get()) is not None:
            yield line

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError, CancelledError):  # the loop has ended
            for line in _split(self._fd):
                asyncio.run_coroutine_threadsafe(self._queue.put(line), loop).result()
            asyncio.run_coroutine_threadsafe(self._queue.put(None), loop).result()


def _split(fd: int) -> Any:  # noqa: ANN401 - a generator of text
    rest, is_too_long = bytearray(), False
    while data := _read_some(fd):
        *lines, end = data.split(b"\n")
        for line in lines:
            rest += line
            yield TOO_LONG if is_too_long or len(rest) > MOST_LINE_BYTES else _text(rest)
            rest, is_too_long = bytearray(), False
        rest += end
        if len(rest) > MOST_LINE_BYTES:
            rest, is_too_long = bytearray(), True
    if rest and not is_too_long:
        yield _text(rest)


def _text(line: bytearray) -> str:
    """Return a line that can be taken apart: halves of character pairs, which some clients send, become `?`."""
    text = line.decode("utf-8", "replace")
    if SURROGATE.search(text) is None:
        return text
    try:
        return json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace").decode()
    except (ValueError, RecursionError):
        return text  # no message; answered as such


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK_BYTES)
    except OSError:  # a terminal that hung up
        return b""
