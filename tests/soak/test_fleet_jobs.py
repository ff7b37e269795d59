"""A fleet from outside of its cluster, by Ray's dashboard: `make soak AREA=fleet`.

It runs with the packages of requirements/frameworks/ray_jobs.txt; outside is the Python of development, without Ray.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.execution.registry import collect_garbage
from tests.harness.ray_cluster import ROOT, RayCluster

pytestmark = [pytest.mark.root, pytest.mark.soak]
PYTHON = str(ROOT / ".venv" / "bin" / "python")
DASHBOARD = "http://10.77.0.1:8265"
PATIENCE_S = 120.0
LIVE = """
import cloche
with cloche.Sandbox(live=True) as sandbox:
    print(sandbox.exec(shell="echo kept > file; echo $((6 * 7))").stdout.strip())
    print(sandbox.read_file("file").strip())
    session = sandbox.session("python")
    session.run("x = 42")
    print(session.run("x + 1").value)
"""


class Outside:
    """A program on a machine of the network that has Cloche, no Ray, and nothing of the cluster but its token."""

    def __init__(self, cluster: RayCluster):
        self.cluster = cluster
        self.environment = {
            name: value for name, value in cluster.environment().items() if name != "RAY_ADDRESS"
        } | {"PYTHONPATH": f"{ROOT}/src"}  # fmt: skip

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Cloche to its end."""
        environment = self.environment | variables
        return self.cluster.run([PYTHON, "-m", "cloche", *words], number=2, env=environment, timeout=400)

    def python(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program that uses the library."""
        return self.cluster.run([PYTHON, "-c", code], number=2, env=self.environment | variables, timeout=200)

    def fleet(self, *words: str, **variables: str) -> str:
        """Run `cloche fleet`, and return what it printed."""
        ran = self.run("fleet", *words, "--address", DASHBOARD, **variables)
        assert ran.returncode == 0, ran.stderr[-4000:]
        return ran.stdout


@pytest.fixture
def outside() -> Iterator[Outside]:
    """Start a head with its dashboard and another node, which lends its network to those outside."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # a job's `python` is the cluster's
    with RayCluster(variables={"PATH": path}, head=("--include-dashboard=true", "--dashboard-host=10.77.0.1")) as made:
        made.start(1)
        made.start(2)
        yield Outside(made)
    collect_garbage()


def served(cluster: RayCluster) -> list[int]:
    """Return the processes of the service on the head."""
    listed = cluster.run(["ps", "-eo", "pid=,args="]).stdout.splitlines()
    return [int(line.split()[0]) for line in listed if " -m cloche serve " in line]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something holds in another process."""
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.5)


def test_a_python_without_ray_runs_code_on_a_fleet(outside: Outside) -> None:
    """By the account that `cloche fleet up` prints, also after the service was killed; it ends with the fleet."""
    cluster, account = outside.cluster, outside.cluster.folder / "fleet.env"
    imported = subprocess.run([PYTHON, "-c", "import ray"], check=False, capture_output=True, text=True)
    assert "No module named 'ray'" in imported.stderr
    stranger = outside.run("fleet", "up", "--address", DASHBOARD, RAY_AUTH_TOKEN_PATH="")
    assert "asks for a token (401)" in stranger.stderr

    account.write_text(outside.fleet("up"))
    run = ("run", "--env-file", str(account), "-c", "print(6 * 7)")
    ran = outside.run(*run, "--json")
    assert json.loads(ran.stdout)["stdout"] == "42\n", ran.stderr
    assert json.loads(ran.stdout)["meta"]["remote"]["provider"] == "cloche"
    key = account.read_text().rpartition("=")[2].strip()
    disks = [path for path in cluster.folder.glob("disk*/**/*") if path.is_file()]
    assert any(b"key-sha256" in path.read_bytes() for path in disks)  # the job's own log is among them
    assert not any(key.encode() in path.read_bytes() for path in disks)

    live = outside.python(LIVE, CLOCHE_ENV_FILE=str(account))
    assert live.stdout.splitlines() == ["42", "b'kept'", "43"], live.stderr

    [pid] = served(cluster)
    cluster.run(["kill", "-9", str(pid)])
    wait_until(lambda: outside.run(*run).stdout == "42\n")
    assert len(json.loads(outside.fleet("status", "--json"))["nodes"]) == 2

    assert outside.fleet("down") == "the fleet has ended\n"
    wait_until(lambda: not served(cluster))
    wait_until(lambda: not any(cluster.folder.glob("disk1/home/state/cloche/fleet/*service*")))
    assert outside.run(*run).returncode != 0

    outside.fleet("up", CLOCHE_FLEET_IDLE="45s")
    wait_until(lambda: not served(cluster))
    assert "there is no fleet" in outside.fleet("status")
