"""Checkpoint, rollback and fork of sessions: what goes back, what is shared, what stands in the way."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import cloche
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.jail.procfs import descendants, text_of
from cloche.sync import Session
from cloche.testing.conformance.sessions import HOARDS
from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.processes import children, guests, held_up, kill_helpers, wait_for_end

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody")]

ROUNDS = 40
WAITING_TASK = """
import asyncio
async def begin():
    global task
    task = asyncio.ensure_future(asyncio.sleep(60))
await begin()
"""


def write(session: Session, text: str) -> None:
    """Change memory and a file."""
    assert session.run(f"x = {text!r}; f = open('f', 'w'); _ = f.write(x); f.close()").ok


def read(session: Session) -> list[str]:
    """Return what memory and the file hold."""
    found: list[str] = session.run("[x, open('f').read()]").value
    return found


def helper_of(session: Session) -> int:
    """Return the process outside that started pid 1 of a session, which is found by a name that it gives itself."""
    name, deadline = f"of-{os.getpid()}", time.monotonic() + 30
    assert session.run(f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}.encode())").ok
    while True:  # a list of children may miss one while another ends
        guests = [pid for pid in descendants(os.getpid()) if text_of(f"/proc/{pid}/comm").strip() == name]
        if guests:
            return parent_of(parent_of(guests[0]))
        assert time.monotonic() < deadline


def parent_of(pid: int) -> int:
    """Return who started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_rollback_goes_back_as_often_as_one_likes(session: Session) -> None:
    """Memory and files are those of the checkpoint, also when files were added or removed since."""
    write(session, "early")
    session.checkpoint("c")
    for _ in range(3):
        write(session, "late")
        session.run("import os; os.remove('f'); open('g', 'w').close()")
        session.rollback("c")
        assert read(session) == ["early", "early"]
        assert "g" not in session.sandbox.list_files()


def test_an_asynchronous_generator_that_is_open_goes_on(session: Session) -> None:
    """It is not closed for a checkpoint, which would wait for its end; a clone goes on with it, too."""
    session.run(
        "import asyncio\nasync def count():\n    try:\n        for n in range(9): yield n\n"
        "    finally: await asyncio.sleep(100)\nnumbers = count()\nawait anext(numbers)"
    )
    session.checkpoint("c")
    (fork,) = session.fork()
    assert [one.run("await anext(numbers)").value for one in (session, fork)] == [1, 1]


def test_later_checkpoints_are_forgotten(session: Session) -> None:
    """Earlier ones stay; an unknown name is an error that lists the known ones."""
    for name in ("one", "two", "three"):
        write(session, name)
        session.checkpoint(name)
    session.rollback("two")
    assert read(session) == ["two", "two"]
    with pytest.raises(cloche.InvalidRequest, match=r"no checkpoint 'three'.*one, two"):
        session.rollback("three")
    session.rollback("one")
    assert read(session) == ["one", "one"]


def test_a_name_can_be_given_again(session: Session) -> None:
    """The later checkpoint of a name replaces the earlier one; an empty name is none."""
    write(session, "first")
    session.checkpoint("c")
    write(session, "second")
    session.checkpoint("c")
    write(session, "third")
    session.rollback("c")
    assert read(session) == ["second", "second"]
    with pytest.raises(cloche.InvalidRequest, match="is not a name"):
        session.checkpoint("")


