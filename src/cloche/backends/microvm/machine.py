"""One virtual machine: its start, the traffic over its ports, and its end.

Theory of operation: the jailer (`jailer.py`) starts the monitor as an unprivileged user, and kills it when this process
requests that or dies. A pipe carries the console's output; socket pairs lead to the ports. The first port is the
machine's own: over it `guest_init.py` gets orders to make or end a container, and reports the end of each. Each
container uses one of the other ports, with the same first process as every container. A machine serves one sandbox: one
container for each run and session, at most one per port at a time; or one container for a sandbox that lives.
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

from ..containers.container import CHUNK_BYTES, OUTPUT, ContainerLink, read_object
from .plan import CONTAINERS, ControlPipe, MachineImage, MachinePlan, Monitor

CONSOLE = 2
log = logging.getLogger("cloche.microvm")
PROBED, CONTAINER_ENDED = b"H", b"L"
FIRST_CONTAINER_PORT = 2  # number of the first container's port
LEAVE_S = 30.0
MARK_BYTES = 16


class MachineWire:
    """Carry a machine's own port, and its console's output as a second stream."""

    def __init__(self, port: socket.socket, console: int, process: subprocess.Popen[bytes], kill: Callable[[], None]):
        self._port, self._console, self._process, self._kill = port, console, process, kill

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the machine has ended, or if this takes longer than a boot may."""
        self._port.sendall(data)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield data of the port and the console until both have ended."""
        poll = select.poll()
        for fd in (self._port.fileno(), self._console):
            poll.register(fd, select.POLLIN)
        open_streams = 2
        while open_streams:
            for fd, _ in poll.poll():
                try:
                    data = os.read(fd, CHUNK_BYTES)
                except ConnectionError:
                    data = b""
                if data:
                    yield (CONSOLE if fd == self._console else OUTPUT), data
                else:
                    poll.unregister(fd)
                    open_streams -= 1

    def shutdown(self) -> None:
        """Shut down the port's connection."""
        self._port.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the monitor, wait until it is dead, and close all descriptors."""
        self._kill()
        self._port.close()
        os.close(self._console)
        self._process.wait()


class PortWire:
    """Carry a container's output, from its mark until the machine reports its end.

    The port itself stays open: it belongs to the machine, and the next container will use it.
    """

    def __init__(self, port: socket.socket, mark: bytes):
        self._port, self._beyond = port, Beyond(mark)
        self._wake, self._waker = os.pipe()
        self._turn = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the machine has ended, or if this takes longer than a boot may."""
        if self._waker < 0:
            raise ConnectionError("this container in the virtual machine is gone")
        self._port.sendall(data)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield data of the port until `shutdown`, including data that has arrived by then."""
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
                poll.unregister(port)  # the machine has ended; its reader calls `shutdown`
            elif answer := self._beyond.feed(data):
                yield OUTPUT, answer

    def shutdown(self) -> None:
        """End `pieces` after the data that has arrived."""
        with self._turn:
            if self._waker >= 0:
                os.close(self._waker)
                self._waker = -1

    def close(self) -> None:
        """Close this wire's own descriptors."""
        self.shutdown()
        os.close(self._wake)


