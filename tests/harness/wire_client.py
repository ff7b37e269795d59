"""A client of `/api/wire` for tests: calls at once, each read, or not, by itself; bytes are granted as a test reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from cloche.init import wire

IN, OUT, ERR, JSON = range(4)
COMING = (OUT, ERR, JSON, wire.HOST_CALLS)


class CallFailed(Exception):
    """Hold the problem that ended a call."""

    def __init__(self, problem: dict[str, Any]):
        super().__init__(problem["detail"])
        self.problem = problem
        self.kind = (problem["status"], problem["type"].rpartition("/")[2])


class WireCall:
    """Hold one call."""

    def __init__(self, client: WireClient, number: int):
        self._wire, self.number = client, number
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.came = dict.fromkeys(COMING, 0)  # bytes of each channel, read or not
        self._pieces: dict[int, asyncio.Queue[bytes | None]] = {one: asyncio.Queue() for one in COMING}
        self._json = bytearray()
        self._window, self._room = wire.WINDOW_BYTES, asyncio.Event()
        self.reads_events = True

    async def take(self, kind: int, body: bytes) -> None:
        """Take a frame."""
        if kind == wire.WINDOW:
            self._window += wire.read_grant(body)[1]
            self._room.set()
        elif kind == wire.EVENT:
            await self._take_event(json.loads(body), len(body))
        elif kind == wire.CLOSE:
            self._take_close(json.loads(body))
        elif body[0] == JSON:
            self._json += body[1:]
            if kind == wire.DATA:
                await self._wire.grant(self.number, JSON, len(body) - 1)
        else:
            self.came[body[0]] += len(body) - 1
            self._pieces[body[0]].put_nowait(None if kind == wire.END else body[1:])

    async def _take_event(self, said: dict[str, Any], size: int) -> None:
        data = self._taken() if "dataOn" in said else said["data"]
        self.events.put_nowait((said["event"], data))
        if self.reads_events:
            await self._wire.grant(self.number, JSON, size)

    def _take_close(self, said: dict[str, Any]) -> None:
        if "error" in said:
            self.result.set_exception(CallFailed(said["error"]))
            self.result.exception()
        else:
            self.result.set_result(self._taken() if "resultOn" in said else said["result"])

    def _taken(self) -> Any:
        whole, self._json = json.loads(self._json), bytearray()
        return whole

    async def event(self) -> tuple[str, Any]:
        """Return the next event."""
        return await self.events.get()

    async def pieces(self, channel: int = OUT) -> AsyncIterator[bytes]:
        """Yield what comes on a channel until its end, giving credit for it."""
        while (piece := await self._pieces[channel].get()) is not None:
            await self._wire.grant(self.number, channel, len(piece))
            yield piece

    async def read(self, channel: int = OUT) -> bytes:
        """Return all of it."""
        return b"".join([piece async for piece in self.pieces(channel)])

    async def send(self, data: bytes, *, channel: int = IN, end: bool = True) -> None:
        """Send as fast as credit comes."""
        left = memoryview(data)
        while left:
            while not self._window:
                self._room.clear()
                await self._room.wait()
            piece = left[: min(self._window, wire.MOST_DATA)]
            self._window -= len(piece)
            await self._wire.socket.send(wire.data_frame(self.number, channel, piece))
            left = left[len(piece) :]
        if end:
            await self._wire.socket.send(wire.frame(wire.END, self.number, bytes((channel,))))

    async def cancel(self) -> None:
        """Cancel it."""
        await self._wire.socket.send(wire.frame(wire.CLOSE, self.number))


class WireClient:
    """Hold a connection."""

    def __init__(self, socket: ClientConnection):
        self.socket, self.calls, self._number = socket, dict[int, WireCall](), 0
        self.hello: dict[str, Any] = {}
        self.pongs: asyncio.Queue[Any] = asyncio.Queue()

    async def grant(self, number: int, channel: int, count: int) -> None:
        """Let the service send so much more."""
        if count:
            await self.socket.send(wire.grant_frame(number, channel, count))

    async def begin(self, verb: str, **fields: Any) -> WireCall:
        """Begin a call."""
        self._number += 1
        call = self.calls[self._number] = WireCall(self, self._number)
        await self.socket.send(wire.json_frame(wire.OPEN, self._number, verb=verb, **fields))
        return call

    async def do(self, verb: str, **fields: Any) -> Any:
        """Do what has a result and nothing else."""
        return await (await self.begin(verb, **fields)).result

    async def read(self) -> None:
        """Hand what comes to its call, until the connection ends."""
        frames = wire.FrameBuffer(last_kind=wire.PONG)
        async for message in self.socket:
            if isinstance(message, str):
                self.hello = json.loads(message)["hello"]
                continue
            for kind, number, body in frames.feed(message):
                if kind == wire.PONG:
                    self.pongs.put_nowait(body)
                elif kind != wire.PING:
                    await self.calls[number].take(kind, body)


@asynccontextmanager
async def wired(address: str, key: str) -> AsyncIterator[WireClient]:
    """Hold a connection for the body."""
    headers = {"Authorization": f"Bearer {key}"}
    url = address.replace("http", "ws", 1) + "/api/wire"
    async with connect(url, additional_headers=headers, proxy=None) as socket:
        client = WireClient(socket)
        reading = asyncio.ensure_future(client.read())
        try:
            yield client
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
