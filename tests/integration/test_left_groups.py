"""Control groups of the local backend's that nobody could remove, for their caller and its helpers were killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloche.backends.garbage_collection import group_name
from cloche.backends.host import measure_host
from tests.harness.processes import descendants, kill_and_wait, tell

pytestmark = [pytest.mark.soak, pytest.mark.root]
CALLERS = {
    "cold": "with cloche.Sandbox(live=False, warm=False) as sandbox:\n    sandbox.run(SLEEPS, on_output=say)",
    "session": (
        "with cloche.Sandbox(live=False) as sandbox:\n    sandbox.session().run('1')\n    say()\n    time.sleep(60)"
    ),
    "warm": (
        "with cloche.Sandbox(live=False) as sandbox:\n    wait_until_warm(sandbox)\n    say()\n    time.sleep(60)"
    ),
}
BEGIN = """
import time, cloche
SLEEPS = "import time; print(1, flush=True); time.sleep(60)"
def say(*_): print("up", flush=True)
def wait_until_warm(sandbox):
    while sandbox.run("1").meta["start"] == "cold": time.sleep(0.05)
"""


def groups_of(pid: int) -> list[Path]:
    """Return the control groups that bear a process's number."""
    return [one for folder in _folders() for one in Path(folder).glob(f"cloche-{pid}-*")]


def _folders() -> set[str]:
    return set(measure_host().cgroup_folders.values())


def left_by_a_killed_caller(kind: str) -> int:
    """Kill a caller with all that it started, at once, and return its number."""
    with subprocess.Popen([sys.executable, "-c", BEGIN + CALLERS[kind]], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        try:
            assert caller.stdout.readline() == b"up\n"
            tell([caller.pid], signal.SIGSTOP)
            started = descendants(caller.pid)
            tell(started, signal.SIGSTOP)  # or else whoever dies last tidies up
            kill_and_wait(started)
        finally:
            caller.kill()
    return caller.pid


@pytest.mark.parametrize("kind", CALLERS)
def test_empty_groups_of_the_dead_go_with_gc(kind: str) -> None:
    """And those of the living stay. Somebody else on the machine may be faster, hardly ever twenty times."""
    has_groups = bool(measure_host().cgroup_version)
    ours = [Path(folder, group_name("local")) for folder in _folders()]
    for group in ours:
        group.mkdir()
    try:
        for _ in range(20):
            pid = left_by_a_killed_caller(kind)
            was_left = bool(groups_of(pid))
            done = subprocess.run([sys.executable, "-m", "cloche", "gc"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            deadline = time.monotonic() + 30  # until whom we did not know of has tidied up
            while groups_of(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert groups_of(pid) == []
            assert all(group.is_dir() for group in ours)
            if not has_groups or (was_left and f"local: removed control group cloche-{pid}-local-" in done.stdout):
                return
        pytest.fail("nothing stayed that could go")
    finally:
        for group in ours:
            os.rmdir(group)
