"""Interrupts of a session's interpreter at any moment, each in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from cloche.backends.session import NOTHING
from cloche.core.frames import FrameReader, encode
from cloche.interpreter import oneshot, session_tasks
from cloche.interpreter import session as module
from tests.harness.processes import interrupted

STEP = 3  # between the instructions that are tried
UNREADY, READY, FIRST, SECOND = -2, -1, 1, 2


def serve(number: int) -> bool:
    """Serve two cells with nothing between them, as after an interrupt, and check what one at an instruction ends.

    Tells whether there were as many instructions.
    """
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    ran: list[int] = []
    cells, sent = [FIRST, NOTHING, SECOND], [UNREADY]
    given = oneshot.Preloaded(), oneshot.Privileges(None)
    session = module.Session(theirs.fileno(), writing, {"ran": ran}, *given)
    on_interrupt, heard = session._on_interrupt, []

    def note(signum: int, frame: Any) -> None:
        heard.append((sent[-1], list(ran)))
        on_interrupt(signum, frame)

    def send(frame: dict[str, Any]) -> None:
        module.Session.send(session, frame)
        sent.append(frame.get("id", READY))
        if cells:
            cell = cells.pop(0)
            ours.sendall(encode({"op": "run", "id": cell, "code": f"ran.append({cell})" if cell else ""}))
        else:
            ours.shutdown(socket.SHUT_WR)

    session._on_interrupt, session.send = note, send  # type: ignore[method-assign]
    were_enough, was_raised = interrupted(module, number, session.serve)
    os.close(writing)
    with open(reading, "rb") as answers:
        told = {frame["id"]: frame for frame in FrameReader().feed(answers.read()) if frame["op"] == "done"}
    for end in (ours, theirs):
        end.close()
    assert not was_raised
    assert told.keys() == {FIRST, NOTHING, SECOND}
    codes = told[FIRST]["exit_code"], told[SECOND]["exit_code"]
    last, before = heard[0] if heard else (SECOND, [])
    if last == READY and not before:  # the first cell has not begun
        assert (codes, ran) == ((130, 0), [SECOND])
    elif last in (UNREADY, READY):
        assert (codes[1], ran) == (0, [FIRST, SECOND])
    elif last == FIRST:  # what is heard now was for that one
        assert (codes, ran) == ((0, 0), [FIRST, SECOND])
    elif last == NOTHING and before == [FIRST]:
        assert (codes, ran) == ((0, 130), [FIRST])
    return were_enough


def test_an_interrupt_is_for_the_cell_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any instruction: one that comes before its cell has begun ends that, and none is for the next one."""
    monkeypatch.setattr(sys, "displayhook", sys.displayhook)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number = 1
    while serve(number):
        number += STEP
    assert number > 100


TASKS = """
import asyncio
async def count():
    while True:
        ran.append("task")
        await asyncio.sleep(0)
task = asyncio.create_task(count())
"""


def serve_beside_a_task(number: int) -> bool:
    """Serve cells while a task goes on, be interrupted at an instruction of what runs the loop, and go on with both.

    Tells whether there were as many.
    """
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    ran: list[str] = []
    cells = ["await asyncio.sleep(0)", "ran.append('cell')", "await asyncio.sleep(0)", TASKS]
    codes: list[int] = []
    session = module.Session(theirs.fileno(), writing, {"ran": ran}, oneshot.Preloaded(), oneshot.Privileges(None))

    def send(frame: dict[str, Any]) -> None:
        module.Session.send(session, frame)
        if frame["op"] == "done":
            codes.append(frame["exit_code"])
            ours.sendall(encode({"op": "collected"}))
            if "task" not in session.namespace:  # it was interrupted before there was one
                assert codes == [130]
                cells.append(TASKS)
        if cells:
            ours.sendall(encode({"op": "run", "id": FIRST, "code": cells.pop()}))
        else:
            ours.shutdown(socket.SHUT_WR)

    session.send = send  # type: ignore[method-assign]
    were_enough, was_raised = interrupted(session_tasks, number, session.serve)
    assert not was_raised
    assert codes.count(130) <= 1
    assert set(codes) <= {0, 130}
    session.tasks.loop.set_exception_handler(lambda *_: None)  # of a task that goes with it
    session.tasks.loop.close()
    for fd in (reading, writing):
        os.close(fd)
    for end in (ours, theirs):
        end.close()
    assert ran[-1] == "task"
    return were_enough


def in_a_child(work: Callable[[], None]) -> None:
    """Do something in a fork: a session with tasks changes asyncio for good, each one on top of the one before."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore")  # a coroutine of which no task was made
def test_an_interrupt_ends_one_cell_at_most_while_a_task_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any instruction of what runs the session's loop; the loop is as good as before."""
    monkeypatch.setattr(sys, "displayhook", sys.displayhook)
    monkeypatch.setattr(asyncio, "set_event_loop", lambda _: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def try_all() -> None:
        number = 1
        while serve_beside_a_task(number):
            number += STEP
        assert number > 100

    in_a_child(try_all)
