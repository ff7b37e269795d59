"""Addresses for names: each name gets one of 198.18.0.0/15 with its first question, which is never given to another.

A connection's local address then identifies its name. A guest can cause every entry, so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address

FIRST = int(IPv4Address("198.18.1.0"))  # the name server's own lies below
MOST_NAMES, LOOPBACK = 4096, "127.0.0.1"


class Names:
    """Hold the names of one sandbox."""

    def __init__(self, own: Sequence[str] = ()) -> None:
        """Begin with the names that are the sandbox's `own`, which stand for loopback."""
        self._by_name = dict.fromkeys(own, LOOPBACK)
        self._by_address: dict[str, str] = {}

    def address_of(self, name: str) -> str | None:
        """Return the address of a name, assigned now if it is new; None above the bound."""
        address = self._by_name.get(name)
        if address is None and len(self._by_name) < MOST_NAMES:
            address = self._by_name[name] = str(IPv4Address(FIRST + len(self._by_address)))
            self._by_address[address] = name
        return address

    def is_own(self, name: str) -> bool:
        """Tell whether a name is the sandbox's own."""
        return self._by_name.get(name) == LOOPBACK

    def name_of(self, address: str) -> str | None:
        """Return the name that an address stands for, None for none."""
        return self._by_address.get(address)

    @staticmethod
    def is_ours(address: str) -> bool:
        """Tell whether an address is in the range of names."""
        return address.startswith(("198.18.", "198.19."))
