"""The loop that whoever waits for it runs: by the caller, by several at once, and by its keeper in between."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

from cloche.blocking import calls as blocking_calls
from cloche.blocking import loops
from cloche.blocking.loops import SharedLoop
from cloche.core.errors import InternalError
from tests.harness.processes import interrupted, no_room


@pytest.fixture(autouse=True)
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedLoop]:
    """Give a shared loop of this test's own, and take away the handler with which the test runner ends what hangs."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    shared = SharedLoop()
    monkeypatch.setattr(blocking_calls, "_shared", shared)
    yield shared
    shared.close()
    signal.signal(signal.SIGALRM, before)


async def _nothing() -> None:
    """End at once."""


async def _who() -> int:
    await asyncio.sleep(0.001)
    return threading.get_ident()


def _is_run_here() -> bool:
    """Tell whether this thread gets the turn, now or when the keeper has finished."""
    return any(blocking_calls.call(_who) == threading.get_ident() for _ in range(1000))


def test_a_plain_call_is_run_by_its_caller() -> None:
    """No other thread needs to wake up for it; and the loop is there again for the next one."""
    assert _is_run_here()
    assert [blocking_calls.call(_who) for _ in range(3)] == [threading.get_ident()] * 3


def test_a_call_with_callbacks_is_run_elsewhere() -> None:
    """Its own thread runs what is delivered."""
    delivered: list[int] = []

    async def deliver_once(deliver: blocking_calls.Deliver) -> int:
        deliver(lambda: delivered.append(threading.get_ident()))
        return threading.get_ident()

    assert blocking_calls.call_delivering(deliver_once) != threading.get_ident()
    assert delivered == [threading.get_ident()]


def test_timers_are_kept_between_calls() -> None:
    """Also one that is due before everything that the keeper knew of, and also behind ones that were cancelled."""
    fired = threading.Event()

    async def set_timers(delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s / 2, fired.clear).cancel()
        loop.call_later(delay_s, fired.set)

    blocking_calls.call(lambda: set_timers(40 * 24 * 3600))  # more milliseconds than the kernel can count
    time.sleep(0.1)
    for delay_s in (0.1, 0.01, 0.0):
        fired.clear()
        blocking_calls.call(lambda delay_s=delay_s: set_timers(delay_s))  # type: ignore[misc]
        assert fired.wait(20)


def test_what_arrives_between_calls_is_heard() -> None:
    """A reader that a call has left behind is served whenever something is there to read."""
    ours, theirs = socket.socketpair()
    heard: list[bytes] = []
    has_heard = threading.Event()

    def hear() -> None:
        heard.append(ours.recv(100))
        has_heard.set()

    async def listen() -> None:
        asyncio.get_running_loop().add_reader(ours, hear)

    async def forget() -> None:
        asyncio.get_running_loop().remove_reader(ours)

    with ours, theirs:
        blocking_calls.call(listen)
        for word in (b"one", b"two", b"three"):
            has_heard.clear()
            theirs.send(word)
            assert has_heard.wait(20)
            blocking_calls.call(_nothing)
        blocking_calls.call(forget)
    assert heard == [b"one", b"two", b"three"]


def test_a_task_that_a_call_left_behind_goes_on() -> None:
    """What it awaits wakes it, though nobody calls."""
    is_over = threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def work() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        await asyncio.to_thread(time.sleep, 0.02)
        is_over.set()

    async def leave_behind() -> None:
        tasks.append(asyncio.create_task(work()))

    blocking_calls.call(leave_behind)
    assert is_over.wait(20)


