"""A connection's two directions, and carrying both between two connections.

Theory of operation: a stream is read only when the other side has taken the bytes before, so no data piles up here
(backpressure). The end of one direction is carried as such (half-close) and the other goes on: git, PostgreSQL and nc
need that. A connection idle in both directions for longer than the limit ends. Received bytes are processed when their
turn comes, so a socket that always has bytes delays no other.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Literal, Protocol

# What is read at once, and may wait for a slow reader: above the most, a copy is not faster. All directions that this
# process passes on share what it may hold.
MOST_READ_BYTES, LEAST_READ_BYTES, HELD_BYTES = 512 << 10, 16 << 10, 128 << 20
_directions: set[object] = set()
TURN_S, SHORT_TURN_S = 0.001, 0.0003  # to compute before others have a turn
# A sandbox that has used so much processor time, and so many times as much as another one, lets that one go first,
# until it has been quiet for a moment. Use counts half after a while.
MUCH_S, FAR_MORE, HALF_S = 0.005, 2.0, 0.1
QUIET_S, LONGEST_YIELD_S, RECENT_S = 0.003, 0.005, 0.05


class Turns:
    """Let those who share it compute one after the other: one of them in each round of the event loop.

    All connections of a sandbox do. However many there are, a round takes no longer than by one of them. A request
    takes some thirty rounds, so a sandbox that has used far more processor time of late than another one waits until
    that one has been quiet for a moment, though never for long.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_passing = False
        self._begun_s: float | None = None  # of this thread's processor time
        self._used_s = self._used_at = 0.0  # of that, less for each moment since
        self._active_at = self._passed_at = 0.0

    async def take(self) -> None:
        """Wait until it is the caller's turn."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        self.note(loop.time())
        if not self._is_passing:
            self._is_passing = True
            loop.call_soon(self._pass, loop)
        await mine

    def note(self, now: float) -> None:
        """Note that something of the sandbox is going on."""
        self._active_at = now
        _recent[self] = None

    def turn_s(self, now: float) -> float:
        """Return how long one may compute in one turn: less where there are others to be let through."""
        return SHORT_TURN_S if any(stream is not self for stream in _recently_active(now)) else TURN_S

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        if self._begun_s is not None:
            self._used_s, self._used_at = self._use(now) + time.thread_time() - self._begun_s, now
            self._begun_s = None
            self._active_at = now
        while self._waiting:
            if self._waiting[0].done():  # who waited was cancelled
                self._waiting.popleft()
            elif self._yields(now):
                loop.call_later(QUIET_S, self._pass, loop)
                return
            else:
                self._passed_at = now
                loop.call_soon(self._begin)  # which comes right before what waits, and that right before the next pass
                self._waiting.popleft().set_result(None)
                loop.call_soon(self._pass, loop)
                return
        self._is_passing = False

    def _begin(self) -> None:
        self._begun_s = time.thread_time()

    def _use(self, now: float) -> float:
        return float(self._used_s * 0.5 ** ((now - self._used_at) / HALF_S))

    def _yields(self, now: float) -> bool:
        """Tell whether a sandbox that has used far less is in the midst of something."""
        used_s = self._use(now)
        if used_s < MUCH_S or now - self._passed_at > LONGEST_YIELD_S:
            return False
        share = used_s / FAR_MORE
        return any(
            stream is not self
            and (stream._is_passing or now - stream._active_at < QUIET_S)
            and stream._use(now) < share
            for stream in _recently_active(now)
        )


def _recently_active(now: float) -> Collection[Turns]:
    """Return the turns of sandboxes with traffic of late."""
    for one in [stream for stream in _recent if now - stream._active_at > RECENT_S]:
        del _recent[one]
    return _recent


_recent: dict[Turns, None] = {}


class Stream(Protocol):
    """Move bytes in both directions. Each method that waits is called by one task at a time."""

    async def receive(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end. Raises OSError when the connection broke."""
        ...

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises OSError when the other side does not take it."""
        ...

    def end_sending(self) -> None:
        """Send the end of this direction; the other one is still received."""
        ...

    def close(self) -> None:
        """Give the connection up. It must have no waiter any more."""
        ...


class SocketStream:
    """Move bytes over a connected socket, which it owns; `received_bytes` and `sent_bytes` count them.

    `turns` are shared with the streams that are to be served equally. `buffer_bytes` bounds the kernel's buffer of each
    direction, which is twice as much; 0 leaves it to the kernel.
    """

    def __init__(self, connected: socket.socket, turns: Turns | None = None, buffer_bytes: int = 0):
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if buffer_bytes else ():
            connected.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            # What we pass on was put together by its sender: to wait for more would only delay it.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._loop, self._turns = asyncio.get_running_loop(), turns or Turns()
        self.received_bytes = self.sent_bytes = 0

    def fileno(self) -> int:
        """Return the descriptor to wait on, -1 once it is closed."""
        return self._socket.fileno()

    async def receive(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end. Raises OSError when the connection broke."""
        data = await self._loop.sock_recv(self._socket, size)
        self.received_bytes += len(data)
        await self._turns.take()
        return data

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises OSError when the other side does not take it."""
        await self._loop.sock_sendall(self._socket, data)
        self.sent_bytes += len(data)

    def end_sending(self) -> None:
        """Send the end of this direction; the other one is still received."""
        with suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give the connection up. It must have no waiter any more."""
        if self._socket.fileno() >= 0:  # else the loop would watch the next socket with this number
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()


@asynccontextmanager
async def idle_limit(idle_s: float) -> AsyncIterator[Callable[[], None]]:
    """Give a function to note that bytes moved; raise TimeoutError once that has not happened for `idle_s`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(idle_s) as clock:

        def note() -> None:
            if not clock.expired():
                clock.reschedule(loop.time() + idle_s)

        yield note


# How the passing on of a connection ended: by both sides, since one broke off, or by the idle limit.
End = Literal["ended", "broken", "idle"]


async def splice(stream: Stream, peer: Stream, *, idle_s: float) -> End:
    """Carry the bytes of both directions until both have ended; then close both, as also when cancelled."""
    try:
        async with idle_limit(idle_s) as note, asyncio.TaskGroup() as group:
            group.create_task(_pass_on(stream, peer, note))
            group.create_task(_pass_on(peer, stream, note))
    except TimeoutError:
        return "idle"
    except ExceptionGroup as errors:
        if errors.split(OSError)[1] is not None:
            raise
        return "broken"
    finally:
        stream.close()
        peer.close()
    return "ended"


async def _pass_on(source: Stream, target: Stream, note: Callable[[], None]) -> None:
    with sharing() as size:
        while data := await source.receive(size()):
            note()
            await target.send(data)
            note()
    target.end_sending()


@contextmanager
def sharing() -> Iterator[Callable[[], int]]:
    """Count as one of the directions that share the buffer; give a function that says how much it may read now."""
    this = object()
    _directions.add(this)
    try:
        yield shared_read_size
    finally:
        _directions.discard(this)


def shared_read_size() -> int:
    """Return how many bytes each direction may read at once now."""
    return read_size(len(_directions) or 1)


def read_size(directions: int) -> int:
    """Return how many bytes each of so many directions may read at once."""
    return max(LEAST_READ_BYTES, min(MOST_READ_BYTES, HELD_BYTES // directions))
