"""One virtual machine: how it is started, talked to, and ended.

Theory of operation: the jailer (`jailer.py`) is started, which starts the monitor as somebody who may do nothing, and
kills it when this process says so or dies. One pipe holds what its console says, socket pairs lead to its ports. The
first port is the machine's own: there `guest_init.py` is told to make a place, or to end one, and says when one has
ended. Each place has one of the others, and the first process in there is the one of every container. A machine serves
one sandbox: a place for each run and each session, and as many at once as there are ports.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cloche.core.errors import StartFailed
from cloche.core.suppressed import noted

from ..containers.container import CHUNK_BYTES, OUTPUT, Link, read_object
from .plan import PLACES, Image, Leash, Monitor, Plan

CONSOLE = 2
log = logging.getLogger("cloche.microvm")
TRIED, LEFT = b"H", b"L"
FIRST_OF_PLACES = 2  # among the ports
LEAVE_S = 30.0
MARK_BYTES = 16


class MachineWire:
    """Carry a machine's own port, and what its console says as another stream."""

    def __init__(self, port: socket.socket, console: int, process: subprocess.Popen[bytes], kill: Callable[[], None]):
        self._port, self._console, self._process, self._kill = port, console, process, kill

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError when the machine is gone, or takes longer than a boot may."""
        self._port.sendall(data)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what comes out of the port and the console, until both have ended."""
        poll = select.poll()
        for fd in (self._port.fileno(), self._console):
            poll.register(fd, select.POLLIN)
        left = 2
        while left:
            for fd, _ in poll.poll():
                try:
                    data = os.read(fd, CHUNK_BYTES)
                except ConnectionError:
                    data = b""
                if data:
                    yield (CONSOLE if fd == self._console else OUTPUT), data
                else:
                    poll.unregister(fd)
                    left -= 1

    def shutdown(self) -> None:
        """End the conversation."""
        self._port.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of everything: kill the monitor, and wait until it is dead."""
        self._kill()
        self._port.close()
        os.close(self._console)
        self._process.wait()


class PortWire:
    """Carry what a place says, from its mark on, until somebody knows that it has ended.

    The port itself does not end with the place: it is the machine's, and the next place will have it.
    """

    def __init__(self, port: socket.socket, mark: bytes):
        self._port, self._beyond = port, Beyond(mark)
        self._wake, self._waker = os.pipe()
        self._turn = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError when the machine is gone, or takes longer than a boot may."""
        if self._waker < 0:
            raise ConnectionError("this place in the virtual machine is gone")
        self._port.sendall(data)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield what comes out of the port until the other end is closed, and what is there then."""
        poll, port = select.poll(), self._port.fileno()
        for fd in (port, self._wake):
            poll.register(fd, select.POLLIN)
        while True:
            if port not in {fd for fd, _ in poll.poll()}:
                return
            try:
                data = os.read(port, CHUNK_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                poll.unregister(port)  # the machine is gone, and whoever knows that calls `shutdown`
            elif said := self._beyond.feed(data):
                yield OUTPUT, said

    def shutdown(self) -> None:
        """Expect nothing more than what has come."""
        with self._turn:
            if self._waker >= 0:
                os.close(self._waker)
                self._waker = -1

    def close(self) -> None:
        """Let go of what is this wire's own."""
        self.shutdown()
        os.close(self._wake)


class Beyond:
    """Leave out all that comes before a mark, and the mark."""

    def __init__(self, mark: bytes):
        self._mark, self._kept, self._is_beyond = mark, b"", False

    def feed(self, data: bytes) -> bytes:
        """Return what of `data` is beyond the mark."""
        if self._is_beyond:
            return data
        self._kept += data
        _, mark, rest = self._kept.partition(self._mark)
        self._is_beyond = bool(mark)
        self._kept = b"" if mark else self._kept[1 - len(self._mark) :]
        return rest


class Occupant(Protocol):
    """Be a place in a machine."""

    def receive(self, tag: bytes, body: bytes) -> None:
        """Take one frame; in the place's reading thread."""
        ...

    def leave(self, left: Mapping[str, Any]) -> None:
        """Learn how it ended; in the machine's reading thread."""
        ...

    def lose(self) -> None:
        """Learn that nothing more will come; in the place's reading thread."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing more will come; tell whether that is so."""
        ...


@dataclass(slots=True, kw_only=True)
class Room:
    """Hold who has a port, and whether its end was told."""

    place: Occupant
    wire: PortWire
    port: int
    is_left: bool = False

    def leave(self, left: Mapping[str, Any]) -> None:
        """Tell its place that it has ended, and how."""
        self.is_left = True
        self.place.leave(left)
        self.wire.shutdown()