@pytest.mark.parametrize(
    "death",
    [
        "import os; os._exit(1)",
        "import ctypes; ctypes.string_at(0)",
        HOARDS,
        "import time\nwhile True:\n try: time.sleep(9)\n except BaseException: pass",
    ],
)
def test_a_dead_session_comes_back(session: Session, death: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ended the interpreter, its checkpoints live."""
    monkeypatch.setattr("cloche.backends.session.INTERRUPT_TIMEOUT_S", 0.5)
    write(session, "kept")
    session.checkpoint("c")
    result = session.run(death, timeout=3 if "while" in death else 30)
    assert (result.ok, result.meta["state"], session.is_alive) == (False, "lost", False)
    session.rollback("c")
    assert session.is_alive
    assert read(session) == ["kept", "kept"]


def test_forks_are_independent(session: Session) -> None:
    """Each begins with the same memory and files, and changes its own; random numbers differ."""
    session.run("import random, os")
    write(session, "common")
    forks = session.fork(3)
    for number, fork in enumerate(forks):
        assert read(fork) == ["common", "common"]
        write(fork, f"fork {number}")
    write(session, "own")
    assert [read(one)[1] for one in (*forks, session)] == ["fork 0", "fork 1", "fork 2", "own"]
    drawn = [one.run("[random.random(), os.urandom(4).hex()]").value for one in (*forks, session)]
    assert len({str(pair) for pair in drawn}) == 4
    assert [entry.code for entry in forks[0].history][:1] == ["import random, os"]


def test_a_fork_has_a_sandbox_of_its_own(session: Session) -> None:
    """Runs in a fork's sandbox see the fork's files; it can be forked and rolled back itself."""
    write(session, "common")
    (fork,) = session.fork()
    fork.sandbox.run("open('mine', 'w').write('m')")
    assert fork.run("open('mine').read()").value == "m"
    assert "mine" not in session.sandbox.list_files()
    fork.checkpoint("c")
    (inner,) = fork.fork()
    write(inner, "inner")
    assert inner.run("open('mine').read()").value == "m"
    fork.close()
    assert read(inner) == ["inner", "inner"]
    assert read(session) == ["common", "common"]


def test_a_fork_that_closes_costs_the_others_nothing(session: Session) -> None:
    """The first session and the other forks go on, whoever leaves first and was forked again meanwhile."""
    write(session, "common")
    first, second, third = session.fork(3)
    first.close()
    (inner,) = second.fork()
    second.close()
    for one in (session, third, inner):
        assert read(one) == ["common", "common"]
        write(one, "own")
    third.close()
    inner.close()
    assert read(session) == ["own", "own"]


def test_an_open_fork_blocks_the_rollback_before_it(session: Session) -> None:
    """The error says what to close; afterwards it works."""
    write(session, "early")
    session.checkpoint("c")
    (fork,) = session.fork()
    with pytest.raises(cloche.InvalidRequest, match=r"fork.*still open; close it"):
        session.rollback("c")
    assert session.run("x").value == "early"
    fork.close()
    session.rollback("c")
    assert read(session) == ["early", "early"]


def test_forks_end_with_the_sandbox() -> None:
    """They are closed with the first session's sandbox at the latest: forks of forks, and sessions beside them, too."""
    before = Snapshot.take()
    with cloche.Sandbox(live=False, warm=False) as sandbox:
        (fork,) = sandbox.session().fork()
        (inner,) = fork.fork()
        beside = fork.sandbox.session()
        assert beside.run("1").value == inner.run("1").value == 1
    for one in (fork, inner, beside):
        assert not one.is_alive
        with pytest.raises(cloche.InvalidRequest, match="closed"):
            one.run("1")
    with pytest.raises(cloche.InvalidRequest, match="not open"):
        fork.sandbox.run("1")
    assert wait_for_leftovers(before, patience_s=20) == []


def test_how_many_is_checked(session: Session) -> None:
    """Nought and very many forks are refused before anything happens."""
    for count in (0, -1, 1000):
        with pytest.raises(cloche.InvalidRequest, match="from 1 to"):
            session.fork(count)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("kept = open('log', 'w')", "log, which is open for writing"),
        ("from threading import *; e = Event(); t = Thread(target=e.wait, name='mine'); t.start()", r"thread \(mine\)"),
        ("import subprocess; p = subprocess.Popen(['sleep', '60'])", r"running process \d+ \(sleep\)"),
        ("import socket; s = socket.socketpair()", "a socket"),
        ("import mmap; m = mmap.mmap(-1, 4096)", "has shared memory"),
        ("import os; p = os.pipe()", "a pipe"),
        (WAITING_TASK, r"1 task that waits in the background: Task-\d+ \(sleep\)"),
        ("import ctypes; ctypes.CDLL(None).timerfd_create(0, 0)", "timerfd"),
    ],
)
def test_what_stands_in_the_way_is_named(session: Session, code: str, what: str) -> None:
    """Nothing has changed then, and no worker is left that was to build its mounts; the session goes on."""
    assert session.run(code).ok
    helper = helper_of(session)
    before = set(children(helper))
    for call in (lambda: session.checkpoint("c"), session.fork):
        with pytest.raises(cloche.InvalidRequest, match=what):
            call()
    assert session.run("1").value == 1
    wait_for_end(set(children(helper)) - before)


