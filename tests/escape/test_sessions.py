"""Attempts from within a live session: on the caller that listens to it, and on what it was told."""

from __future__ import annotations

import asyncio
import itertools
import resource
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import cloche
from tests.harness.escape.hostile import TAKE_OVER
from tests.harness.escape.runners import survivors

pytestmark = pytest.mark.both_users

FLOODS = {
    "standard output": "os.write(1, bytes(65536))",
    "the link": 'send(b\'{"op":"display","data":{"text/plain":"x"}}\'.ljust(1 << 20))',
}
SEND = """
def send(frame):
    view = memoryview(len(frame).to_bytes(4, "big") + frame)
    while view:
        view = view[os.write(SESSION.answers, view):]
"""
SAID = {
    "nesting without end": b'{"op":"done","id":2,"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no JSON": b"what?",
    "no object": b"[]",
    "too many digits": b'{"op":"done","id":' + b"1" * 10_000 + b"}",
}
TOLERATED = {
    "another run's answer": b'{"op":"done","id":1,"exit_code":0,"value":"forged"}',
    "the next run's answer": b'{"op":"done","id":4,"exit_code":0,"value":"forged"}',
    "an answer to nobody": b'{"op":"done","id":99999999999,"value":1}',
    "an answer of no number": b'{"op":"done","id":"3"}',
    "another clone": b'{"op":"cloned"}',
    "another beginning": b'{"op":"ready","runtime":5}',
    "its own end": b'{"op":"gone","wait_status":1180591620717411303424}',
    "a kind that nobody knows": b'{"op":[],"id":{}}',
    "a bundle without shape": b'{"op":"display","data":{"":{"a":[]}},"metadata":[]}',
}


@pytest.mark.parametrize("name", SAID)
def test_what_nobody_understands_ends_the_session(name: str) -> None:
    """What cannot be read ends the session at once, and neither hangs nor crashes the caller."""
    with cloche.Sandbox(live=False, timeout=90) as sandbox:
        session = sandbox.session()
        assert session.run(TAKE_OVER + SEND).ok
        began = time.monotonic()
        assert session.run(f"send({SAID[name]!r}); time.sleep(80)").status in ("error", "signaled", "output_limit")
        assert time.monotonic() - began < 40
        assert not session.is_alive


@pytest.mark.parametrize("name", TOLERATED)
def test_words_out_of_turn_change_nothing(name: str) -> None:
    """A frame that belongs to another run, or to none, is left out."""
    with cloche.Sandbox(live=False, timeout=10) as sandbox:
        session = sandbox.session()
        assert session.run(TAKE_OVER + SEND).ok
        assert session.run("1").value == 1
        assert session.run(f"send({TOLERATED[name]!r})\n'mine'").value == "mine"
        assert session.run("'next'").value == "next"


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_between_runs_ends(name: str) -> None:
    """A session that talks without end while nobody asked is ended; the caller's loop goes on meanwhile."""

    async def main() -> tuple[float, float, bool]:
        async with cloche.AsyncSandbox(live=False, timeout=30, cpus=2) as sandbox:
            session = await sandbox.session()
            await session.run(TAKE_OVER + SEND)
            flood = f"def flood():\n    while True:\n        {FLOODS[name]}\n"
            await session.run(flood + "threading.Thread(target=flood, daemon=True).start()")
            worst, computed, deadline = 0.0, 0.0, time.monotonic() + 60
            while session.is_alive and time.monotonic() < deadline:
                asked, began = time.monotonic(), time.thread_time()
                await asyncio.sleep(0.01)
                worst, computed = max(worst, time.monotonic() - asked), max(computed, time.thread_time() - began)
            return worst, computed, session.is_alive

    worst, computed, is_alive = asyncio.run(main())
    assert not is_alive
    assert computed < 2
    assert worst < 20  # others may keep it from computing


def test_what_is_shown_with_an_output_counts() -> None:
    """Metadata are bounded like what they belong to."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    frame = 'b\'{"op":"display","data":{"text/plain":"x"},"metadata":{"a":"\' + b\'A\' * (7 << 20) + b\'"}}\''
    with cloche.Sandbox(live=False, timeout=20) as sandbox:
        session = sandbox.session()
        session.run(TAKE_OVER + SEND)
        result = session.run(f"for _ in range(40): send({frame})")
    assert sum(len(str(output.metadata)) for output in result.outputs) < 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


def test_a_writer_that_never_stops_does_not_keep_the_caller() -> None:
    """A thread that fills the pipe faster than it is read does not keep a cell's result back."""
    with cloche.Sandbox(live=False, timeout=10, cpus=2) as sandbox:
        session = sandbox.session()
        began = time.monotonic()
        writer = "import os, threading\ndef write():\n    while True: os.write(1, bytes(65536))\n"
        session.run(writer + "threading.Thread(target=write, daemon=True).start()")
        session.close()
        assert time.monotonic() - began < 60


