"""A helper that is stopped keeps no clock: its caller gives it up soon after the time-out, and nothing is left."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import cloche
from cloche.backends.local import helper_ends
from tests.harness.leaks import Snapshot, wait_for_leftovers
from tests.harness.processes import run_pooled, seen, stop_and_wait, tell, wait_for_word

pytestmark = pytest.mark.both_users
WORD = f"62.{os.getpid()}"
SLEEPS = f"import subprocess; subprocess.run(['sleep', '{WORD}'])"
LEVELS = pytest.mark.parametrize("level", ["jail", "confined"])


def parent_of(pid: int) -> int:
    """Return a process's parent."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


DEPTH = 3  # sleep, guest, the guest's parent, helper


@contextmanager
def stopped_helper() -> Iterator[None]:
    """Wait for a program that sleeps inside, and stop its helper."""
    wait_for_word(WORD)
    pid = seen(WORD)[0]
    for _ in range(DEPTH):
        pid = parent_of(pid)
    stop_and_wait([pid])
    try:
        yield
    finally:
        tell([pid], signal.SIGCONT)


@LEVELS
@pytest.mark.parametrize("warm", [False, True])
def test_a_run_ends_at_its_time_out(level: Any, warm: bool) -> None:
    """Its outcome is unknown, since nobody has said how it ended; the next run is well."""
    before = Snapshot.take()
    if warm:
        run_pooled("pass", level=level)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(cloche.run, SLEEPS, timeout=2, level=level, warm=warm)
        with stopped_helper(), pytest.raises(cloche.OutcomeUnknown, match="was killed with all processes of the run"):
            run.result(60)
    wait_for_word(WORD, is_there=False)
    assert cloche.run("print(1)", level=level, warm=warm).stdout == "1\n"
    assert wait_for_leftovers(before, patience_s=30) == []


@LEVELS
def test_a_command_ends_at_its_time_out_and_the_sandbox_closes(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sandbox that lives, its first process keeps the clocks; closing waits for a helper for a while only."""
    monkeypatch.setattr(helper_ends, "CLOSE_TIMEOUT_S", 0.5)
    before = Snapshot.take()
    with cloche.Sandbox(level=level) as sandbox, ThreadPoolExecutor(1) as threads:
        command = threads.submit(sandbox.exec, ["sleep", WORD], timeout=2)
        wait_for_word(WORD)
        pid = seen(WORD)[0]
        while parent_of(pid) != os.getpid():
            pid = parent_of(pid)
        stop_and_wait([pid])
        assert command.result(60).status == "timeout"
    wait_for_word(WORD, is_there=False)
    assert wait_for_leftovers(before, patience_s=30) == []
