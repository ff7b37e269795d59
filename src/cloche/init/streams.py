"""The streams of one process at init's end: input at its pace, output at the client's. Of unread output, the last
`KEPT_BYTES` of each stream are kept.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios

from . import wire
from .loop import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from .loop import Loop

    class Feeder(Protocol):
        """Hold bytes of input that are to be granted when the process has read them."""

        def settle(self) -> None: ...

    class StreamOwner(Protocol):
        """Be the process of streams: its loop, and its channel, 0 without a client."""

        loop: Loop
        channel: int

        def note_output_end(self) -> None: ...


KEPT_BYTES = 1 << 15  # of each unread stream
# Of a program that prints line by line, what comes is read after such a rest, not once for each line.
REST_S, SMALL_BYTES = 0.002, 4096  # more than that at once is no such program's, and would fill the pipe meanwhile
PIPE_BYTES = 1 << 20  # the most that a pipe holds
MOST_LEFT_PIPES = 64  # of ended processes, whose orphans may still write
POLLIN, POLLOUT = select.POLLIN, select.POLLOUT
INTO = (wire.STDIN, wire.REQUESTS, wire.HOST_ANSWERS)


class Incoming:
    """Write the client's bytes for one stream to the process, as fast as it reads."""

    def __init__(self, process: StreamOwner, stream: int, fd: int):
        self.process, self.stream, self.fd = process, stream, fd
        self.pieces: list[bytes] = []
        self.held = 0
        self.others = 0  # bytes of it, that this client has not sent
        self.feeders: set[Feeder] = set()  # other clients, whose bytes are among them
        self.is_ending = self.is_waiting = False

    def take(self, data: memoryview) -> None:
        self.held += len(data)
        if self.held - self.others > wire.WINDOW_BYTES:
            raise wire.WireError("data exceeds the window")
        if self.fd < 0:  # the process has closed it
            self._passed(len(data))
            return
        self.pieces.append(bytes(data))
        if not self.is_waiting:
            self.write()

    def add(self, data: bytes) -> None:
        """Write bytes that no client has sent, and that no window counts."""
        self.others += len(data)
        self.take(memoryview(data))

    def end(self) -> None:
        self.is_ending = True
        if not self.pieces:
            self.close()

    def write(self, _: int = 0) -> None:
        passed = 0
        while self.pieces:
            piece = self.pieces[0]
            try:
                sent = os.write(self.fd, piece)
            except BlockingIOError:
                break
            except OSError:  # the process has closed it
                passed = self.held
                self.close()
                break
            passed += sent
            if sent < len(piece):
                self.pieces[0] = piece[sent:]
            else:
                self.pieces.pop(0)
        loop = self.process.loop
        if self.pieces and not self.is_waiting:
            self.is_waiting = True
            loop.watch(self.fd, POLLOUT, self.write)
        elif not self.pieces and self.is_waiting:
            self.is_waiting = False
            loop.ignore(self.fd)
        self._passed(passed)
        if self.is_ending and not self.pieces:
            self.close()

    def attach(self) -> None:
        """Have a client whose window is new."""
        self.others = self.held

    def _passed(self, count: int) -> None:
        self.held -= count
        of_others = min(count, self.others)
        self.others -= of_others
        count -= of_others
        while self.feeders and not self.held:
            self.feeders.pop().settle()
        if count and self.process.channel:
            self.process.loop.send(wire.grant_frame(self.process.channel, self.stream, count))

    def close(self) -> None:
        if self.fd >= 0:
            if self.is_waiting:
                self.process.loop.ignore(self.fd)
            os.close(self.fd)
        self.fd, self.pieces, self.is_waiting = -1, [], False


