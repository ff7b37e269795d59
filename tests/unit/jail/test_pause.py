"""Processes that stand still while files are looked at, and go on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cloche.jail import procfs
from cloche.jail.pause import MOST, Halt
from cloche.jail.procfs import states_of

# A process with a thread, a child that stopped itself, and one that makes a new child again and again.
FAMILY = """
import os, signal, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
if os.fork() == 0:
    while True:
        if os.fork() == 0:
            time.sleep(0.005)
            os._exit(0)
        os.wait()
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def find() -> Iterator[Callable[[], list[int]]]:
    """Start the processes, and return what finds them, the first one before the others."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"up\n"
        yield lambda: [first.pid, *procfs.descendants(first.pid)]
        for pid in reversed([first.pid, *procfs.descendants(first.pid)]):
            os.kill(pid, signal.SIGKILL)


def test_all_stand_still_and_go_on(find: Callable[[], list[int]]) -> None:
    """Threads and new children too; who was stopped before stays so."""
    _await(lambda: [pid for pid in find() if states_of(pid) == ["T"]] != [])
    (asleep,) = [pid for pid in find() if states_of(pid) == ["T"]]
    halt = Halt(lambda: iter([find()]), None)

    def all_stand() -> bool:
        halt.begin()  # which gives up soon, as on a busy machine it may have to
        return {state for pid in find() for state in states_of(pid)} <= set("TZ")

    _await(all_stand)
    stopped = find()
    time.sleep(0.05)  # in which ten children would be forked
    assert find() == stopped
    halt.end()
    _await(lambda: set(find()) - set(stopped) != set())
    assert states_of(asleep) == ["T"]
    assert "T" not in states_of(stopped[0])


# As many sleeping children as its argument says.
MANY = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
print("up", flush=True)
time.sleep(60)
"""


@contextmanager
def many(count: int) -> Iterator[int]:
    """Start so many processes below one, and give that."""
    with subprocess.Popen([sys.executable, "-c", MANY, str(count)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"up\n"
        yield first.pid
        for pid in [*procfs.descendants(first.pid), first.pid]:
            os.kill(pid, signal.SIGKILL)


def test_all_are_looked_for_a_few_times_however_many_they_are() -> None:
    """Nothing else is done meanwhile, so that one look for each of them would be far too much."""
    walks = 0

    def find() -> Iterator[list[int]]:
        nonlocal walks
        walks += 1
        yield from procfs.descend(first)

    with many(MOST - 1) as first:
        halt = Halt(find, None)
        halt.begin()
        halt.end()
    assert 0 < walks < MOST / 4


def test_too_many_go_on() -> None:
    """Where not all can be stopped in time, none is."""
    with many(MOST + 1) as first:
        halt = Halt(lambda: procfs.descend(first), None)
        halt.begin()
        assert halt.held() == 0
        assert "T" not in {state for pid in procfs.descendants(first) for state in states_of(pid)}


def test_a_walk_without_end_is_given_up() -> None:
    """A guest decides how long a walk through its processes takes."""
    last = time.monotonic() + 30

    def find() -> Iterator[list[int]]:
        while time.monotonic() < last:
            yield []

    Halt(find, None).begin()
    assert time.monotonic() < last


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)
