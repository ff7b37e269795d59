"""Writing the guest's bytes: untouched into files and pipes, harmless on a terminal."""

from __future__ import annotations

import codecs
import os
import select

from cloche.core.errors import ClocheError
from cloche.core.plain import plain_output


class OutputFailed(ClocheError):
    """Report that our own output cannot be written: a full disk, most likely."""


RED, PLAIN = b"\x1b[31m", b"\x1b[0m"


class Writer:
    """Write one stream of the guest to one of our descriptors, at once and complete.

    `is_red` holds on a terminal, unless NO_COLOR is set there.
    """

    def __init__(self, fd: int, *, is_red: bool = False) -> None:
        self._fd = fd
        self._is_terminal = os.isatty(fd)
        self._is_red = is_red and self._is_terminal and not os.environ.get("NO_COLOR")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end inside a character

    def write(self, data: bytes) -> None:
        """Write `data`; raises BrokenPipeError when nobody reads any more."""
        if self._is_terminal:
            data = self._coloured(plain_output(self._decoder.decode(data)))
        self._write_all(data)

    def finish(self) -> None:
        """Write what is left of a character that never ended."""
        if self._is_terminal:
            self._write_all(self._coloured(plain_output(self._decoder.decode(b"", final=True))))

    def _coloured(self, text: str) -> bytes:
        data = text.encode("utf-8", "replace")
        return b"%s%s%s" % (RED, data, PLAIN) if self._is_red and data else data

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # the descriptor's other owner made it non-blocking
                select.select([], [self._fd], [])
            except BrokenPipeError:
                raise
            except OSError as error:
                raise OutputFailed(f"cannot pass the output on: {error.strerror}; the run was stopped") from error
