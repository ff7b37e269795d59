"""The first process of a container: takes files in, runs one program, sees it out, and hands files back.

It is sent over standard input as text, to an interpreter of the image's own, and imports nothing of Cloche. What it
hears and says are frames: a tag of one byte, a length of four, a body.

Theory of operation: the program is a child with pipes of its own, so nothing that it writes can be taken for a frame,
and this process cannot be read or traced by it. When the program ends, or when it must, everything else in the
process namespace is killed in one call, and only then files are looked at; but for those of a session, see there.
When standard input ends, the caller is gone, and so is the container.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys

from . import reaper_program
from .reaper_counters import Counters
from .reaper_files import (
    WORKSPACE,
    Refused,
    Seen,
    hand_file,
    hand_files,
    list_files,
    prepare_workspace,
    remove_file,
    survey,
    take_files,
)
from .reaper_link import CHUNK, DONE, FAILED, ORDER, READY, STARTED, Caller, Incoming
from .reaper_program import GRACE_S, Account, Attempt, write_generated
from .reaper_rehearsal import rehearse
from .reaper_session import live
from .reaper_waiting import Waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def run(caller: Caller, order: dict[str, Any], wake: int, counters: Counters, waiting: Waiting | None) -> None:
    """Do one run: files in, program, report, files out. A guest that waits may be the program."""
    weight = waiting.weight() if waiting is not None else 0
    prepare_workspace()
    incoming = Incoming(caller)
    take_files(incoming)
    incoming.drain()
    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    if order["has_stdin"]:
        os.close(stdin)
        stdin = os.dup(waiting.stdin) if waiting is not None else os.memfd_create("stdin", os.MFD_CLOEXEC)
        take_stdin(Incoming(caller), stdin)
    before = survey()
    write_generated(order)
    account = Account(caller, counters)
    caller.say(STARTED)
    end = account.started + order["timeout_s"] + GRACE_S
    attempt = Attempt(caller, order, stdin, wake, end, counters, weight)
    status = 0
    for index in range(max(1, len(order["commands"]))):
        status = attempt.go(index, waiting)
        attempt.status = None
        if status or attempt.cause:
            break
    account.close(attempt, status)
    os.close(stdin)
    prepare_workspace()
    if order["own_file"]:
        remove_file(order["own_file"])
    hand_files(caller, before, order["disk_bytes"], order["walk_s"])


def take_stdin(incoming: Incoming, fd: int) -> None:
    """Fill a file in memory with the program's standard input."""
    while data := incoming.read(CHUNK):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)


def write(caller: Caller) -> None:
    """Take files in, without a run."""
    prepare_workspace()
    incoming = Incoming(caller)
    take_files(incoming)
    incoming.drain()
    caller.say_json(DONE)


def serve(caller: Caller) -> None:
    """Do what is asked, one order after the other, until nobody asks any more."""
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    counters, seen = Counters(), Seen(caller)
    ahead: list[Waiting] = []  # at most one

    def start(order: dict[str, Any]) -> None:
        if order["python"] is None or (ahead and not ahead[0].is_alive()):
            dismiss()
        try:
            run(caller, order, wake, counters, ahead[0] if ahead else None)
        finally:
            dismiss()

    def dismiss() -> None:
        while ahead:
            ahead.pop().let_go()

    def hold(order: dict[str, Any]) -> None:
        dismiss()
        seen.files = survey()
        live(caller, order, wake, counters, obey)

    def expect(order: dict[str, Any]) -> None:
        try:
            if not ahead:
                ahead.append(Waiting(order["nofile"], counters))
            if not caller.is_spoken_to():
                rehearse(counters)
        except OSError:
            pass  # nobody waits for an answer, and the run does without what there was no room for

    verbs: dict[str, Callable[[dict[str, Any]], None]] = {
        "run": start,
        "expect": expect,
        "session": hold,
        "read": lambda order: hand_file(caller, order["path"], order["max_bytes"]),
        "write": lambda _: write(caller),
        "list": lambda _: list_files(caller),
        "leave": lambda _: os._exit(0),
        "look": lambda order: seen.hand(order["disk_bytes"], order["walk_s"]),
    }

    def obey(order: dict[str, Any]) -> None:
        try:
            verbs[order["do"]](order)
        except Refused as error:
            caller.say_json(FAILED, kind=error.kind, path=error.path, why=error.why)
        except OSError as error:
            caller.say_json(
                FAILED, kind="refused", path=order.get("path", WORKSPACE), why=os.strerror(error.errno or 0)
            )

    while True:
        tag, body = caller.hear()
        if tag == ORDER:  # else the rest of what a failed order left
            obey(json.loads(body))


def main(archive: Any, settings: dict[str, Any]) -> None:
    """Get ready, say so, and serve."""
    reaper_program.archive = archive
    reaper_program.prctl(reaper_program.PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.modules.pop("ctypes", None)
    failed = importlib.import_module("interpreter.warming").warm_up(settings)["failed"]
    gc.collect()
    gc.freeze()
    caller = Caller()
    caller.say_json(READY, version=sys.version.split()[0], failed=failed, kernel=os.uname().release)
    serve(caller)