def test_two_callers_share_it_and_either_may_end_first() -> None:
    """The second one's task is run by whoever has the turn, and after that by the keeper."""

    async def wait_for(event: Callable[[], Awaitable[object]]) -> str:
        await event()
        return "done"

    for first_s, second_s in ((0.05, 0.2), (0.2, 0.05)):
        ended: dict[float, str] = {}

        def one(pause_s: float, ended: dict[float, str] = ended) -> None:
            ended[pause_s] = blocking_calls.call(lambda: wait_for(lambda: asyncio.sleep(pause_s)))

        threads = [threading.Thread(target=one, args=(pause_s,)) for pause_s in (first_s, second_s)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert ended == {first_s: "done", second_s: "done"}


def test_many_callers_at_once_each_get_their_own_answer() -> None:
    """Whoever takes the turn, gives it back or comes too late for it."""
    wrong: list[tuple[int, int]] = []
    chance = random.Random(7)
    pauses = [[chance.choice((0, 0, 0.0005, 0.002)) for _ in range(100)] for _ in range(8)]

    async def answer(number: int, pause_s: float) -> int:
        await asyncio.sleep(pause_s)
        return number

    def caller(mine: list[float]) -> None:
        for number, pause_s in enumerate(mine):
            got = blocking_calls.call(lambda number=number, pause_s=pause_s: answer(number, pause_s))  # type: ignore[misc]
            if got != number:
                wrong.append((number, got))

    threads = [threading.Thread(target=caller, args=(mine,), daemon=True) for mine in pauses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_the_keeper_sleeps_while_callers_come_and_go(loop: SharedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that leaves nothing to do wakes no other thread: that is what the turns are for."""
    rounds = 0
    run = SharedLoop._run_what_is_ready

    def counted(self: SharedLoop) -> None:
        nonlocal rounds
        rounds += 1
        run(self)

    async def with_a_timer() -> None:
        asyncio.get_running_loop().call_later(0.001, rounds.bit_length).cancel()
        await asyncio.sleep(0)

    blocking_calls.call(with_a_timer)
    time.sleep(0.1)
    monkeypatch.setattr(SharedLoop, "_run_what_is_ready", counted)
    for _ in range(50):
        blocking_calls.call(with_a_timer)
    assert rounds == 0
    assert loop.try_acquire() is not None  # nobody has it
    loop.release()


def test_a_task_that_breaks_out_takes_nobody_along() -> None:
    """SystemExit in a task passes through asyncio; the keeper goes on."""
    gone = threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def leave() -> None:
        gone.set()
        raise SystemExit(3)

    async def leave_behind() -> None:
        tasks.append(asyncio.create_task(leave()))

    async def swallow() -> None:
        with pytest.raises(SystemExit):
            await asyncio.wait_for(tasks[0], 5)

    blocking_calls.call_delivering(lambda _: leave_behind())
    assert gone.wait(20)
    blocking_calls.call_delivering(lambda _: swallow())
    assert _is_run_here()


@pytest.mark.parametrize("module", [loops, blocking_calls], ids=["loops", "calls"])
def test_ctrl_c_at_any_moment_leaves_the_turn_free(module: object, loop: SharedLoop) -> None:
    """Wherever it comes, it is raised, and the next call finds the loop as it was."""
    number, came = 0, True
    while came:
        number += 1
        came, was_raised = interrupted(module, number, lambda: blocking_calls.call(_who))  # type: ignore[arg-type]
        assert was_raised == came, f"at instruction {number}"
        assert _is_run_here(), f"at instruction {number}"
    assert number > 10


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_a_caller_has_the_turn_begins_anew() -> None:
    """It has a loop of its own, and the parent's is left alone."""
    is_inside, may_end = threading.Event(), threading.Event()

    async def stay() -> str:
        is_inside.set()
        await asyncio.to_thread(may_end.wait, 20)
        return "parent"

    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(blocking_calls.call(stay)))
    thread.start()
    assert is_inside.wait(20)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _is_run_here() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    may_end.set()
    thread.join(20)
    assert got == ["parent"]


def _in_a_thread(work: Callable[[], object]) -> list[object]:
    """Return what came of it, or what it raised; nothing if it hangs."""
    outcome: list[object] = []

    def note() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=note, daemon=True)
    thread.start()
    thread.join(20)
    return outcome


def test_a_call_by_who_has_the_turn_but_does_not_run_the_loop_yet_is_refused() -> None:
    """A finalizer may make it there, or a handler for a signal; it would wait for itself."""

    def make() -> Coroutine[Any, Any, None]:
        blocking_calls.call(_nothing)
        return _nothing()

    (outcome,) = _in_a_thread(lambda: blocking_calls.call(make)) or ("it hangs",)
    assert isinstance(outcome, InternalError)
    assert _is_run_here()


def test_a_call_from_deep_down_is_run_elsewhere() -> None:
    """Others' tasks would meet the limit of a stack that is not theirs."""

    def down(calls: int) -> int:
        return down(calls - 1) if calls else blocking_calls.call(_who)

    assert _is_run_here()
    (outcome,) = _in_a_thread(
        lambda: down(sys.getrecursionlimit() - blocking_calls.NEEDED_CALLS) != threading.get_ident()
    )
    assert outcome is True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of coroutines that never began
@pytest.mark.parametrize("module", [loops, blocking_calls], ids=["loops", "calls"])
def test_what_another_thread_raises_in_a_caller_leaves_the_turn_free(module: ModuleType, loop: SharedLoop) -> None:
    """PyThreadState_SetAsyncExc, by which some end what takes too long, raises at any instruction."""

    class Stopped(Exception):
        """What is raised."""

    def call_until(number: int) -> bool:
        left = number

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal left
            if frame.f_code.co_filename != module.__file__:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left == 0:
                raise Stopped
            return trace

        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            blocking_calls.call(_nothing)
        except Stopped:
            return True
        finally:
            sys.settrace(None)
        return False

    number, came = 0, True
    while came:
        number += 1
        outcome = _in_a_thread(lambda: call_until(number))  # noqa: B023
        assert outcome in ([True], [False]), f"at instruction {number}: {outcome}"
        came = outcome == [True]
        assert _in_a_thread(_is_run_here) == [True], f"at instruction {number}"
    assert number > 10


def test_a_call_when_it_has_been_closed_is_told_so() -> None:
    """At the interpreter's exit, others' exit handlers may still call."""
    shared = SharedLoop()
    shared.close()
    assert shared.try_acquire() is None


def test_what_a_handed_over_call_leaves_ready_is_run() -> None:
    """What is ready when the last such call ends has had its wake-up, and must not be left lying."""
    is_over = threading.Event()

    async def leave_behind() -> None:
        await asyncio.sleep(0.05)  # until the keeper waits in the loop
        loop, steps = asyncio.get_running_loop(), iter(range(10))

        def go_on() -> None:
            if next(steps, None) is None:
                is_over.set()
            else:
                loop.call_soon(go_on)

        go_on()

    blocking_calls.call_delivering(lambda _: leave_behind())
    assert is_over.wait(60)


def test_a_loop_that_cannot_be_made_leaves_nothing_open() -> None:
    """However far it came: the call that wanted it fails, and the next one may do better."""
    before = len(os.listdir("/proc/self/fd"))
    for free in (0, 3, 4):  # a selector, two sockets that wake it (asyncio warns where they fail), a bell, a watch
        with no_room(free), pytest.raises(OSError, match="Too many open files"):
            SharedLoop()
        assert len(os.listdir("/proc/self/fd")) == before
    with no_room(5):
        SharedLoop().close()
    assert len(os.listdir("/proc/self/fd")) == before
