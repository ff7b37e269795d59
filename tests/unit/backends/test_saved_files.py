"""Looks at files in threads: when their time begins, how long they wait for a thread, how they are cancelled."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cloche.backends import saved_files
from cloche.backends.archive import MOST_NAMES, Spool
from cloche.backends.saved_files import Until, in_thread


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Have looks in all threads, which end with the event that is given."""
    event, count = threading.Event(), saved_files.most_at_once()
    begun = threading.Barrier(count + 1)

    def look() -> None:
        begun.wait(30)
        event.wait(30)

    jobs = [saved_files._executor().submit(look) for _ in range(count)]
    begun.wait(30)
    yield event
    event.set()
    for job in jobs:
        job.result(30)


def test_the_time_of_a_look_begins_with_its_thread(release: threading.Event) -> None:
    """What others take does not count."""
    until = Until(0.5)

    async def look() -> bool:
        looking = asyncio.create_task(in_thread(until, until.is_over))
        await asyncio.sleep(0.6)
        assert not looking.done()
        release.set()
        return await looking

    assert asyncio.run(look()) is False


def test_a_look_that_waits_too_long_is_told_that_its_time_is_over(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody waits for others without a bound, and what is missing is said."""
    monkeypatch.setattr(saved_files, "LONGEST_QUEUE_S", 0.01)
    until = Until(60)
    assert asyncio.run(in_thread(until, until.is_over)) is True
    assert not release.is_set()


def test_a_look_that_waits_is_cancelled_at_once(release: threading.Event) -> None:
    """It never begins, and nobody waits for those before it."""
    seen: list[str] = []

    async def cancel() -> None:
        looking = asyncio.create_task(in_thread(Until(60), lambda: seen.append("looked")))
        await asyncio.sleep(0)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking

    asyncio.run(cancel())
    assert not release.is_set()
    release.set()
    assert asyncio.run(in_thread(Until(60), lambda: "next")) == "next"
    assert seen == []


def test_a_cancelled_look_says_nothing_of_its_error() -> None:
    """That it was told to end is an error of the walk's, for which nobody asks any more."""
    said: list[dict[str, Any]] = []
    begun = threading.Event()

    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        until = Until(60)

        def walk() -> None:
            begun.set()
            while not until.is_over():
                time.sleep(0.001)
            raise ValueError("too much")

        looking = asyncio.create_task(in_thread(until, walk))
        while not begun.is_set():  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.001)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        del looking, walk
        gc.collect()

    asyncio.run(cancel())
    gc.collect()
    assert said == []


def test_looks_leave_descriptors_to_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many go on at once as runs do, as long as they hold no more than half of what may be open."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert saved_files.most_at_once() == 4
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert saved_files.most_at_once() == 64


def test_a_list_of_paths_is_no_longer_than_any_of_ours() -> None:
    """A guest that writes to a container's link can name its bytes paths: no millions of them are made."""
    spool = Spool(64 << 20)
    spool.add(bytes(32 << 20))
    assert len(spool.take_names(32 << 20)) == MOST_NAMES
    assert spool.size == 0
    spool.file.close()