@pytest.mark.both_users
@pytest.mark.parametrize(
    ("timer", "sent"), [("ITIMER_REAL", "SIGALRM"), ("ITIMER_VIRTUAL", "SIGVTALRM"), ("ITIMER_PROF", "SIGPROF")]
)
def test_a_timer_that_runs_is_named_and_goes_on(session: Session, timer: str, sent: str) -> None:
    """A clone would not have it, so there is none; a checkpoint from before can be gone back to all the same."""
    session.checkpoint("before")
    session.run(f"import signal; signal.setitimer(signal.{timer}, 1000, 500)")
    for call in (lambda: session.checkpoint("c"), session.fork):
        with pytest.raises(cloche.InvalidRequest, match=f"the interval timer {timer}, which sends {sent}"):
            call()
    assert session.run(f"signal.getitimer(signal.{timer})[0] > 900").value is True
    session.rollback("before")
    assert session.run(f"import signal; list(signal.getitimer(signal.{timer}))").value == [0.0, 0.0]
    session.fork()[0].close()


def test_a_session_can_make_no_timer_of_another_kind(session: Session) -> None:
    """`timer_create` is refused, so there is none that a clone would lose."""
    session.run("import ctypes; libc = ctypes.CDLL(None, use_errno=True)")
    made = session.run("[libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())), ctypes.get_errno()]")
    assert made.value == [-1, errno.EPERM]


@pytest.mark.parametrize("ends", [lambda session, _: session.close(), lambda _, helper: kill_helpers([helper])])
def test_nobody_waits_for_a_clone_that_never_comes(session: Session, ends: Callable[[Session, int], None]) -> None:
    """The worker that was to build its mounts ends with the session, and with the helper alike."""
    helper = helper_of(session)
    before, deadline = set(children(helper)), time.monotonic() + 30
    with held_up(guests(helper), for_s=60), ThreadPoolExecutor(1) as thread:
        asking = thread.submit(session.checkpoint, "c")
        while not (called := set(children(helper)) - before):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        ends(session, helper)
        wait_for_end(called)
        assert asking.exception(60) is not None


def test_what_does_not_stand_in_the_way(session: Session) -> None:
    """A file open for reading keeps its offset; an event loop that was used and a process that ended do not matter."""
    session.run("_ = open('r', 'w').write('abcdef')")
    session.run(
        "import asyncio, subprocess; f = open('r'); f.read(2); await asyncio.sleep(0); subprocess.run(['true'])"
    )
    session.checkpoint("c")
    assert session.run("f.read(2)").value == "cd"
    (fork,) = session.fork()
    assert (fork.run("f.read()").value, session.run("f.read()").value) == ("ef", "ef")
    fork.close()
    session.rollback("c")
    assert session.run("await asyncio.sleep(0, f.read(2))").value == "cd"


@pytest.mark.soak
def test_forty_rounds_nest_no_deeper(session: Session) -> None:
    """Going back to one checkpoint, and forking and closing, can be done on and on; going back holds no descriptors."""
    write(session, "early")
    session.checkpoint("c")
    session.rollback("c")
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(ROUNDS):
        write(session, str(number))
        session.rollback("c")
        assert read(session) == ["early", "early"]
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4
    for number in range(ROUNDS):
        write(session, str(number))
        (fork,) = session.fork()
        assert read(fork) == [str(number)] * 2
        fork.close()


