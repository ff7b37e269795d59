"""Ends that take the kernel long: who was killed may be throttled, or have much memory to give up."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import cloche
from cloche.backends.host import measure_host
from tests.harness.processes import run_pooled

BUSY = """
import os
for _ in range(40):
    if not os.fork():
        break
while True:
    pass
"""
SLEEPERS = """
import os, time
shared = bytearray(190 << 20)
for at in range(0, len(shared), 4096):
    shared[at] = 1
for _ in range(56):
    os.fork() or time.sleep(60)
time.sleep(2)
"""


@pytest.mark.both_users
@pytest.mark.parametrize("is_warm", [True, False])
def test_a_small_share_of_the_processor_delays_no_end(is_warm: bool) -> None:
    """Who is killed dies at full speed: many busy processes end with their time-out."""
    if is_warm:
        run_pooled("pass", cpus=0.1)
    begun = time.monotonic()
    assert cloche.run(BUSY, cpus=0.1, timeout=1, warm=is_warm).status == "timeout"
    assert time.monotonic() - begun < 2.5


def test_a_quota_that_was_lifted_holds_for_the_next_run() -> None:
    """In the group of the one that was killed, too; without groups there is none."""
    with cloche.Sandbox(live=False, cpus=0.1, timeout=1) as sandbox:
        assert sandbox.run(BUSY).status == "timeout"
        spun = sandbox.run("import time\nuntil = time.monotonic() + 0.6\nwhile time.monotonic() < until: pass")
        assert spun.usage.cpu_user_s + spun.usage.cpu_system_s < 0.4 or not measure_host().cgroup_version


@pytest.mark.root
def test_root_that_may_signal_no_others_ends_its_runs() -> None:
    """Without CAP_KILL, which some containers and services drop, a guest's time-out is kept, and nothing is left."""
    program = "import cloche; print(cloche.run('while True: pass', timeout=1).status)"
    words = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "timeout\n", done.stderr


@pytest.mark.both_users
def test_watching_takes_a_part_of_one_processor() -> None:
    """However many processes share however much: their memory is summed less often where that takes long."""
    before, spent, is_over = {}, {}, threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            for pid in " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split():
                try:
                    rows = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                used_s = (int(rows[11]) + int(rows[12])) / os.sysconf("SC_CLK_TCK")
                spent[pid] = used_s - before.setdefault(pid, used_s)  # by earlier tests' helpers, for one

    looking = threading.Thread(target=look)
    looking.start()
    begun = time.monotonic()
    try:
        result = cloche.run(SLEEPERS, warm=False, timeout=30, memory="256m")
    finally:
        is_over.set()
        looking.join()
    assert result.status == "ok", result.stderr
    assert spent
    assert max(spent.values()) < 0.3 * (time.monotonic() - begun) + 0.2
