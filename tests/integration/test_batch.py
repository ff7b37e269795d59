"""`cloche.map` and `amap`: order, bounds, ends and repetitions of many programs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import cloche
from cloche.testing import FakeBackend

SLEEPS = "import time; time.sleep(120)"
AT_ONCE_S = 60  # far less than the programs sleep


def endless() -> Iterator[str]:
    """Yield programs that print their number."""
    yield from (f"print({number})" for number in itertools.count())


def test_results_come_in_order_with_what_each_program_says(tmp_path: Path) -> None:
    """Text, commands, languages, standard input, files and ids stand side by side."""
    programs = [
        "import time; time.sleep(0.3); print('slow')",
        {"argv": ["cat", "in.txt"], "files": {"in.txt": "a file"}, "id": "cat"},
        {"code": "read x; echo $x", "language": "bash", "stdin": "typed\n"},
        {"code": SLEEPS, "timeout": 0.3},
        {"code": "import os; print(os.environ['SEED'])"},
    ]
    with cloche.map(programs, env={"SEED": "7"}, audit=tmp_path / "audit") as results:
        slow, cat, bash, stopped, seed = results
    assert [r.stdout for r in (slow, cat, bash, seed)] == ["slow\n", "a file", "typed\n", "7\n"]
    assert stopped.status == "timeout"
    assert cat.meta["program"] == {"index": 1, "id": "cat", "attempts": 1}


def test_results_come_as_they_are_ready() -> None:
    """Not in order, a slow program delays none; `on_result` sees each one in this thread, and first."""
    programs = [{"code": "import time; time.sleep(1)", "id": "slow"}, *["pass"] * 5]
    calls: list[tuple[int, bool]] = []

    def note(result: cloche.Result) -> None:
        calls.append((result.meta["program"]["index"], threading.current_thread() is threading.main_thread()))

    indexes = [r.meta["program"]["index"] for r in cloche.map(programs, in_order=False, on_result=note)]
    assert indexes[-1] == 0
    assert sorted(indexes) == list(range(6))
    assert calls == [(index, True) for index in indexes]


def test_an_endless_input_is_pulled_as_there_is_room() -> None:
    """Leaving the loop ends the batch; what was pulled is not much more than what was taken."""
    pulled = 0

    def counted() -> Iterator[str]:
        nonlocal pulled
        for program in endless():
            pulled += 1
            yield program

    for number, result in enumerate(cloche.map(counted(), concurrency=1)):
        assert result.stdout == f"{number}\n"
        if number == 30:
            break
    assert 31 <= pulled <= 33


@pytest.mark.parametrize("way", ["break", "close", "block", "error", "interrupt"])
def test_however_the_loop_ends_everything_ends(way: str) -> None:
    """The programs that run are killed at once, and nothing further starts."""
    programs = itertools.chain(["print(1)"], itertools.repeat(SLEEPS))
    began = time.monotonic()
    results = cloche.map(programs, concurrency=4, audit=False)
    if way == "break":
        for _ in results:
            break
        del results
    elif way == "close":
        next(results)
        results.close()
        assert list(results) == []
    elif way == "block":
        with results:
            next(results)
    elif way == "error":
        with pytest.raises(ZeroDivisionError):
            list(cloche.map(programs, concurrency=4, on_result=lambda _: 1 // 0))
    else:
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(results)
    assert time.monotonic() - began < AT_ONCE_S
    assert cloche.run("print(2)").stdout == "2\n"


async def test_an_asynchronous_input_delays_no_result() -> None:
    """A result is given while the input still waits for its next program; cancelling ends all."""
    has_result = asyncio.Event()

    async def programs() -> AsyncIterator[str]:
        yield "print(1)"
        await has_result.wait()
        yield "print(2)"
        yield SLEEPS
        await asyncio.sleep(120)

    results = cloche.amap(programs())
    assert (await anext(results)).stdout == "1\n"
    has_result.set()
    assert (await anext(results)).stdout == "2\n"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(results), 0.2)
    with pytest.raises(StopAsyncIteration):
        await anext(results)


def test_an_error_of_cloche_ends_the_batch_or_is_returned() -> None:
    """Raised in its program's place, with the program's number; or given in its place, and the others go on."""
    programs = ["print(1)", {"code": "x", "language": "nope"}, {"cod": "x"}, "print(4)"]
    results = cloche.map(programs)
    assert next(results).stdout == "1\n"
    with pytest.raises(cloche.InvalidRequest, match="nope") as raised:
        next(results)
    assert raised.value.__notes__ == ["program 1 of the batch (counted from 0)"]
    assert next(results, None) is None
    kinds = [type(outcome).__name__ for outcome in cloche.map(programs, return_errors=True)]
    assert kinds == ["Result", "InvalidRequest", "InvalidRequest", "Result"]


def test_a_program_that_never_ran_is_tried_again_and_one_that_may_have_run_is_not() -> None:
    """Unless it may run twice; the result says how many attempts there were."""
    lost, unstarted, good = cloche.OutcomeUnknown("lost"), cloche.StartFailed("no"), cloche.Result("", "", 0, 0.0)

    def outcome(*answers: cloche.Result | Exception, **keywords: bool) -> object:
        (only,) = cloche.map(
            [{"code": "1", **keywords}], backend=FakeBackend(list(answers)), retries=1, return_errors=True
        )
        return only.meta["program"]["attempts"] if isinstance(only, cloche.Result) else only

    assert outcome(unstarted, good) == 2
    assert outcome(unstarted, unstarted, good) is unstarted
    assert outcome(lost, good) is lost
    assert outcome(lost, good, idempotent=True) == 2


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"retries": True}, {"backend": "nope"}, {"on_result": 3}])
def test_a_wrong_keyword_is_refused_at_once(wrong: dict[str, object]) -> None:
    """Before a program is pulled."""
    with pytest.raises(cloche.InvalidRequest):
        cloche.map(endless(), **wrong)  # type: ignore[call-overload]
    for late in (
        {"language": "cobol"},
        {"files": {"a": Path("/nowhere")}},
        {"env": {"": "a"}},
        {"toolchains": ["/no"]},
    ):
        with pytest.raises(cloche.InvalidRequest):
            next(cloche.map(endless(), return_errors=True, **late))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="concurency"):
        cloche.map(endless(), concurency=3)  # type: ignore[call-overload]


def test_a_concurrency_above_the_default_is_real() -> None:
    """Twenty programs that sleep for a second end together, on any number of processors."""
    began = time.monotonic()
    count = 4 * (os.cpu_count() or 1) * 3
    programs = ["import time; time.sleep(2)"] * count
    statuses = [str(r.status) for r in cloche.map(programs, concurrency=count)]
    assert statuses == ["ok"] * count
    assert time.monotonic() - began < 2 * 3 * 2
