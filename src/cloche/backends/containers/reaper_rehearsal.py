"""What the first process does for nothing after it has forked a guest ahead, so that the run need not.

A fork shares every page, and whoever first writes to one then copies it; in gVisor that takes most of what a short run
takes. So the first process goes through a run's steps, as far as they leave no trace: it opens no file for writing,
kills nobody, and says nothing to anybody but itself.
"""

from __future__ import annotations

import json
import os
import tarfile

from .reaper_counters import Counters
from .reaper_files import TEXT, WORKSPACE, hand_files, survey
from .reaper_link import DATA, ORDER, Caller, Incoming, Outgoing
from .reaper_program import FOR_EVER, Account, Attempt
from .reaper_waiting import NO_ORDER, give

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Echo(Caller):
    """Hear what is said here."""

    def say(self, tag: bytes, body: bytes = b"") -> None:
        """Keep a frame until it is heard."""
        self.buffer += tag + len(body).to_bytes(4, "big") + body


def rehearse(counters: Counters) -> None:
    """Go through what leaves no trace: orders, files that come in, the program's output, the report, files that go."""
    echo = Echo()
    out: Any = Outgoing(echo)
    echo.say_json(ORDER, **NO_ORDER)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT, **TEXT) as archive:
        archive.addfile(tarfile.TarInfo("main.py"))
    echo.say(DATA)
    _, body = echo.hear()
    order = {**json.loads(body), "commands": [], "memory_bytes": 0, "pids": 0}
    incoming: Any = Incoming(echo)
    with tarfile.open(fileobj=incoming, mode="r|", **TEXT) as archive:
        for member in archive:
            archive.extractfile(member)
    incoming.drain()
    account = Account(echo, counters)
    attempt = Attempt(echo, order, -1, -1, FOR_EVER, counters)
    reading, writing = os.pipe()
    give(order, writing)
    os.close(writing)
    attempt.rehearse(reading)
    account.close(attempt, 0)
    if not os.listdir(WORKSPACE):  # what a sandbox has gathered would take its time
        hand_files(echo, survey(), 0)
