"""The loop of init: frames of the client, output and ends of processes, clocks. One thread, and nothing but the loop waits.

What differs between a jail and a container is in the `Host` that is given to it.
"""

from __future__ import annotations

import os
import select
import signal

from . import wire
from .ports import connect, listening
from .process import MOST_KEPT_EXITS, Process, now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Channel(Protocol):
        """Hold what one operation of the client's is about."""

        def ask(self, body: dict[str, Any]) -> None: ...
        def take(self, stream: int, data: memoryview) -> None: ...
        def take_end(self, stream: int) -> None: ...
        def grant(self, stream: int, count: int) -> None: ...
        def leave(self) -> None: ...

    class Host(Protocol):
        """Do what differs: in a jail, pid 1 with capabilities; in a container, a process with those of all others."""

        def fork(self, order: dict[str, Any], streams: dict[int, int]) -> Forked:
            """Have a process become a guest and do what `order` says: a program, or `files.serve`. Raises OSError.

            `streams` are its descriptors by the numbers of `wire`.
            """
            ...

        def members(self, mark: Mark) -> list[int]:
            """Return the pids of all that have this mark, and still live."""
            ...

        def note_orphan(self, pid: int) -> None:
            """Take note of the end of a process that the client has not asked for."""
            ...

        def note_busy(self, *, is_busy: bool) -> None:
            """Take note of whether any process of the client's runs."""
            ...

        def why_killed(self, take: Callable[[str], None]) -> None:
            """Find out why the kernel may have killed a process, and give the cause to `take`, at once or later."""
            ...

    class Mark(Protocol):
        """Stand for all that belongs to a process."""

        def close(self) -> None: ...

    class Forked(Protocol):
        """Say what was forked: its pid, and the mark of all that will belong to it."""

        pid: int
        mark: Mark

        def conclude(self) -> dict[str, Any]: ...


POLLIN, POLLOUT, GONE = select.POLLIN, select.POLLOUT, select.POLLHUP | select.POLLERR
CHUNK = 1 << 18
MOST_UNSENT = 1 << 20  # bytes that wait for the client, beyond which nothing more of a guest's is read
WNOHANG = os.WNOHANG
LINGER_S = 0.05  # until what was killed is looked at again


