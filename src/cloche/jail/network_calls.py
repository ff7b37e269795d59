"""Sockets of the network where it has no namespace: the reaper connects, and puts the connected socket in place.

A guest at level confined is in its host's own network. So it never has a network socket that is neither connected nor
listening, and none of its calls that name an address continues:

- `socket` returns a *stand-in*: an unconnected Unix socket, of streams for TCP, of packets for UDP. It reaches nothing:
  the filter notifies of `bind`, `connect` and `listen` on it, and a send fails without a connection.
- `connect` is decided on one copy of the address. For a served address it makes a pair of TCP sockets, connected to
  each other over loopback: one replaces the guest's descriptor, the other goes to the egress process with the requested
  address, as if accepted there. Any other address is refused here.
- `bind` is refused, and so is UDP. Names are resolved over TCP, at any address with the name server's port.

A guest's socket stays connected to the egress process: another peer would take `connect`, or a send with MSG_FASTOPEN,
which the filter refuses. A copy of a descriptor (`dup`, a process forked before) keeps the stand-in, and may be
connected by itself.
"""

from __future__ import annotations

import posix

from . import messages
from .network import BACKLOG, DNS_PORT
from .syscalls import AF_UNIX, SOCK_SEQPACKET, call, fresh, ppoll, read_uint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .answered_calls import Answerer, HeldCall
    from .messages import Spec

AF_INET, AF_INET6, SOCK_STREAM, SOCK_DGRAM, TCP, UDP = 2, 10, 1, 2, 6, 17
TYPE_MASK, IPPROTO_TCP, TCP_NODELAY = 0xF, 6, 1
MOST_STAND_INS = 16_384  # of which the oldest is forgotten, and cannot be connected any more
LEAST_ADDRESS, MOST_ADDRESS, IPV4_BYTES, IPV6_BYTES = 2, 128, 16, 28
MAPPED = bytes(10) + b"\xff\xff"
LOOPBACK = bytes((127, 0, 0, 1))
MOST_STRANGERS, CONNECT_S = 16, 0.2  # others may connect to our listener, and are closed
SEND_TRIES, SEND_PAUSE_S = 40, 0.005
EAGAIN, EACCES, EINVAL, EPROTONOSUPPORT, EAFNOSUPPORT = 11, 13, 22, 93, 97
ENETUNREACH, EISCONN, ECONNREFUSED, EINPROGRESS = 101, 106, 111, 115
REFUSED = EACCES, "a sandbox at level confined has only TCP connections"


def begin(link: int) -> None:
    """Tell the egress process that connections of a new sandbox will come by this link. Raises OSError."""
    posix.set_blocking(link, False)  # one that reads nothing must not hold up the guest's end
    names = ["localhost", posix.uname().nodename.lower()]  # a guest is not shown the host's file of these
    messages.send_retrying(link, "begin", {"jail": 0, "names": names})


def answerers(spec: Spec, names: Mapping[int, str]) -> dict[int, Answerer]:
    """Return the answerers of these calls, by number, for guests of this sandbox."""
    network = spec.network or {}
    sockets = NetworkSockets(network["link"], network["ports"])
    by_name = {"socket": sockets.make, "connect": sockets.connect, "bind": sockets.bind}
    return {number: by_name[name] for number, name in names.items()}


