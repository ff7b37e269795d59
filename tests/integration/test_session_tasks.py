"""Tasks of a session's event loop: which loop a cell's own code finds, and what goes on between cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cloche
from cloche.core.errors import StartFailed
from cloche.core.events import BETWEEN_BYTES
from cloche.sync import Session

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("settings_of_nobody")]

TICKING = """\
import asyncio
async def tick(count):
    for number in range(count):
        print('tick', number)
        await asyncio.sleep(0.001)
    return count
"""
WAITING = "import asyncio\nwaiting = asyncio.create_task(asyncio.sleep(600), name='waiting')"
HOG = """\
import asyncio, time
async def hog():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass
task = asyncio.create_task(hog())
"""
SHOUTING = """\
import array, asyncio, fcntl, sys, termios
def is_read(fd):
    unread = array.array('i', [0])
    fcntl.ioctl(fd, termios.FIONREAD, unread)
    return unread[0] == 0
async def shout():
    for number in range(2000):
        print('o' * 90, number)
        print('e' * 90, number, file=sys.stderr)
    sys.stdout.flush()
    while not (is_read(1) and is_read(2)):
        await asyncio.sleep(0.001)
    open('shouted', 'w').close()
task = asyncio.create_task(shout())
"""
COUNTING = """\
import asyncio
n = 0
async def count():
    global n
    while True:
        n += 1
        await asyncio.sleep(0)
task = asyncio.create_task(count())
"""
LIBRARY = """\
import asyncio
def is_loop_running():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
"""


@pytest.fixture(params=[False, True], ids=["run", "live"])
def any_session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Return a session that is one long run, or one in a live sandbox."""
    with cloche.Sandbox(live=request.param) as sandbox:
        yield sandbox.session()


def until(session: Session, condition: str) -> str:
    """Run cells until one says so, and return what all of them printed."""
    printed = ""
    for _ in range(10_000):
        result = session.run(condition)
        assert result.ok
        printed += result.stdout + result.stderr
        if result.value:
            return printed
    raise AssertionError(condition)


def test_what_a_task_prints_between_cells_is_the_next_one_s(any_session: Session) -> None:
    """Not that of the cell that has begun it, which does not await; and it comes first, also by `on_output`."""
    assert any_session.run(f"{TICKING}task = asyncio.create_task(tick(3))\nprint('begun')").stdout == "begun\n"
    chunks: list[tuple[str, bytes]] = []
    result = any_session.run("print('cell')", on_output=lambda stream, data: chunks.append((stream, data)))
    assert result.stdout.startswith("tick 0\n")
    assert result.stdout.endswith("cell\n")
    assert b"".join(data for _, data in chunks).decode() == result.stdout
    printed = result.stdout.removesuffix("cell\n") + until(any_session, "task.done()")
    assert printed == "tick 0\ntick 1\ntick 2\n"
    assert any_session.run("await task").value == 3


def test_the_end_of_what_a_task_prints_is_kept(any_session: Session) -> None:
    """64 KiB of each stream: what comes before is left out, and that is said."""
    assert any_session.run(SHOUTING).ok
    for _ in range(10_000):
        if "shouted" in any_session.sandbox.list_files():
            break
    result = any_session.run("task.done()")
    assert (result.value, result.truncated) == (True, True)
    for text, letter in ((result.stdout, "o"), (result.stderr, "e")):
        note, _, kept = text.partition("\n")
        assert "bytes left out" in note
        assert len(kept) == BETWEEN_BYTES
        assert kept.endswith(f"{letter * 90} 1999\n")


@pytest.mark.parametrize(
    "begin",
    [
        "found = asyncio.create_task(tick(1))",
        "found = asyncio.ensure_future(tick(1))",
        "found = asyncio.gather(tick(1))",
        "found = asyncio.get_running_loop().create_task(tick(1))",
        "found = asyncio.get_event_loop().create_task(tick(1))",
        "def begin():\n    return asyncio.create_task(tick(1))\nfound = begin()",
        "from asyncio import create_task\n(found,) = map(create_task, [tick(1)])",
        "%time found = asyncio.create_task(tick(1))",
        "asyncio.run(tick(1))\nfound = asyncio.get_event_loop().create_task(tick(1))",
    ],
)
def test_a_cell_s_own_code_finds_the_session_s_loop(session: Session, begin: str) -> None:
    """Without `await`: what it begins advances between cells, and can be awaited in a later one."""
    assert session.run(TICKING + begin if "%" not in begin else TICKING).ok
    if "%" in begin:
        assert session.run(begin).ok
    until(session, "found.done()")
    assert session.run("await found is not None and asyncio.get_running_loop() is found.get_loop()").value is True
    assert session.run("[asyncio.get_running_loop() is found.get_loop(), found.get_loop().is_running()]").value == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.run(tick(1))",
        "asyncio.new_event_loop().run_until_complete(tick(1))",
        "asyncio.get_event_loop().run_until_complete(tick(1))",
        "import anyio\nanyio.run(tick, 1)",
        "import library\nint(not library.is_loop_running())",  # as Django's ORM and Playwright's calls ask
    ],
)
def test_for_a_library_no_loop_runs_during_a_cell_that_does_not_await(session: Session, code: str) -> None:
    """Also while a task of the session waits."""
    session.sandbox.write_file("library.py", LIBRARY.encode())
    assert session.run(TICKING + WAITING).ok
    assert session.run(code).value == 1
    assert session.run("await asyncio.sleep(0)\nimport library\nlibrary.is_loop_running()").value is True
    assert session.run("waiting.done()").value is False


