"""The attempts of every module once more, in a container of the docker backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.containers import Daemon
from tests.harness.escape.attempts import JAIL, SESSION, Attempt, key_of, places_of, run_check
from tests.harness.escape.cells import Cells, Kept, own_session
from tests.harness.escape.controls import Controls, all_attempts
from tests.harness.escape.runners import Inside

pytestmark = pytest.mark.root
# Some minutes of attempts that the jail is held to in every test run: there, a container is held to one of each family.
PER_FAMILY = 1
# The walls of a session's container are those of any other, so it is held to some of each family, and only as soak.
CELLS_PER_FAMILY = 4

IN_SYS = "docker shows /sys, read-only"
IN_PROC = "docker hides less of /proc/self than the jail does"
BY_COMMAND = "docker's filter does not tell apart the commands of ioctl that are a file system's, nor those of fcntl"
EXECUTES = "what may be written may be executed in a container, also without a name"
# What a container does not hold and the jail does; docs/limitations/docker.md says so too.
NOT_HELD = {
    "files/change the times of the host's device": "a container has device nodes of its own",
    "files/the kernel's objects in sys": IN_SYS,
    "leaks/the machine's hardware": IN_SYS,
    "leaks/the host's mounts": IN_PROC,
    "leaks/the host's mounts, by pid 1": IN_PROC,
    "system calls/add an encryption key": BY_COMMAND,
    "system calls/execute from memory": EXECUTES,
    "system calls/execute a deleted file by execveat": EXECUTES,
    "system calls/hint how long a file's data will live": BY_COMMAND,
    "system calls/remove an encryption key": BY_COMMAND,
    "system calls/see the host's namespaces": "without userns-remap a container is in the host's user namespace",
}


@pytest.fixture(scope="module")
def image(docker_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give an image on a daemon that Cloche finds for as long as this module's attempts last."""
    from tests.harness.containers import chosen

    with pytest.MonkeyPatch.context() as patch:
        folder: Path = tmp_path_factory.mktemp("cache")
        with chosen(docker_daemon, patch, folder):
            yield docker_daemon.image("cloche-test:python")


def attempts() -> Iterator[Any]:
    """Yield the attempts that a jail must hold, for a container must hold them too: a few now, the others as soak."""
    seen: Counter[str] = Counter()
    for attempt in all_attempts():
        if JAIL in attempt.levels and attempt.has_control_here:
            seen[attempt.family] += 1
            marks = [pytest.mark.soak] if seen[attempt.family] > PER_FAMILY else []
            yield pytest.param(attempt, id=f"{attempt.family}: {attempt.name}", marks=marks)


def judge(controls: Controls, runner: Inside | Cells, attempt: Attempt) -> None:
    """Run an attempt there, and fail unless it was held."""
    controls.control(attempt)
    try:
        verdict = run_check(attempt, runner, controls.canaries)
    finally:
        runner.close()
    if verdict.breach and runner.promises.get(attempt.promise, "enforced") != "enforced":
        return
    why = NOT_HELD.get(f"{attempt.family}/{attempt.name}")
    if why is not None:
        assert verdict.breach, f"held after all, although {why}; take it off the list"
        return
    assert not verdict.breach, f"escaped from a container: {verdict.breach}"
    assert verdict.stopped_by, f"broke instead of trying: {verdict.trace}"


@pytest.mark.parametrize("attempt", list(attempts()))
def test_a_container_holds_it(controls: Controls, image: str, attempt: Attempt) -> None:
    """What works outside does not work in a container."""
    judge(controls, Inside(controls.canaries, level=JAIL, backend="docker", image=image, require=JAIL), attempt)


# Their clock includes the start of a container.
TIMED = ("resources/time without end",)


def cells() -> Iterator[Any]:
    """Yield those attempts that make sense in a session, and need no prompt to be shown at."""
    seen: Counter[str] = Counter()
    for one in attempts():
        (attempt,) = one.values
        if SESSION not in places_of(attempt) or attempt.terminal or key_of(attempt) in TIMED:
            continue
        seen[attempt.family] += 1
        if seen[attempt.family] <= CELLS_PER_FAMILY:
            yield pytest.param(attempt, id=one.id, marks=[pytest.mark.soak])


@pytest.fixture(scope="module")
def kept(image: str) -> Iterator[Kept]:
    """Hold a session for plain attempts, which follow one another in it."""
    holder = Kept(lambda: own_session(backend="docker", image=image))
    yield holder
    holder.close()


@pytest.mark.parametrize("attempt", list(cells()))
def test_a_session_in_a_container_holds_it(controls: Controls, image: str, kept: Kept, attempt: Attempt) -> None:
    """Nor does it as a cell of a session there."""
    judge(
        controls, Cells(controls.canaries, kept=kept, level=JAIL, backend="docker", image=image, require=JAIL), attempt
    )
