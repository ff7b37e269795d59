"""One process that init has started: its streams, its clock, its end, and its kept output.

It ends when its own first process does: processes that it leaves behind live on until the sandbox ends, and their
output is read and dropped, so that writing does not end them. Remaining processes of a session are killed. Of unread
output the last `KEPT_BYTES` of each stream are kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import termios

from . import terminal, wire
from .loop import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from .loop import Ends, Host, Loop

    class ProcessOwner(Protocol):
        """Hold all processes, and their channels."""

        ender: Ends

        def close(self, channel: int, **error: Any) -> None: ...
        def forget(self, process: Process) -> None: ...
        def note_pace(self) -> None: ...


MOST_KEPT_EXITS = 128
KEPT_BYTES = 1 << 15  # of each unread stream
MOST_SHOWN = 200  # characters of an argument list, in a list of processes
# Of a program that prints line by line, what comes is read after such a rest, not once for each line.
REST_S, SMALL_BYTES = 0.002, 4096  # more than that at once is no such program's, and would fill the pipe meanwhile
PIPE_BYTES = 1 << 20  # the most that a pipe holds
MOST_LEFT_PIPES = 64  # of ended processes, whose orphans may still write
POLLIN, POLLOUT = select.POLLIN, select.POLLOUT
INTO = (wire.STDIN, wire.REQUESTS, wire.HOST_ANSWERS)
SIGHUP, SIGKILL = 1, 9


class Incoming:
    """Write the client's bytes for one stream to the process, as fast as it reads."""

    def __init__(self, process: Process, stream: int, fd: int):
        self.process, self.stream, self.fd = process, stream, fd
        self.pieces: list[bytes] = []
        self.held = 0
        self.others = 0  # bytes of it, that this client has not sent
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

    def __init__(self, process: Process, stream: int, fd: int):
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
        if 0 < self.read() < SMALL_BYTES and self.is_watched:
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

    def __init__(self, process: Process, stream: int, fd: int, printed: list[Outgoing]):
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


