"""Whether an address is one of the host's own, by the kernel's routing at the time of the call."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address

NEW_ROUTE, GET_ROUTE, REQUEST = 24, 26, 1
UNICAST, DESTINATION = 1, 1
HEADER_BYTES, ROUTE_TYPE_AT = 16, 23


def is_elsewhere(address: IPv4Address | IPv6Address) -> bool:
    """Tell whether packets to `address` would leave for another machine: the host's own are routed to itself.

    Broadcast addresses, and those that a route refuses or that cannot be reached, are not elsewhere either.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    packed = address.packed
    body = bytes((family, len(packed) * 8)) + bytes(10)
    body += (4 + len(packed)).to_bytes(2, "little") + DESTINATION.to_bytes(2, "little") + packed
    size = HEADER_BYTES + len(body)
    header = size.to_bytes(4, "little") + GET_ROUTE.to_bytes(2, "little") + REQUEST.to_bytes(2, "little") + bytes(8)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as link:
        link.send(header + body)
        answer = link.recv(4096)
    is_route = int.from_bytes(answer[4:6], "little") == NEW_ROUTE
    return is_route and answer[ROUTE_TYPE_AT] == UNICAST
