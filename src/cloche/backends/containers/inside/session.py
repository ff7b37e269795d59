"""A program that lives in a container: it is given cells on a link, and what it says there goes to the caller.

It is one long run, with the same walls and the same end. Meanwhile the caller may have it signalled, and ask about
files: those are looked at beside a guest that may change them, so nothing of what is found is relied upon.
"""

from __future__ import annotations

import json
import os
import select
import signal

from .files import prepare_workspace
from .link import CHUNK, ERR, ORDER, OUT, SAID, STARTED, TOLD, WORD, Caller, Counters
from .program import FOR_EVER, LOOK_S, Account, Attempt, write_generated

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

IDLE_LOOK_S = 0.5  # how often memory is looked at between cells
MOST_PIECES = 32  # of what is in a pipe, before the word that followed it: nobody shall keep us with endless output


class Life(Attempt):
    """Serve a program as long as it lives."""

    def __init__(
        self,
        caller: Caller,
        order: dict[str, Any],
        stdin: int,
        wake: int,
        counters: Counters,
        obey: Callable[[dict[str, Any]], None],
    ):
        super().__init__(caller, order, stdin, wake, FOR_EVER, counters)
        self.obey = obey
        self.streams: dict[int, bytes] = {}
        self.link, self.is_pushing = -1, False
        self.waiting = bytearray()

    def live(self) -> int:
        """Start it, see it through its life, and return its wait status."""
        out, err, answers, asked = (os.pipe() for _ in range(4))
        self.link = asked[1]
        os.set_blocking(self.link, False)
        self.streams = {out[0]: OUT, err[0]: ERR}
        self.start(0, [out[1], err[1], answers[1], asked[0]])
        status = self.see_out({**self.streams, answers[0]: SAID})
        os.close(self.link)
        return status

    def _pass_on(self, fd: int, tag: bytes) -> bool:
        """Pass on what is there; what was printed before a word on the link goes before that word."""
        if tag != SAID:
            return super()._pass_on(fd, tag)
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return self.status is None
        for stream, its_tag in self.streams.items() if data else ():
            for _ in range(MOST_PIECES):
                if not self._pass_on_at_once(stream, its_tag):
                    break
        self.caller.say(SAID, data)
        return bool(data)

    def _pass_on_at_once(self, fd: int, tag: bytes) -> bool:
        """Pass on what is there now; False when there was nothing."""
        try:
            data = os.read(fd, CHUNK)
        except (BlockingIOError, OSError):
            return False
        if data:
            self.caller.say(tag, data)
        return bool(data)

    def _take(self, tag: bytes, body: bytes) -> None:
        if tag == TOLD:
            self.waiting += body
            self._push()
        elif tag == WORD:
            self._heed(json.loads(body))
        elif tag == ORDER:
            self.obey(json.loads(body))
        else:
            super()._take(tag, body)

    def _push(self) -> None:
        """Write what the link takes; the program may be slow to read."""
        try:
            while self.waiting:
                del self.waiting[: os.write(self.link, self.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            self.waiting.clear()  # its end is closed: it will say no more either
        if bool(self.waiting) != self.is_pushing:
            self.is_pushing = not self.is_pushing
            if self.is_pushing:
                self.poll.register(self.link, select.POLLOUT)
            else:
                self.poll.unregister(self.link)

    def _heed(self, word: dict[str, Any]) -> None:
        """Signal the program, or look at its memory more or less often."""
        if word["word"] == "pace":
            self.look_s = LOOK_S if word["is_busy"] else IDLE_LOOK_S
        elif word["word"] == "interrupt":
            self._signal(signal.SIGINT, to_group=True)
        else:
            self._signal(word["number"], to_group=bool(word["to_group"]))

    def _signal(self, number: int, *, to_group: bool) -> None:
        """Signal the program, and with it what it started in its own group."""
        try:
            leads = os.getpgid(self.pid) == self.pid
            (os.killpg if to_group and leads else os.kill)(self.pid, number)
        except ProcessLookupError:
            pass  # it has just ended


def live(
    caller: Caller, order: dict[str, Any], wake: int, counters: Counters, obey: Callable[[dict[str, Any]], None]
) -> None:
    """See a session through, and report how it ended."""
    prepare_workspace()
    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    write_generated(order)
    account = Account(caller, counters)
    caller.say(STARTED)
    life = Life(caller, order, stdin, wake, counters, obey)
    account.close(life, life.live())
    os.close(stdin)
