"""A program `cloche` for tests that type many commands: it has one process that has imported the modules run them."""

from __future__ import annotations

import functools
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

FORKING = Path(__file__).parent / "programs" / "imported.py"
# Without `site` and the modules of Python's own, it starts in a few milliseconds.
PROGRAM = """\
#!{python} -IS
import marshal, posix, sys, _socket
asking = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
asking.connect({socket!r})
mask = posix.umask(0)
posix.umask(mask)
told = marshal.dumps((sys.argv[1:], posix.getcwd(), mask, posix.environ))
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
asking.sendmsg([told], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
asking.recv(16)  # the process number
code = int(asking.recv(16) or 125)
posix._exit(code if code >= 0 else 128 - code)
"""
_OPEN = ExitStack()


class Command:
    """A `cloche` command in a fork of a process that has the modules, with the methods of `Popen` that tests use."""

    def __init__(self, asking: socket.socket):
        self._asking = asking
        self.pid = int(asking.recv(16))
        self.returncode: int | None = None

    def poll(self, timeout_s: float = 0) -> int | None:
        """Return the exit code, or None if it still runs after a time."""
        if self.returncode is None and select.select([self._asking], [], [], timeout_s)[0]:
            with self._asking:
                self.returncode = int(self._asking.recv(16))
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the exit code."""
        if (code := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired("cloche", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Imported:
    """The folder of a program `cloche` whose commands run in forks of one process."""

    folder: Path

    def start(self, words: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: int) -> Command:
        """Start a command whose outputs go to a file, without input."""
        told = ([*words], os.fsencode(cwd), 0o022, {os.fsencode(name): os.fsencode(env[name]) for name in env})
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asking.connect(f"{self.folder}/socket")
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(asking, [marshal.dumps(told)], [nothing.fileno(), output, output])
        return Command(asking)


@contextmanager
def imported(*modules: str) -> Iterator[Imported]:
    """Give a program `cloche`; `modules` are imported before its commands beside those of commands that run code."""
    with tempfile.TemporaryDirectory() as folder:
        address, program = f"{folder}/socket", Path(folder, "cloche")
        program.write_text(PROGRAM.format(python=sys.executable, socket=address))
        program.chmod(0o755)
        words = [sys.executable, str(FORKING), address, *modules]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as forking:
            try:
                assert forking.stdout is not None
                assert forking.stdout.readline() == b"\n"
                yield Imported(Path(folder))
            finally:
                forking.kill()


@functools.cache
def imported_once(*modules: str) -> Imported:
    """Give the same to all tests of this process, until `close_imported`."""
    return _OPEN.enter_context(imported(*modules))


def close_imported() -> None:
    """End what `imported_once` has started."""
    imported_once.cache_clear()
    _OPEN.close()
