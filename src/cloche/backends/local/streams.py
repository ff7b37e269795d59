"""The pipes of a guest, at the caller's end: of one run (`Pipes`), and of a session with its link (`SessionPipes`).

A guest may write faster than its caller reads. That must neither delay the kill nor grow the caller's memory. So
reading never stops; beyond the output limit only a head and a tail are kept, and beyond the flood limit nothing.

Theory of operation of a session's link: the guest writes only to pipes, never to a socket. An AF_UNIX socket can carry
descriptors, and a receiver without room for them closes them (unix(7), MSG_CTRUNC). If one is a TCP socket with
SO_LINGER, close(2) blocks the receiving thread for a time that the guest chose. Only the caller sends descriptors, for
a clone. So cells and descriptors travel to the guest over a socket whose reverse direction is shut down before the
guest gets it: the kernel then refuses anything sent towards the caller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloche.core.events import Event, HeadTail, OutputChunk, Sink, Started, Stream, discard, kept_between
from cloche.core.frames import MAX_REPORT_BYTES, GuestReport, GuestReportReader, encode
from cloche.core.functions import OfferedFunctions
from cloche.core.limits import Limits
from cloche.core.result import KillCause
from cloche.core.suppressed import suppress_logged
from cloche.jail.syscalls import FORK_FLAGS

from ..cell_outputs import Printed
from ..session import SessionLink
from ..session_languages import Codec
from .call_pipes import CallPipes, QuietSocket

log = logging.getLogger("cloche.jail")
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
CHUNK_BYTES = 65_536
DRAIN_S = 0.3
PIPE_BYTES = 1 << 20  # the default of /proc/sys/fs/pipe-max-size (pipe(7))
LISTEN_DELAY_S = 0.003  # a short program's output is read once, at its end: add_reader costs more than read
# A guest that prints line by line is read again after this pause, not once per line. A line after a silent pause is
# passed on at once.
REST_S = 0.002
SMALL_BYTES = 4096  # reads below this size are followed by a pause; a guest that fills the pipe must not wait
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008  # F_SEAL_SEAL, _SHRINK, _GROW, _WRITE
_F_ADD_SEALS = 1033
SESSION_CHUNK_BYTES = 1 << 18
MOST_PIECES = 16


class StreamReader:
    """Read one pipe to its end on the running event loop."""

    def __init__(
        self,
        fd: int,
        *,
        limit: int,
        flood_limit: int,
        on_chunk: Callable[[bytes], None],
        on_flood: Callable[[], None],
    ):
        self.output, self._limit = HeadTail(limit), limit
        self._fd, self._flood_limit = fd, flood_limit
        self._on_chunk, self._on_flood = on_chunk, on_flood
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] | None = None
        self._is_listening = self.has_ended = self.is_resting = False
        os.set_blocking(fd, False)

    @property
    def ended(self) -> asyncio.Future[None]:
        """Return a future that is done at the stream's end. It is made on first use, because few callers wait for
        it.
        """
        if self._ended is None:
            self._ended = self._loop.create_future()
            if self._fd < 0:
                self._ended.set_result(None)
        return self._ended

    def listen(self) -> None:
        """Read data as it arrives, from now on."""
        if not self._is_listening and self._fd >= 0:
            self._is_listening = True
            self._loop.add_reader(self._fd, self._read_then_rest)

    def _read_then_rest(self) -> None:
        """Read once, then pause after a small read: a guest that prints line by line is read in batches."""
        before = self.output.total
        self._read()
        if self._fd >= 0 and self.output.total - before < SMALL_BYTES:
            self.is_resting = True
            self._loop.remove_reader(self._fd)
            self._loop.call_later(REST_S, self._go_on)

    def _go_on(self) -> None:
        self.is_resting = False
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._read_then_rest)

    def renew(self) -> None:
        """Start a new buffer for a stream that outlives a run; the buffer keeps the latest output."""
        self._on_chunk, self.output = ignore, kept_between(self._limit)

    def hand_on_to(self, on_chunk: Callable[[bytes], None]) -> None:
        """Pass data to `on_chunk` from now on, starting with the data buffered since `renew`."""
        self._on_chunk, self.output = on_chunk, self.output.followed(self._limit)
        if before := self.output.joined():
            on_chunk(before)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        else:
            self._take(data)

    def finish(self, *, is_quiet: bool = False) -> bool:
        """Read the buffered data without waiting; tell whether the stream has ended or, with `is_quiet`, has no
        more writers.

        At most one full pipe is read: a guest that still writes faster than this loop reads would never let it return.
        """
        last = self.output.total + PIPE_BYTES
        while self._fd >= 0 and self.output.total < last:
            before = self.output.total
            self._read()
            if self.output.total == before and self._fd >= 0:
                return is_quiet
        return self._fd < 0

    def _take(self, data: bytes) -> None:
        was_flooded = self.output.total > self._flood_limit
        self.output.add(data)
        if was_flooded:
            return
        self._on_chunk(data)
        if self.output.total > self._flood_limit:
            self._on_flood()

    def close(self) -> None:
        """Stop reading and close the pipe; the stream counts as ended."""
        if self._fd >= 0:
            if self._is_listening:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd, self.has_ended = -1, True
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class StreamSet:
    """Hold the pipes that a guest writes to: the caller's ends, and the guest's until they are passed on. Close it
    in any case.
    """

    def __init__(self) -> None:
        self._guest: list[int] = []
        self._readers: dict[str, StreamReader] = {}
        self.calls: CallPipes | None = None

    def _new_pipe(self) -> int:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        self._guest.append(theirs)
        return ours

    def _add_reader(
        self, name: str, limit: int, flood_limit: int, on_chunk: Callable[[bytes], None], on_flood: Callable[[], None]
    ) -> None:
        self._readers[name] = StreamReader(
            self._new_pipe(), limit=limit, flood_limit=flood_limit, on_chunk=on_chunk, on_flood=on_flood
        )

    def close_guest_ends(self) -> None:
        """Close the guest's ends, so that the pipes end with the guest."""
        while self._guest:
            os.close(self._guest.pop())
        if self.calls is not None:
            self.calls.close_guest_ends()

    async def drain(self, *, is_quiet: bool = False) -> None:
        """Read the data left in the pipes, for a bounded time although every writer is dead.

        With `is_quiet` the writers have stopped for good, but may still hold their ends open.
        """
        self.close_guest_ends()
        open_ones = [reader for reader in self._readers.values() if not reader.finish(is_quiet=is_quiet)]
        for reader in open_ones:
            reader.listen()
        if open_ones:
            await asyncio.wait([reader.ended for reader in open_ones], timeout=DRAIN_S)

    def close(self) -> None:
        if self.calls is not None:
            self.calls.close()
        self.close_guest_ends()
        for reader in self._readers.values():
            if not reader.has_ended:
                reader.close()

    def kept(self, stream: Stream) -> bytes:
        return self._readers[stream].output.joined()

    @property
    def is_truncated(self) -> bool:
        """Tell whether output was dropped."""
        return self._readers["stdout"].output.is_truncated or self._readers["stderr"].output.is_truncated


