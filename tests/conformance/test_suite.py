"""The suite itself: it finds a backend that does not do what it says, and keeps the list of deviations true."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cloche.backends.local.backend import LocalBackend
from cloche.backends.local.sandbox import LocalOpenSandbox
from cloche.core.enforcement import Control, Enforcement, Level, Measure, State
from cloche.core.errors import InvalidRequest
from cloche.core.events import Sink, discard
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.request import Request
from cloche.core.result import Result
from cloche.testing import FakeBackend
from cloche.testing.conformance import CHECKS, Outcome, Row, run_conformance

LIES = {control: Measure(state=State.ENFORCED, mechanism="a lie") for control in Control}


class _Liar(LocalBackend):
    """Run at level process, really, and say that everything is enforced."""

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities(), controls=LIES)

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[LocalOpenSandbox]:
        async with super().open(policy, limits) as sandbox:
            yield _lying(sandbox)


def _lying(sandbox: LocalOpenSandbox) -> LocalOpenSandbox:
    truthful = sandbox.run_streaming

    async def run_streaming(request: Request, sink: Sink = discard) -> Result:
        result = await truthful(request, sink)
        result.enforcement = Enforcement(level=result.enforcement.level, controls=LIES, hits=result.enforcement.hits)
        return result

    sandbox.run = sandbox.run_streaming = run_streaming  # type: ignore[method-assign, assignment]
    return sandbox


def _outcomes(rows: tuple[Row, ...]) -> dict[str, Outcome]:
    return {row.check.name: row.outcome for row in rows}


def test_every_check_has_a_name_of_its_own() -> None:
    """Deviations are declared by name, so no two checks share one."""
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names)) > 100


def test_a_lie_is_found() -> None:
    """A backend that claims walls which it has not is caught by every check that attempts to pass them."""
    names = [f"{control} is true" for control in ("filesystem", "network", "syscalls", "time")]
    rows = run_conformance(_Liar(), level=Level.PROCESS, only=names, deviations={})
    wanted = dict.fromkeys(names, Outcome.BROKEN) | {"time is true": Outcome.KEPT}
    if os.geteuid() != 0:  # most of these system calls need root anyway
        wanted.pop("syscalls is true")
    assert _outcomes(rows).items() >= wanted.items()
    assert not all(row.ok for row in rows)


def test_a_deviation_is_reported_by_name() -> None:
    """A declared deviation is no failure, and the row says why."""
    rows = run_conformance(
        LocalBackend(), level=Level.PROCESS, only=["host loopback"], deviations={"host loopback": "no wall"}
    )
    assert [(row.outcome, row.reason, row.ok) for row in rows] == [(Outcome.DEVIATES, "no wall", True)]


def test_a_deviation_that_passes_is_an_error() -> None:
    """What is declared and yet kept fails, so that the list stays true."""
    rows = run_conformance(LocalBackend(), only=["exit code 0"], deviations={"exit code 0": "believed broken"})
    assert [(row.outcome, row.ok) for row in rows] == [(Outcome.UNEXPECTED, False)]


def test_what_is_not_offered_is_skipped() -> None:
    """Who has no forks at a level is not held to them, and the row says why; who has them is."""
    rows = [
        run_conformance(LocalBackend(), level=level, only=["fork"], deviations={})[0]
        for level in (Level.PROCESS, Level.JAIL)
    ]
    assert [(row.outcome, row.ok) for row in rows] == [(Outcome.SKIPPED, True), (Outcome.KEPT, True)]
    assert "need level jail" in rows[0].reason


def test_a_skipped_check_is_no_deviation() -> None:
    """Who declares that it deviates from what it does not offer is skipped all the same, and a row is plain data."""
    (row,) = run_conformance(FakeBackend(), only=["session"], deviations={"session": "believed broken"})
    wanted = {"check": "session", "ok": True, "outcome": "skipped", "reason": "its sandboxes have no sessions"}
    assert row.as_dict().items() >= wanted.items()


def test_an_unknown_name_is_refused() -> None:
    """A deviation from a check that does not exist is a slip, and says which names there are."""
    for arguments in ({"only": ["nonesuch"]}, {"deviations": {"nonesuch": "x"}}):
        with pytest.raises(InvalidRequest, match=r"nonesuch.*exit code 0"):
            run_conformance(LocalBackend(), **arguments)  # type: ignore[arg-type]


@pytest.mark.soak
def test_the_command_line_runs_it() -> None:
    """`cloche conformance --json` prints one row per check and exits with 0 when all is as promised."""
    command = [sys.executable, "-m", "cloche", "conformance", "--backend", "subprocess", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    rows = json.loads(done.stdout)
    assert (done.returncode, [row for row in rows if not row["ok"]]) == (0, []), done.stderr
    assert len(rows) == len(CHECKS)
    assert {row["check"] for row in rows if row["outcome"] == "skipped"} == {"rollback", "fork"}
    assert {"host files", "host loopback"} <= {row["check"] for row in rows if row["outcome"] == "deviates"}
