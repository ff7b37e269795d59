"""The public conformance suite at level confined: in a container with docker's defaults, as root and as a user."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cloche.testing.conformance import CHECKS, LIVE_CHECKS, Outcome
from tests.conformance.test_local_live import NOT_CONFINED
from tests.harness.containers import Daemon, lay_out, run_inside

pytestmark = pytest.mark.root
# Nobody else on the machine has this user's id: what the kernel counts per user is counted over all containers.
USERS = pytest.mark.parametrize("user", ["0:0", f"{61_300 + os.getpid() % 3_000}:61234"], ids=["root", "user"])
PROGRAM = """
import json, sys
from cloche.backends.local.backend import LocalBackend
from cloche.core.enforcement import Level
from cloche.testing.conformance import run_conformance
rows = run_conformance(LocalBackend(), level=Level.CONFINED, deviations={}, at_once=10, **json.loads(sys.argv[1]))
print(json.dumps([row.as_dict() for row in rows]))
"""
# What a gate has time for: each way to end, what is counted, what comes out, what is left, and the walls.
CHOSEN = (
    "exact bytes", "meta", "timeout", "signal kill", "out of memory", "out of memory in children", "pids limit",
    "ok at the process limit", "disk limit", "output limit", "links and fifos", "there and back", "survivor: daemon",
    "cancellation", "runs at once", "capabilities agree", "host files",
    "host loopback", "caller's process", "descriptors", "cell values", "cell floods", "session: javascript",
    *(check.name for check in CHECKS if check.family == "truth" and check.name != "cpu is true"),
)  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what is shown to a container."""
    return lay_out(tmp_path_factory.mktemp("project"))


def conformance(
    docker: Daemon, project: Path, user: str, only: Sequence[str] = (), *, is_live: bool = False
) -> list[dict[str, Any]]:
    """Run checks in a container and return their rows."""
    words = ["python3", "-c", PROGRAM, json.dumps({"only": only, "is_live": is_live})]
    image = docker.image("cloche-test:sessions")
    done = run_inside(docker, project, words, image=image, options=[f"--user={user}"], timeout_s=280)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def lines_of(rows: list[dict[str, Any]], outcome: Outcome) -> list[str]:
    """Return a line for each row of an outcome."""
    return [f"{row['check']}: {row['reason']}" for row in rows if row["outcome"] == outcome]


@USERS
def test_what_a_run_promises_is_kept_in_a_container(docker: Daemon, project: Path, user: str) -> None:
    """A selection of the checks passes, and none is skipped."""
    rows = conformance(docker, project, user, CHOSEN)
    assert len(rows) == len(CHOSEN)
    assert not [row for row in rows if row["outcome"] != Outcome.KEPT]


@pytest.mark.soak
@USERS
def test_the_suite_passes_in_a_container(docker: Daemon, project: Path, user: str) -> None:
    """Every check is kept; what the level does not offer is skipped, which its limitations name."""
    rows = conformance(docker, project, user)
    assert len(rows) == len(CHECKS)
    assert not lines_of(rows, Outcome.BROKEN)
    assert {row["check"] for row in rows if row["outcome"] != Outcome.KEPT} == {"rollback", "fork"}


@pytest.mark.soak
@USERS
def test_the_suite_of_sandboxes_that_live_passes_in_a_container(docker: Daemon, project: Path, user: str) -> None:
    """Every check is kept; what the level has not is skipped."""
    rows = conformance(docker, project, user, is_live=True)
    assert len(rows) == len(LIVE_CHECKS)
    assert not lines_of(rows, Outcome.BROKEN)
    assert {row["check"] for row in rows if row["outcome"] != Outcome.KEPT} == NOT_CONFINED


NETWORK = """
import json, cloche
asks = '''
import socket, urllib.error, urllib.request
try: socket.gethostbyname("other.example")
except OSError as error: print(error.errno)
try: urllib.request.urlopen("http://10.1.2.3/", timeout=60)
except urllib.error.HTTPError as error: print(error.code)
'''
with cloche.Sandbox(level="confined", live=True, network="allowlist", network_allow=["good.example"]) as sandbox:
    results = [sandbox.run(asks), sandbox.exec(["python3", "-c", asks])]
print(json.dumps([[one.stdout.split(), sorted(row["host"] for row in one.network_refused)] for one in results]))
"""


@pytest.mark.soak
@USERS
def test_the_network_of_one_that_lives_is_decided_in_a_container(docker: Daemon, project: Path, user: str) -> None:
    """Runs and commands are refused, by name and by address, what the rules do not have; no packet goes anywhere."""
    words = ["python3", "-c", NETWORK]
    done = run_inside(docker, project, words, image=docker.image("cloche-test:sessions"), options=[f"--user={user}"])
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == [[["-2", "403"], ["10.1.2.3", "other.example"]]] * 2, done.stdout