def to_sink(stream: Stream, sink: Sink) -> Callable[[bytes], None]:
    """Return a function that passes the chunks of a stream to `sink`."""
    return ignore if sink is discard else lambda data: sink(OutputChunk(stream=stream, data=data))


def ignore(data: bytes) -> None:
    """Drop a chunk, which is in the bounded buffer already."""


class Pipes(StreamSet):
    """Hold the descriptors of one run. Use from a running event loop, and close in any case."""

    def __init__(
        self,
        stdin: bytes,
        limits: Limits,
        kill: Callable[[KillCause], None],
        sink: Sink,
        functions: OfferedFunctions | None = None,
    ):
        super().__init__()
        self._report_reader = GuestReportReader()
        self._listening: asyncio.TimerHandle | None = None

        def on_flood() -> None:
            kill(KillCause.OUTPUT_LIMIT)

        try:
            self._guest.append(_stdin(stdin))
            for stream in _STREAMS:
                self._add_reader(stream, limits.output_bytes, limits.flood_bytes, to_sink(stream, sink), on_flood)
            self._add_reader("value", 1, MAX_REPORT_BYTES, self._value_reader(kill), on_flood)
            self.calls = CallPipes(functions) if functions is not None else None
        except BaseException:
            self.close()
            raise

    def _value_reader(self, kill: Callable[[KillCause], None]) -> Callable[[bytes], None]:
        """Return a callback that parses the guest's report, and kills a run whose report is too large."""
        reader = self._report_reader

        def read(data: bytes) -> None:
            was_refused = bool(reader.refused)
            reader.feed(data)
            if reader.refused and not was_refused:
                kill(KillCause.OUTPUT_LIMIT)

        return read

    def guest_ends(self) -> tuple[int, ...]:
        """Return the guest's ends: standard input, output, error, the pipe of the report; those of calls."""
        return (*self._guest, *(self.calls.guest_ends() if self.calls is not None else ()))

    def notes(self) -> Mapping[str, Any]:
        """Return the entries for the result's meta about the report, and about calls of the caller's functions."""
        return {**self.report().notes(), **(self.calls.calls.notes() if self.calls is not None else {})}

    def listen(self) -> None:
        """Read data as it arrives, from now on; until then it waits in the pipes."""
        for reader in self._readers.values():
            reader.listen()

    def listen_soon(self, seconds: float = LISTEN_DELAY_S) -> None:
        """Start listening after `seconds`: the output of a shorter program is read once, at its end."""
        if self._listening is None:
            self._listening = asyncio.get_running_loop().call_later(seconds, self.listen)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        super().close()

    def report(self) -> GuestReport:
        """Return the guest's report: its value and displayed outputs."""
        return self._report_reader.report()