class Process:
    """Hold one process from its start until it is forgotten."""

    def __init__(self, loop: Loop, host: Host, channel: int, name: str, order: dict[str, Any], owner: ProcessOwner):
        self.loop, self.host, self.channel, self.id, self.owner = loop, host, channel, name, owner
        self.is_hidden, self.is_kept = bool(order.get("is_hidden")), bool(order.get("is_kept"))
        self.hangs_up = not self.is_kept  # its terminal is gone with its client
        self.shown = _shown(order)
        self.started_at = now()
        # That of what all else stands still for goes on: the guest may have stopped it.
        self._kind_of_clock = "bound" if order.get("pauses") else "clock"
        self.status: int | None = None
        self.cause = ""
        self.usage: dict[str, float] = {}
        self.error: dict[str, Any] = {}
        self.is_killing = self.is_forgotten = self.is_over = self.is_resting = self.is_full = False
        self.pids_hits = 0
        self.is_session = wire.REQUESTS in order.get("streams", ())
        self.master = -1
        timeout_s = seconds(order.get("timeout_s"))
        theirs, ours = self._make_streams(order)
        try:
            forked = host.fork(order, theirs)  # which a fork leaves by no exception of these
        except Exception as error:
            for fd in {*ours.values(), *theirs.values(), *({self.master} - {-1})}:
                os.close(fd)
            if getattr(error, "errno", 0) == errno.EAGAIN:
                raise wire.Refused("pids", "the limit on processes is reached") from None
            raise
        for fd in {*theirs.values()}:
            os.close(fd)
        self.forked, self.pid, self.mark = forked, forked.pid, forked.mark
        self.incoming = {number: Incoming(self, number, fd) for number, fd in ours.items() if number in INTO}
        self.outgoing: dict[int, Outgoing] = {}
        for number in sorted(ours):
            if number == wire.REPORT and self.is_session:
                self.outgoing[number] = Answers(self, number, ours[number], list(self.outgoing.values()))
            elif number not in INTO:
                kind = Calls if number == wire.HOST_CALLS else Outgoing
                self.outgoing[number] = kind(self, number, ours[number])
        if timeout_s is not None:
            loop.call_at((self, self._kind_of_clock), self.started_at + timeout_s, lambda: self.kill("timeout"))

    def _make_streams(self, order: dict[str, Any]) -> tuple[dict[int, int], dict[int, int]]:
        """Return the process's ends and init's, by the streams' numbers."""
        theirs: dict[int, int] = {}
        ours: dict[int, int] = {}
        try:
            if order.get("terminal"):
                self.master, slave = terminal.open_pair(*order["terminal"])
                ours = {number: os.dup(self.master) for number in (wire.STDIN, wire.STDOUT)}
                return dict.fromkeys((0, 1, 2), slave), ours
            for number in order.get("streams", ()):
                reading, writing = os.pipe2(os.O_CLOEXEC)
                mine, their_end = (writing, reading) if number in INTO else (reading, writing)
                os.set_blocking(mine, False)
                theirs[number], ours[number] = their_end, mine
            for number in (0, 1, 2):
                if number not in theirs:
                    theirs[number] = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            for fd in {*theirs.values(), *ours.values()}:
                os.close(fd)
            raise
        return theirs, ours

    def announce(self) -> None:
        self._event("started", id=self.id, pid=self.pid)

    def _event(self, name: str, **body: Any) -> None:
        if self.channel:
            self.loop.send(wire.json_frame(wire.EVENT, self.channel, event=name, **body))

    def describe(self) -> dict[str, Any]:
        """Return a row of the list of processes."""
        return {
            "id": self.id, "pid": self.pid, "command": self.shown, "started_s": now() - self.started_at,
            "status": self.status, "cause": self.cause, "is_kept": self.is_kept, "is_attached": self.channel > 0,
            "printed": sum(stream.total for stream in self.outgoing.values()),
            "foreground": terminal.foreground(self.master) if self.master >= 0 else 0,
        }  # fmt: skip

    # The client's requests.

    def ask(self, body: dict[str, Any]) -> None:
        action = body.get("do")
        if action == "signal":
            self.signal(int(body["number"]), str(body.get("to", "process")))
        elif action == "resize" and self.master >= 0 and self.status is None:
            terminal.resize(self.master, int(body["rows"]), int(body["columns"]))
        elif action == "kill":
            self.kill(str(body.get("cause", "")))
        elif action == "rest":
            self.is_resting = bool(body.get("is_resting", True))
            self.owner.note_pace()
        elif action == "keep":
            self.is_kept = bool(body.get("is_kept", True))

    def take(self, stream: int, data: memoryview) -> None:
        if stream in self.incoming:
            for outgoing in self.outgoing.values():  # the answer to this input shall come at once
                outgoing.end_rest()
            self.incoming[stream].take(data)

    def take_end(self, stream: int) -> None:
        if stream not in self.incoming:
            return
        if self.master >= 0:  # a terminal has no end of file but Ctrl-D at the beginning of a line
            self.incoming[stream].add(b"\4")
        else:
            self.incoming[stream].end()

    def grant(self, stream: int, count: int) -> None:
        if stream in self.outgoing:
            self.outgoing[stream].grant(count)
            if self.status is not None:
                self._conclude()
            elif self.is_session:
                self.outgoing[wire.REPORT].pass_on()

    def leave(self) -> None:
        """Go on without a client, or end."""
        self.channel = 0
        for stream in self.outgoing.values():
            stream.take_back()
        if self.status is None and not self.is_kept:
            self.kill("")
        elif self.status is None and self.master >= 0 and self.hangs_up:
            self.signal(SIGHUP, "group")
        for stream in self.outgoing.values():
            stream.go_on()
        if self.status is not None:
            self._conclude()

    def forget_sent(self) -> None:
        """Take all that was sent as read: another client takes over from one that is there."""
        for stream in self.outgoing.values():
            stream.forget_sent()

    def attach(self, channel: int) -> None:
        """Be this client's from now on."""
        self.channel = channel
        self.announce()
        for incoming in self.incoming.values():
            incoming.attach()
        for stream in self.outgoing.values():
            stream.attach()
        if self.status is not None:
            self._conclude()

    def signal(self, number: int, to: str) -> None:
        """Send a signal to the process, to its group (that of a terminal's foreground), or to all that is its."""
        if self.status is not None or not 0 < number < 65:
            return
        try:
            if to == "tree":
                self.owner.ender.signal(self.mark.number, number)
            elif to == "group":
                group = terminal.foreground(self.master) if self.master >= 0 else 0
                self.forked.signal(number, group or self.pid)
            else:
                self.forked.signal(number)
        except (ProcessLookupError, PermissionError):
            pass  # it has gone meanwhile, or has not yet its own group

    def kill(self, cause: str) -> None:
        """Kill all that belongs to it, and look again until nothing is left."""
        if self.is_forgotten:  # its mark may be another's by now
            return
        if self.status is None and not self.cause:
            self.cause = cause
        self.loop.cancel((self, self._kind_of_clock))
        self.is_killing = True
        self.owner.ender.end(self.mark.number, self._note_nothing_left)

    def _note_nothing_left(self) -> None:
        self.is_killing = False
        if self.is_forgotten:
            self.mark.close()
        elif self.status is not None and self.is_session:
            self.is_over = True
            self._conclude()

    def release(self) -> None:
        """Drop all references to it. Until then the mark is held, so that its number is not reused."""
        self.is_forgotten = True
        self.incoming.clear()  # which hold us: nothing is left for the collector of garbage, which comes late
        self.outgoing.clear()
        if not self.is_killing:
            self.mark.close()

    # Its end.

    def note_exit(self, status: int, usage: Any) -> None:
        """Take note of its end."""
        self.loop.cancel((self, self._kind_of_clock))
        self.error = self.forked.conclude()
        self.usage = {
            "wall_s": now() - self.started_at, "user_s": usage.ru_utime, "system_s": usage.ru_stime,
            "most_kib": usage.ru_maxrss,
        }  # fmt: skip
        if status and not self.cause and not self.is_hidden:
            self.is_full = self.host.is_full()
            self.host.why_failed(lambda cause, hits: self._exited(status, cause, hits))
        else:
            self._exited(status, "", 0)

    def _exited(self, status: int, cause: str, pids_hits: int) -> None:
        """Go on when the reason of its end is known. `cause` applies to a process that init did not kill itself."""
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == SIGKILL
        self.status, self.cause, self.pids_hits = status, self.cause or (cause if is_killed else ""), pids_hits
        for stream in self.incoming.values():
            stream.close()
        if self.master >= 0:
            os.close(self.master)
            self.master = -1
        if self.is_session:  # all that it has started ends with it
            self.kill("")
        self._conclude()

    def _conclude(self) -> None:
        """Report the end after all output, and forget the process; for a session, when its whole tree has ended."""
        if self.is_session and not self.is_over:
            return
        finished = [stream.finish() for stream in self.outgoing.values()]
        if not all(finished):
            return
        for outgoing in self.outgoing.values():
            outgoing.drain()
        if self.channel:
            if not self.error:
                report = {"usage": self.usage, "dropped": self._dropped(), "denied": self.forked.denied}
                report |= {"pids_hits": self.pids_hits, "is_full": self.is_full}
                self._event("exit", status=self.status, cause=self.cause, **report)
            channel, self.channel = self.channel, 0
            for outgoing in self.outgoing.values():
                outgoing.forget_sent()
            self.owner.close(channel, **self.error)
        self.owner.forget(self)

    def _dropped(self) -> int:
        return sum(stream.dropped for stream in self.outgoing.values())


def seconds(value: object) -> float | None:
    """Return a time-out in seconds. Raises ValueError for a malformed one, before a process is started."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("a malformed time-out")
    return float(value)


def _shown(order: dict[str, Any]) -> str:
    argv = order.get("argv") or (["python"] if order.get("python") else [])
    text = " ".join(map(str, argv))
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"
