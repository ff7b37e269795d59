"""Suites that run beside each other do so below adopters of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.processes import is_alive

ROOT = Path(__file__).parents[2]
ADOPT = [sys.executable, str(ROOT / "scripts" / "adopt.py")]
# Leaves an orphan in a session of its own, which notes that it is asked to end and does not; says its number.
LEAVES = """
import os, subprocess, sys
program = "import os, signal; signal.sigwait([signal.SIGTERM]); os.write(2, b'asked'); signal.sigwait([signal.SIGTERM])"
program = "import signal; signal.pthread_sigmask(0, [signal.SIGTERM]); print(flush=True); " + program
orphan = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
orphan.stdout.readline()
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
# Runs the adopter so that a signal comes as soon as its command has been started.
AT_ONCE = """
import os, runpy, sys
spawn = os.posix_spawnp
def spawn_and_be_stopped(*words, **options):
    child = spawn(*words, **options)
    os.kill(os.getpid(), %d)
    return child
os.posix_spawnp = spawn_and_be_stopped
del sys.argv[0]
runpy.run_path("adopt.py", run_name="__main__")
"""
ADOPTER = "from tests.harness.leaks import adopter, is_of_this_suite; import os; print(adopter(), is_of_this_suite(%d))"


def test_the_exit_code_is_kept_and_nothing_lives_on() -> None:
    """Not even an orphan in a session of its own, which is asked to end and then killed."""
    done = subprocess.run(
        [*ADOPT, sys.executable, "-c", LEAVES], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (5, "asked")
    assert not is_alive(int(done.stdout))


def test_orphans_go_to_it_and_others_are_told_apart() -> None:
    """Who adopts orphans in there is the adopter, and a process outside is none of that suite's."""
    words = [*ADOPT, sys.executable, "-c", ADOPTER % os.getpid()]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.communicate(timeout=60)[0].split() == [str(running.pid), "False"]


def test_it_passes_on_what_asks_to_stop() -> None:
    """A Ctrl-C reaches the command, whose own end decides."""
    with subprocess.Popen([*ADOPT, sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_asks_to_stop_at_the_first_moment_is_passed_on(number: signal.Signals) -> None:
    """The command has just been started and nothing else has happened: it is told, and ends of it."""
    words = [sys.executable, "-c", AT_ONCE % int(number), "adopt.py", "sleep", "60"]
    done = subprocess.run(words, cwd=ROOT / "scripts", check=False, timeout=50)
    assert done.returncode == 128 + number


def test_its_command_blocks_and_ignores_nothing() -> None:
    """What an adopter blocks for itself, and what a shell ignores for those in the background, is not handed on."""
    words = ["sh", "-c", 'trap "" INT TERM; exec "$@"', "sh", *ADOPT, "cat", "/proc/self/status"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    rows = dict(row.split(":", 1) for row in done.stdout.splitlines())
    usual = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)
    found = {name: [one for one in usual if int(rows[name], 16) >> (one - 1) & 1] for name in ("SigBlk", "SigIgn")}
    assert found == {"SigBlk": [], "SigIgn": []}
