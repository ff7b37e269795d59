"""Processes of a sandbox, found from its helper, which somebody outside ends or holds up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the processes that this one has started in its first thread; none of one that is gone."""
    assert pid > 1
    return _children_of_thread(Path(f"/proc/{pid}/task/{pid}"))


def descendants(pid: int) -> list[int]:
    """Return the processes that this one has started in any thread, and those that these have."""
    assert pid > 1
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    found = [child for thread in threads for child in _children_of_thread(thread)]
    return found + [one for child in found for one in descendants(child)]


def _children_of_thread(folder: Path) -> list[int]:
    try:
        return [int(one) for one in (folder / "children").read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Tell whether there is such a process that has not ended."""
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def kill_and_wait(pids: Iterable[int]) -> None:
    """Kill processes and return when they are dead: a signal takes a moment to reach another processor."""
    killed = list(pids)
    tell(killed, signal.SIGKILL)
    wait_for_end(killed)


def wait_for_end(pids: Iterable[int], *, patience_s: float = 30) -> None:
    """Return when none of the processes lives; a pid 1 ends after everybody in its namespace."""
    waited, deadline = list(pids), time.monotonic() + patience_s
    while living := [pid for pid in waited if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {living} live on"
        time.sleep(0.001)


def stop_and_wait(pids: Iterable[int], *, patience_s: float = 30) -> None:
    """Stop processes and return when none of them does anything any more."""
    stopped, deadline = list(pids), time.monotonic() + patience_s
    tell(stopped, signal.SIGSTOP)
    while running := [pid for pid in stopped if _state(pid) not in "TZX"]:
        assert time.monotonic() < deadline, f"processes {running} do not stop"
        time.sleep(0.001)


def kill_helpers(helpers: Iterable[int]) -> None:
    """Kill helpers and return when everybody whom they started is dead, too."""
    killed = list(helpers)
    assert killed
    stop_and_wait(killed)  # so that they start nobody whom we do not know of
    firsts = [first for helper in killed for first in children(helper)]
    kill_and_wait(killed)
    wait_for_end(firsts)


def seen(word: str) -> list[int]:
    """Return the processes of this machine, in sandboxes or not, whose command line has a word."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for_word(word: str, *, is_there: bool = True) -> None:
    """Return when a process whose command line has the word is there, or none is any more."""
    deadline = time.monotonic() + 60
    while bool(seen(word)) is not is_there:
        assert time.monotonic() < deadline, f"{word}: is {'not ' if is_there else ''}there"
        time.sleep(0.02)


def guests(helper: int) -> list[int]:
    """Return the guests of a helper, each the child of a pid 1 of its own."""
    return [guest for first in children(helper) for guest in children(first)]


def tell(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes of a sandbox; one that is gone need not hear it."""
    for pid in pids:
        assert pid > 1
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def held_up(pids: Iterable[int], *, for_s: float) -> Iterator[None]:
    """Stop processes, at most for so long: what waits for them goes on then."""
    held = list(pids)
    stop_and_wait(held)
    timer = threading.Timer(for_s, tell, (held, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        tell(held, signal.SIGCONT)
