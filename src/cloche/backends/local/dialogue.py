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

from cloche.core.events import Sink, Stream
from cloche.core.frames import encode
from cloche.core.limits import Limits
from cloche.jail.syscalls import FORK_FLAGS

from ..drivers import Codec
from ..noting import noted
from ..session import Printed, SessionLink
from .streams import StreamSet, ignore, to_sink

log = logging.getLogger("cloche.local")
CHUNK_BYTES = 1 << 18
MOST_PIECES = 16
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class SessionPipes(StreamSet):
    """Hold the caller's ends of one interpreter's link and streams. Use from one event loop, and close in any case.

    `link` reads what it answers; `link.on_flood` is called for a flood of output, too.
    """

    def __init__(self, limits: Limits, codec: Codec, on_flood: Callable[[], None]):
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._socket, self._theirs = socket.socketpair()
        self._socket.shutdown(socket.SHUT_RD)
        self._socket.setblocking(False)
        self._answers = -1  # where the guest's answers are read
        self.link = SessionLink(codec, on_flood, on_lost=self._close_link, on_other=self._take)
        self.born: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.wait_status: int | None = None
        try:
            self._guest.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            for stream in _STREAMS:
                self._add_reader(stream, limits.output_bytes, limits.flood_bytes, ignore, self._flood)
                self._readers[stream].listen()
            self._answers = self._new_pipe()
            os.set_blocking(self._answers, False)
        except BaseException:
            self.close()
            raise
        self._loop.add_reader(self._answers, self._listen)

    def _flood(self) -> None:
        self.link.on_flood()  # a clone's is put in place later

    def guest_ends(self) -> list[int]:
        """Return the guest's ends: standard input, output, error, the pipe of its answers, and the link."""
        return [*self._guest, self._theirs.fileno()]

    def close_guest_ends(self) -> None:
        """Close the guest's ends, so that pipes and link end with the guest."""
        super().close_guest_ends()
        self._theirs.close()

    def holds(self) -> list[str]:
        """Name the guest's ends as the kernel names them to whoever looks which descriptors a process has."""
        return [_name(self._theirs.fileno(), "socket"), *(_name(fd, "pipe") for fd in self._guest[1:])]

    async def ask_for_clone(
        self, request_id: int, other: SessionPipes, timeout_s: float
    ) -> asyncio.Future[dict[str, Any]]:
        """Ask the interpreter to clone itself; the clone takes the guest's ends of `other`.

        An interpreter that does not read what it is asked for so long is lost.
        """
        answer = self.link.expect(request_id)
        sending = self.send(encode({"op": "fork", "id": request_id, "flags": FORK_FLAGS}))
        if sending is not None:
            with noted(log, "the interpreter does not read what it is asked", TimeoutError):
                await asyncio.wait_for(sending, timeout_s)
        _, *ends = other.guest_ends()
        with noted(log, "the interpreter is gone, as the answer will say", OSError):
            socket.send_fds(self._socket, [b"f"], ends)
        return answer

    def keep(self, path: str, text: str) -> Awaitable[None] | None:
        """Have the interpreter write a file, unless there is one; return what to wait for, as `send` does."""
        return self.send(encode({"op": "keep", "path": path, "text": text}))

    def go(self, *, is_fork: bool) -> None:
        """Let a clone go on that has a home by now; it will say that it is ready."""
        with noted(log, "the clone is gone, as its link will say", OSError):
            self._socket.send(encode({"op": "go", "is_fork": is_fork}))

    def send(self, data: bytes) -> Awaitable[None] | None:
        """Send all of it, or return what to await until all is sent; cancelled in the middle, the link is lost."""
        try:
            sent = self._socket.send(data) if len(data) < CHUNK_BYTES else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.link.lose(f"the link is gone: {error}")
            return None
        return self._send_rest(memoryview(data)[sent:]) if sent < len(data) else None

    async def _send_rest(self, data: memoryview) -> None:
        sending = self._loop.create_task(self._loop.sock_sendall(self._socket, data))
        try:  # whoever does not read any more may have closed its answers, and not the link
            await asyncio.wait((sending, self.link.lost), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError as error:
            self.link.lose(f"the link is gone: {error}")
        except asyncio.CancelledError:
            self.link.lose("a cell was sent in part")
            raise
        finally:
            sending.cancel()

    def begin(self, sink: Sink) -> None:
        """Hand output on as it comes, and first what has come since it was collected."""
        for stream in _STREAMS:
            self._readers[stream].hand_on_to(to_sink(stream, sink))

    def catch_up(self) -> None:
        """Read what is in the pipes now."""
        for reader in self._readers.values():
            reader.finish()

    def collect(self, *, is_up_to_date: bool) -> Printed:
        """Return what was printed since it was last collected, and keep nothing of it.

        Where this loop has just handled all that was ready, pipes of which nothing was heard are empty.
        """
        readers = self._readers.values()
        if not is_up_to_date or any(reader.output.total for reader in readers):
            self.catch_up()
        printed = Printed(stdout=self.kept("stdout"), stderr=self.kept("stderr"), is_truncated=self.is_truncated)
        for reader in readers:
            reader.renew()
        return printed

    def close(self) -> None:
        """Close the link and all pipes."""
        self.link.lose("the session was closed")
        super().close()

    def end(self, reason: str) -> None:
        """Take what was said at last: the interpreter has ended, though somebody may still hold its end of the link."""
        for _ in range(MOST_PIECES):  # more than the socket holds: who still writes would keep us here
            if self.link.lost.done() or not self._listen():
                break
        self.link.lose(reason)

    def _listen(self) -> bool:
        """Take what has come; tell whether anything had."""
        try:
            data = os.read(self._answers, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self.link.lose(f"the link is gone: {error}")
            return False
        if not data:
            self.link.lose("the interpreter has closed its link")
            return False
        self.link.receive(data)
        return True

    def _take(self, frame: dict[str, Any]) -> None:
        """Take what only an interpreter says that is cloned, and pid 1 around a clone."""
        kind = frame.get("op")
        if kind == "born" and not self.born.done():
            self.born.set_result(frame)
        elif kind == "gone" and isinstance(frame.get("wait_status"), int):
            self.wait_status = frame["wait_status"] & 0xFFFF

    def _close_link(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)  # of a cell that was sent in part: its number is soon another's
        self._socket.close()
        if self._answers >= 0:
            self._loop.remove_reader(self._answers)
            os.close(self._answers)
            self._answers = -1


def _name(fd: int, kind: str) -> str:
    return f"{kind}:[{os.fstat(fd).st_ino}]"
