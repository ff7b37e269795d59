"""The addresses of a fleet's nodes, which no guest may reach. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from .engine import DeniedAddresses, EngineNode, denied_tag

DENIED_S = 600.0  # after a node has left, guests may not reach its addresses for that long


class NodeHosts:
    """Remember the addresses of nodes, and when they were last listed; `denied` are those that count now."""

    def __init__(self) -> None:
        self._listed_at: dict[str, float] = {}
        self.denied = DeniedAddresses()

    def note(self, nodes: Iterable[EngineNode], now: float) -> None:
        """Note the nodes that an engine lists."""
        for node in nodes:
            for host in (*node.hosts, urlsplit(node.address).hostname or ""):
                if host:
                    self._listed_at[_plain(host)] = now
        self._listed_at = {host: at for host, at in self._listed_at.items() if now - at < DENIED_S}
        addresses = tuple(sorted(self._listed_at))
        if addresses != self.denied.addresses:
            self.denied = DeniedAddresses(addresses=addresses, tag=denied_tag(addresses))


def _plain(host: str) -> str:
    """Return an address as rules of the network write it, without the interface of a link-local one."""
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host
