"""Keep what a stream says within bounds: its head, its tail, and how much there was in all."""

from __future__ import annotations


class HeadTail:
    """Keep the first and the last half of `limit` bytes, and count all."""

    def __init__(self, limit: int):
        self._half = max(1, limit // 2)
        self.limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.limit - len(self._head) if not self._tail else 0
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self.limit:
                del self._tail[: -self.limit]

    @property
    def is_truncated(self) -> bool:
        return self.total > self.limit

    def kept(self) -> bytes:
        """Return everything, or head, a line that says how much is missing, and tail."""
        if not self.total:
            return b""
        if not self.is_truncated:
            return bytes(self._head + self._tail)
        head, tail = bytes(self._head[: self._half]), bytes((self._head + self._tail)[-self._half :])
        missing = self.total - len(head) - len(tail)
        return head + f"\n[cloche: {missing} bytes left out]\n".encode() + tail
