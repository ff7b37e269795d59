"""Warm starts at level confined: a guest is used once, and leaves nothing to the next one."""

import glob
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.local.prefork import close_pools
from tests.harness.processes import (
    children,
    descendants,
    kill_and_wait,
    run_pooled,
    stop_and_wait,
    wait_for_word,
)

pytestmark = pytest.mark.both_users
CONFINED: Any = {"level": "confined"}
SETTLED = "import time; time.sleep(0.3)"  # for a guest to be built ahead meanwhile

LOOKS = """
import os, threading
print(sorted(os.listdir(".")), os.listdir(os.environ["TMPDIR"]), sorted(os.listdir("/proc/self/fd"))[:3],
      threading.active_count(), os.getcwd())
"""
LEAVES = """
import os, signal, time
open("left", "w").write("x")
os.makedirs("a/b/c")
os.chmod("a", 0)
open(os.environ["TMPDIR"] + "/left", "w").write("x")
signal.setitimer(signal.ITIMER_REAL, 100)
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""


def folders() -> list[str]:
    """Return this process's work folders."""
    return glob.glob(f"{tempfile.gettempdir()}/cloche-{os.getpid()}-work-*")


def test_a_run_finds_nothing_of_the_one_before() -> None:
    """It has another folder, empty but for its own program, and the usual descriptors."""
    first = run_pooled(LOOKS, **CONFINED)
    for _ in range(3):
        assert run_pooled(LEAVES, **CONFINED).status == "ok"
        second = run_pooled(LOOKS, **CONFINED)
        assert second.stdout.rpartition(" ")[0] == first.stdout.rpartition(" ")[0]
        assert second.stdout != first.stdout, "the folder has the same name"


MARKS = """
import fcntl, os
for path in (".", os.environ["TMPDIR"]):
    try:
        fcntl.ioctl(os.open(path, os.O_RDONLY), 0x40087602, b"marked??")  # FS_IOC_SETVERSION
    except OSError as error:
        print(error.errno)
"""


def test_a_run_writes_no_number_into_its_folders() -> None:
    """They may serve another run, and the number of an inode's generation would stay."""
    assert run_pooled(MARKS, **CONFINED).stdout.split() == ["1"] * 2


def test_what_a_run_leaves_running_is_ended_before_the_result() -> None:
    """Also where it has left its session: nobody outlives it by a moment."""
    word = f"left-{os.getpid()}"
    code = f"import subprocess; subprocess.Popen(['sleep', '61.{os.getpid()}'], start_new_session=True)"
    assert run_pooled(code, **CONFINED).ok, word
    wait_for_word(f"61.{os.getpid()}", is_there=False)


def waiting_guests() -> set[int]:
    """Return the guests that wait for a run, or are about to."""
    below = descendants(os.getpid())
    templates = set(below).difference(*map(children, below))
    helpers = [helper for template in templates for helper in children(template)]
    return {guest for helper in helpers for reaper in children(helper) for guest in children(reaper)}


def test_guests_that_were_killed_while_they_waited_cost_a_run_nothing() -> None:
    """The run starts afresh, and the code runs once."""
    run_pooled(SETTLED, **CONFINED)
    guests = waiting_guests()
    assert guests
    kill_and_wait(guests)
    assert cloche.run("print('once')", **CONFINED).stdout == "once\n"


def stopped_before_it_was_restricted() -> int:
    """Return a guest that was stopped before it had its filter; 0 if the one after this run was faster."""
    before, deadline = waiting_guests(), time.monotonic() + 1
    assert cloche.run("print(1)", **CONFINED).ok
    while not (new := waiting_guests() - before) and time.monotonic() < deadline:
        pass
    for guest in new:
        stop_and_wait([guest])
        if "Seccomp:\t0" in Path(f"/proc/{guest}/status").read_text():
            return guest
        os.kill(guest, signal.SIGCONT)
    return 0