def test_tasks_stand_still_during_a_cell_that_does_not_await(session: Session) -> None:
    """However long it takes; they advance while a cell awaits."""
    assert session.run(COUNTING).ok
    until(session, "n")
    assert session.run("import time\nbefore = n\ntime.sleep(0.05)\nn - before").value == 0
    assert session.run("before = n\nawait asyncio.sleep(0.01)\nn - before").value > 0
    assert session.run("task.cancel()").value is True


def test_a_task_that_never_awaits_costs_a_cell_and_no_state(any_session: Session) -> None:
    """The cell that waits behind it is interrupted, and so is the task, which is told."""
    assert any_session.run(HOG).ok
    result = any_session.run("'late'", timeout=0.3)
    assert (result.status, result.meta["state"]) == ("timeout", "kept")
    assert "in hog" in result.stderr
    assert "session_tasks" not in result.stderr
    assert any_session.run("task.done()").value is True


def test_a_task_that_ends_by_an_exception_ends_no_session(session: Session) -> None:
    """`sys.exit` and errors alike; what ends other programs is told, and what awaits it gets it."""
    leaving = "async def leave():\n    sys.exit(3)\ntask = asyncio.create_task(leave())"
    assert session.run(f"import asyncio, sys\n{leaving}").ok
    assert "SystemExit: 3" in until(session, "task.done()")
    assert session.run("repr(task.exception())").value == "SystemExit(3)"
    assert session.run("async def fail():\n    1 / 0\ntask = asyncio.create_task(fail())").ok
    until(session, "task.done()")
    result = session.run("await task")
    assert (result.meta["error"]["name"], result.meta["state"]) == ("ZeroDivisionError", "kept")


def test_a_child_that_a_cell_forks_has_no_part_in_the_loop(session: Session) -> None:
    """In it no loop runs, as in any process; the session's own goes on."""
    assert session.run(TICKING + WAITING).ok
    code = """\
import os
if not (pid := os.fork()):
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        os._exit(7)
    os._exit(1)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"""
    assert session.run(code).value == 7
    assert session.run("found = asyncio.create_task(tick(1))").ok
    until(session, "found.done()")


def test_a_checkpoint_needs_that_no_task_waits(session: Session) -> None:
    """Tasks that do are named; afterwards it works, also where threads of the loop's executor have been used."""
    assert session.run(WAITING + "\nwaiting.set_name('\\x1b[2Jwaiting')").ok
    with pytest.raises(cloche.InvalidRequest, match=r"1 task that waits .*: \?\[2Jwaiting \(sleep\); await or cancel"):
        session.checkpoint("c")
    assert session.run("waiting.cancel()\nawait asyncio.to_thread(hash, 5)").value == 5
    session.checkpoint("c")
    assert session.run(f"{TICKING}found = asyncio.create_task(tick(1))").ok
    until(session, "found.done()")
    session.rollback("c")
    assert session.run("waiting.cancelled()").value is True
    assert session.run(f"{TICKING}await tick(1)").value == 1


def test_a_session_that_a_task_keeps_busy_is_not_cloned(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said in time, and the session goes on."""
    monkeypatch.setattr("cloche.backends.local.fork_tree.CLONE_TIMEOUT_S", 0.3)
    assert session.run(HOG).ok
    with pytest.raises(StartFailed, match="did not answer"):
        session.checkpoint("c")
    assert session.run("1", timeout=0.2).status == "timeout"
    assert session.run("task.done()").value is True
    monkeypatch.undo()
    session.checkpoint("c")


def test_a_loop_that_a_library_leaves_running_is_not_the_session_s(session: Session) -> None:
    """As Playwright's is between two calls: tasks and cells go on beside it, and it is the running one afterwards."""
    left = "other = asyncio.new_event_loop()\nasyncio._set_running_loop(other)"
    assert session.run(f"{TICKING}{left}").ok
    assert session.run("found = asyncio.create_task(tick(1))").ok
    until(session, "found.done()")
    assert session.run("await tick(1)").value == 1
    assert session.run("asyncio._get_running_loop() is other").value is True
