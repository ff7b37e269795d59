"""stub until merge"""

from __future__ import annotations

import json
from typing import Any


class FrameReader:
    def __init__(self, max_bytes: int):
        self._max, self._data = max_bytes, bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        self._data += data
        found = []
        while len(self._data) >= 4:
            size = int.from_bytes(self._data[:4], "big")
            if size > self._max:
                raise ValueError("frame too large")
            if len(self._data) < 4 + size:
                break
            frame = json.loads(bytes(self._data[4 : 4 + size]))
            if not isinstance(frame, dict):
                raise ValueError("no object")
            found.append(frame)
            del self._data[: 4 + size]
        return found


def encode(frame: dict[str, Any]) -> bytes:
    data = json.dumps(frame).encode()
    return len(data).to_bytes(4, "big") + data