def test_a_session_that_closed_its_answers_still_counts() -> None:
    """Its processes may be at work in the files: no other session's checkpoint is made beside them."""
    with cloche.Sandbox(live=False, timeout=10) as sandbox:
        other, session = sandbox.session(), sandbox.session()
        other.run(TAKE_OVER)
        leave = "lambda: (time.sleep(0.5), os.close(SESSION.answers), time.sleep(30))"
        other.run(f"threading.Thread(target={leave}).start()")
        deadline = time.monotonic() + 30
        while other.is_alive:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(cloche.InvalidRequest, match="another session is open"):
            session.checkpoint("a")
        other.close()
        session.checkpoint("a")


LEAVINGS = {
    "closes its answers": "os.close(SESSION.answers)",
    "says what nobody understands": "os.write(SESSION.answers, b'\\xff' * 8)",
    "ends": "os._exit(3)",
}


@pytest.mark.parametrize("name", LEAVINGS)
def test_who_leaves_while_a_large_cell_is_sent_keeps_nobody(name: str) -> None:
    """A cell that does not fit the link is being sent to an interpreter that does not read: its caller hears of it."""
    leave = f"""
import signal
def leave(*_):
    open("begun", "w").close()
    time.sleep(1)
    {LEAVINGS[name]}
    time.sleep(60)
signal.signal(signal.SIGALRM, leave)
_ = signal.setitimer(signal.ITIMER_REAL, 0.05)
"""
    with cloche.Sandbox(live=False, timeout=10) as sandbox:
        session = sandbox.session()
        assert session.run(TAKE_OVER + leave).ok
        while "begun" not in sandbox.list_files():
            time.sleep(0.01)
        began = time.monotonic()
        assert not session.run(f"len({'x' * (3 << 20)!r})", timeout=10).ok
        assert time.monotonic() - began < 40
        assert not session.is_alive


ENDINGS = {
    "import os; os.abort()": 6,
    "import os; os.kill(os.getpid(), 9)": 9,
    "import os; os.kill(os.getpid(), 15)": 15,
}


@pytest.mark.parametrize("is_fork", [False, True], ids=["session", "fork"])
@pytest.mark.parametrize("code", ENDINGS)
def test_signals_are_what_they_are_outside(code: str, *, is_fork: bool) -> None:
    """Who aborts or kills itself has ended by that signal, in a session as in a fork."""
    with cloche.Sandbox(live=False, timeout=10) as sandbox:
        session = sandbox.session()
        one = session.fork(1)[0] if is_fork else session
        result = one.run(code)
        assert (result.status, result.exit_code) == ("signaled", 128 + ENDINGS[code])
        if is_fork:
            assert session.run("1").value == 1


# Ways to be deaf to an interrupt, after a child was left behind that hears of none.
LEAVE = """
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
"""
DEAF = {
    "ignores it": "for number in set(signal.Signals) - {9, 19}: signal.signal(number, signal.SIG_IGN)\ntime.sleep(60)",
    "stands still": "os.kill(os.getpid(), signal.SIGSTOP)",
    "is stopped by its child": "os.fork() or (os.kill(os.getppid(), 19), time.sleep(60), os._exit(0))\ntime.sleep(60)",
}


def test_who_is_deaf_to_interrupts_dies_with_all_that_it_started() -> None:
    """Some seconds after the time-out nobody is left, in a session as in a fork, while other cells go on."""
    names = {way: f"deaf-{secrets.token_hex(4)}" for way in DEAF}

    def end(way: str, *, is_fork: bool) -> float:
        with cloche.Sandbox(live=False) as sandbox:
            session = sandbox.session()
            one = session.fork(1)[0] if is_fork else session
            began = time.monotonic()
            result = one.run(LEAVE.format(name=names[way]) + DEAF[way], timeout=10)
            assert (result.status, result.meta["state"]) == ("timeout", "lost")
            if is_fork:
                assert session.run("1").value == 1
            return time.monotonic() - began

    with ThreadPoolExecutor(2 * len(DEAF)) as pool:
        waited = list(pool.map(lambda both: end(both[0], is_fork=both[1]), itertools.product(DEAF, (False, True))))
    assert max(waited) < 60
    assert not [name for name in names.values() if survivors(name)]
