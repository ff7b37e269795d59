"""The client's requests to init: operations, each on a channel; and the ends of processes.

A jail and a container differ in the `Host` that it gets.
"""

from __future__ import annotations

import os
import time

from . import wire
from .control import Control
from .lifetime import Lifetime
from .loop import POLLIN, Loop, now
from .names import unpack
from .ports import Listing, connect
from .process import MOST_KEPT_EXITS, Process, seconds
from .tree import Ender

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from .loop import Host

    class Channel(Protocol):
        """Hold one operation of the client's."""

        def ask(self, body: dict[str, Any]) -> None: ...
        def take(self, stream: int, data: memoryview) -> None: ...
        def take_end(self, stream: int) -> None: ...
        def grant(self, stream: int, count: int) -> None: ...
        def leave(self) -> None: ...


_signal: Any = __import__("_signal")  # `signal` would take as long to load as all the rest of us
WNOHANG, SIGKILL, SIGTERM, SIGCONT, SIGSTOP = os.WNOHANG, 9, 15, 18, 19
MOST_REAPED = 64  # in one turn: those that others leave behind may die as fast as they are reaped
TICK_S = 0.001  # between two looks at a clock that moves on every few milliseconds
GONE_S = 0.02  # between two looks at whether all that was asked to end is gone
ROOM_S = 0.02  # between two looks at whether a process that waits for room can be started
MOST_AWAITING = 64  # ended processes whose output others may still write
MOST_LISTED = 1 << 18  # characters of the descriptions in one list of processes
MOST_BEHIND_S = 0.5  # how long is looked, where that clock was set back meanwhile
REALTIME_COARSE = 5  # the clock of linux/time.h by which file systems tell when a file changed


