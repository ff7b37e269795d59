"""Suites that run beside each other do so below adopters of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.kin import is_alive

ROOT = Path(__file__).parents[2]
ADOPT = [sys.executable, str(ROOT / "scripts" / "adopt.py")]
# Leaves an orphan in a session of its own, and says its number.
LEAVES = """
import os, subprocess
orphan = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(orphan.pid, flush=True)
os._exit(5)
"""
STOPS = """
import time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
ADOPTER = "from tests.leftovers import adopter, is_of_this_suite; import os; print(adopter(), is_of_this_suite(%d))"


def test_the_exit_code_is_kept_and_nothing_lives_on() -> None:
    """Not even an orphan in a session of its own."""
    done = subprocess.run(
        [*ADOPT, sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 5, done.stderr
    assert not is_alive(int(done.stdout))


def test_orphans_go_to_it_and_others_are_told_apart() -> None:
    """Who adopts orphans in there is the adopter, and a process outside is none of that suite's."""
    words = [*ADOPT, sys.executable, "-c", ADOPTER % os.getpid()]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.communicate(timeout=60)[0].split() == [str(running.pid), "False"]


def catches(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process has a handler for a signal."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return bool(int(next(row for row in rows if row.startswith("SigCgt:")).split()[1], 16) >> (number - 1) & 1)


def test_it_passes_on_what_asks_to_stop() -> None:
    """A Ctrl-C reaches the command, whose own end decides."""
    with subprocess.Popen([*ADOPT, sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        deadline = time.monotonic() + 30
        while not catches(running.pid, signal.SIGTERM):  # the last that it arranges, when its command may run already
            assert time.monotonic() < deadline, "signals are not passed on"
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 7