class Beyond:
    """Filter that drops everything up to and including a mark."""

    def __init__(self, mark: bytes):
        self._mark, self._kept, self._is_beyond = mark, b"", False

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` after the mark."""
        if self._is_beyond:
            return data
        self._kept += data
        _, mark, remainder = self._kept.partition(self._mark)
        self._is_beyond = bool(mark)
        self._kept = b"" if mark else self._kept[1 - len(self._mark) :]
        return remainder


class MachineContainer(Protocol):
    """A container in a machine; it receives the machine's reports."""

    def leave(self, final_message: Mapping[str, Any]) -> None:
        """Record how the container ended. Called in the machine's reading thread."""
        ...

    def lose(self) -> None:
        """Record that no more frames will arrive. Called in the container's reading thread."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until no more frames will arrive; return whether that is so."""
        ...


@dataclass(slots=True, kw_only=True)
class PortLease:
    """The container that uses a port, and whether its end was reported."""

    container: MachineContainer
    wire: PortWire
    port: int
    has_ended: bool = False

    def leave(self, final_message: Mapping[str, Any]) -> None:
        """Report the container's end to it."""
        self.has_ended = True
        self.container.leave(final_message)
        self.wire.shutdown()


class VirtualMachine:
    """One running virtual machine. All methods are thread-safe; all but `kill` block."""

    def __init__(self, plan: MachinePlan, image: MachineImage, monitor: Monitor):
        self.plan, self.image, self.monitor = plan, image, monitor
        self.is_lost = False
        self._link: ContainerLink | None = None
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
        """Return whether the machine was ever started."""
        return self._link is not None

    @property
    def is_killed(self) -> bool:
        """Return whether the machine was killed, also before its start."""
        return self._is_killed

    @property
    def boot_s(self) -> float:
        """Return the maximum seconds until the machine is ready."""
        return self.monitor.boot_s(self.plan)

    def boot(self, timeout_s: float | None = None) -> None:
        """Start the machine. Raises StartFailed; nothing is left then."""
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
        self._link = ContainerLink(wire, self._receive, self._lose)

    def _make_control_pipe(self) -> int:
        """Make the pipe that the jailer watches, and return the jailer's end.

        Raises StartFailed if the machine was killed.
        """
        with self._turn:
            if self._is_killed:
                raise StartFailed("nobody waits for this virtual machine any more", step="boot")
            read_end, self._control_fd = os.pipe()
            return read_end

    def argv(self) -> Sequence[str]:
        """Return the arguments that start its monitor."""
        return self.monitor.argv(self.plan)

    def make_container(self, container: MachineContainer) -> tuple[int, PortWire, bytes]:
        """Have a container made; return its number, the wire to its first process, and the mark to send first.

        The reader of the wire calls `return_port` at its end. Raises OSError if the machine has ended, StartFailed if
        no port is free.
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
        """Have all processes of a container killed. Its end is reported as usual."""
        with suppress_logged(log, "a machine is gone, as its containers will report", OSError):
            self._send("end", number=number)

    def probe(self, timeout_s: float) -> None:
        """Boot the machine, wait for the answer of its pid 1, and kill it. Raises StartFailed."""
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
        """Request the kill of the machine. Does not wait for its end."""
        with self._turn:
            self._is_killed = True
            if self._control_fd >= 0:
                try:
                    os.write(
                        self._control_fd, b"k"
                    )  # a forked child may also hold the write end, so closing it is not enough
                except OSError:
                    pass  # it is dead already
                os.close(self._control_fd)
                self._control_fd = -1

    def wait(self) -> None:
        """Wait up to `LEAVE_S` for the end of a killed machine."""
        if self._link is not None:
            self._gone.wait(LEAVE_S)

    def check(self) -> None:
        """Raise StartFailed if the machine, and with it the workspace, is lost."""
        if self.is_lost:
            raise StartFailed(f"the workspace is gone with its machine{self.last_output()}", step="boot")

    def last_output(self) -> str:
        """Return the end of the output of console and monitor, for messages."""
        output = self._link.last_output.decode("utf-8", "replace").strip() if self._link is not None else ""
        return f": {output[-600:]}" if output else ""

    def _send(self, verb: str, **body: object) -> None:
        """Send an order to pid 1. Raises OSError if the machine has ended."""
        if self._link is None or self.is_lost:
            raise ConnectionError("the virtual machine is gone")
        text = json.dumps({"do": verb, **body}).encode()
        self._link.send_raw(f"{len(text):09d}".encode() + text)

    def _lease_port(self, container: MachineContainer, mark: bytes) -> tuple[int, PortLease]:
        """Assign a number and a port to a container; waits for a port if none is free. Raises StartFailed."""
        with self._change:
            if not self._change.wait_for(lambda: self._free or self.is_lost, LEAVE_S) or self.is_lost:
                raise StartFailed(f"the virtual machine has no container left{self.last_output()}", step="boot")
            number, port = next(self._numbers), self._free.popleft()
            self._leases[number] = PortLease(container=container, wire=PortWire(self._ports[port], mark), port=port)
            return number, self._leases[number]

    def return_port(self, number: int) -> None:
        """Take a port back. The machine is killed if the container lost its link without a report of its end."""
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
        """Mark the machine and all of its containers as lost."""
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
    """Return the number of a container that the machine sent. Raises ValueError for other types."""
    if not isinstance(number, int):
        raise ValueError("the virtual machine sent what is no number of a container")
    return number
