"""A client of `/api/wire` for tests: calls at once, each read, or not, by itself; credit is given as a test reads."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

HEADER = struct.Struct(">IBB")
DATA, END, CREDIT = range(3)
IN, OUT, ERR, JSON = range(4)
WINDOW, MOST_DATA = 1 << 18, 1 << 16


class CallFailed(Exception):
    """Hold the problem that ended a call."""

    def __init__(self, problem: dict[str, Any]):
        super().__init__(problem["detail"])
        self.problem = problem
        self.kind = (problem["status"], problem["type"].rpartition("/")[2])


class WireCall:
    """Hold one call."""

    def __init__(self, wire: WireClient, number: int):
        self._wire, self.number = wire, number
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.came = dict.fromkeys((OUT, ERR, JSON), 0)  # bytes of each channel, read or not
        self._pieces: dict[int, asyncio.Queue[bytes | None]] = {one: asyncio.Queue() for one in (OUT, ERR, JSON)}
        self._json = bytearray()
        self._window, self._room = WINDOW, asyncio.Event()
        self.reads_events = True

    async def take(self, channel: int, kind: int, data: bytes) -> None:
        """Take a binary frame."""
        if kind == CREDIT:
            self._window += int.from_bytes(data, "big")
            self._room.set()
        elif channel == JSON:
            self._json += data
            if data:
                await self._wire.credit(self.number, JSON, len(data))
        else:
            self.came[channel] += len(data)
            self._pieces[channel].put_nowait(None if kind == END else data)

    async def hear(self, said: dict[str, Any], size: int) -> None:
        """Take a text frame."""
        if said.get("dataOn") or said.get("resultOn"):
            whole, self._json = json.loads(self._json), bytearray()
            said = {**said, ("data" if "event" in said else "result"): whole}
        if "event" in said:
            self.events.put_nowait((said["event"], said["data"]))
            if self.reads_events:
                await self._wire.credit(self.number, JSON, size)
        elif "error" in said:
            self.result.set_exception(CallFailed(said["error"]))
            self.result.exception()
        else:
            self.result.set_result(said["result"])

    async def event(self) -> tuple[str, Any]:
        """Return the next event."""
        return await self.events.get()

    async def pieces(self, channel: int = OUT) -> AsyncIterator[bytes]:
        """Yield what comes on a channel until its end, giving credit for it."""
        while (piece := await self._pieces[channel].get()) is not None:
            await self._wire.credit(self.number, channel, len(piece))
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
            piece = left[: min(self._window, MOST_DATA)]
            self._window -= len(piece)
            await self._wire.socket.send(HEADER.pack(self.number, channel, DATA) + piece)
            left = left[len(piece) :]
        if end:
            await self._wire.socket.send(HEADER.pack(self.number, channel, END))

    async def cancel(self) -> None:
        """Cancel it."""
        await self._wire.say(cancel=self.number)


class WireClient:
    """Hold a connection."""

    def __init__(self, socket: ClientConnection):
        self.socket, self.calls, self._number = socket, dict[int, WireCall](), 0
        self.hello: dict[str, Any] = {}
        self.pongs: asyncio.Queue[Any] = asyncio.Queue()

    async def say(self, **said: Any) -> None:
        """Send a text frame."""
        await self.socket.send(json.dumps(said))

    async def credit(self, number: int, channel: int, count: int) -> None:
        """Give credit."""
        await self.socket.send(HEADER.pack(number, channel, CREDIT) + count.to_bytes(4, "big"))

    async def begin(self, verb: str, **fields: Any) -> WireCall:
        """Begin a call."""
        self._number += 1
        call = self.calls[self._number] = WireCall(self, self._number)
        await self.say(call=self._number, verb=verb, **fields)
        return call

    async def do(self, verb: str, **fields: Any) -> Any:
        """Do what has a result and nothing else."""
        return await (await self.begin(verb, **fields)).result

    async def read(self) -> None:
        """Hand what comes to its call, until the connection ends."""
        async for message in self.socket:
            if isinstance(message, bytes):
                number, channel, kind = HEADER.unpack_from(message)
                await self.calls[number].take(channel, kind, message[HEADER.size :])
                continue
            said = json.loads(message)
            if "call" in said:
                await self.calls[said["call"]].hear(said, len(message.encode()))
            elif "pong" in said:
                self.pongs.put_nowait(said["pong"])
            else:
                self.hello = said.get("hello", self.hello)


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