class Machine:
    """Hold one running virtual machine. All methods but `kill` block, and are for any thread."""

    def __init__(self, plan: Plan, image: Image, monitor: Monitor):
        self.plan, self.image, self.monitor = plan, image, monitor
        self.is_lost = False
        self._link: Link | None = None
        self._numbers = itertools.count(1)
        self._ports: list[socket.socket] = []
        self._free = deque(range(PLACES))
        self._rooms: dict[int, Room] = {}
        self._lifeline, self._is_killed = -1, False
        self._turn = threading.Lock()
        self._change = threading.Condition(self._turn)
        self._tried, self._gone = threading.Event(), threading.Event()

    @property
    def has_booted(self) -> bool:
        """Tell whether it was ever started."""
        return self._link is not None

    @property
    def boot_s(self) -> float:
        """Return how long it may take to get ready, in seconds."""
        return self.monitor.boot_s(self.plan)

    def boot(self, patience_s: float | None = None) -> None:
        """Start it. Raises StartFailed; then nothing is left."""
        lifeline = self._make_lifeline()
        leash = Leash(lifeline=lifeline, kill=self.kill)
        try:
            launched = self.monitor.launch(self.plan, self.image, leash, patience_s or self.boot_s)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(lifeline)
        self._ports = launched.ports
        wire = MachineWire(launched.own, launched.console, launched.process, self.kill)
        self._link = Link(wire, self._receive, self._lose)

    def _make_lifeline(self) -> int:
        """Make the pipe that the jailer watches, and return its end. Raises StartFailed once it was killed."""
        with self._turn:
            if self._is_killed:
                raise StartFailed("nobody waits for this virtual machine any more", step="boot")
            lifeline, self._lifeline = os.pipe()
            return lifeline

    def words(self) -> Sequence[str]:
        """Return the words that start its monitor."""
        return self.monitor.words(self.plan)

    def make_room(self, place: Occupant) -> tuple[int, Link, bytes]:
        """Have a place made; return its number, the link to its first process, and the mark to begin with there.

        Raises OSError when the machine is gone, StartFailed when it is full.
        """
        mark = os.urandom(MARK_BYTES)
        number, room = self._take_room(place, mark)
        link = Link(room.wire, place.receive, lambda: self._clear(number))
        try:
            settings = self.plan.settings(now=time.time(), seed=os.urandom(32))
            self._tell("make", number=number, port=FIRST_OF_PLACES + room.port, mark=mark.hex(), **settings)
        except BaseException:
            link.close()
            raise
        return number, link, mark

    def end_place(self, number: int) -> None:
        """Have all that is in a place killed; its end is told as any other."""
        with noted(log, "a machine is gone, as its places will say", OSError):
            self._tell("end", number=number)

    def try_out(self, patience_s: float) -> None:
        """Boot it, and see that its first process answers in time; then nothing of it is left. Raises StartFailed."""
        try:
            until = time.monotonic() + patience_s
            self.boot(patience_s)
            self._tell("try")
            self._tried.wait(max(0.0, until - time.monotonic()))
            if self.is_lost or not self._tried.is_set():
                raise StartFailed(f"the virtual machine did not get ready{self.last_output()}", step="boot")
        except OSError as error:
            raise StartFailed(f"the virtual machine is gone: {error}{self.last_output()}", step="boot") from error
        finally:
            self.kill()
            self.wait()

    def kill(self) -> None:
        """Kill it, at once; it is gone a moment later."""
        with self._turn:
            self._is_killed = True
            if self._lifeline >= 0:
                try:
                    os.write(self._lifeline, b"k")  # a forked child of ours may hold the other end, too
                except OSError:
                    pass  # it is dead already
                os.close(self._lifeline)
                self._lifeline = -1

    def wait(self) -> None:
        """Wait a bounded time until it is gone, once it was killed."""
        if self._link is not None:
            self._gone.wait(LEAVE_S)

    def check(self) -> None:
        """Raise StartFailed when the workspace is gone with the machine."""
        if self.is_lost:
            raise StartFailed(f"the workspace is gone with its machine{self.last_output()}", step="boot")

    def last_output(self) -> str:
        """Return what its console and its monitor said last, for messages."""
        said = self._link.last_output.decode("utf-8", "replace").strip() if self._link is not None else ""
        return f": {said[-600:]}" if said else ""

    def _tell(self, verb: str, **body: object) -> None:
        """Give the first process an order. Raises OSError when the machine is gone."""
        if self._link is None or self.is_lost:
            raise ConnectionError("the virtual machine is gone")
        text = json.dumps({"do": verb, **body}).encode()
        self._link.send_raw(f"{len(text):09d}".encode() + text)

    def _take_room(self, place: Occupant, mark: bytes) -> tuple[int, Room]:
        """Give a place a number and a port; one may be on its way back. Raises StartFailed."""
        with self._change:
            if not self._change.wait_for(lambda: self._free or self.is_lost, LEAVE_S) or self.is_lost:
                raise StartFailed(f"the virtual machine has no place left{self.last_output()}", step="boot")
            number, port = next(self._numbers), self._free.popleft()
            self._rooms[number] = Room(place=place, wire=PortWire(self._ports[port], mark), port=port)
            return number, self._rooms[number]

    def _clear(self, number: int) -> None:
        """Take a port back; a place that is not heard any more, and has not ended, costs the machine."""
        with self._change:
            room = self._rooms.pop(number)
            self._free.append(room.port)
            self._change.notify_all()
        if not room.is_left:
            self.kill()
        room.place.lose()

    def _receive(self, tag: bytes, body: bytes) -> None:
        if tag == TRIED:
            self._tried.set()
        elif tag == LEFT:
            found = read_object(body)
            with self._turn:
                room = self._rooms.get(_whole(found.get("number")))
            if room is not None:
                room.leave(found)

    def _lose(self) -> None:
        """Learn that it is gone: so are all places."""
        with self._change:
            self.is_lost = True
            rooms = list(self._rooms.values())
            self._change.notify_all()
        for room in rooms:
            room.leave({})
        for room in rooms:
            room.place.wait(LEAVE_S)
        for port in self._ports:
            port.close()
        self._tried.set()
        self._gone.set()


def _whole(number: object) -> int:
    """Return a number of the machine's. Raises ValueError for anything else."""
    if not isinstance(number, int):
        raise ValueError("the virtual machine sent what is no number of a place")
    return number
