"""Connections to ports of this host's loopback that a sandbox was given: to 127.0.0.1 at exactly these ports."""

from __future__ import annotations

from ipaddress import IPv4Address

from cloche.core.network import NetworkRules
from cloche.core.refusals import not_allowed

from .connections import GuestConnection
from .errors import Failed, Refused
from .ledger import Ledger
from .stream import SocketStream, Turns, splice
from .upstream import connect_to

LOOPBACK = "127.0.0.1"


def is_host_port(rules: NetworkRules, address: str, port: int) -> bool:
    """Tell whether a guest's connection is to such a port. Only one address counts, of all that are loopback."""
    return address == LOOPBACK and port in rules.host_ports


async def carry_to_host(
    connection: GuestConnection, guest: SocketStream, rules: NetworkRules, ledger: Ledger, turns: Turns, idle_s: float
) -> None:
    """Carry bytes to and from a port of the host, unread. Raises Refused, Failed."""
    where = f"{LOOPBACK}:{connection.port}"
    if not is_host_port(rules, connection.host, connection.port):
        raise Refused(not_allowed(where, "it is no port that this sandbox was given", "ask the user for --host-port"))
    if rules.denies(LOOPBACK, connection.port):
        raise Refused(not_allowed(where, "network_deny names it", "leave it out there"))
    try:
        host_socket = await connect_to(IPv4Address(LOOPBACK), connection.port)
    except OSError as error:
        raise Failed(f"{where} of the host cannot be connected to: {error.strerror or error}") from None
    upstream = SocketStream(host_socket, turns, connection.buffer_bytes)
    connection.is_approved = True  # by whoever gave the port to the sandbox; rules that deny it come first
    connection.row = ledger.row(LOOPBACK, connection.port)
    try:
        await splice(guest, upstream, idle_s=idle_s)
    finally:
        upstream.close()
