"""A guest in a pod has no way to the cluster: attempts by bytes received, in a network namespace of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.harness.node import POD
from tests.harness.programs.pod_guest import TARGETS

ROOT = Path(__file__).parents[2]
NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")


def test_a_guest_reaches_nothing_of_the_cluster() -> None:
    """API server, kubelet, name service, another pod, metadata, the pod's loopback; a caller's rules open none."""
    command = [*NAMESPACE, sys.executable, "-m", "tests.harness.programs.pod_guest", "cluster", *POD]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["level"] == "confined"
    assert told["outside"] == f"{[1] * len(TARGETS)} 1\n"
    public = [int(name == "a public address") for name in TARGETS]
    assert (told["open"], told["allowed"]) == (f"{public} 0\n", f"{public} 0\n")
