"""A session's link and streams as a jail has them.

Theory of operation: whatever a guest writes to is a pipe. A socket of AF_UNIX carries descriptors, and who receives
one that it has no room for closes it: a TCP socket with SO_LINGER keeps the thread that closes it for as long as the
guest says. Only the caller sends descriptors, to be cloned with. So cells and descriptors go to the guest by a socket
whose other direction is shut down before the guest gets it: the kernel refuses all that is sent to the caller there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from cloche.core.events import OutputChunk, Sink, Stream, discard
from cloche.core.frames import encode
from cloche.core.limits import Limits
from cloche.jail.syscalls import FORK_FLAGS

from ..exchange import Codec, Exchange
from ..noting import noted
from .streams import StreamReader, ignore

log = logging.getLogger("cloche.local")
CHUNK_BYTES = 1 << 18
MOST_PIECES = 16


class Dialogue(Exchange):
    """Hold the caller's ends of a session's link and streams. Use from one event loop, and close in any case."""

    def __init__(self, limits: Limits, codec: Codec, on_flood: Callable[[], None]):
        super().__init__(codec, on_flood)
        self._link, self._theirs = socket.socketpair()
        self._link.shutdown(socket.SHUT_RD)
        self._link.setblocking(False)
        self._said = -1  # where the guest's answers are read
        self._guest: list[int] = []
        self._readers: dict[Stream, StreamReader] = {}
        self.born: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.wait_status: int | None = None
        self._is_caught_up = False  # the answer was heard, and with it that the pipes are empty
        try:
            self._guest.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            for stream in ("stdout", "stderr"):
                self._readers[stream] = self._new_reader(limits)
            self._said = self._new_pipe()
            os.set_blocking(self._said, False)
        except BaseException:
            self.close()
            raise
        self._loop.add_reader(self._said, self._listen)

    def _new_pipe(self) -> int:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        self._guest.append(theirs)
        return ours

    def _new_reader(self, limits: Limits) -> StreamReader:
        reader = StreamReader(
            self._new_pipe(),
            limit=limits.output_bytes,
            flood_limit=limits.flood_bytes,
            on_chunk=ignore,
            on_flood=lambda: self.on_flood(),  # noqa: PLW0108 - a clone's is put in place later
        )
        reader.listen()
        return reader

    def guest_ends(self) -> list[int]:
        """Return the guest's ends: standard input, output, error, the pipe of its answers, and the link."""
        return [*self._guest, self._theirs.fileno()]

    def close_guest_ends(self) -> None:
        """Let go of the guest's ends."""
        while self._guest:
            os.close(self._guest.pop())
        self._theirs.close()

    def _hand_on_to(self, sink: Sink) -> None:
        for stream, reader in self._readers.items():
            reader.hand_on_to(_hand_on(stream, sink))

    def holds(self) -> list[str]:
        """Name the guest's ends as the kernel names them to whoever looks which descriptors a process has."""
        return [_name(self._theirs.fileno(), "socket"), *(_name(fd, "pipe") for fd in self._guest[1:])]

    async def ask_for_clone(
        self, request_id: int, other: Dialogue, patience_s: float
    ) -> asyncio.Future[dict[str, Any]]:
        """Ask the interpreter to clone itself; the clone takes the guest's ends of `other`.

        An interpreter that does not read what it is asked for so long is lost.
        """
        answer, sending = self._ask(request_id, encode({"op": "fork", "id": request_id, "flags": FORK_FLAGS}))
        if sending is not None:
            with noted(log, "the interpreter does not read what it is asked", TimeoutError):
                await asyncio.wait_for(sending, patience_s)
        _, *ends = other.guest_ends()
        with noted(log, "the interpreter is gone, as the answer will say", OSError):
            socket.send_fds(self._link, [b"f"], ends)
        return answer

    def keep(self, path: str, text: str) -> Awaitable[None] | None:
        """Have the interpreter write a file, unless there is one; return what to wait for, as `ask` does."""
        return self._send(encode({"op": "keep", "path": path, "text": text}))

    def go(self, *, is_fork: bool) -> None:
        """Let a clone go on that has a home by now; it will say that it is ready."""
        with noted(log, "the clone is gone, as its link will say", OSError):
            self._link.send(encode({"op": "go", "is_fork": is_fork}))

    def _send(self, data: bytes) -> Awaitable[None] | None:
        try:
            sent = self._link.send(data) if len(data) < CHUNK_BYTES else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(f"the link is gone: {error}")
            return None
        return self._send_rest(memoryview(data)[sent:]) if sent < len(data) else None

    async def _send_rest(self, data: memoryview) -> None:
        sending = self._loop.create_task(self._loop.sock_sendall(self._link, data))
        try:  # whoever does not read any more may have closed its answers, and not the link
            await asyncio.wait((sending, self.lost), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError as error:
            self._lose(f"the link is gone: {error}")
        except asyncio.CancelledError:
            self._lose("a cell was sent in part")
            raise
        finally:
            sending.cancel()

    def kept(self, stream: Stream) -> bytes:
        return self._readers[stream].output.kept()

    @property
    def is_truncated(self) -> bool:
        return any(reader.output.is_truncated for reader in self._readers.values())

    def wait_briefly(self, answer: asyncio.Future[dict[str, Any]], seconds: float) -> bool:
        # All that is ready is heard of at once, so that pipes of which nothing was heard before the answer are empty.
        is_there = super().wait_briefly(answer, seconds)
        self._is_caught_up = is_there and not any(reader.output.total for reader in self._readers.values())
        return is_there

    def catch_up(self) -> None:
        """Read what is in the pipes now."""
        if self._is_caught_up:
            self._is_caught_up = False
            return
        for reader in self._readers.values():
            reader.finish()

    def _renew_streams(self) -> None:
        for reader in self._readers.values():
            reader.renew()

    async def drain(self, patience_s: float) -> None:
        """Read to the end of the streams, when nobody is left to write."""
        self.close_guest_ends()
        endings = [reader.ended for reader in self._readers.values() if not reader.finish()]
        if endings:
            await asyncio.wait(endings, timeout=patience_s)

    def close(self) -> None:
        self.close_guest_ends()
        self._lose("the session was closed")
        for reader in self._readers.values():
            reader.close()

    def end(self, reason: str) -> None:
        """Hear what was said at last: the interpreter has ended, though somebody may still hold its end of the link."""
        for _ in range(MOST_PIECES):  # more than the socket holds: who still writes would keep us here
            if self.lost.done() or not self._listen():
                break
        if not self.lost.done():
            self._lose(reason)

    def _listen(self) -> bool:
        """Take what has come; tell whether anything had."""
        try:
            data = os.read(self._said, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(f"the link is gone: {error}")
            return False
        if not data:
            self._lose("the interpreter has closed its link")
            return False
        self._hear(data)
        return True

    def _take(self, frame: dict[str, Any]) -> None:
        kind = frame.get("op")
        if kind == "done":
            super()._take(frame)
        elif kind == "born" and not self.born.done():
            self.born.set_result(frame)
        elif kind == "gone" and isinstance(frame.get("wait_status"), int):
            self.wait_status = frame["wait_status"] & 0xFFFF
        else:
            super()._take(frame)

    def _lose(self, reason: str) -> None:
        if self._link.fileno() >= 0:
            self._loop.remove_writer(self._link)  # of a cell that was sent in part: its number is soon another's
        self._link.close()
        if self._said >= 0:
            self._loop.remove_reader(self._said)
            os.close(self._said)
            self._said = -1
        super()._lose(reason)


def _name(fd: int, kind: str) -> str:
    return f"{kind}:[{os.fstat(fd).st_ino}]"


def _hand_on(stream: Stream, sink: Sink) -> Callable[[bytes], None]:
    if sink is discard:
        return ignore
    return lambda data: sink(OutputChunk(stream=stream, data=data))
