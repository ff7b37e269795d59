"""Take connections and datagrams on every address at some ports, record them, and hand them to who answers."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address

from .record import Arrival, Record
from .streams import PATIENCE_S

DATAGRAM_BYTES = 1 << 16
BACKLOG = 512
QUIET_S = 5.0
Answerer = Callable[[socket.socket, Arrival], None]
Replier = Callable[[bytes, Arrival], bytes]
# Family, protocol and type of the message that says where a datagram was sent to, and what its address looks like.
FAMILIES = {
    socket.AF_INET: ("0.0.0.0", socket.IPPROTO_IP, 8, "=I4s4s"),
    socket.AF_INET6: ("::", socket.IPPROTO_IPV6, 50, "=16sI"),
}
RECEIVE_INFO = {socket.AF_INET: 8, socket.AF_INET6: 49}
IPV6_V6ONLY, IP_ADD_MEMBERSHIP = 26, 35


class Listeners:
    """Serve: each connection in a thread, each datagram at once."""

    def __init__(self, tcp: Mapping[int, Answerer], udp: Mapping[int, Replier]) -> None:
        self.record = Record()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._accepting: dict[int, tuple[socket.socket, Callable[[socket.socket], None]]] = {}
        for port, answer in tcp.items():
            for family in FAMILIES:
                self._listen(family, port, answer)
        for port, reply in udp.items():
            for family in FAMILIES:
                self._receive(family, port, reply)

    def _listen(self, family: socket.AddressFamily, port: int, answer: Answerer) -> None:
        one = _bound(family, socket.SOCK_STREAM, port)
        one.listen(BACKLOG)
        self._accepting[one.fileno()] = one, lambda listener: self._accept(listener, answer)

    def _receive(self, family: socket.AddressFamily, port: int, reply: Replier) -> None:
        one = _bound(family, socket.SOCK_DGRAM, port)
        _, level, _, _ = FAMILIES[family]
        one.setsockopt(level, RECEIVE_INFO[family], 1)
        self._accepting[one.fileno()] = one, lambda receiver: self._take(receiver, reply)

    def join(self, group: str, port: int, interface_address: str) -> None:
        """Hear a multicast group at a port that is served."""
        for one, _ in self._accepting.values():
            if one.family == socket.AF_INET and one.type == socket.SOCK_DGRAM and one.getsockname()[1] == port:
                wanted = socket.inet_aton(group) + socket.inet_aton(interface_address)
                one.setsockopt(socket.IPPROTO_IP, IP_ADD_MEMBERSHIP, wanted)

    def listen_by_name(self, name: str, answer: Answerer) -> None:
        """Listen on an abstract socket of this network namespace."""
        one = socket.socket(socket.AF_UNIX)
        one.bind(f"\0{name}")
        one.listen(BACKLOG)
        self._accepting[one.fileno()] = one, lambda listener: self._accept(listener, answer)

    def start(self) -> None:
        """Serve from now on, beside who calls."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        poll = select.poll()
        for fd in self._accepting:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                one, take = self._accepting[fd]
                take(one)

    def _accept(self, listener: socket.socket, answer: Answerer) -> None:
        connection, peer = listener.accept()
        if connection.family == socket.AF_UNIX:
            arrival = Arrival("unix", str(listener.getsockname()), 0)
        else:
            address, port, *_ = connection.getsockname()
            arrival = Arrival("tcp", str(ip_address(address)), port, peer=peer[0])
        self.record.add(arrival)
        with self._lock:
            self._open.add(connection)
        threading.Thread(target=self._answer, args=(connection, arrival, answer), daemon=True).start()

    def _answer(self, connection: socket.socket, arrival: Arrival, answer: Answerer) -> None:
        connection.settimeout(PATIENCE_S)
        try:
            answer(connection, arrival)
        except (OSError, ValueError) as error:  # who called is gone, or is not understood: it is on record
            arrival.requests.append({"error": str(error)})
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def _take(self, receiver: socket.socket, reply: Replier) -> None:
        data, infos, _, peer = receiver.recvmsg(DATAGRAM_BYTES, 256)
        _, level, kind, layout = FAMILIES[receiver.family]
        found = [info for one_level, one_kind, info in infos if (one_level, one_kind) == (level, kind)]
        fields = struct.unpack(layout, found[0])
        is_old = receiver.family == socket.AF_INET
        address = fields[2] if is_old else fields[0]
        arrival = Arrival("udp", str(ip_address(address)), receiver.getsockname()[1], peer=peer[0])
        arrival.note(data, data)
        self.record.add(arrival)
        # From the address that was asked; from another one to who asked a group or all.
        source = struct.pack(layout, 0, address, bytes(4)) if is_old else struct.pack(layout, address, 0)
        info = (
            [] if ip_address(address).is_multicast or arrival.address == "255.255.255.255" else [(level, kind, source)]
        )
        try:
            receiver.sendmsg([reply(data, arrival)], info, 0, peer)
        except (OSError, ValueError, IndexError) as error:  # nobody listens there any more, or it is not understood
            arrival.requests.append({"error": str(error)})

    def settle(self) -> None:
        """Return when nothing waits to be read, so that the record has all that was sent before."""
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            with self._lock:
                waiting = [*self._open, *(one for one, _ in self._accepting.values())]
            poll = select.poll()
            for one in waiting:
                if one.fileno() >= 0:
                    poll.register(one, select.POLLIN)
            if not poll.poll(0):
                return
            time.sleep(0.001)


def _bound(family: socket.AddressFamily, kind: socket.SocketKind, port: int) -> socket.socket:
    one = socket.socket(family, kind)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, IPV6_V6ONLY, 1)
    if kind == socket.SOCK_DGRAM and family == socket.AF_INET:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    one.bind((FAMILIES[family][0], port))
    return one
