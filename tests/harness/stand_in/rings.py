"""The host's half of a virtio device by vhost-user: the monitor's messages, its memory, and its rings.

The monitor shares the machine's memory and tells where the rings lie; buffers are taken and given back in there.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

(GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEMORY, SET_NUMBER, SET_ADDRESS, SET_BASE, GET_BASE, SET_KICK, SET_CALL) = (
    1, 2, 3, 5, 8, 9, 10, 11, 12, 13,
)  # fmt: skip
GET_PROTOCOL, SET_ENABLE, GET_CONFIG = 15, 18, 24
VERSION_1, PROTOCOL_FEATURES, CONFIG = 1 << 32, 1 << 30, 1 << 9
REPLY, NO_DESCRIPTOR = 0x5, 1 << 8
MORE, WRITABLE, QUIET = 1, 2, 1
HEADER = struct.Struct("<III")


@dataclass
class Region:
    """Hold one piece of the machine's memory: where the machine has it, where the monitor has it, and it."""

    guest: int
    size: int
    monitor: int
    offset: int
    memory: mmap.mmap


@dataclass
class Ring:
    """Hold one ring; addresses are the monitor's."""

    size: int = 0
    table: tuple[Region, int] | None = None
    used: tuple[Region, int] | None = None
    available: tuple[Region, int] | None = None
    seen: int = 0
    kick: int = -1
    call: int = -1


@dataclass
class Chain:
    """Hold one buffer of the machine's, in pieces."""

    head: int
    parts: list[tuple[Region, int, int]] = field(default_factory=list)

    @property
    def room(self) -> int:
        return sum(size for _, _, size in self.parts)

    def read(self) -> bytes:
        """Return all of it."""
        return b"".join(region.memory[at : at + size] for region, at, size in self.parts)

    def write(self, data: bytes) -> None:
        """Fill it."""
        for region, at, size in self.parts:
            piece, data = data[:size], data[size:]
            region.memory[at : at + len(piece)] = piece


class Device:
    """Serve a monitor's messages, and give out buffers of its rings."""

    def __init__(self, link: socket.socket, config: bytes, rings: int):
        self.link, self.config = link, config
        self.regions: list[Region] = []
        self.rings = [Ring() for _ in range(rings)]
        self._does: dict[int, Callable[[bytes, list[int]], bytes | None]] = {
            GET_FEATURES: lambda *_: struct.pack("<Q", VERSION_1 | PROTOCOL_FEATURES),
            GET_PROTOCOL: lambda *_: struct.pack("<Q", CONFIG),
            GET_CONFIG: self._tell_config,
            SET_MEMORY: self._map,
            SET_NUMBER: self._set_number,
            SET_ADDRESS: self._set_address,
            SET_BASE: self._set_base,
            GET_BASE: self._stop,
            SET_KICK: self._set_kick,
            SET_CALL: self._set_call,
        }

    def serve(self) -> bool:
        """Do what one message says; tell whether there was one."""
        head, parts, _, _ = self.link.recvmsg(HEADER.size, socket.CMSG_SPACE(8 * 4))
        if not head:
            return False
        fds = array.array("i")
        for level, kind, data in parts:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        request, _, size = HEADER.unpack(head)
        body = b""
        while len(body) < size:
            body += self.link.recv(size - len(body))
        do = self._does.get(request)
        answer = do(body, list(fds)) if do else None
        if answer is not None:
            self.link.sendall(HEADER.pack(request, REPLY, len(answer)) + answer)
        return True

    def _tell_config(self, body: bytes, _: list[int]) -> bytes:
        offset, size, flags = struct.unpack_from("<III", body)
        piece = self.config[offset : offset + size]
        return struct.pack("<III", offset, size, flags) + piece.ljust(size, b"\0")

    def _map(self, body: bytes, fds: list[int]) -> None:
        (count,) = struct.unpack_from("<I", body)
        self.regions = []
        for number, fd in zip(range(count), fds, strict=True):
            guest, size, monitor, offset = struct.unpack_from("<QQQQ", body, 8 + 32 * number)
            self.regions.append(Region(guest, size, monitor, offset, mmap.mmap(fd, size + offset)))
            os.close(fd)

    def _set_number(self, body: bytes, _: list[int]) -> None:
        index, size = struct.unpack("<II", body)
        self.rings[index].size = size

    def _set_base(self, body: bytes, _: list[int]) -> None:
        index, seen = struct.unpack("<II", body)
        self.rings[index].seen = seen

    def _set_address(self, body: bytes, _: list[int]) -> None:
        index, _flags, table, used, available, _log = struct.unpack("<IIQQQQ", body)
        ring = self.rings[index]
        ring.table, ring.used, ring.available = (self._place(one, "monitor") for one in (table, used, available))

    def _stop(self, body: bytes, _: list[int]) -> bytes:
        index, _unused = struct.unpack("<II", body)
        ring = self.rings[index]
        ring.available = None
        return struct.pack("<II", index, ring.seen)

    def _set_kick(self, body: bytes, fds: list[int]) -> None:
        (value,) = struct.unpack("<Q", body)
        self.rings[value & 0xFF].kick = fds[0] if not value & NO_DESCRIPTOR else -1

    def _set_call(self, body: bytes, fds: list[int]) -> None:
        (value,) = struct.unpack("<Q", body)
        self.rings[value & 0xFF].call = fds[0] if not value & NO_DESCRIPTOR else -1

    def _place(self, address: int, whose: str) -> tuple[Region, int]:
        """Return where an address is in the memory that is mapped here. Raises ValueError for one outside of it."""
        for region in self.regions:
            start = region.guest if whose == "guest" else region.monitor
            if start <= address < start + region.size:
                return region, address - start + region.offset
        raise ValueError(f"{address:#x} is in no memory of the machine")

    def has_buffer(self, index: int) -> bool:
        """Tell whether the machine has given a buffer."""
        ring = self.rings[index]
        if ring.available is None:
            return False
        region, at = ring.available
        (count,) = struct.unpack_from("<H", region.memory, at + 2)
        return bool(count != ring.seen & 0xFFFF)

    def take(self, index: int) -> Chain | None:
        """Take the machine's next buffer, if there is one."""
        ring = self.rings[index]
        if ring.available is None or ring.table is None or not self.has_buffer(index):
            return None
        region, at = ring.available
        (head,) = struct.unpack_from("<H", region.memory, at + 4 + 2 * (ring.seen % ring.size))
        ring.seen = (ring.seen + 1) & 0xFFFF
        chain, number = Chain(head), head
        while True:
            table, start = ring.table
            address, size, flags, following = struct.unpack_from("<QIHH", table.memory, start + 16 * number)
            chain.parts.append((*self._place(address, "guest"), size))
            if not flags & MORE:
                return chain
            number = following

    def give_back(self, index: int, chain: Chain, written: int) -> None:
        """Give a buffer back, with so many bytes in it, and wake the machine."""
        ring = self.rings[index]
        if ring.used is None or ring.available is None:
            return
        region, at = ring.used
        (count,) = struct.unpack_from("<H", region.memory, at + 2)
        struct.pack_into("<II", region.memory, at + 4 + 8 * (count % ring.size), chain.head, written)
        struct.pack_into("<H", region.memory, at + 2, (count + 1) & 0xFFFF)
        other, start = ring.available
        (flags,) = struct.unpack_from("<H", other.memory, start)
        if ring.call >= 0 and not flags & QUIET:
            os.write(ring.call, struct.pack("<Q", 1))
