"""One virtual machine: how it is started, what goes over its ports, and how it is ended.

Theory of operation: the jailer (`jailer.py`) is started, which starts the monitor as somebody who may do nothing, and
kills it when this process asks for that or dies. One pipe has the output of its console, socket pairs lead to its
ports. The first port is the machine's own: there `guest_init.py` is asked to make a container, or to end one, and
reports when one has ended. Each container has one of the other ports; its first process is that of every container. A
machine serves one sandbox: a container for each run and each session, and as many at once as there are ports; or, for a
sandbox that lives, one for all.
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
from typing import Any, Protocol

from cloche.core.errors import StartFailed
from cloche.core.record import dataclass
from cloche.core.suppressed import suppress_logged

from ..containers.container import CHUNK_BYTES, OUTPUT, Link, read_object
from .plan import CONTAINERS, ControlPipe, MachineImage, MachinePlan, Monitor

CONSOLE = 2
log = logging.getLogger("cloche.microvm")
PROBED, CONTAINER_ENDED = b"H", b"L"
FIRST_CONTAINER_PORT = 2  # among the ports
LEAVE_S = 30.0
MARK_BYTES = 16


class MachineWire:
    """Carry a machine's own port, and the output of its console as another stream."""

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
        """Kill the monitor, wait until it is dead, and close everything."""
        self._kill()
        self._port.close()
        os.close(self._console)
        self._process.wait()


class PortWire:
    """Carry the output of a container, from its mark on, until it is known that it has ended.

    The port itself does not end with the container: it is the machine's, and the next container will have it.
    """

    def __init__(self, port: socket.socket, mark: bytes):
        self._port, self._beyond = port, Beyond(mark)
        self._wake, self._waker = os.pipe()
        self._turn = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError when the machine is gone, or takes longer than a boot may."""
        if self._waker < 0:
            raise ConnectionError("this container in the virtual machine is gone")
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
            elif answer := self._beyond.feed(data):
                yield OUTPUT, answer

    def shutdown(self) -> None:
        """Expect nothing more than what has come."""
        with self._turn:
            if self._waker >= 0:
                os.close(self._waker)
                self._waker = -1

    def close(self) -> None:
        """Close what is this wire's own."""
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
        _, mark, remainder = self._kept.partition(self._mark)
        self._is_beyond = bool(mark)
        self._kept = b"" if mark else self._kept[1 - len(self._mark) :]
        return remainder


class MachineContainer(Protocol):
    """Be a container in a machine: receive what the machine reports about it."""

    def leave(self, final_message: Mapping[str, Any]) -> None:
        """Learn how it ended; in the machine's reading thread."""
        ...

    def lose(self) -> None:
        """Learn that nothing more will come; in the container's reading thread."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing more will come; tell whether that is so."""
        ...


@dataclass(slots=True, kw_only=True)
class PortLease:
    """Hold which container has a port, and whether its end was reported."""

    container: MachineContainer
    wire: PortWire
    port: int
    has_ended: bool = False

    def leave(self, final_message: Mapping[str, Any]) -> None:
        """Report to its container that it has ended, and how."""
        self.has_ended = True
        self.container.leave(final_message)
        self.wire.shutdown()


