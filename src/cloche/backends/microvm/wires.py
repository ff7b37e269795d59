"""What carries a machine's words: its own port with its console, and a port for each place in it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

from ..containers.frames import CHUNK_BYTES, OUTPUT

CONSOLE = 2


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

    def hang_up(self) -> None:
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
        """Yield what comes out of the port until it is hung up, and what is there then."""
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
                poll.unregister(port)  # the machine is gone, and whoever knows that will hang up
            elif said := self._beyond.feed(data):
                yield OUTPUT, said

    def hang_up(self) -> None:
        """Expect nothing more than what has come."""
        with self._turn:
            if self._waker >= 0:
                os.close(self._waker)
                self._waker = -1

    def close(self) -> None:
        """Let go of what is this wire's own."""
        self.hang_up()
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
