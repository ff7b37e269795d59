"""What passes from the host to the internet, of whatever kind, seen at the pair of interfaces.

Theory of operation. A packet socket gets all of it; a filter in the kernel leaves out what TCP sends after a
connection's first packet, so that nothing is lost in long transfers. What a kernel says by itself to find its
neighbours is left out, too.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from ipaddress import IPv4Address, IPv6Address

from .record import Arrival, Record

ETH_P_ALL, ETH_P_IP, ETH_P_IPV6, ETH_P_ARP = 3, 0x0800, 0x86DD, 0x0806
SO_ATTACH_FILTER, SO_RCVBUFFORCE = 26, 33
PACKET_OUTGOING = 4
SYN, ACK = 2, 16
# Of ICMPv6, and the header that only listener reports have: routers, neighbours, groups.
NEIGHBOURS = {*range(130, 138), 143}
HOP_BY_HOP = 0
NAMES = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", socket.IPPROTO_ICMP: "icmp", 58: "icmp6"}

# (operation, where to if true, where to if false, value): classic BPF on an Ethernet frame.
FILTER = (
    (0x28, 0, 0, 12),  # the kind of frame
    (0x15, 0, 5, ETH_P_IP),
    (0x30, 0, 0, 23),  # the protocol in IPv4
    (0x15, 0, 9, socket.IPPROTO_TCP),
    (0xB1, 0, 0, 14),  # the length of its header
    (0x50, 0, 0, 14 + 13),  # TCP's flags behind it
    (0x05, 0, 0, 4),
    (0x15, 0, 5, ETH_P_IPV6),
    (0x30, 0, 0, 20),  # the protocol in IPv6
    (0x15, 0, 3, socket.IPPROTO_TCP),
    (0x30, 0, 0, 14 + 40 + 13),
    (0x54, 0, 0, SYN | ACK),
    (0x15, 0, 1, SYN),
    (0x06, 0, 0, 0x40000),
    (0x06, 0, 0, 0),
)


class Packets:
    """Watch an interface; `record` has what came so far once it was asked for."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        program = b"".join(struct.pack("HBBI", *step) for step in FILTER)
        buffer = ctypes.create_string_buffer(program)
        self._socket.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HxxxxxxP", len(FILTER), ctypes.addressof(buffer))
        )
        self._socket.bind((interface, 0))
        self._socket.setblocking(False)
        self._record = Record()

    @property
    def record(self) -> Record:
        """Read what waits, and return all."""
        while True:
            try:
                frame, (_, _, direction, *_) = self._socket.recvfrom(1 << 16)
            except BlockingIOError:
                return self._record
            if direction != PACKET_OUTGOING and (arrival := read_frame(frame)):
                self._record.add(arrival)


def read_frame(frame: bytes) -> Arrival | None:
    """Return what a frame is; nothing for neighbours' talk."""
    (kind,) = struct.unpack_from("!H", frame, 12)
    packet = frame[14:]
    if kind == ETH_P_ARP:
        return None
    if kind == ETH_P_IP and len(packet) >= 20:
        return _described(packet[9], str(IPv4Address(packet[16:20])), packet[(packet[0] & 15) * 4 :], frame)
    if kind == ETH_P_IPV6 and len(packet) >= 40:
        rest = packet[40:]
        if packet[6] == HOP_BY_HOP or (packet[6] == 58 and rest[:1] and rest[0] in NEIGHBOURS):
            return None
        return _described(packet[6], str(IPv6Address(packet[24:40])), rest, frame)
    return Arrival(f"ethernet {kind:#06x}", frame[:6].hex(":"), 0, raw=bytearray(frame))


def _described(protocol: int, address: str, rest: bytes, frame: bytes) -> Arrival:
    name = NAMES.get(protocol, f"protocol {protocol}")
    port = struct.unpack_from("!H", rest, 2)[0] if name in ("tcp", "udp") and len(rest) >= 4 else 0
    return Arrival(name, address, port, raw=bytearray(frame))
