"""`cloche serve` on a fleet of pods: the commands of docs/kubernetes.md, with two replicas and PostgreSQL."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import cloche
from cloche.core.fleet import FleetSettings
from tests.harness.commands import imported_once
from tests.harness.kubectl import Kubectl
from tests.harness.kubernetes_api import Cluster, NodePods
from tests.harness.kubernetes_kubelet import Kubelet, image_with
from tests.harness.postgres import postgres
from tests.harness.service import MODULES

from .test_service_workers import free_port

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
PORT, IMAGE = "8470", "cloche-node"
# The image's program has the account of its pod.
PROGRAM = ("#!/bin/sh", "export KUBECONFIG={kubeconfig}", 'exec {cloche}/cloche "$@"')


@pytest.fixture
def kubectl(tmp_path: Path) -> Iterator[Kubectl]:
    """Return the program `kubectl` of a cluster without a fleet."""
    with ExitStack() as at_end:
        cluster = Cluster(FleetSettings(image=IMAGE), version=cloche.__version__)
        at_end.callback(cluster.close)
        cluster.objects.clear()
        cluster.rules = None  # until the role of the service is bound
        facts = {"kubeconfig": cluster.kubeconfig(tmp_path), "cloche": imported_once(*MODULES).folder}
        image = image_with(tmp_path, IMAGE, {"cloche": [line.format(**facts) for line in PROGRAM]})
        kubelet = Kubelet(cluster, tmp_path, {IMAGE: image})
        at_end.callback(kubelet.close)
        end_replica = cluster.end_pod
        pods = NodePods(cluster, tmp_path)
        at_end.callback(pods.close)
        end_node = cluster.end_pod
        cluster.end_pod = lambda name: (end_replica(name), end_node(name))
        made = Kubectl(cluster, kubelet, tmp_path)
        at_end.callback(made.close)
        yield made


def commands(database: str, port: int) -> str:
    """Return the commands of the page, with a database and a port in place of its own."""
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    script = f"set -eu\ntrap 'kill $(jobs -p)' EXIT\n{block}\necho \"$KEY\" > key"
    script = script.replace("postgresql://USER:PASSWORD@HOST/NAME", f"'{database}'")
    return script.replace(f"localhost:{PORT}", f"localhost:{port}").replace(f"{PORT}:{PORT}", f"{port}:{PORT}")


def kill(address: str) -> None:
    """End the service at an address by SIGKILL."""
    listed = subprocess.run(["ss", "-ltnpH", f"src {address}"], capture_output=True, text=True, check=True).stdout
    os.kill(int(re.findall(r"pid=(\d+)", listed)[0]), signal.SIGKILL)


def test_the_commands_of_the_page_serve_code_by_two_replicas(kubectl: Kubectl, tmp_path: Path) -> None:
    """From nothing to an answer; a run by one replica is seen by the other, which serves on when that one is killed."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    path = f"{tmp_path}:{imported_once(*MODULES).folder}:/usr/bin:/bin"
    environ = {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": f"{tmp_path}/kubeconfig", "CLOCHE_FLEET_PODS": "1"}
    with postgres() as server:
        script = commands(server.new_database(), free_port())
        done = subprocess.run(
            ["bash", "-c", script], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        assert (answer["stdout"], answer["meta"]["remote"]["provider"]) == ("42\n", "kubernetes")
        addresses = [row["status"]["podIP"] for row in kubectl.pods("cloche-serve").values()]
        headers = {"Authorization": f"Bearer {(tmp_path / 'key').read_text().strip()}"}
        one, other = (
            httpx.Client(base_url=f"https://{address}:{PORT}", headers=headers, verify=False, timeout=60)
            for address in addresses
        )
        with one, other:
            made = one.post("/api/code/exec", json={"code": "print('by one')"}).json()
            assert other.get(f"/api/runs/{made['id']}").json()["stdout"] == "by one\n"
            assert answer["id"] in {row["id"] for row in other.get("/api/runs").json()["items"]}
            kill(addresses[0])
            with pytest.raises(httpx.TransportError):
                one.get("/health")
            after = other.post("/api/code/exec", json={"code": "print('by the other')"}).json()
            assert (after["status"], after["stdout"]) == ("ok", "by the other\n")
        kill(addresses[1])  # before the database
