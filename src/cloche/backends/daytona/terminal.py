"""A terminal at Daytona as the streams of a first process: what is typed into it first, frames, and how much may wait.

Theory of operation: the terminal runs a shell, whose prompt and echo may be anything. Into it one line is typed, which
makes it raw and becomes an interpreter that writes `MARK` and reads a program (`relay`). What comes before the mark is
kept for messages. From then on nothing but frames comes, and each side sends no more than `WINDOW` bytes that the other
one has not taken. The server drops a terminal whose output is not read fast enough, which that keeps from happening.

The loop's task reads everything at once; whoever calls `pieces` takes it from a queue and so gives more leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import shlex
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from cloche.core.errors import StartFailed

from ..containers.container import ARGUMENTS, OUTPUT
from .client import call
from .relay import DATA, END, ERR, EXITED, FAILED, FOUND, KILL, OUT, PIECE, TAKEN, WINDOW

ERROR = 2
MARK = bytes(range(1, 9))  # as no shell writes it, and as it is not typed
READY_S, STALL_S, LEASE_PING_S = 60.0, 60.0, 10.0
MOST_BEFORE, MOST_FRAME = 64 * 1024, 1 << 20
MOST_UNREAD = 6 * WINDOW + MOST_FRAME  # a window of single bytes has six times as many with their headers
_STREAMS = {OUT: OUTPUT, ERR: ERROR}
_BEGIN = f"import os\nos.write(1,bytes(range(1,9)))\n{ARGUMENTS[-1]}"
LINE = f" stty raw -echo; exec python3 -I -S -c {shlex.quote(f'exec(bytes.fromhex({_BEGIN.encode().hex()!r}))')}\r"


class TerminalWire:
    """Carry the streams of a first process; see containers.container.Wire. Methods block, but for those in the loop."""

    def __init__(self, socket: Any):
        self._socket = socket
        self._received, self._before = bytearray(), b""
        self._queue: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._left, self._may_send = WINDOW, asyncio.Event()
        self._has_mark: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._why_over, self._is_shut_down = "", False
        self._untold = 0
        self._came, self._took = 0, 0  # of frames, and each is changed by one thread alone

    def boot(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start the relay and, by it, a first process; return what it found. Raises StartFailed, OSError."""
        program = (files("cloche.backends.daytona") / "relay.py").read_bytes()
        told = json.dumps(dict(settings)).encode()
        message = b"".join(f"{len(one):09d}".encode() + one for one in (program, told))
        try:
            call(lambda: self._boot(message), READY_S)
            kind, body = self._queue.get(timeout=READY_S) or (FAILED, self._why_over.encode())
        except (OSError, queue.Empty):  # TimeoutError is one
            raise StartFailed(f"no Python listens in a sandbox at Daytona{self._shown()}", step="boot") from None
        if kind != FOUND:
            why = body.decode("utf-8", "replace")[:600] if kind == FAILED else "it does not speak our protocol"
            raise StartFailed(f"a sandbox at Daytona cannot be used: {why}{self._shown()}", step="boot")
        self._took += 5 + len(body)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise StartFailed("a sandbox at Daytona says what makes no sense of what is in it", step="boot") from None
        return found if isinstance(found, dict) else {}

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError when it is gone, or takes nothing for a while."""
        view = memoryview(data)
        for at in range(0, len(view), PIECE):
            piece = bytes(view[at : at + PIECE])
            try:
                call(lambda piece=piece: self._send_data(piece), STALL_S)  # type: ignore[misc]
            except TimeoutError as error:
                raise ConnectionError("the sandbox takes nothing") from error

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what it writes, until it ends. Raises OSError."""
        while True:
            frame = self._queue.get()
            if frame is None:
                if self._why_over and not self._is_shut_down:
                    raise ConnectionError(self._why_over)
                return
            kind, body = frame
            self._took += 5 + len(body)
            if kind == EXITED:
                return
            if kind in _STREAMS:
                self._untold += len(body)
                if self._untold >= WINDOW // 4 or self._queue.empty():
                    self._tell(TAKEN, str(self._untold).encode())
                    self._untold = 0
                yield _STREAMS[kind], body

    def shutdown(self) -> None:
        """End its standard input."""
        self._is_shut_down = True
        self._tell(END)

    def kill(self) -> None:
        """Kill all that runs behind it."""
        self._is_shut_down = True
        self._tell(KILL)

    def close(self) -> None:
        """Close everything: nothing of it runs any more."""
        self.kill()
        with contextlib.suppress(TimeoutError, OSError):
            call(self._close, STALL_S)

    def _shown(self) -> str:
        text = self._before.decode("utf-8", "replace").replace("\r", "").strip()
        return f"; its terminal said {text[-300:]!r}" if text else ""

    def _tell(self, kind: bytes, body: bytes = b"") -> None:
        """Send a frame, soon; one that cannot be sent any more is dropped."""
        asyncio.run_coroutine_threadsafe(self._send_frame(kind, body), call.loop())

    # In the loop.

    async def _boot(self, message: bytes) -> None:
        self._has_mark = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep())]
        await self._socket.send_bytes(LINE.encode())
        await asyncio.wait([self._has_mark])
        if self._why_over:
            return
        for at in range(0, len(message), PIECE):
            await self._socket.send_bytes(message[at : at + PIECE])

    async def _send_data(self, piece: bytes) -> None:
        while self._left < len(piece) and not self._why_over:
            self._may_send.clear()
            await self._may_send.wait()
        if self._why_over or self._is_shut_down:
            raise ConnectionError(self._why_over or "the sandbox was closed")
        self._left -= len(piece)
        await self._send_frame(DATA, piece)

    async def _send_frame(self, kind: bytes, body: bytes) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await self._socket.send_bytes(kind + len(body).to_bytes(4, "big") + body)
        except (OSError, TimeoutError, RuntimeError) as error:
            self._end(f"the connection to the sandbox is lost ({type(error).__name__})")

    async def _keep(self) -> None:
        """Say now and then that somebody is there."""
        while True:
            await asyncio.sleep(LEASE_PING_S)
            await self._send_frame(TAKEN, b"0")

    async def _read(self) -> None:
        why = "the connection to the sandbox is lost"
        try:
            async for message in self._socket:
                if message.type.name == "BINARY":
                    self._take(message.data)
                elif message.type.name == "TEXT":
                    self._take_control(message.data)
                elif message.type.name == "ERROR":
                    break
            if self._socket.close_code is not None:
                why += f" (close code {self._socket.close_code})"
        except (OSError, ValueError, RecursionError, RuntimeError) as error:
            why += f" ({error})" if isinstance(error, ValueError) else f" ({type(error).__name__})"
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        self._why_over = self._why_over or why
        self._may_send.set()
        if self._has_mark is not None and not self._has_mark.done():
            self._has_mark.set_result(None)
        self._queue.put(None)

    def _take_control(self, text: str) -> None:
        """Take a message of the server's own about the terminal. Raises ValueError where that failed."""
        said = json.loads(text) if len(text) <= MOST_BEFORE else None
        if isinstance(said, dict) and said.get("status") == "error":
            raise ValueError(str(said.get("error"))[:300])

    def _take(self, data: bytes) -> None:
        """Take a piece of what the terminal writes. Raises ValueError for what makes no sense."""
        self._received += data
        if self._has_mark is not None and not self._has_mark.done():
            self._find_mark()
            if not self._has_mark.done():
                return
        while len(self._received) >= 5:
            end = 5 + int.from_bytes(self._received[1:5], "big")
            if end > MOST_FRAME:
                raise ValueError("what comes from the sandbox makes no sense")
            if len(self._received) < end:
                return
            kind, body = bytes(self._received[:1]), bytes(self._received[5:end])
            del self._received[:end]
            if kind == TAKEN:
                self._left += int(body)
                if not 0 <= self._left <= WINDOW:
                    raise ValueError("it takes what it was not sent")
                self._may_send.set()
            elif kind in _STREAMS and not body:
                raise ValueError("it writes nothing")
            else:
                self._came += 5 + len(body)
                if self._came - self._took > MOST_UNREAD:
                    raise ValueError("it writes more than it may")
                self._queue.put((kind, body))

    def _find_mark(self) -> None:
        at = self._received.find(MARK)
        if at < 0 and len(self._received) > MOST_BEFORE:
            raise ValueError("its shell writes without end")
        if at >= 0 and self._has_mark is not None:
            self._before = bytes(self._received[:at])
            del self._received[: at + len(MARK)]
            self._has_mark.set_result(None)
        elif at < 0:
            self._before = bytes(self._received)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._socket.close()
        self._end("the sandbox was closed")