class VirtualMachine:
    """Hold one running virtual machine. All methods but `kill` block, and are for any thread."""

    def __init__(self, plan: MachinePlan, image: MachineImage, monitor: Monitor):
        self.plan, self.image, self.monitor = plan, image, monitor
        self.is_lost = False
        self._link: Link | None = None
        self._numbers = itertools.count(1)
        self._ports: list[socket.socket] = []
        self._free = deque(range(CONTAINERS))
        self._leases: dict[int, PortLease] = {}
        self._control_fd, self._is_killed = -1, False
        self._turn = threading.Lock()
        self._change = threading.Condition(self._turn)
        self._probed, self._gone = threading.Event(), threading.Event()

    @property
    def has_booted(self) -> bool:
        """Tell whether it was ever started."""
        return self._link is not None

    @property
    def is_killed(self) -> bool:
        """Tell whether it was killed, or is not to be started any more."""
        return self._is_killed

    @property
    def boot_s(self) -> float:
        """Return how long it may take to get ready, in seconds."""
        return self.monitor.boot_s(self.plan)

    def boot(self, timeout_s: float | None = None) -> None:
        """Start it. Raises StartFailed; then nothing is left."""
        read_end = self._make_control_pipe()
        control = ControlPipe(read_end=read_end, kill=self.kill)
        try:
            launched = self.monitor.launch(self.plan, self.image, control, timeout_s or self.boot_s)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(read_end)
        self._ports = launched.ports
        wire = MachineWire(launched.own, launched.console, launched.process, self.kill)
        self._link = Link(wire, self._receive, self._lose)

    def _make_control_pipe(self) -> int:
        """Make the pipe that the jailer watches, and return its end. Raises StartFailed once it was killed."""
        with self._turn:
            if self._is_killed:
                raise StartFailed("nobody waits for this virtual machine any more", step="boot")
            read_end, self._control_fd = os.pipe()
            return read_end

    def argv(self) -> Sequence[str]:
        """Return the words that start its monitor."""
        return self.monitor.argv(self.plan)

    def make_container(self, container: MachineContainer) -> tuple[int, PortWire, bytes]:
        """Have a container made; return its number, the wire to its first process, and the mark to begin with there.

        Whoever reads the wire calls `return_port` at its end. Raises OSError when the machine is gone, StartFailed when
        it is full.
        """
        mark = os.urandom(MARK_BYTES)
        number, lease = self._lease_port(container, mark)
        try:
            settings = self.plan.settings(now=time.time(), seed=os.urandom(32))
            self._send("make", number=number, port=FIRST_CONTAINER_PORT + lease.port, mark=mark.hex(), **settings)
        except BaseException:
            lease.wire.close()
            self.return_port(number)
            raise
        return number, lease.wire, mark

    def end_container(self, number: int) -> None:
        """Have all that is in a container killed; its end is reported as any other."""
        with suppress_logged(log, "a machine is gone, as its containers will report", OSError):
            self._send("end", number=number)

    def probe(self, timeout_s: float) -> None:
        """Boot it, and see that its first process answers in time; then nothing of it is left. Raises StartFailed."""
        try:
            until = time.monotonic() + timeout_s
            self.boot(timeout_s)
            self._send("try")
            self._probed.wait(max(0.0, until - time.monotonic()))
            if self.is_lost or not self._probed.is_set():
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
            if self._control_fd >= 0:
                try:
                    os.write(self._control_fd, b"k")  # a forked child of ours may hold the other end, too
                except OSError:
                    pass  # it is dead already
                os.close(self._control_fd)
                self._control_fd = -1

    def wait(self) -> None:
        """Wait a bounded time until it is gone, once it was killed."""
        if self._link is not None:
            self._gone.wait(LEAVE_S)

    def check(self) -> None:
        """Raise StartFailed when the workspace is gone with the machine."""
        if self.is_lost:
            raise StartFailed(f"the workspace is gone with its machine{self.last_output()}", step="boot")

    def last_output(self) -> str:
        """Return the last output of its console and its monitor, for messages."""
        output = self._link.last_output.decode("utf-8", "replace").strip() if self._link is not None else ""
        return f": {output[-600:]}" if output else ""

    def _send(self, verb: str, **body: object) -> None:
        """Give the first process an order. Raises OSError when the machine is gone."""
        if self._link is None or self.is_lost:
            raise ConnectionError("the virtual machine is gone")
        text = json.dumps({"do": verb, **body}).encode()
        self._link.send_raw(f"{len(text):09d}".encode() + text)

    def _lease_port(self, container: MachineContainer, mark: bytes) -> tuple[int, PortLease]:
        """Give a container a number and a port; one may be on its way back. Raises StartFailed."""
        with self._change:
            if not self._change.wait_for(lambda: self._free or self.is_lost, LEAVE_S) or self.is_lost:
                raise StartFailed(f"the virtual machine has no container left{self.last_output()}", step="boot")
            number, port = next(self._numbers), self._free.popleft()
            self._leases[number] = PortLease(container=container, wire=PortWire(self._ports[port], mark), port=port)
            return number, self._leases[number]

    def return_port(self, number: int) -> None:
        """Take a port back; the machine is killed where the container has lost its link and not ended."""
        with self._change:
            lease = self._leases.pop(number)
            self._free.append(lease.port)
            self._change.notify_all()
        if not lease.has_ended:
            self.kill()
        lease.container.lose()

    def _receive(self, tag: bytes, body: bytes) -> None:
        if tag == PROBED:
            self._probed.set()
        elif tag == CONTAINER_ENDED:
            message = read_object(body)
            with self._turn:
                lease = self._leases.get(_integer(message.get("number")))
            if lease is not None:
                lease.leave(message)

    def _lose(self) -> None:
        """Learn that it is gone: so are all containers."""
        with self._change:
            self.is_lost = True
            leases = list(self._leases.values())
            self._change.notify_all()
        for lease in leases:
            lease.leave({})
        for lease in leases:
            lease.container.wait(LEAVE_S)
        for port in self._ports:
            port.close()
        self._probed.set()
        self._gone.set()


def _integer(number: object) -> int:
    """Return a number of the machine's. Raises ValueError for anything else."""
    if not isinstance(number, int):
        raise ValueError("the virtual machine sent what is no number of a container")
    return number