class Server:
    """Serve one client, on a socket, until it closes it. Any number of processes may run meanwhile."""

    def __init__(self, link: int, host: Host, greeting: dict[str, Any]):
        self.link, self.host = link, host
        self.frames = wire.FrameBuffer()
        self.unsent: list[bytes] = [wire.json_frame(wire.HELLO, 0, version=wire.VERSION, **greeting)]
        self.unsent_bytes = len(self.unsent[0])
        self.paused: list[Callable[[], None]] = []  # what goes on when the client has read
        self.channels: dict[int, Channel] = {}
        self.processes: dict[str, Process] = {}
        self.by_pid: dict[int, Process] = {}
        self.kept: dict[str, Process] = {}  # ended, oldest first
        self.timers: dict[object, tuple[float, Callable[[], None]]] = {}
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.poll = select.poll()
        self.number = 0
        self.is_greeted = False
        self.woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.wake = wake
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        os.set_blocking(link, False)
        self.watch(link, POLLIN | POLLOUT, self._serve_link)
        self.watch(self.woken, POLLIN, self._take_dead)

    # What everything here is made of: descriptors, clocks, frames.

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events of a descriptor from now on."""
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def ignore(self, fd: int) -> None:
        """Watch a descriptor no more."""
        if self.handlers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def call_at(self, key: object, at: float, function: Callable[[], None]) -> None:
        """Call a function at a time of the clock `now`, in place of what the same key stood for."""
        self.timers[key] = (at, function)

    def cancel(self, key: object) -> None:
        """Forget what a key stands for."""
        self.timers.pop(key, None)

    def send(self, data: bytes) -> None:
        """Send a frame: now, or when the client reads."""
        if not self.unsent:
            try:
                sent = os.write(self.link, data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the client is gone, as the loop will find
            if sent == len(data):
                return
            data = data[sent:]
            self.poll.register(self.link, POLLIN | POLLOUT)
        self.unsent.append(data)
        self.unsent_bytes += len(data)

    @property
    def is_full(self) -> bool:
        """Tell whether more waits for the client than should."""
        return self.unsent_bytes > MOST_UNSENT

    def close(self, channel: int, **error: Any) -> None:
        """Send the last frame of a channel, and forget it."""
        if self.channels.pop(channel, None) is not None:
            self.send(wire.json_frame(wire.CLOSE, channel, **({"error": error} if error else {})))

    def serve(self) -> None:
        """Do everything until the client is gone."""
        while True:
            for fd, events in self.poll.poll(self._timeout_ms()):
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler(events)
            if self.link < 0:
                return
            if self.timers:
                self._ring()

    def _timeout_ms(self) -> float | None:
        if not self.timers:
            return None
        return max(0.0, min(at for at, _ in self.timers.values()) - now()) * 1000 + 1

    def _ring(self) -> None:
        moment = now()
        for key, (at, function) in list(self.timers.items()):
            if at <= moment and self.timers.pop(key, None) is not None:
                function()

    def _serve_link(self, events: int) -> None:
        if events & POLLOUT:
            self._send_more()
        if events & (POLLIN | GONE):
            try:
                data = os.read(self.link, CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                frames = self.frames.feed(data) if data else None
                for kind, channel, body in frames or ():
                    self._handle(kind, channel, body)
            except wire.WireError:
                frames = None
            if frames is None:  # the client is gone, or speaks another language
                self.ignore(self.link)
                self.link = -1

    def _send_more(self) -> None:
        while self.unsent:
            data = self.unsent[0] if len(self.unsent) == 1 else b"".join(self.unsent[:64])
            taken = 1 if len(self.unsent) == 1 else min(64, len(self.unsent))
            try:
                sent = os.write(self.link, data)
            except BlockingIOError:
                return
            except OSError:
                self.unsent.clear()
                break
            self.unsent_bytes -= sent
            self.unsent[:taken] = [data[sent:]] if sent < len(data) else []
        self.poll.register(self.link, POLLIN)
        self.unsent_bytes = 0
        paused, self.paused = self.paused, []
        for go_on in paused:
            go_on()

    # What the client asks for.

    def _handle(self, kind: int, number: int, body: bytes) -> None:
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
            raise wire.WireError("a channel that is in use")
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
        self.number += 1
        process = Process(self, number, str(self.number), order)
        self.processes[process.id] = self.by_pid[process.pid] = process
        self.channels[number] = process
        if len(self.processes) == 1:
            self.host.note_busy(is_busy=True)
        return process

    def _start(self, number: int, order: dict[str, Any]) -> None:
        self.start(number, order).announce()

    def _files(self, number: int, order: dict[str, Any]) -> None:
        self.start(number, {**order, "streams": [0, 1, 3], "is_hidden": True})

    def _attach(self, number: int, order: dict[str, Any]) -> None:
        process = self._found(order)
        if process.channel in self.channels:
            self.close(process.channel, kind="replaced", message="another client has attached to this process")
        self.channels[number] = process
        process.attach(number)

    def _found(self, order: dict[str, Any]) -> Process:
        name = str(order.get("id"))
        process = self.processes.get(name) or self.kept.get(name)
        if process is None:
            raise wire.Refused("not_found", f"there is no process {name!r}, or it has ended long ago")
        return process

    def _kill(self, number: int, order: dict[str, Any]) -> None:
        self._found(order).kill(str(order.get("cause", "")))
        self.close(number)

    def _list(self, number: int, _: dict[str, Any]) -> None:
        rows = [one.describe() for one in (*self.kept.values(), *self.processes.values()) if not one.is_hidden]
        self.send(wire.json_frame(wire.EVENT, number, event="processes", processes=rows))
        self.close(number)

    def _connect(self, number: int, order: dict[str, Any]) -> None:
        self.channels[number] = connect(self, number, int(order["port"]))

    def _ports(self, number: int, _: dict[str, Any]) -> None:
        self.send(wire.json_frame(wire.EVENT, number, event="ports", ports=listening()))
        self.close(number)

    def _end(self, number: int, _: dict[str, Any]) -> None:
        for process in list(self.processes.values()):
            process.kill("")
        self.close(number)

    # The dead.

    def _take_dead(self, _: int) -> None:
        try:
            os.read(self.woken, 512)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status, usage = os.wait4(-1, WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            process = self.by_pid.pop(pid, None)
            if process is not None:
                process.note_exit(status, usage)
            else:
                self.host.note_orphan(pid)

    def forget(self, process: Process) -> None:
        """Take a process out of those that run, and keep what is known of it for a while."""
        if self.processes.pop(process.id, None) is None:
            return
        if not process.is_hidden:
            self.kept[process.id] = process
            while len(self.kept) > MOST_KEPT_EXITS:
                self.kept.pop(next(iter(self.kept)))
        if not self.processes:
            self.host.note_busy(is_busy=False)


class _Nothing:
    """Be the channel of an operation that has no more to say."""

    def ask(self, body: dict[str, Any]) -> None: ...
    def take(self, stream: int, data: memoryview) -> None: ...
    def take_end(self, stream: int) -> None: ...
    def grant(self, stream: int, count: int) -> None: ...
    def leave(self) -> None: ...


OPERATIONS: dict[str, Callable[[Server, int, dict[str, Any]], None]] = {
    "start": Server._start,
    "attach": Server._attach,
    "processes": Server._list,
    "kill": Server._kill,
    "files": Server._files,
    "connect": Server._connect,
    "ports": Server._ports,
    "end": Server._end,
}


def _nothing(number: int, frame: object) -> None:
    """Be the handler without which no signal would reach the wakeup pipe."""
