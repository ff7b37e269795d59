"""Where the frames of a web socket end (RFC 6455, section 5.2). Pure.

The package `websockets` parses all that it gets at once, and a frame without content costs far more than its two to six
bytes: so readers pass it a bounded number in one turn of the event loop.
"""

from __future__ import annotations


def size_of_frame(data: bytes | bytearray, start: int) -> int:
    """Return the size of the frame that begins at `start`, with its header; 0 where the header is incomplete."""
    if len(data) - start < 2:
        return 0
    length, mask = data[start + 1] & 127, 4 if data[start + 1] & 128 else 0
    header = 2 + {126: 2, 127: 8}.get(length, 0)
    if len(data) - start < header + mask:
        return 0
    return header + mask + (length if length < 126 else int.from_bytes(data[start + 2 : start + header], "big"))


class FrameEnds:
    """Say where a bounded number of frames ends in what was received, also for frames that come in pieces."""

    def __init__(self) -> None:
        self._left = 0  # of a frame whose header has come

    def after(self, data: bytes | bytearray, most: int) -> int:
        """Return where at most `most` frames end, or what has come of the last one. An incomplete header waits."""
        end = 0
        for _ in range(most):
            self._left = self._left or size_of_frame(data, end)
            come = min(self._left, len(data) - end)
            end, self._left = end + come, self._left - come
            if self._left or not come:
                break
        return end
