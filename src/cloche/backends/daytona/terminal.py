"""A terminal at Daytona as the streams of a first process: the line typed into it, frames, and flow control.

Theory of operation: the terminal runs a shell with an unknown prompt and echo. One line is typed into it, which makes
the terminal raw and executes an interpreter that writes `MARK` and reads a program (`relay`). Output before the mark is
kept for messages. After the mark, only frames are exchanged, and each side has at most `WINDOW` unacknowledged bytes.
The server drops a terminal whose output is not read fast enough; the window prevents that. A task in the loop reads
everything at once; the caller of `pieces` reads from a queue and thereby acknowledges.
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
MARK = bytes(range(1, 9))  # bytes that no shell prints; the typed line does not contain them literally
READY_S, STALL_S, LEASE_PING_S = 60.0, 60.0, 10.0
MOST_BEFORE, MOST_FRAME = 64 * 1024, 1 << 20
MOST_UNREAD = 6 * WINDOW + MOST_FRAME  # worst case: a window of frames with one byte and a header of five
_STREAMS = {OUT: OUTPUT, ERR: ERROR}
_BEGIN = f"import os\nos.write(1,bytes(range(1,9)))\n{ARGUMENTS[-1]}"
LINE = f" stty raw -echo; exec python3 -I -S -c {shlex.quote(f'exec(bytes.fromhex({_BEGIN.encode().hex()!r}))')}\r"


class TerminalWire:
    """Carry the streams of a first process; see containers.container.ContainerWire.

    Methods block, except those in the loop.
    """

    def __init__(self, socket: Any):
        self._socket = socket
        self._received, self._before = bytearray(), b""
        self._queue: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._left, self._may_send = WINDOW, asyncio.Event()
        self._has_mark: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._why_over, self._is_shut_down = "", False
        self._untold = 0
        self._came, self._took = 0, 0  # bytes of frames; each is written by one thread only

    def boot(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start the relay, which starts a first process; return the relay's report. Raises StartFailed, OSError."""
        program = (files("cloche.backends.daytona") / "relay.py").read_bytes()
        encoded_settings = json.dumps(dict(settings)).encode()
        message = b"".join(f"{len(part):09d}".encode() + part for part in (program, encoded_settings))
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
            contents = json.loads(body)
        except (ValueError, RecursionError):
            raise StartFailed("a sandbox at Daytona sent an invalid description of its contents", step="boot") from None
        return contents if isinstance(contents, dict) else {}

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the sandbox has ended or reads nothing for `STALL_S`."""
        view = memoryview(data)
        for offset in range(0, len(view), PIECE):
            piece = bytes(view[offset : offset + PIECE])
            try:
                call(lambda piece=piece: self._send_data(piece), STALL_S)  # type: ignore[misc]
            except TimeoutError as error:
                raise ConnectionError("the sandbox does not read its input") from error

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the output of the first process until it ends. Raises OSError."""
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
        """Close its standard input."""
        self._is_shut_down = True
        self._tell(END)

    def kill(self) -> None:
        """Kill all processes behind the terminal."""
        self._is_shut_down = True
        self._tell(KILL)

    def close(self) -> None:
        """Kill all processes and close the connection."""
        self.kill()
        with contextlib.suppress(TimeoutError, OSError):
            call(self._close, STALL_S)

    def _shown(self) -> str:
        text = self._before.decode("utf-8", "replace").replace("\r", "").strip()
        return f"; its terminal said {text[-300:]!r}" if text else ""

    def _tell(self, kind: bytes, body: bytes = b"") -> None:
        """Send a frame in the background; it is dropped if the connection is lost."""
        asyncio.run_coroutine_threadsafe(self._send_frame(kind, body), call.loop())

    # In the loop.

    async def _boot(self, message: bytes) -> None:
        self._has_mark = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep())]
        await self._socket.send_bytes(LINE.encode())
        await asyncio.wait([self._has_mark])
        if self._why_over:
            return
        for offset in range(0, len(message), PIECE):
            await self._socket.send_bytes(message[offset : offset + PIECE])

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
        """Send an empty acknowledgement every `LEASE_PING_S`, which renews the lease."""
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
        """Handle the server's own message about the terminal. Raises ValueError if the terminal failed."""
        status = json.loads(text) if len(text) <= MOST_BEFORE else None
        if isinstance(status, dict) and status.get("status") == "error":
            raise ValueError(str(status.get("error"))[:300])

    def _take(self, data: bytes) -> None:
        """Handle a piece of the terminal's output. Raises ValueError for an invalid one."""
        self._received += data
        if self._has_mark is not None and not self._has_mark.done():
            self._find_mark()
            if not self._has_mark.done():
                return
        while len(self._received) >= 5:
            end = 5 + int.from_bytes(self._received[1:5], "big")
            if end > MOST_FRAME:
                raise ValueError("the sandbox sent invalid data")
            if len(self._received) < end:
                return
            kind, body = bytes(self._received[:1]), bytes(self._received[5:end])
            del self._received[:end]
            if kind == TAKEN:
                self._left += int(body)
                if not 0 <= self._left <= WINDOW:
                    raise ValueError("it acknowledged data that was not sent")
                self._may_send.set()
            elif kind in _STREAMS and not body:
                raise ValueError("it sends no output")
            else:
                self._came += 5 + len(body)
                if self._came - self._took > MOST_UNREAD:
                    raise ValueError("it exceeded its window")
                self._queue.put((kind, body))

    def _find_mark(self) -> None:
        start = self._received.find(MARK)
        if start < 0 and len(self._received) > MOST_BEFORE:
            raise ValueError("its shell does not stop writing")
        if start >= 0 and self._has_mark is not None:
            self._before = bytes(self._received[:start])
            del self._received[: start + len(MARK)]
            self._has_mark.set_result(None)
        elif start < 0:
            self._before = bytes(self._received)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._socket.close()
        self._end("the sandbox was closed")