class Outgoing:
    """Send a process's output of one stream to the client, or keep the end of it."""

    def __init__(self, process: StreamOwner, stream: int, fd: int):
        self.process, self.stream, self.fd = process, stream, fd
        self.window = wire.WINDOW_BYTES
        self.tail = bytearray()
        self.unread = bytearray()  # sent bytes that the client has not consumed yet, the last of them
        self.dropped = self.total = 0
        self.due = 0  # bytes that had been written when they were counted, and were not read yet
        self.left = -1  # bytes that are still read after the process has ended, -1 while it lives
        self.is_watched = self.is_resting = False
        self.go_on()

    @property
    def is_attached(self) -> bool:
        return self.process.channel > 0

    def go_on(self) -> None:
        """Read from now on, if the output has a receiver."""
        if self.fd < 0 or self.is_resting:
            return
        may = not self.is_attached or (self.window > 0 and not self.process.loop.is_full)
        if may and not self.is_watched:
            self.process.loop.watch(self.fd, POLLIN, self.take_event)
            self.is_watched = True
        elif not may:
            if self.is_watched:
                self.process.loop.ignore(self.fd)
                self.is_watched = False
            if self.window > 0:
                self.process.loop.go_on_later(self.go_on)

    def take_event(self, _: int) -> None:
        """Read once, and not again for a moment if it was little: more may be coming line by line."""
        count = self.read()
        if self.fd < 0:
            self.process.note_output_end()
        elif 0 < count < SMALL_BYTES and self.is_watched:
            self.process.loop.ignore(self.fd)
            self.is_watched, self.is_resting = False, True
            self.process.loop.call_at((self, "rest"), now() + REST_S, self.end_rest)

    def end_rest(self) -> None:
        """Go on after a rest."""
        self.is_resting = False
        self.go_on()

    def read(self) -> int:
        """Read once; return how many bytes came, 0 for none."""
        max_bytes = min(wire.MOST_DATA, self.window) if self.is_attached else wire.MOST_DATA
        try:
            data = os.read(self.fd, max_bytes)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: no process has the terminal open any more
            data = b""
        if not data:
            self.close()
            if self.is_attached:
                self.process.loop.send(wire.frame(wire.END, self.process.channel, bytes((self.stream,))))
            return 0
        self.due -= len(data)
        self.total += len(data)
        if self.is_attached:
            self._send(data)
        else:
            self._keep(data)
        self.go_on()
        return len(data)

    def _send(self, data: bytes | memoryview) -> None:
        self.window -= len(data)
        self.unread += data
        del self.unread[:-KEPT_BYTES]
        self.process.loop.send(wire.data_frame(self.process.channel, self.stream, data))

    def _keep(self, data: bytes) -> None:
        self.tail += data
        over = len(self.tail) - KEPT_BYTES
        if over > 0:
            del self.tail[:over]
            self.dropped += over

    def attach(self) -> None:
        """Send the kept output, with a new window, and go on."""
        self.take_back()
        tail, self.tail = bytes(self.tail), bytearray()
        for offset in range(0, len(tail), wire.MOST_DATA):
            self._send(tail[offset : offset + wire.MOST_DATA])
        self.go_on()

    def pass_on(self) -> None:
        """Send held output; here there is never any."""

    def take_back(self) -> None:
        """Keep the output that was sent to a lost client without being consumed."""
        self.dropped += max(0, wire.WINDOW_BYTES - self.window - len(self.unread))
        self.tail, self.unread, self.window = self.unread + self.tail, bytearray(), wire.WINDOW_BYTES
        del self.tail[:-KEPT_BYTES]

    def forget_sent(self) -> None:
        """Take all that was sent as read: the client has been told of the end."""
        self.unread, self.window = bytearray(), wire.WINDOW_BYTES

    def grant(self, count: int) -> None:
        self.window += count
        waiting = max(0, wire.WINDOW_BYTES - self.window)
        if len(self.unread) > waiting:
            del self.unread[: len(self.unread) - waiting]
        self.go_on()
        if self.left >= 0:
            self.finish()

    def count(self) -> None:
        """Take note of how much has been written by now, and not been read."""
        if self.fd >= 0:
            self.due = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)))[0]

    def catch_up(self) -> bool:
        """Read the output that was counted, as far as the client takes it; tell whether that was all."""
        while self.fd >= 0 and self.due > 0 and (not self.is_attached or self.window > 0):
            self.due = self.due if self.read() else 0
        return self.fd < 0 or self.due <= 0

    def finish(self) -> bool:
        """Read the remaining output of an ended process, as far as it is taken; tell whether that was all.

        No more than a pipe can hold: other processes may still write.
        """
        if self.left < 0:
            self.left = PIPE_BYTES
        while self.fd >= 0 and self.left > 0 and (not self.is_attached or self.window > 0):
            count = self.read()
            self.left = self.left - count if count else 0
        return self.fd < 0 or self.left <= 0

    def close(self) -> None:
        if self.fd >= 0:
            if self.is_watched:
                self.process.loop.ignore(self.fd)
            os.close(self.fd)
            self.fd, self.is_watched = -1, False

    def drain(self) -> None:
        """Read and drop the later output of other processes."""
        if self.fd < 0:
            return
        if self.is_watched:
            self.process.loop.ignore(self.fd)
        fd, self.fd, self.is_watched = self.fd, -1, False
        Drain(self.process.loop, fd)


class Calls(Outgoing):
    """Send calls of the client's functions: at once, and no more when the process has ended."""

    def take_event(self, _: int) -> None:
        self.read()

    def finish(self) -> bool:
        """Tell that nothing remains to be read: there is no one to take an answer."""
        return True


class Answers(Outgoing):
    """Send a session's answers, each after all output that was printed before it."""

    def __init__(self, process: StreamOwner, stream: int, fd: int, printed: list[Outgoing]):
        self.printed = printed
        self.held: bytes | memoryview = b""
        super().__init__(process, stream, fd)

    def _send(self, data: bytes | memoryview) -> None:
        self.held = data
        for stream in self.printed:
            stream.count()
        self.pass_on()

    def pass_on(self) -> None:
        """Send the held answer, if everything that was printed before it has been sent."""
        caught_up = [stream.catch_up() for stream in self.printed]
        if not self.held or not all(caught_up):
            return
        data, self.held = self.held, b""
        if self.is_attached:
            super()._send(data)
        else:
            self._keep(bytes(data))
        self.go_on()

    def go_on(self) -> None:
        """Read from now on, unless something is held."""
        if not self.held:
            super().go_on()
        elif self.is_watched:
            self.process.loop.ignore(self.fd)
            self.is_watched = False

    def take_event(self, _: int) -> None:
        """Read once: an answer is sent without delay."""
        self.read()

    def read(self) -> int:
        """Read once, unless something is held."""
        return 0 if self.held else super().read()

    def finish(self) -> bool:
        """Read the remaining answers of an ended session, after all its other output; tell whether that was all."""
        finished = [stream.finish() for stream in self.printed]
        if not all(finished):
            return False
        self.pass_on()
        return super().finish()

    def attach(self) -> None:
        """Send the kept answers, then the held one."""
        super().attach()
        self.pass_on()


class Drain:
    """Read and drop the output of processes that outlived the one a pipe was made for."""

    count = 0

    def __init__(self, loop: Loop, fd: int):
        if Drain.count >= MOST_LEFT_PIPES:
            os.close(fd)
            return
        Drain.count += 1
        self.loop, self.fd = loop, fd
        loop.watch(fd, POLLIN, self.read)

    def read(self, _: int) -> None:
        try:
            data = os.read(self.fd, wire.MOST_DATA)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            Drain.count -= 1
            self.loop.ignore(self.fd)
            os.close(self.fd)
