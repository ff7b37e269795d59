"""A guest forked ahead: an interpreter that has gone through a run of nothing, and waits for the order of a real one.

Theory of operation: forking takes gVisor most of a short run's time, and needs no order. So a container that was made
ahead may be told to expect a Python program. The waiting guest has let go of all that is ours but for three ends:
where its order comes from, where it says that it has begun, and a file in memory that its standard input will be in.
It closes the first two before anything of the caller's runs. It knows nothing of any run before that.

It is used once, or not at all. One that died before it had begun has run nothing: then a guest is forked as if there
had been none. What it says before it begins is our own code's word; afterwards it can say nothing here.
"""

from __future__ import annotations

import json
import os
import resource
import signal

from . import reaper_program
from .reaper_counters import Counters
from .reaper_files import WORKSPACE
from .reaper_link import CHUNK, has_come

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LENGTH_BYTES = 8
NO_ORDER: dict[str, Any] = {"python": {"path": "", "argv": []}, "env": {"A": "b"}, "has_stdin": False}


class Waiting:
    """Hold one guest that waits. `readers` are where its output, errors and value come from."""

    def __init__(self, nofile: int, counters: Counters):
        self.counters, self.held = counters, counters.held()[0]
        self.is_taken = False
        self.stdin = os.memfd_create("stdin", os.MFD_CLOEXEC)
        pipes = [os.pipe() for _ in range(3)]
        heard, self.orders = os.pipe()
        self.begun, says = os.pipe()
        self.readers = [ours for ours, _ in pipes]
        theirs = [end for _, end in pipes]
        self.pid = os.fork()
        if self.pid == 0:
            become_waiting(nofile, self.stdin, theirs, heard, says)
        for fd in (*theirs, heard, says):
            os.close(fd)

    def is_alive(self) -> bool:
        """Tell whether it still waits; one that has ended is taken leave of."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            return False

    def weight(self) -> int:
        """Return the private memory that it has taken, which counts as its run's."""
        return max(0, self.counters.held()[0] - self.held)

    def take(self, order: dict[str, Any]) -> bool:
        """Give it its order; False when it has ended. Once only."""
        try:
            give(order, self.orders)
        except BrokenPipeError:
            return False
        self.is_taken = True
        return True

    def beginning(self) -> tuple[float, float] | None:
        """Return the CPU times that it had used before it began; None when it never did. For when it has ended."""
        os.set_blocking(self.begun, False)
        try:
            said = os.read(self.begun, CHUNK)
        except BlockingIOError:
            said = b""
        if not said:
            return None
        user_s, system_s = json.loads(said)
        return user_s, system_s

    def let_go(self) -> None:
        """Close what is left open of it here; and if it was given no order, end it."""
        if not self.is_taken:
            if self.is_alive():
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            for fd in self.readers:
                os.close(fd)
        for fd in (self.stdin, self.begun, self.orders):
            os.close(fd)


def become_waiting(nofile: int, stdin: int, ends: list[int], heard: int, says: int) -> None:
    """Become a guest that waits, and then the program; never returns."""
    try:
        reaper_program.leave_first()
        value = nofile - 1
        heard_at, says_at = value - 1, value - 2
        for fd, number in ((ends[2], value), (heard, heard_at), (says, says_at)):
            os.dup2(fd, number, inheritable=False)
        for number, fd in enumerate((stdin, ends[0], ends[1])):
            os.dup2(fd, number)
        os.closerange(3, says_at)
        oneshot = reaper_program.interpreter()
        reaper_program.forget_ours()
        if not has_come(heard_at):
            rehearse(oneshot)
        order = begin(heard_at, says_at)
        os.closerange(says_at, value)
        if not order["has_stdin"]:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
        os.chdir(WORKSPACE)
        oneshot.run(order["python"], order["env"], value)
    finally:
        os._exit(1)  # whatever went wrong before the order, the run then gets another guest


def rehearse(oneshot: Any) -> None:
    """Go through a run of nothing, with streams of the same kinds as a run's that nobody reads."""
    kept = [os.dup(number) for number in (1, 2)]
    reading, writing = os.pipe()
    try:
        for number in (1, 2):
            os.dup2(writing, number)
        oneshot.rehearse()
        if has_come(reading):
            os.read(reading, CHUNK)  # what was printed
        give(NO_ORDER, writing)
        begin(reading, writing)
    finally:
        for number, fd in zip((1, 2), kept, strict=True):
            os.dup2(fd, number)
        for fd in (*kept, reading, writing):
            os.close(fd)
    if any(path.startswith(WORKSPACE) for path in oneshot.paths_ahead or ()):
        oneshot.paths_ahead = None  # what is there then is for the run to see


def give(order: dict[str, Any], fd: int) -> None:
    """Write what a guest needs of an order. Raises BrokenPipeError."""
    body = json.dumps({name: order[name] for name in ("python", "env", "has_stdin")}).encode()
    view = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    while view:
        view = view[os.write(fd, view) :]


def begin(heard: int, says: int) -> dict[str, Any]:
    """Wait for the order, and say that it has come, and what this process has used until then."""
    order = hear(heard)
    used = resource.getrusage(resource.RUSAGE_SELF)
    os.write(says, json.dumps([used.ru_utime, used.ru_stime]).encode())
    return order


def hear(fd: int) -> dict[str, Any]:
    """Wait for the order. Ends this process when none will come."""
    data = bytearray()
    while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big"):
        piece = os.read(fd, CHUNK)
        if not piece:
            os._exit(0)
        data += piece
    order: dict[str, Any] = json.loads(data[LENGTH_BYTES:])
    return order
