"""The attempts of every module once more, on gVisor without docker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cloche.backends.gvisor.backend import RunscBackend
from tests.harness.escape.attempts import JAIL, Attempt, run_check
from tests.harness.escape.controls import Controls, all_attempts
from tests.harness.escape.runners import Inside

pytestmark = pytest.mark.usefixtures("runsc_alone")
GVISOR = "gvisor"
# The jail is held to some minutes of attempts in every test run. gVisor is held to the first of a few families there,
# and in the soak to the first of each family and to all that it is known not to hold: the others ask of another kernel
# what they were written to ask of the host's.
AT_ONCE = ("files", "processes", "way out")
SOAKED_PER_FAMILY = 6
# What gVisor does not hold and the jail does; docs/limitations/gvisor.md says so too.
OWN_SYS = "gVisor makes up a /sys of its own, with nothing of the host's in it"
OWN_MOUNTS = "/sys and /dev/pts are gVisor's own mounts"
NO_INODES = "gVisor ignores inode limits; the size holds"
SAME_ID = "our first process has the guest's id, and this gVisor lets it be signalled: the guest ends its own run"
NOTHING_OUTSIDE = "it changes a number of gVisor's kernel alone"
EXECUTES = "what may be written may be executed, also without a name"
# The CPU time that is read inside counts ticks in which a program could have run: these attempts tell nothing there.
UNTELLING = ("the processor", "the processor, in many children")
NOT_HELD = {
    "files/a set-user-ID program of its own": "gVisor ignores nosuid; without new privileges such a program gains none",
    "files/more devices than the harmless": "gVisor makes /dev/tty and /dev/fuse of its own",
    "files/change the times of the host's device": "/dev is gVisor's own",
    "files/the kernel's objects in sys": OWN_SYS,
    "leaks/the machine's hardware": OWN_SYS,
    "leaks/the host's mounts": OWN_MOUNTS,
    "leaks/the host's mounts, by pid 1": OWN_MOUNTS,
    "processes/stop the parent": SAME_ID,
    "processes/raise its own priority": NOTHING_OUTSIDE,
    "resources/fill with the smallest files: tmp": NO_INODES,
    "resources/fill with the smallest files: shared memory": NO_INODES,
    "resources/protect itself from the killer for memory": NOTHING_OUTSIDE,
    "system calls/execute from memory": EXECUTES,
    "system calls/execute a deleted file by execveat": EXECUTES,
}


@pytest.fixture(scope="module", autouse=True)
def nothing_waits_afterwards() -> Iterator[None]:
    """End the containers that were kept warm."""
    yield
    RunscBackend().drain()


def attempts() -> Iterator[Any]:
    """Yield attempts that a jail must hold: a few for each test run, more as soak."""
    seen: Counter[str] = Counter()
    for attempt in all_attempts():
        if JAIL in attempt.levels and attempt.has_control_here and attempt.name not in UNTELLING:
            seen[attempt.family] += 1
            is_first = seen[attempt.family] == 1
            is_named = f"{attempt.family}/{attempt.name}" in NOT_HELD
            if seen[attempt.family] > SOAKED_PER_FAMILY and not is_named:
                continue
            marks = [] if is_first and attempt.family in AT_ONCE else [pytest.mark.soak]
            yield pytest.param(attempt, id=f"{attempt.family}: {attempt.name}", marks=marks)


@pytest.mark.parametrize("attempt", list(attempts()))
def test_gvisor_holds_it(controls: Controls, attempt: Attempt) -> None:
    """What works outside does not work in it."""
    controls.control(attempt)
    runner = Inside(controls.canaries, level=GVISOR, backend="gvisor", require=GVISOR)
    verdict = run_check(attempt, runner, controls.canaries)
    if verdict.breach and runner.promises.get(attempt.promise, "enforced") != "enforced":
        return
    why = NOT_HELD.get(f"{attempt.family}/{attempt.name}")
    if why is not None:
        assert verdict.breach, f"held after all, although {why}; take it off the list"
        return
    assert not verdict.breach, f"escaped from gVisor: {verdict.breach}"
    assert verdict.stopped_by, f"broke instead of trying: {verdict.trace}"
