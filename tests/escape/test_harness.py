"""Claims about this suite itself: that enough attempts count, and that its checks can fail."""

import json
from collections import Counter
from contextlib import closing

import pytest

import cloche
from tests.harness.escape.attempts import (
    FORK,
    FOUND_OPEN,
    IS_ROOT,
    JAIL,
    LIVE,
    NOT_AS_CELL,
    NOT_LIVE,
    SESSION,
    Attempt,
    Verdict,
    judge,
    key_of,
    places_of,
    run_check,
)
from tests.harness.escape.batch import Batch
from tests.harness.escape.cells import Cells
from tests.harness.escape.controls import Controls, all_attempts
from tests.harness.escape.runners import Inside, new_token, survivors, whole_program

LEAST_COUNTED = 100 if IS_ROOT else 80
WITHOUT_WALLS = [
    "files/a file at home",
    "files/write to a file of the host",
    "processes/signal (host)",
    "processes/see processes of others",
    "system calls/io_uring_setup",
    "network/loopback, version 4 (host)",
    "leaks/the host's name",
    "residue/a file in tmp",
]


def test_names_are_unique() -> None:
    """Every attempt has a name of its own in its family."""
    twice = [key for key, count in Counter((a.family, a.name) for a in all_attempts()).items() if count > 1]
    assert not twice


@pytest.mark.soak
def test_enough_attempts_count(controls: Controls) -> None:
    """At least a hundred attempts are shown to work outside when root makes them."""
    counted = list(controls.counted(all_attempts()))
    print("\n".join(controls.report()))
    assert len(counted) >= LEAST_COUNTED


def test_what_is_left_out_is_there() -> None:
    """The tables name attempts that exist, and that would be run there."""
    known = {key_of(attempt): attempt for attempt in all_attempts()}
    for key in (*NOT_AS_CELL, *NOT_LIVE):
        assert JAIL in known[key].levels
    for key, where in FOUND_OPEN:
        assert where in places_of(known[key])


@pytest.mark.parametrize("name", WITHOUT_WALLS)
def test_a_breach_is_seen(name: str, controls: Controls) -> None:
    """Where there are no walls, the same checks report that the attempt escaped."""
    attempt = next(a for a in all_attempts() if key_of(a) == name)
    runner = Inside(controls.canaries, level="process", backend="subprocess", screen="off")
    assert run_check(attempt, runner, controls.canaries).breach


@pytest.mark.parametrize("name", WITHOUT_WALLS)
def test_a_breach_in_a_cell_is_seen(name: str, controls: Controls) -> None:
    """So they do when the attempt is a cell of a session."""
    attempt = next(a for a in all_attempts() if key_of(a) == name)
    with closing(Cells(controls.canaries, level="process", screen="off")) as runner:
        assert run_check(attempt, runner, controls.canaries).breach


@pytest.mark.parametrize("where", [SESSION, FORK, LIVE])
def test_a_survivor_would_be_seen(where: str, controls: Controls) -> None:
    """What a cell starts is found on the host by the token of its run, as long as the session lives."""
    lingers = "import time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\n"
    attempt = Attempt(name="linger", family="harness", code=lingers)
    with controls.runner(where).workspace(attempt) as workspace:
        token = workspace.run(attempt.code).token
        interpreters = 0 if where == LIVE else 1  # that of a session bears the name of its last run
        assert len(survivors(token)) == 1 + interpreters
    assert not survivors(token)


def test_a_survivor_of_a_run_would_be_seen(controls: Controls) -> None:
    """So is the process of a run, whose command line is not its own."""
    token, found = new_token(), []
    attempt = Attempt(name="wait", family="harness", code="import time\nos.write(1, b'up')\ntime.sleep(60)")
    argument = json.dumps({**controls.canaries.targets, "neighbour": controls.canaries.neighbour(), "token": token})

    def look(*_: object) -> None:
        found.extend(survivors(token))
        raise LookupError("seen enough")

    with pytest.raises(LookupError, match="seen enough"):  # by which the run is ended
        cloche.run(whole_program(attempt, attempt.code), argv=[argument], on_output=look)
    assert found
    assert not survivors(token)


def test_a_batch_sees_what_a_run_would(controls: Controls) -> None:
    """Of attempts that follow one another in one run: a success, a crash, a refusal, and one that ends the run."""
    codes = {
        "success": "escaped('by name')",
        "secret": f"print({controls.canaries.secrets['a file in /tmp']!r})",
        "crash": "1 / 0",
        "refusal": "os.rmdir('/')",
        "end": "os.kill(os.getppid(), 9)\nimport time\ntime.sleep(20)",
        "last": "contained('at last')",
    }
    attempts = [Attempt(name=name, family="harness", code=code) for name, code in codes.items()]
    seen: dict[str, Verdict] = {}
    with cloche.Sandbox() as sandbox:
        runner = Batch(sandbox, controls.canaries, slowness=1)
        runner.run_all(attempts, lambda attempt, one: seen.__setitem__(attempt.name, judge(one, controls.canaries)))
        believed = runner.verdicts(attempts[:1] + attempts[4:])
    assert [name for name, verdict in seen.items() if verdict.breach] == ["success", "secret"]
    assert [name for name, verdict in seen.items() if verdict.stopped_by] == ["refusal", "end", "last"]
    assert "ZeroDivisionError" in seen["crash"].trace
    assert believed["harness/success"].breach
    assert believed["harness/last"].stopped_by == "CONTAINED at last"
