"""A session's program in a container: it gets cells over a link, and its answers are passed to the caller.

It is one long run, with the same isolation and the same end. Meanwhile the caller may have it signalled and request
files. Those are read beside a guest that may change them, so their contents are not trusted to be consistent.
"""

from __future__ import annotations

import json
import os
import select
import signal

from .files import prepare_workspace
from .link import CHUNK, CONTROL, ERR, FROM_SESSION, ORDER, OUT, STARTED, TO_SESSION, CallerLink, Counters
from .program import FOR_EVER, LOOK_S, Attempt, RunReport, write_generated

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

IDLE_LOOK_S = 0.5  # interval of memory checks between cells
MOST_PIECES = 32  # maximum number of output pieces passed on before an answer, because output may be endless


class SessionAttempt(Attempt):
    """Serve a program as long as it lives."""

    def __init__(
        self,
        caller: CallerLink,
        order: dict[str, Any],
        stdin: int,
        wake: int,
        counters: Counters,
        handle: Callable[[dict[str, Any]], None],
    ):
        super().__init__(caller, order, stdin, wake, FOR_EVER, counters)
        self.handle = handle
        self.streams: dict[int, bytes] = {}
        self.link, self.is_pushing = -1, False
        self.pending = bytearray()

    def live(self) -> int:
        """Start the program, pass on its output until its end, and return its wait status."""
        out, err, answers, requests = (os.pipe() for _ in range(4))
        self.link = requests[1]
        os.set_blocking(self.link, False)
        self.streams = {out[0]: OUT, err[0]: ERR}
        self.start(0, [out[1], err[1], answers[1], requests[0]])
        status = self.relay({**self.streams, answers[0]: FROM_SESSION})
        os.close(self.link)
        return status

    def _pass_on(self, fd: int, tag: bytes) -> bool:
        """Pass on available data. Output printed before an answer on the link is passed on before that answer."""
        if tag != FROM_SESSION:
            return super()._pass_on(fd, tag)
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return self.status is None
        for stream, its_tag in self.streams.items() if data else ():
            for _ in range(MOST_PIECES):
                if not self._pass_on_at_once(stream, its_tag):
                    break
        self.caller.send(FROM_SESSION, data)
        return bool(data)

    def _pass_on_at_once(self, fd: int, tag: bytes) -> bool:
        """Pass on available output; returns False if there was none."""
        try:
            data = os.read(fd, CHUNK)
        except (BlockingIOError, OSError):
            return False
        if data:
            self.caller.send(tag, data)
        return bool(data)

    def _take(self, tag: bytes, body: bytes) -> None:
        if tag == TO_SESSION:
            self.pending += body
            self._push()
        elif tag == CONTROL:
            self._control(json.loads(body))
        elif tag == ORDER:
            self.handle(json.loads(body))
        else:
            super()._take(tag, body)

    def _push(self) -> None:
        """Write as much to the link as it accepts; the program may read slowly."""
        try:
            while self.pending:
                del self.pending[: os.write(self.link, self.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self.pending.clear()  # the link's other end is closed
        if bool(self.pending) != self.is_pushing:
            self.is_pushing = not self.is_pushing
            if self.is_pushing:
                self.poll.register(self.link, select.POLLOUT)
            else:
                self.poll.unregister(self.link)

    def _control(self, message: dict[str, Any]) -> None:
        """Signal the program, or change how often its memory is checked."""
        if message["word"] == "pace":
            self.look_s = LOOK_S if message["is_busy"] else IDLE_LOOK_S
        elif message["word"] == "interrupt":
            self._signal(signal.SIGINT, to_group=True)
        else:
            self._signal(message["number"], to_group=bool(message["to_group"]))

    def _signal(self, number: int, *, to_group: bool) -> None:
        """Signal the program, and its process group if requested."""
        try:
            leads = os.getpgid(self.pid) == self.pid
            (os.killpg if to_group and leads else os.kill)(self.pid, number)
        except ProcessLookupError:
            pass  # the program has just ended


def live(
    caller: CallerLink, order: dict[str, Any], wake: int, counters: Counters, handle: Callable[[dict[str, Any]], None]
) -> None:
    """Run a session to its end, and report how it ended."""
    prepare_workspace()
    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    write_generated(order)
    report = RunReport(caller, counters)
    caller.send(STARTED)
    attempt = SessionAttempt(caller, order, stdin, wake, counters, handle)
    report.close(attempt, attempt.live())
    os.close(stdin)
