"""A machine's vsock as sockets of the host's, by Firecracker's rules.

Who connects to the socket says `CONNECT port` and is told `OK port`; a machine's call to port N goes to the socket
whose name has `_N` behind it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

from .rings import Device

RECEIVE, SEND = 0, 1  # rings, seen from the machine
HOST, STREAM = 2, 1
REQUEST, RESPONSE, RESET, SHUTDOWN, DATA, CREDIT, ASK_CREDIT = range(1, 8)
HEADER = struct.Struct("<QQIIIHHIII")
BUFFER_BYTES = 65_536
PIECE_BYTES = 3072  # with its header it fits into what kernels give: a page
FIRST_HOST_PORT = 1 << 30
NO_MORE_IN, NO_MORE_OUT = 1, 2


@dataclass
class Stream:
    """Hold one connection: its socket, and how far both sides are."""

    own: socket.socket
    host_port: int
    guest_port: int
    is_open: bool = False
    is_ended: bool = False  # no more comes from the host
    must_say_ok: bool = False
    sent: int = 0
    taken: int = 0  # by the machine, of what was sent
    room: int = 0  # that the machine has
    given: int = 0  # to the host
    told: int = 0  # of that, to the machine
    waiting: bytearray = field(default_factory=bytearray)  # for the host to take it

    @property
    def credit(self) -> int:
        return max(0, self.room - ((self.sent - self.taken) & 0xFFFFFFFF))


class Vsock:
    """Carry bytes between sockets of the host's and those of a machine."""

    def __init__(self, device: Device, cid: int, path: str):
        self.device, self.cid, self.path = device, cid, path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(16)
        self.greeting: dict[int, tuple[socket.socket, bytearray]] = {}
        self.streams: dict[tuple[int, int], Stream] = {}
        self.answers: deque[bytes] = deque()
        self.next_port = FIRST_HOST_PORT

    def serve(self) -> None:
        """Carry bytes until the monitor hangs up."""
        while True:
            poll = select.poll()
            watched = {self.device.link.fileno(): select.POLLIN, self.listener.fileno(): select.POLLIN}
            watched.update({ring.kick: select.POLLIN for ring in self.device.rings if ring.kick >= 0})
            watched.update(dict.fromkeys(self.greeting, select.POLLIN))
            has_room = self.device.has_buffer(RECEIVE)
            for stream in self.streams.values():
                mask = select.POLLIN if self._can_read(stream) and has_room else 0
                if mask | bool(stream.waiting):
                    watched[stream.own.fileno()] = mask | (select.POLLOUT if stream.waiting else 0)
            for fd, mask in watched.items():
                poll.register(fd, mask)
            for fd, _ in poll.poll():
                if fd == self.device.link.fileno():
                    if not self.device.serve():
                        return
                elif fd == self.listener.fileno():
                    taken, _ = self.listener.accept()
                    self.greeting[taken.fileno()] = (taken, bytearray())
                elif fd in self.greeting:
                    self._greet(fd)
                else:
                    self._drain(fd)
            self._hear()
            self._forward()

    def _can_read(self, stream: Stream) -> bool:
        return stream.is_open and not stream.is_ended and stream.credit > 0

    def _drain(self, fd: int) -> None:
        """Empty the counter of a ring that was kicked."""
        if any(ring.kick == fd for ring in self.device.rings):
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 8)

    def _greet(self, fd: int) -> None:
        own, line = self.greeting[fd]
        data = own.recv(1)
        line += data
        if data and not line.endswith(b"\n") and len(line) < 32:
            return
        del self.greeting[fd]
        word, _, port = bytes(line).decode("ascii", "replace").strip().partition(" ")
        if word.upper() != "CONNECT" or not port.isdigit():
            own.close()
            return
        self.next_port += 1
        stream = Stream(own=own, host_port=self.next_port, guest_port=int(port), must_say_ok=True)
        own.setblocking(False)
        self.streams[stream.host_port, stream.guest_port] = stream
        self._say(stream, REQUEST)

    def _say(self, stream: Stream, word: int, flags: int = 0, data: bytes = b"") -> None:
        stream.told = stream.given
        head = HEADER.pack(
            HOST, self.cid, stream.host_port, stream.guest_port, len(data), STREAM, word, flags,
            BUFFER_BYTES, stream.given & 0xFFFFFFFF,
        )  # fmt: skip
        self.answers.append(head + data)

    def _hear(self) -> None:
        """Take what the machine has sent."""
        while (chain := self.device.take(SEND)) is not None:
            packet = chain.read()
            self.device.give_back(SEND, chain, 0)
            source, target, guest_port, host_port, size, kind, word, flags, room, taken = HEADER.unpack_from(packet)
            if source != self.cid or target != HOST or kind != STREAM:
                continue
            stream = self.streams.get((host_port, guest_port))
            if word == REQUEST:
                stream = self._call_host(host_port, guest_port)
            if stream is None:
                if word != RESET:
                    self._say(Stream(own=self.listener, host_port=host_port, guest_port=guest_port), RESET)
                continue
            stream.room, stream.taken = room, taken
            self._obey(stream, word, flags, packet[HEADER.size : HEADER.size + size])

    def _call_host(self, host_port: int, guest_port: int) -> Stream | None:
        own = socket.socket(socket.AF_UNIX)
        try:
            own.connect(f"{self.path}_{host_port}")
        except OSError:
            own.close()
            return None
        own.setblocking(False)
        stream = Stream(own=own, host_port=host_port, guest_port=guest_port, is_open=True)
        self.streams[host_port, guest_port] = stream
        self._say(stream, RESPONSE)
        return stream

    def _obey(self, stream: Stream, word: int, flags: int, data: bytes) -> None:
        if word == RESPONSE:
            stream.is_open = True
            if stream.must_say_ok:
                stream.waiting += f"OK {stream.host_port}\n".encode()
                stream.given -= len(stream.waiting)  # which was none of the machine's
        elif word == RESET:
            self._end(stream)
        elif word == DATA:
            stream.waiting += data
        elif word == ASK_CREDIT:
            self._say(stream, CREDIT)
        elif word == SHUTDOWN and flags == NO_MORE_IN | NO_MORE_OUT:
            self._flush(stream)
            self._say(stream, RESET)
            self._end(stream)
        elif word == SHUTDOWN and flags & NO_MORE_OUT:
            self._flush(stream)
            with contextlib.suppress(OSError):
                stream.own.shutdown(socket.SHUT_WR)

    def _end(self, stream: Stream) -> None:
        stream.own.close()
        self.streams.pop((stream.host_port, stream.guest_port), None)

    def _flush(self, stream: Stream) -> None:
        """Give the host what it takes."""
        try:
            while stream.waiting:
                count = stream.own.send(stream.waiting)
                del stream.waiting[:count]
                stream.given += count
        except BlockingIOError:
            pass
        except OSError:
            stream.waiting.clear()

    def _forward(self) -> None:
        """Give the host what the machine sent, and the machine what there is for it."""
        for stream in list(self.streams.values()):
            self._flush(stream)
            if stream.is_open and stream.given - stream.told > BUFFER_BYTES // 4:
                self._say(stream, CREDIT)
        self._deliver()
        for stream in list(self.streams.values()):
            while self._can_read(stream) and self.device.has_buffer(RECEIVE):
                if not self._read(stream):
                    break
                self._deliver()

    def _read(self, stream: Stream) -> bool:
        """Take some of what the host has sent, for the machine; tell whether there was any."""
        try:
            data = stream.own.recv(min(stream.credit, PIECE_BYTES))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            stream.sent += len(data)
            self._say(stream, DATA, data=data)
        else:
            stream.is_ended = True
            self._say(stream, SHUTDOWN, NO_MORE_IN | NO_MORE_OUT)
        return bool(data)

    def _deliver(self) -> None:
        while self.answers and (chain := self.device.take(RECEIVE)) is not None:
            packet = self.answers.popleft()
            if len(packet) > chain.room:
                raise ValueError("a buffer of the machine is too small")
            chain.write(packet)
            self.device.give_back(RECEIVE, chain, len(packet))
