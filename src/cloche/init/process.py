"""One process that init has started: its streams, its clock, its end, and its kept output.

It ends when its own first process does: processes that it leaves behind live on until the sandbox ends, and their
output is read and dropped, so that writing does not end them. Remaining processes of a session are killed. Of unread
output the last bytes of each stream are kept (`streams`).
"""

from __future__ import annotations

import errno
import os

from . import terminal, wire
from .loop import now
from .streams import INTO, Answers, Calls, Incoming, Outgoing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from .loop import Ends, Host, Loop

    class ProcessOwner(Protocol):
        """Hold all processes, and their channels."""

        ender: Ends

        def close(self, channel: int, **error: Any) -> None: ...
        def forget(self, process: Process) -> None: ...
        def note_awaiting(self, process: Process) -> None: ...
        def note_pace(self) -> None: ...


MOST_KEPT_EXITS = 128
MOST_SHOWN = 200  # characters of an argument list, in a list of processes
SIGHUP, SIGKILL, SIGTERM = 1, 9, 15


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
        self.tag, self.listed = str(order.get("tag") or ""), str(order.get("listed") or "")
        # It ends when its output does, and its time-out kills none of those that it has started.
        self.is_alone = self.awaits_output = bool(order.get("alone")) and not self.is_session
        self.master, self.has_terminal = -1, bool(order.get("terminal"))
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
            loop.call_at((self, self._kind_of_clock), self.started_at + timeout_s, self._end_in_time)

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

    def announce_running(self) -> None:
        """Announce it when its program runs, as far as that is known here; not at all if it cannot be started."""
        if getattr(self.forked, "reports_program", False):
            setattr(self.forked, "on_running", self.announce)  # noqa: B010 - not of every host
        else:
            self.announce()

    def announce(self) -> None:
        self._event("started", id=self.id, pid=self.pid, is_terminal=self.has_terminal)

    def _event(self, name: str, **body: Any) -> None:
        if self.channel:
            self.loop.send(wire.json_frame(wire.EVENT, self.channel, event=name, **body))

    def describe(self) -> dict[str, Any]:
        """Return a row of the list of processes."""
        return {
            "id": self.id, "pid": self.pid, "tag": self.tag, "command": self.shown,
            "started_s": now() - self.started_at,
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
        if number in (SIGKILL, SIGTERM):
            self.await_no_output()
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

    def await_no_output(self) -> None:
        """End when it ends itself, whoever has its output open."""
        if self.awaits_output:
            self.awaits_output = False
            if self.status is not None:
                self._conclude()

    def note_output_end(self) -> None:
        """Take note that one of its streams has ended."""
        if self.awaits_output and self.status is not None:
            self._conclude()

    def _end_in_time(self) -> None:
        if not self.is_alone:
            self.kill("timeout")
            return
        if self.status is None:
            self.cause = self.cause or "timeout"
        self.signal(SIGKILL, "process")

    def kill(self, cause: str) -> None:
        """Kill all that belongs to it, and look again until nothing is left."""
        if self.is_forgotten:  # its mark may be another's by now
            return
        if self.status is None and not self.cause:
            self.cause = cause
        self.loop.cancel((self, self._kind_of_clock))
        self.await_no_output()
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
        if not self.awaits_output:
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
        if self.awaits_output and any(stream.fd >= 0 for stream in self.outgoing.values()):
            self.owner.note_awaiting(self)
            return
        self.loop.cancel((self, self._kind_of_clock))
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