def test_a_guest_that_was_killed_before_it_was_ready_costs_a_run_nothing() -> None:
    """Its parent ends at once, and nobody opens the folder that was meant for the run."""
    run_pooled(SETTLED, **CONFINED)
    deadline = time.monotonic() + 60
    while not (guest := stopped_before_it_was_restricted()):
        assert time.monotonic() < deadline, "no guest was seen before it was ready"
    kill_and_wait([guest])
    began = time.monotonic()
    assert cloche.run("print('once')", **CONFINED).stdout == "once\n"
    assert time.monotonic() - began < 30, "the helper waited for the dead guest until its own time was up"


NAMES = """
import os
for number in range(12):
    open(f"{number}-Seen-By-Others-{'x' * 80}", "w").close()
"""
SEARCHES = """
import re
word, found = bytes.fromhex("HEX"), set()
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        (first, last), rights = [int(one, 16) for one in line.split()[0].split("-")], line.split()[1]
        if "w" in rights:
            memory.seek(first)
            found |= set(re.findall(rb"[0-9]+-" + word, memory.read(last - first)))
print(found)
""".replace("HEX", b"Seen-By-Others".hex())


def test_a_run_finds_no_names_of_the_files_of_others_in_its_memory() -> None:
    """Who measures and removes a run's files is never the parent of what becomes another run's guest."""
    for _ in range(3):
        assert run_pooled(NAMES, **CONFINED).ok
        for _ in range(2):
            assert run_pooled(SEARCHES, **CONFINED).stdout == "set()\n"


PARENT = "import os; print(os.getppid())"


def test_a_guests_parent_goes_on_unless_it_has_read_something_of_a_guest() -> None:
    """Runs that ask it nothing have the same one after the other, and its helper has no more open for that."""
    first = run_pooled(PARENT, **CONFINED).stdout
    helper = next(one for one in descendants(os.getpid()) if int(first) in children(one))
    opened = len(os.listdir(f"/proc/{helper}/fd")) if os.geteuid() == 0 else 0
    found = {run_pooled(PARENT, **CONFINED).stdout for _ in range(8)}
    assert first in found
    assert len(found) < 4, "there are as many as may be in use at once, and one more"
    assert os.geteuid() != 0 or len(os.listdir(f"/proc/{helper}/fd")) <= opened + 1
    asks = "import ctypes; ctypes.CDLL(None).mount(b'/', b'/', None, 4096, None)"
    asked = run_pooled(f"{PARENT}; {asks}", **CONFINED).stdout
    assert asked in found
    assert asked not in {run_pooled(PARENT, **CONFINED).stdout for _ in range(8)}


def test_no_folder_is_left() -> None:
    """Those of runs go when these are over, and those that were made ahead with the pool."""
    run_pooled(LEAVES, **CONFINED)
    close_pools()
    assert folders() == []


def test_limits_hold_in_a_guest_that_was_built_ahead() -> None:
    """The clock, and what ends with it: a bomb of processes that fork for ever."""
    bomb = "import os\nfor _ in range(5): os.fork()\nwhile True: pass"
    assert run_pooled(bomb, timeout=0.5, **CONFINED).status == "timeout"
    assert run_pooled("import sys; sys.exit(3)", **CONFINED).exit_code == 3


def test_its_folder_is_its_own_by_the_name_that_it_has() -> None:
    """Modes are changed and locks are given there, which who answers for them knows by its path."""
    code = """
import fcntl, os
with open("file", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    os.chmod("file", 0o751)
    print(oct(os.stat(os.path.abspath("file")).st_mode & 0o777))
print(open("/proc/self/oom_score_adj").read().strip())
"""
    assert run_pooled(code, **CONFINED).stdout == "0o751\n1000\n"


@pytest.mark.parametrize("levels", [("confined", "jail"), ("jail", "confined")], ids=" then ".join)
def test_a_helper_keeps_to_its_level(levels: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    """One that was for runs of one level is not used for those of the other."""
    first, second = levels
    close_pools()
    deadline = time.monotonic() + 60
    while cloche.run("print(1)", level=first).meta["start"] != "pooled":
        assert time.monotonic() < deadline
    for level in (second, second, first, second):
        assert cloche.run("print(1)", level=level).stdout == "1\n"
    assert "a warm start failed" not in caplog.text
