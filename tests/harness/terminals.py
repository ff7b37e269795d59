"""A pseudo-terminal with `cloche session`, another verb, or a program: what a person types, and what a person sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from types import TracebackType
from typing import Self

COMMAND = [sys.executable, "-m", "cloche", "session"]
PATIENCE_S = 60
SIZE = struct.pack("4H", 50, 200, 0, 0)
# What readline sends to the terminal besides text: bracketed paste, cursor movements, erasures.
READLINE = re.compile(rb"\x1b\[(?:\?2004[hl]|[0-9;]*[A-HJKPm@])|\x07")


class Terminal:
    """Type into a real pseudo-terminal, and read what a person would see."""

    def __init__(self, *words: str, verb: str = "session", program: str = "") -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            self.resize(*struct.unpack("4H", SIZE)[:2], fd=0)  # before anybody asks for it
            if program:
                os.execv(program, [program, *words])
            os.execv(COMMAND[0], [*COMMAND[:-1], verb, *words])
        os.set_inheritable(self._fd, False)  # else the next one would keep it open
        self.raw = b""
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)  # hangs up, whereupon it leaves orderly
        with_end = time.monotonic() + PATIENCE_S
        while time.monotonic() < with_end:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("the prompt did not end with its terminal")

    @property
    def text(self) -> str:
        """Return everything shown so far, without readline's own movements."""
        return READLINE.sub(b"", self.raw).decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "")

    def see(self, what: str) -> str:
        """Wait until `what` is shown after what was waited for last; return what came before it."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.text.find(what, self._at)) < 0:
            left = deadline - time.monotonic()
            assert left > 0, f"{what!r} was not shown; this was:\n{self.text[self._at :]}"
            self._read(left)
        before, self._at = self.text[self._at : found], found + len(what)
        return before

    def shows(self, what: str, *, patience_s: float) -> bool:
        """Tell whether `what` is shown within a while after what was waited for last."""
        deadline = time.monotonic() + patience_s
        while what not in self.text[self._at :] and (left := deadline - time.monotonic()) > 0:
            self._read(left)
        return what in self.text[self._at :]

    def _read(self, patience_s: float) -> None:
        if not select.select([self._fd], [], [], patience_s)[0]:
            return
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            data = b""
        assert data, f"the prompt has ended; it had shown:\n{self.text[self._at :]}"
        self.raw += data

    def resize(self, rows: int, columns: int, *, fd: int | None = None) -> None:
        """Give it another size."""
        fcntl.ioctl(self._fd if fd is None else fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Type keys, without a Return."""
        os.write(self._fd, text.encode())

    def enter(self, *lines: str, prompt: str = "In [") -> str:
        """Type lines and return what is shown up to the next prompt."""
        for line in lines:
            self.type(line + "\r")
            self.see(line)
        return self.see(prompt)

    def leave(self) -> int:
        """Read to the end and return the exit code."""
        try:
            while True:
                self._read(PATIENCE_S)
        except AssertionError:
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = os.posix_spawn("/bin/true", ["true"], {})  # something for the end to wait for
        return os.waitstatus_to_exitcode(status)
