"""Run code in this thread again and again, and be interrupted at random moments; say what went wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import threading
import time

import cloche
from cloche.blocking import calls
from tests.harness.processes import run_pooled

LATEST_S = 0.012  # about two runs
RUN_S = 60.0
CODES = ("print(1)", f"import time; time.sleep({RUN_S})")
PROMPTLY_S = 30.0
MAIN = threading.main_thread().ident


class _Interrupt(threading.Thread):
    """Send SIGINT to the main thread at a moment."""

    def __init__(self, after_s: float):
        super().__init__()
        self._after_s = after_s

    def run(self) -> None:
        time.sleep(self._after_s)
        assert MAIN is not None
        signal.pthread_kill(MAIN, signal.SIGINT)


def _run_interrupted(code: str, after_s: float) -> None:
    """Run, and wait for the interrupt, which comes sooner or later."""
    interrupt = _Interrupt(after_s)
    try:
        interrupt.start()
        cloche.run(code)
        interrupt.join()
        time.sleep(PROMPTLY_S)  # the signal is on its way
    except KeyboardInterrupt:
        interrupt.join()
        return
    raise AssertionError("the interrupt was lost")


def _check(number: int) -> None:
    """Check that everything is as it was before, and that the next run is answered."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    assert len(calls._idle_loops) == calls._loop_count <= calls.MOST_LOOPS, "a loop was lost"
    assert not any(asyncio.all_tasks(loop) for loop in calls._idle_loops), "a task was left"
    assert cloche.run(f"print({number})").stdout == f"{number}\n"


def main(count: int, seed: int) -> None:
    """Do it so often."""
    draw = random.Random(seed)
    assert run_pooled("1").ok
    assert calls.can_run_inline()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(count):
        started = time.monotonic()
        after_s = draw.random() * LATEST_S
        _run_interrupted(CODES[number % 2], after_s)
        _check(number)
        took = time.monotonic() - started
        assert took < PROMPTLY_S, f"seed {seed}, round {number}: {took:.1f} s"
    gc.collect()
    grown = len(os.listdir("/proc/self/fd")) - before
    assert grown < 12, f"{grown} more descriptors"  # the pool may have opened a slot or two, with handoff sockets
    print(f"{count} interrupts")


if __name__ == "__main__":
    main(int(sys.argv[1]), random.SystemRandom().randrange(1 << 32))
