"""Processes: those of a sandbox, found and ended from outside; interrupts, descriptors that run out, and warm runs."""

from __future__ import annotations

import dis
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import cloche
from cloche.core.result import Result


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


@contextmanager
def no_room(free: int) -> Iterator[None]:
    """Leave so many descriptors that can still be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                break
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


UNHEARD = {dis.opmap[name] for name in ("RETURN_VALUE", "NOP", "JUMP_FORWARD")}  # before which Python hears no signal


class _InterruptAt:
    """Trace this thread, and send it SIGINT just before the `number`th instruction of a file."""

    def __init__(self, file: str, number: int):
        self._file, self.left = file, number

    def __call__(self, frame: FrameType, event: str, _argument: object) -> _InterruptAt | None:
        if frame.f_code.co_filename != self._file:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in UNHEARD:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted(module: ModuleType, number: int, work: Callable[[], object]) -> tuple[bool, bool]:
    """Work, and be interrupted before the `number`th instruction in the module.

    Tells whether there were as many, and whether the interrupt was raised.
    """
    assert module.__file__ is not None
    trace, before, was_raised = _InterruptAt(module.__file__, number), sys.gettrace(), False
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        was_raised = True
    finally:
        sys.settrace(before)
    return trace.left <= 0, was_raised


PATIENCE_S = 60.0


def run_warm(code: str, **options: Any) -> Result:
    """Run in a sandbox that came from a template; runs that start cold until there is one are repeated."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        result = cloche.run(code, **options)
        if result.meta["start"] != "cold":
            return result
        assert time.monotonic() < deadline, "no run started warm within a minute"
        time.sleep(0.05)


def run_pooled(code: str, **options: Any) -> Result:
    """Run in a jail that was built ahead."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        result = cloche.run(code, **options)
        if result.meta["start"] == "pooled":
            return result
        assert time.monotonic() < deadline, "no run found a jail built ahead within a minute"
        time.sleep(0.05)


def fill_pool(*, settle_s: float = 0.5) -> None:
    """Wait until the containers are there that runs have asked for, and what is forked ahead in them is ready."""
    for thread in threading.enumerate():
        if thread.name == "cloche-container-pool":
            thread.join(PATIENCE_S)
    time.sleep(settle_s)