class NetworkSockets:
    """Make the sockets of a sandbox's guests, and connect them. `ports` are those that are served."""

    def __init__(self, link: int, ports: list[int]):
        self._link, self._ports = link, frozenset((*ports, DNS_PORT))
        self._stand_ins: dict[int, tuple[int, int]] = {}  # family and type that were asked for, by inode
        self._listener, self._address = -1, b""

    def make(self, held_call: HeldCall) -> int:
        """Answer `socket` with a stand-in."""
        family, kind, protocol = held_call.argument(0), held_call.argument(1), held_call.argument(2)
        of_type = {SOCK_STREAM: (SOCK_STREAM, TCP), SOCK_DGRAM: (SOCK_SEQPACKET, UDP)}.get(kind & TYPE_MASK)
        if family not in (AF_INET, AF_INET6) or of_type is None or protocol not in (0, of_type[1]):
            raise OSError(EPROTONOSUPPORT, "neither TCP nor UDP")
        is_blocking, is_kept = not kind & posix.O_NONBLOCK, not kind & posix.O_CLOEXEC
        stand_in = call("socket", AF_UNIX, of_type[0] | posix.O_CLOEXEC | (0 if is_blocking else posix.O_NONBLOCK), 0)
        try:
            inode = posix.fstat(stand_in).st_ino
            self._stand_ins[inode] = family, kind & TYPE_MASK
            if len(self._stand_ins) > MOST_STAND_INS:
                del self._stand_ins[next(iter(self._stand_ins))]
            return held_call.put(stand_in, flags=0 if is_kept else posix.O_CLOEXEC, is_answer=True)
        finally:
            posix.close(stand_in)

    def connect(self, held_call: HeldCall) -> int:
        """Answer `connect`: put a connected socket in place of the stand-in, where the address is served."""
        number, size = held_call.argument(0), held_call.argument(2)
        if not LEAST_ADDRESS <= size <= MOST_ADDRESS:
            raise OSError(EINVAL, "no address")
        address = held_call.copy(held_call.arguments[1], size)
        inode = held_call.open_socket(number)
        if inode not in self._stand_ins:
            raise OSError(EISCONN, "connected, or no socket of the network")
        flags = held_call.open_flags(number)
        host, port = self._served_address(address, *self._stand_ins[inode])
        guests, ours = self._pair()
        try:
            self._hand_over(ours, host, port)
            posix.set_blocking(guests, not flags & posix.O_NONBLOCK)
            held_call.put(guests, number, flags=flags & posix.O_CLOEXEC)
        finally:
            posix.close(guests)
            posix.close(ours)
        return 0

    def bind(self, held_call: HeldCall) -> int:
        """Answer `bind`: nothing is listened for."""
        held_call.open_socket(held_call.argument(0))
        raise OSError(*REFUSED)

    def _served_address(self, address: bytes, family: int, kind: int) -> tuple[str, int]:
        """Return the requested address and port of a connection. Raises OSError for one that is not served."""
        if read_uint(address, 0, 2) != family:
            raise OSError(EAFNOSUPPORT, "an address of another family")
        if len(address) < (IPV4_BYTES if family == AF_INET else IPV6_BYTES):
            raise OSError(EINVAL, "too short an address")
        ipv4_bytes = address[4:8] if family == AF_INET else address[20:24]
        port = int.from_bytes(address[2:4], "big")
        if kind != SOCK_STREAM or (family == AF_INET6 and address[8:20] not in (MAPPED, bytes(12))):
            raise OSError(ENETUNREACH, "neither TCP nor IPv4")
        is_own = port != DNS_PORT and (ipv4_bytes[0] in (0, 127) or (family == AF_INET6 and address[8:20] != MAPPED))
        if is_own or port not in self._ports:
            raise OSError(ECONNREFUSED, "no server for that")
        return ".".join(map(str, ipv4_bytes)), port

    def _pair(self) -> tuple[int, int]:
        """Return two TCP sockets that are connected to each other. Raises OSError.

        Other processes of this network can connect to the listener, too: only our own connection is used.
        """
        if self._listener < 0:
            self._listen()
        guests = call("socket", AF_INET, SOCK_STREAM | posix.O_CLOEXEC | posix.O_NONBLOCK, 0)
        try:
            call("setsockopt", guests, IPPROTO_TCP, TCP_NODELAY, (1).to_bytes(4, "little"), 4)
            try:
                call("connect", guests, self._address, len(self._address))
            except OSError as error:
                if error.errno != EINPROGRESS:
                    raise
            name = _name("getsockname", guests)
            for _ in range(MOST_STRANGERS):
                if not ppoll((self._listener,), CONNECT_S):
                    break
                accepted = call("accept4", self._listener, 0, 0, posix.O_CLOEXEC | posix.O_NONBLOCK)
                if _name("getpeername", accepted) == name:
                    return guests, accepted
                posix.close(accepted)
            raise OSError(ECONNREFUSED, "the listener of ours is not reached")
        except BaseException:
            posix.close(guests)
            raise

    def _listen(self) -> None:
        listener = call("socket", AF_INET, SOCK_STREAM | posix.O_CLOEXEC | posix.O_NONBLOCK, 0)
        try:
            address = AF_INET.to_bytes(2, "little") + bytes(2) + LOOPBACK + bytes(8)
            call("bind", listener, address, len(address))
            call("listen", listener, BACKLOG)
            self._address = _name("getsockname", listener)
        except OSError:
            posix.close(listener)
            raise
        self._listener = listener

    def _hand_over(self, connected: int, host: str, port: int) -> None:
        """Give one end to the egress process, with the address that the guest's end is for. Raises OSError."""
        for _ in range(SEND_TRIES):
            try:
                messages.send(self._link, "connection", {"jail": 0, "host": host, "port": port}, [connected])
            except BlockingIOError:
                ppoll((), SEND_PAUSE_S)
            except OSError as error:
                raise OSError(ECONNREFUSED, "the egress process is gone") from error
            else:
                return
        raise OSError(EAGAIN, "too many connections at once")


def _name(which: str, connected: int) -> bytes:
    """Return the IPv4 address and port of a socket's own or other end, as the kernel writes it."""
    name, size = fresh(IPV4_BYTES), (IPV4_BYTES).to_bytes(4, "little")
    call(which, connected, name, bytes(bytearray(size)))
    return bytes(bytearray(name))
