"""Processes that stand still while files are looked at, and go on afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from cloche.jail import tree
from cloche.jail.halting import Halt
from cloche.jail.inspection import states_of

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
        yield lambda: [first.pid, *tree.descendants(first.pid)]
        for pid in reversed([first.pid, *tree.descendants(first.pid)]):
            os.kill(pid, signal.SIGKILL)


def test_all_stand_still_and_go_on(find: Callable[[], list[int]]) -> None:
    """Threads and new children too; who was stopped before stays so."""
    _await(lambda: [pid for pid in find() if states_of(pid) == ["T"]] != [])
    (asleep,) = [pid for pid in find() if states_of(pid) == ["T"]]
    halt = Halt(find, None)

    def all_stand() -> bool:
        halt.begin()  # which gives up soon, as on a busy machine it may have to
        return {state for pid in find() for state in states_of(pid)} <= set("TZ")

    _await(all_stand)
    stopped = find()
    time.sleep(0.05)  # in which ten children would be born
    assert find() == stopped
    halt.end()
    _await(lambda: set(find()) - set(stopped) != set())
    assert states_of(asleep) == ["T"]
    assert "T" not in states_of(stopped[0])


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)
