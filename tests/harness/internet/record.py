"""What arrived: one entry for each connection, datagram, question or packet."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

KEPT_BYTES = 1 << 17  # of one connection


@dataclass(slots=True)
class Arrival:
    """Say what came to an address: `raw` as it came, `said` without TLS, `requests` as the server read them."""

    protocol: str
    address: str
    port: int
    peer: str = ""
    server_name: str = ""
    raw: bytearray = field(default_factory=bytearray)
    said: bytearray = field(default_factory=bytearray)
    requests: list[dict[str, str]] = field(default_factory=list)

    def note(self, raw: bytes = b"", said: bytes = b"") -> None:
        """Keep what came, up to a bound."""
        self.raw += raw[: max(0, KEPT_BYTES - len(self.raw))]
        self.said += said[: max(0, KEPT_BYTES - len(self.said))]

    def as_json(self) -> dict[str, Any]:
        """Return it with its bytes as text, each a character."""
        texts = {"raw": self.raw.decode("latin-1"), "said": self.said.decode("latin-1")}
        rest = ("protocol", "address", "port", "peer", "server_name", "requests")
        return {**{name: getattr(self, name) for name in rest}, **texts}


class Record:
    """Hold arrivals; threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrivals: list[Arrival] = []

    def add(self, arrival: Arrival) -> Arrival:
        """Keep an arrival, which may go on."""
        with self._lock:
            self._arrivals.append(arrival)
        return arrival

    def as_json(self) -> list[dict[str, Any]]:
        """Return all."""
        with self._lock:
            return [arrival.as_json() for arrival in self._arrivals]

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self._arrivals.clear()