class Server:
    """Serve one client until it closes its end. Any number of processes may run meanwhile."""

    def __init__(self, link: int, host: Host, greeting: dict[str, Any], out: int = -1, *, blocks: bool = False):
        """Take the descriptor of the client, or one to read and another `out` to write; see `Loop` for `blocks`."""
        self.host = host
        self.loop = Loop(link, self.receive, out, blocks=blocks)
        self.ender = host.ender or Ender(self.loop, host)
        self.frames = wire.FrameBuffer()
        self.channels: dict[int, Channel] = {}
        self.processes: dict[str, Process] = {}
        self.by_pid: dict[int, Process] = {}
        self.kept: dict[str, Process] = {}  # ended, oldest first
        self.awaiting: dict[Process, None] = {}  # ended but for their output, oldest first
        self.waiting: dict[int, _Waiting] = {}  # for room, by channel, in their order
        self.most_at_once = 0  # processes of the sandbox when there was no room for another one
        self.pausing: set[Process | _Refreshing] = set()  # operations for which everything else stands still
        self.is_held = False  # by the client, until it says so
        self.is_late = False  # held by our clock, as no client did it in time
        self.is_stopping = False
        self.number = 0
        self.reaped_s = 0.0  # processor time of all that has ended
        self.is_greeted = self.is_busy = False
        self.lifetime = Lifetime(self.loop, host, lambda: bool(self.processes or self.channels), self._pause_late)
        self.woken, self.wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, _nothing)
        self.loop.watch(self.woken, POLLIN, self._take_dead)
        self.loop.send(wire.json_frame(wire.HELLO, 0, version=wire.VERSION, **greeting))

    def serve(self) -> None:
        """Do everything until the client is gone, or the time is up."""
        self.loop.serve()

    def close(self, channel: int, **error: Any) -> None:
        """Send the last frame of a channel, and forget it."""
        if self.channels.pop(channel, None) is not None:
            self.loop.send(wire.json_frame(wire.CLOSE, channel, **({"error": error} if error else {})))

    # The client's requests.

    def receive(self, data: bytes) -> None:
        """Handle bytes of the client's. Raises WireError."""
        frames = self.frames.feed(data)
        closed = {channel: index for index, (kind, channel, _) in enumerate(frames) if kind == wire.CLOSE}
        for position, (kind, channel, body) in enumerate(frames):
            if kind == wire.OPEN and closed.get(channel, -1) > position:
                continue  # its caller has given it up before it could begin: it is not begun
            try:
                self._handle(kind, channel, body)
            except (IndexError, KeyError, TypeError, OverflowError, ValueError) as error:
                raise wire.WireError(f"a malformed frame of kind {kind}") from error

    def _handle(self, kind: int, number: int, body: bytes) -> None:
        self.lifetime.note_use()
        if kind == wire.HELLO:
            if wire.read_object(body).get("version") != wire.VERSION:
                raise wire.WireError("another version")
            self.is_greeted = True
        elif not self.is_greeted:
            raise wire.WireError("no greeting")
        elif kind == wire.OPEN:
            self._open(number, wire.read_object(body))
        else:
            channel = self.channels.get(number)
            if channel is None:
                return
            if kind == wire.DATA:
                channel.take(*wire.read_data(body))
            elif kind == wire.END:
                channel.take_end(body[0])
            elif kind == wire.WINDOW:
                channel.grant(*wire.read_grant(body))
            elif kind == wire.ASK:
                channel.ask(wire.read_object(body))
            elif kind == wire.CLOSE:
                self.channels.pop(number)
                channel.leave()

    def _open(self, number: int, order: dict[str, Any]) -> None:
        if number in self.channels or number <= 0:
            raise wire.WireError("the channel is in use already")
        self.channels[number] = _Nothing()
        try:
            if len(self.channels) > wire.MOST_CHANNELS:
                raise wire.Refused("too_many", f"more than {wire.MOST_CHANNELS} operations at once")
            operation = OPERATIONS.get(str(order.get("op")))
            if operation is None:
                raise wire.Refused("unknown", f"no operation {order.get('op')!r}")
            operation(self, number, order)
        except wire.Refused as error:
            self.close(number, **error.error)
        except OSError as error:
            self.close(number, kind="os", message=f"{error.strerror or error}", errno=error.errno or 0)
        except (KeyError, TypeError, ValueError) as error:
            self.close(number, kind="unknown", message=f"malformed: {type(error).__name__}: {error}")

    def start(self, number: int, order: dict[str, Any]) -> Process:
        """Start a process whose channel has this number."""
        self._check_may_start(is_hidden=bool(order.get("is_hidden")), pauses=bool(order.get("pauses")))
        self.number += 1
        process = Process(self.loop, self.host, number, str(self.number), order, self)
        self.processes[process.id] = self.by_pid[process.pid] = process
        self.channels[number] = process
        if self.pausing and not order.get("pauses"):
            process.forked.signal(SIGSTOP)  # until `forget` lets all go on
        self.note_pace()
        return process

    def _check_may_start(self, *, is_hidden: bool = False, pauses: bool = False) -> None:
        if not pauses and (not self.pausing or self.is_held):  # what stops all others may also find them stopped
            self.lifetime.check_running()
        if self.is_stopping and not is_hidden:  # files are still to be read: what was done may have to be saved
            raise wire.Refused("stopping", "the sandbox is being stopped and starts no more processes")

    def note_pace(self) -> None:
        """Say whether any process is at work, when that has changed: a session between two cells is not."""
        is_busy = any(not process.is_resting for process in self.processes.values())
        if is_busy is not self.is_busy:
            self.is_busy = is_busy
            self.host.note_busy(is_busy=is_busy)

    def _start(self, number: int, order: dict[str, Any]) -> None:
        """Start a process; with `waits`, it waits for room, at most as long as its time-out."""
        if order.get("waits") and self.waiting:
            self._check_may_start()
            self._wait(number, order)
            return
        try:
            process = self.start(number, order)
            (process.announce_running if order.get("alone") else process.announce)()
        except wire.Refused as error:
            if error.error["kind"] != "pids" or not order.get("waits"):
                raise
            self.most_at_once = len(self.host.other_pids())
            self._wait(number, order)

    def _wait(self, number: int, order: dict[str, Any]) -> None:
        longest_s = seconds(order.get("timeout_s"))
        waiting = self.channels[number] = self.waiting[number] = _Waiting(self, number, order)
        until = now() + (wire.LONGEST_WAIT_S if longest_s is None else longest_s)
        self.loop.call_at((waiting, "clock"), until, lambda: self.give_up(waiting, "the limit on processes is reached"))
        self.loop.send(wire.json_frame(wire.EVENT, number, event="waiting"))
        self.loop.call_at("room", now() + ROOM_S, self._start_waiting)

    def _start_waiting(self) -> None:
        """Start the first waiting process, if there is room: not all at once, as each starts others."""
        if self.waiting and not self.loop.is_paused and self._has_room():
            self._start_first(next(iter(self.waiting.values())))
        if self.waiting:
            self.loop.call_at("room", now() + ROOM_S, self._start_waiting)

    def _has_room(self) -> bool:
        """Tell whether one more would fit, with the average number of processes of the running ones."""
        count, running = len(self.host.other_pids()), max(1, len(self.processes))
        return count + -(-count // running) <= self.most_at_once or not self.processes

    def _start_first(self, waiting: _Waiting) -> None:
        try:
            process = self.start(waiting.number, waiting.order)
        except wire.Refused as error:
            if error.error["kind"] == "pids":
                self.most_at_once = len(self.host.other_pids())
            else:
                self.give_up(waiting, **error.error)
        except OSError as error:
            self.give_up(waiting, f"{error.strerror or error}", kind="os", errno=error.errno or 0)
        else:
            self.forget_waiting(waiting)
            (process.announce_running if waiting.order.get("alone") else process.announce)()
            waiting.hand_over(process)

    def give_up(self, waiting: _Waiting, message: str, kind: str = "pids", **more: Any) -> None:
        """Start one that waits no more, and say why."""
        self.forget_waiting(waiting)
        self.close(waiting.number, kind=kind, message=message, **more)

    def forget_waiting(self, waiting: _Waiting) -> None:
        """Take one out of those that wait."""
        self.waiting.pop(waiting.number, None)
        self.loop.cancel((waiting, "clock"))

    def _files(self, number: int, order: dict[str, Any]) -> None:
        """Start an operation on files; with `pauses`, all other processes are stopped until it has ended."""
        process = self.start(number, {**order, "streams": [0, 1, 3], "is_hidden": True})
        if order.get("pauses"):
            self.pausing.add(process)
            self._stop_others()

    def _stop_others(self) -> None:
        """Stop all processes but the operations that asked for it."""
        self.lifetime.pause()
        for operation in self.pausing:
            operation.signal(SIGCONT, "process")
        if not self.pausing and not self.is_held:  # it has ended before the others stood still
            self.lifetime.resume()

    def _attach(self, number: int, order: dict[str, Any]) -> None:
        process = self._process_of(order)
        if process.channel in self.channels:
            process.forget_sent()
            self.close(process.channel, kind="replaced", message="another client has attached to this process")
        self.channels[number] = process
        process.attach(number)

    def _control(self, number: int, order: dict[str, Any]) -> None:
        process = self._process_of(order)
        if process.id not in self.processes:
            raise wire.Refused("not_found", f"process {process.id} has ended")
        self.channels[number] = Control(self, number, process)
        stdin = process.incoming.get(wire.STDIN)
        self.loop.send(wire.json_frame(
            wire.EVENT, number, event="started", id=process.id, pid=process.pid, is_terminal=process.has_terminal,
            has_input=stdin is not None and stdin.fd >= 0,
        ))  # fmt: skip

    def _process_of(self, order: dict[str, Any]) -> Process:
        """Return the process with an `id`; or the last one with a `pid` or a `tag`, one that runs before others."""
        key = "id" if "id" in order else "pid" if "pid" in order else "tag"
        value = int(order["pid"]) if key == "pid" else str(order.get(key))
        rows: dict[str, Process] = {**self.kept, **self.processes}
        for process in reversed(rows.values()) if key != "id" else filter(None, (rows.get(str(value)),)):
            if getattr(process, key) == value and (key == "id" or not process.is_hidden):
                return process
        raise wire.Refused("not_found", f"there is no process with {key} {value!r}, or it ended long ago")

    def _kill(self, number: int, order: dict[str, Any]) -> None:
        self._process_of(order).kill(str(order.get("cause", "")))
        self.close(number)

    def _list(self, number: int, _: dict[str, Any]) -> None:
        shown = [process for process in (*self.kept.values(), *self.processes.values()) if not process.is_hidden]
        rows = [process.describe() for process in shown]
        room = MOST_LISTED
        for process, row in zip(shown, rows, strict=True):
            if process.status is None and len(process.listed) <= room:
                row["listed"] = process.listed
                room -= len(process.listed)
        self._note_stopped(rows)
        self.loop.send(wire.json_frame(wire.EVENT, number, event="processes", processes=rows))
        self.close(number)

    def _note_stopped(self, rows: list[dict[str, Any]]) -> None:
        """Note of each terminal whether all processes in its foreground are stopped, unless everything is."""
        groups = {row["foreground"] for row in rows if row["foreground"]} if not self.loop.is_paused else set()
        states: dict[int, set[bytes]] = {group: set() for group in groups}
        for fields in map(_stat_of, self.host.other_pids() if groups else ()):
            if fields and int(fields[2]) in states:
                states[int(fields[2])].add(fields[0])
        for row in rows:
            row["is_stopped"] = states.get(row.pop("foreground")) == {b"T"}

    def _usage(self, number: int, _: dict[str, Any]) -> None:
        """Report the processor time of all processes so far, how many live, how many are stopped, and their memory."""
        ticks = pages = stopped = 0
        pids = self.host.other_pids()
        for pid in pids:
            fields = _stat_of(pid)
            if fields:
                ticks += sum(map(int, fields[11:15]))  # of it, and of its children that have ended
                pages += int(fields[21])
                stopped += fields[0] == b"T"
        report = {"cpu_s": self.reaped_s + ticks / os.sysconf("SC_CLK_TCK"), "processes": len(pids), "stopped": stopped}
        own_pages = int((_stat_of(os.getpid()) or [b"0"] * 22)[21])
        report["memory_bytes"], report["init_bytes"] = (
            count * os.sysconf("SC_PAGE_SIZE") for count in (pages, own_pages)
        )
        report["disk_bytes"], report["disk_total_bytes"] = self.host.disk()
        self.loop.send(wire.json_frame(wire.EVENT, number, event="usage", **report))
        self.close(number)

    def _connect(self, number: int, order: dict[str, Any]) -> None:
        self.channels[number] = connect(self, number, int(order["port"]), hands_out=bool(order.get("hands_out")))

    def _ports(self, number: int, _: dict[str, Any]) -> None:
        listing = Listing(self, number)
        if number in self.channels:  # else all was told at once
            self.channels[number] = listing

    def _clock(self, number: int, _: dict[str, Any], began: int = 0, until: float = 0.0) -> None:
        """Tell the time once it has moved on, a few milliseconds later: no file that changed before has that one.

        Since Linux 6.13 a file may have the time of the exact clock, behind which that of the ticks stays.
        """
        began, until = began or time.time_ns(), until or now() + MOST_BEHIND_S
        moment = time.clock_gettime_ns(REALTIME_COARSE)
        if moment <= began and now() < until and number in self.channels:
            self.loop.call_at((number, "tick"), now() + TICK_S, lambda: self._clock(number, _, began, until))
        elif number in self.channels:
            self.loop.send(wire.json_frame(wire.EVENT, number, event="clock", ns=moment))
            self.close(number)

    def _refresh(self, number: int, order: dict[str, Any]) -> None:
        """Show the host's current files in the views of folders, when all processes stand still."""
        if getattr(self.host, "refresh", None) is None:
            raise wire.Refused("unknown", "this sandbox has no view of a folder")
        refreshing = self.channels[number] = _Refreshing(self, number, order)
        self.pausing.add(refreshing)
        self._stop_others()
        self._await_still(refreshing, now() + MOST_BEHIND_S)

    def _await_still(self, refreshing: _Refreshing, until: float) -> None:
        """Refresh once each process has stopped; if one does not in time, remove nothing."""
        are_still = all(_stat_of(pid)[:1] in ([], [b"T"], [b"t"], [b"Z"]) for pid in self.host.other_pids())
        if not are_still and now() < until:
            self.loop.call_at((refreshing, "still"), now() + TICK_S, lambda: self._await_still(refreshing, until))
            return
        try:
            kept = refreshing.refresh(removes=are_still)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close(refreshing.number, kind="os", message=f"the view cannot be refreshed: {error}")
        else:
            self.loop.send(wire.json_frame(wire.EVENT, refreshing.number, event="refreshed", kept=kept))
            self.close(refreshing.number)
        finally:
            self._resume_after(refreshing)

    def _resume_after(self, operation: Process | _Refreshing) -> None:
        """Let all others go on, if this was the last operation for which they stood still."""
        if operation in self.pausing:
            self.pausing.discard(operation)
            if not self.pausing and not self.is_held:
                self.lifetime.resume()

    def _output(self, number: int, order: dict[str, Any]) -> None:
        for stream, outgoing in self._process_of(order).outgoing.items():
            if outgoing.tail:
                self.loop.send(wire.data_frame(number, stream, bytes(outgoing.tail[-wire.MOST_DATA :])))
        self.close(number)

    def _pause(self, number: int, order: dict[str, Any]) -> None:
        self.is_held, self.is_late = True, False
        self._end_others(order)
        self._stop_others()
        self.close(number)

    def _pause_late(self) -> None:
        self.is_held = self.is_late = True
        self._stop_others()

    def _resume(self, number: int, order: dict[str, Any]) -> None:
        self._end_others(order)
        self._let_go()
        self.close(number)

    def _let_go(self) -> None:
        self.is_held = self.is_late = False
        if not self.pausing:
            self.lifetime.resume()

    def _end_others(self, order: dict[str, Any]) -> None:
        """Without memory, end all processes, and those that wait to be started."""
        if order.get("memory") is False:
            for waiting in list(self.waiting.values()):
                self.give_up(waiting, "the sandbox was paused without its processes", kind="paused")
            self.lifetime.end_others()

    def _limits(self, number: int, order: dict[str, Any]) -> None:
        self.lifetime.limit(order)
        if self.is_late:
            self._let_go()
        self.close(number)

    def _stop(self, number: int, order: dict[str, Any]) -> None:
        """Ask all processes to end, stopped ones too, and answer when they have ended, or the time is up."""
        until = now() + float(order["grace_s"])
        if self.pausing:
            raise wire.Refused("busy", "a diff of the sandbox is being made; try again")
        self.is_stopping = True
        self.host.signal_others(SIGTERM)
        self.is_held = False
        self.lifetime.resume()
        self._await_gone(number, until)

    def _await_gone(self, number: int, until: float) -> None:
        if now() < until and self.host.other_pids() and number in self.channels:
            self.loop.call_at((number, "gone"), now() + GONE_S, lambda: self._await_gone(number, until))
        else:
            self.close(number)

    def _end(self, number: int, _: dict[str, Any]) -> None:
        self.host.signal_others(SIGKILL)  # at once: a look for each tree takes quadratic time
        self.close(number)

    # The dead.

    def _take_dead(self, _: int) -> None:
        try:
            os.read(self.woken, 512)
        except BlockingIOError:
            pass
        for _ in range(MOST_REAPED):
            try:
                pid, status, usage = os.wait4(-1, WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self.lifetime.note_use()
            self.reaped_s += usage.ru_utime + usage.ru_stime
            process = self.by_pid.pop(pid, None)
            if process is not None:
                process.note_exit(status, usage)
            else:
                self.host.note_orphan(pid)
        self.loop.call_at("dead", now(), lambda: self._take_dead(0))

    def note_awaiting(self, process: Process) -> None:
        """Take note of a process that has ended but for its output. Of too many, the oldest ends at once."""
        self.awaiting[process] = None
        if len(self.awaiting) > MOST_AWAITING:
            next(iter(self.awaiting)).await_no_output()

    def forget(self, process: Process) -> None:
        """Remove a process from the running ones, and keep its result for a while."""
        self.awaiting.pop(process, None)
        if self.processes.pop(process.id, None) is None:
            return
        self._resume_after(process)
        if process.is_hidden:
            process.release()
        else:
            self.kept[process.id] = process
            while len(self.kept) > MOST_KEPT_EXITS:
                self.kept.pop(next(iter(self.kept))).release()
        self.note_pace()


class _Waiting:
    """Be the channel of a process that waits for room, and keep its input meanwhile."""

    def __init__(self, server: Server, number: int, order: dict[str, Any]):
        self.server, self.number, self.order = server, number, order
        self.sent: list[tuple[int, bytes | None]] = []  # pieces by stream; None is the end of one
        self.held: dict[int, int] = {}

    def ask(self, body: dict[str, Any]) -> None:
        if body.get("do") == "kill":
            self.server.give_up(self, "it was killed before it had started")

    def take(self, stream: int, data: memoryview) -> None:
        held = self.held[stream] = self.held.get(stream, 0) + len(data)
        if held > wire.WINDOW_BYTES:
            raise wire.WireError("data exceeds the window")
        self.sent.append((stream, bytes(data)))

    def take_end(self, stream: int) -> None:
        if (stream, None) not in self.sent[-wire.REQUESTS :]:
            self.sent.append((stream, None))

    def grant(self, stream: int, count: int) -> None: ...

    def leave(self) -> None:
        self.server.forget_waiting(self)

    def hand_over(self, process: Process) -> None:
        """Pass the kept input on."""
        for stream, data in self.sent:
            if data is None:
                process.take_end(stream)
            else:
                process.take(stream, memoryview(data))


class _Refreshing:
    """Be the channel of a request to show the host's current files."""

    def __init__(self, server: Server, number: int, order: dict[str, Any]):
        self.server, self.number, self.order = server, number, order

    def refresh(self, *, removes: bool) -> int:
        """Do it, and return how many of the named files are kept. Raises OSError and others for a malformed order."""
        paths, apart = ([unpack(name) for name in self.order[key]] for key in ("paths", "apart"))
        host: Any = self.server.host
        kept = host.refresh(unpack(self.order["at"]), paths if removes else [], apart, int(self.order["before_ns"]))
        return int(kept) if removes else len(paths)

    def signal(self, number: int, to: str = "process") -> None: ...
    def ask(self, body: dict[str, Any]) -> None: ...
    def take(self, stream: int, data: memoryview) -> None: ...
    def take_end(self, stream: int) -> None: ...
    def grant(self, stream: int, count: int) -> None: ...
    def leave(self) -> None: ...


class _Nothing:
    """Be the channel of an operation without further frames."""

    def ask(self, body: dict[str, Any]) -> None: ...
    def take(self, stream: int, data: memoryview) -> None: ...
    def take_end(self, stream: int) -> None: ...
    def grant(self, stream: int, count: int) -> None: ...
    def leave(self) -> None: ...


OPERATIONS: dict[str, Callable[[Server, int, dict[str, Any]], None]] = {
    "start": Server._start,
    "attach": Server._attach,
    "control": Server._control,
    "processes": Server._list,
    "usage": Server._usage,
    "kill": Server._kill,
    "files": Server._files,
    "connect": Server._connect,
    "ports": Server._ports,
    "clock": Server._clock,
    "refresh": Server._refresh,
    "output": Server._output,
    "pause": Server._pause,
    "resume": Server._resume,
    "limits": Server._limits,
    "stop": Server._stop,
    "end": Server._end,
}


def _stat_of(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, from the state on; empty if the process has ended."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(fd, 4096).rpartition(b")")[2].split()
    except OSError:
        return []
    finally:
        os.close(fd)


def _nothing(number: int, frame: object) -> None:
    """Handle SIGCHLD: without a handler no signal would reach the wakeup pipe."""
