"""Create the sockets of another container's network, from a container that shares its namespace, and send them.

It is for callers who cannot enter the namespace themselves: members of the docker group. It does the same as
`jail/network.py`, with an image's Python and the standard library. Arguments are the ports, as JSON, and the path of
the socket over which the created sockets are sent.
"""

import json
import os
import socket
import sys

NAME_SERVER, PREFIX_BITS, DNS_PORT, BACKLOG, LOOPBACK = "198.18.0.1", 15, 53, 512, 1
NEW_LINK, NEW_ADDRESS, NEW_ROUTE, ACK, ERROR = 16, 20, 24, 0x405, 2


def make_all_local() -> None:
    """Bring the loopback interface up, and make every IPv4 address local to this namespace."""
    index, up, address = (LOOPBACK).to_bytes(4, "little"), (1).to_bytes(4, "little"), socket.inet_aton(NAME_SERVER)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as link:
        ask(link, NEW_LINK, bytes(4) + index + up + up)
        own = bytes((socket.AF_INET, PREFIX_BITS, 0, 254)) + index
        ask(link, NEW_ADDRESS, own + attribute(1, address) + attribute(2, address))
        ask(link, NEW_ROUTE, bytes((socket.AF_INET, 0, 0, 0, 255, 4, 254, 2, 0, 0, 0, 0)) + attribute(4, index))


def ask(link: socket.socket, kind: int, body: bytes) -> None:
    """Send an rtnetlink request and read its acknowledgement."""
    head = (16 + len(body)).to_bytes(4, "little") + kind.to_bytes(2, "little") + ACK.to_bytes(2, "little") + bytes(8)
    link.send(head + body)
    answer = link.recv(4096)
    code = int.from_bytes(answer[16:20], "little", signed=True)
    if int.from_bytes(answer[4:6], "little") != ERROR or code:
        raise OSError(-code, f"rtnetlink: {os.strerror(-code)}")


def attribute(kind: int, value: bytes) -> bytes:
    """Return an rtnetlink attribute."""
    return (4 + len(value)).to_bytes(2, "little") + kind.to_bytes(2, "little") + value


def bound(kind: int, address: str, port: int) -> socket.socket:
    """Return a bound socket; a stream socket also listens."""
    bound_socket = socket.socket(socket.AF_INET, kind)
    if kind == socket.SOCK_STREAM:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound_socket.bind((address, port))
    if kind == socket.SOCK_STREAM:
        bound_socket.listen(BACKLOG)
    return bound_socket


def main() -> None:
    """Create all sockets and send them in one message."""
    ports, path = json.loads(sys.argv[1]), sys.argv[2]
    make_all_local()
    sockets = [bound(socket.SOCK_DGRAM, NAME_SERVER, DNS_PORT), bound(socket.SOCK_STREAM, NAME_SERVER, DNS_PORT)]
    sockets += [bound(socket.SOCK_STREAM, "0.0.0.0", port) for port in ports]  # noqa: S104 - the namespace has no other interface
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(path)
        socket.send_fds(link, [b"sockets"], [bound_socket.fileno() for bound_socket in sockets])


main()