@pytest.mark.soak
@pytest.mark.xfail(
    strict=True,
    raises=cloche.InvalidRequest,
    reason="a session that is forked while a fork is open goes on one namespace deeper, also when all are closed later",
)
def test_forty_rounds_of_overlapping_forks_nest_no_deeper(session: Session) -> None:
    """Forking can go on when every fork is closed at last, also when two were open at a time."""
    for _ in range(ROUNDS):
        (first,) = session.fork()
        (second,) = session.fork()
        second.close()
        first.close()


def test_too_deep_is_said(session: Session) -> None:
    """Checkpoints one inside the other end where the kernel's nesting does: with an error, and nothing is lost."""

    def go_deep() -> None:
        for number in range(ROUNDS):
            write(session, str(number))
            session.checkpoint(str(number))

    with pytest.raises(cloche.InvalidRequest, match="nested as deep"):
        go_deep()
    deepest = session.run("x").value
    assert int(deepest) > 20
    session.rollback("3")
    assert read(session) == ["3", "3"]
    write(session, "on")
    session.checkpoint("on")


def test_a_restart_forgets_checkpoints(session: Session) -> None:
    """A new interpreter has none, and can have its own."""
    write(session, "old")
    session.checkpoint("c")
    session.restart()
    with pytest.raises(cloche.InvalidRequest, match="no checkpoint 'c'"):
        session.rollback("c")
    write(session, "new")
    session.checkpoint("c")
    write(session, "late")
    session.rollback("c")
    assert read(session) == ["new", "new"]


def test_what_a_closed_fork_keeps_goes_with_the_first_sandbox() -> None:
    """Its files can be read until then, which takes at most two descriptors of each; nothing is kept afterwards."""
    before = len(os.listdir("/proc/self/fd"))
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session()
        session.run("open('f', 'w').write('here')")
        session.fork()[0].close()
        session.run("1")
        opened = len(os.listdir("/proc/self/fd"))
        forks = [fork for _ in range(6) for fork in session.fork()]
        for fork in forks:
            fork.close()
        session.run("1")
        assert len(os.listdir("/proc/self/fd")) <= opened + 2 * len(forks)
        assert [fork.read_file("f") for fork in forks] == [b"here"] * len(forks)
    with pytest.raises(cloche.InvalidRequest, match="not open"):
        forks[0].read_file("f")
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # of a pool that has begun meanwhile


# It answers cells without reading them, until the link has no room for the request for a clone.
NEVER_READS = """
import array, fcntl, gc, json, os, signal, termios, time
own = next(one for one in gc.get_objects() if type(one).__name__ == "Session" and hasattr(one, "answers"))
def queued():
    found = array.array("i", [0])
    fcntl.ioctl(own.link, termios.FIONREAD, found)
    return found[0]
def answer(number):
    body = json.dumps({"op": "done", "id": number, "exit_code": 0}).encode()
    os.write(own.answers, len(body).to_bytes(4, "big") + body)
signal.signal(signal.SIGINT, signal.SIG_IGN)
number, before = own.request_id, queued()
answer(number)
while True:
    time.sleep(0.001)
    if queued() > before:
        before, number = queued(), number + 1
        answer(number)
"""


def test_who_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that leaves what it is asked on its link is given up when it should have been cloned."""
    monkeypatch.setattr("cloche.backends.local.fork_tree.CLONE_TIMEOUT_S", 1.0)  # read when a session begins
    with cloche.Sandbox(live=False) as sandbox:
        session = sandbox.session()
        assert session.run(NEVER_READS).ok
        for _ in range(11):
            assert session.run("#" * 20_000, timeout=20).ok
        with pytest.raises(StartFailed, match="while it was cloned"):
            session.checkpoint("a")
        with pytest.raises(InvalidRequest, match="has ended"):
            session.run("1")