def _stdin(data: bytes) -> int:
    """Return a descriptor of a sealed memfd with `data`: unlike a pipe, writing it never blocks the caller."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    import fcntl

    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.close(fd)
        raise
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def started_first(sink: Sink) -> Sink:
    """Hold output back until `Started` was passed on, which travels another way and may arrive later."""
    held: list[Event] | None = []

    def hand_on(event: Event) -> None:
        nonlocal held
        if held is None:
            sink(event)
        elif not isinstance(event, Started):
            held.append(event)
        else:
            early, held = held, None
            for queued in (event, *early):
                sink(queued)

    return hand_on


class SessionPipes(StreamSet):
    """Hold the caller's ends of one interpreter's link and streams. Use from one event loop, and close in any case.

    `link` parses the interpreter's answers; `link.on_flood` is also called for too much output.
    """

    def __init__(
        self,
        limits: Limits,
        codec: Codec,
        on_flood: Callable[[], None],
        functions: OfferedFunctions | None = None,
    ):
        super().__init__()
        self._loop = asyncio.get_running_loop()
        ours, self._theirs = socket.socketpair()
        self._socket = QuietSocket(ours)
        self._socket.shutdown(socket.SHUT_RD)
        self._socket.setblocking(False)
        self._answers = -1  # the reading end of the guest's answers
        self.link = SessionLink(codec, on_flood, on_lost=self._close_link, on_other=self._take)
        self.cloned: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.wait_status: int | None = None
        try:
            self._guest.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            for stream in _STREAMS:
                self._add_reader(stream, limits.output_bytes, limits.flood_bytes, ignore, self._flood)
                self._readers[stream].listen()
            self._answers = self._new_pipe()
            os.set_blocking(self._answers, False)
            self.calls = CallPipes(functions) if functions is not None else None
        except BaseException:
            self.close()
            raise
        self._loop.add_reader(self._answers, self._listen)

    def _flood(self) -> None:
        self.link.on_flood()  # looked up late, because a clone's callback is set later

    def guest_ends(self) -> list[int]:
        """Return the guest's ends: standard input, output, error, the pipe of its answers, its link; those of calls."""
        return [*self._guest, self._theirs.fileno(), *(self.calls.guest_ends() if self.calls is not None else ())]

    def close_guest_ends(self) -> None:
        super().close_guest_ends()
        self._theirs.close()

    def holds(self) -> list[str]:
        """Return the names of the guest's ends as /proc/PID/fd shows them, such as `pipe:[123]`."""
        pipes, sockets = self._guest[1:], [self._theirs.fileno()]
        if self.calls is not None:
            calls, answers = self.calls.guest_ends()
            pipes, sockets = [*pipes, calls], [*sockets, answers]
        return [*(_name(fd, "socket") for fd in sockets), *(_name(fd, "pipe") for fd in pipes)]

    async def ask_for_clone(
        self, request_id: int, clone_pipes: SessionPipes, timeout_s: float
    ) -> asyncio.Future[dict[str, Any]]:
        """Ask the interpreter to clone itself; the clone gets the guest's ends of `clone_pipes`.

        An interpreter that does not read the request within `timeout_s` counts as lost.
        """
        answer = self.link.expect(request_id)
        sending = self.send(encode({"op": "fork", "id": request_id, "flags": FORK_FLAGS}))
        if sending is not None:
            with suppress_logged(log, "the interpreter does not read its input", TimeoutError):
                async with asyncio.timeout(timeout_s):  # `wait_for` may drop a cancellation
                    await sending
        _, *ends = clone_pipes.guest_ends()
        with suppress_logged(log, "the interpreter is gone; the answer will report that", OSError):
            socket.send_fds(self._socket, [b"f"], ends)
        return answer

    def keep(self, path: str, text: str) -> Awaitable[None] | None:
        """Have the interpreter write a file unless it exists; return an awaitable as `send` does."""
        return self.send(encode({"op": "keep", "path": path, "text": text}))

    def go(self, *, is_fork: bool) -> None:
        """Let a clone continue once it has its namespaces and mounts; it answers when it is ready."""
        with suppress_logged(log, "the clone is gone; its link will report that", OSError):
            self._socket.send(encode({"op": "go", "is_fork": is_fork}))

    def send(self, data: bytes) -> Awaitable[None] | None:
        """Send `data`; return an awaitable for the remainder if the socket is full. Cancelling that loses the link."""
        try:
            sent = self._socket.send(data) if len(data) < SESSION_CHUNK_BYTES else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.link.lose(f"the link is gone: {error}")
            return None
        return self._send_rest(memoryview(data)[sent:]) if sent < len(data) else None

    async def _send_rest(self, data: memoryview) -> None:
        sending = self._loop.create_task(self._loop.sock_sendall(self._socket, data))
        try:  # a guest that stops reading may have closed its answers but not the link
            await asyncio.wait((sending, self.link.lost), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError as error:
            self.link.lose(f"the link is gone: {error}")
        except asyncio.CancelledError:
            self.link.lose("a cell was sent only in part")
            raise
        finally:
            sending.cancel()

    def begin(self, sink: Sink) -> None:
        """Pass output on as it arrives, starting with the output since the last `collect`."""
        for stream in _STREAMS:
            self._readers[stream].hand_on_to(to_sink(stream, sink))

    def catch_up(self) -> None:
        for reader in self._readers.values():
            reader.finish()

    def collect(self, *, is_up_to_date: bool) -> Printed:
        """Return the output since the last `collect`, and empty the buffers.

        `is_up_to_date` says that the loop has just handled every ready descriptor. Then pipes without buffered output
        are empty, unless a reader pauses.
        """
        readers = self._readers.values()
        if not is_up_to_date or any(reader.output.total or reader.is_resting for reader in readers):
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
        """Read the last answers of an interpreter that has ended, although another process may hold its end of the
        link.
        """
        # More than the socket holds; a guest that still writes must not keep this loop busy.
        for _ in range(MOST_PIECES):
            if self.link.lost.done() or not self._listen():
                break
        self.link.lose(reason)

    def _listen(self) -> bool:
        try:
            data = os.read(self._answers, SESSION_CHUNK_BYTES)
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
        """Handle the messages about clones, and those of the pid 1 around one."""
        kind = frame.get("op")
        if kind == "cloned" and not self.cloned.done():
            self.cloned.set_result(frame)
        elif kind == "gone" and isinstance(frame.get("wait_status"), int):
            self.wait_status = frame["wait_status"] & 0xFFFF

    def _close_link(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)  # of a partly sent cell: the descriptor's number is reused soon
        self._socket.close()
        if self._answers >= 0:
            self._loop.remove_reader(self._answers)
            os.close(self._answers)
            self._answers = -1


def _name(fd: int, kind: str) -> str:
    return f"{kind}:[{os.fstat(fd).st_ino}]"
