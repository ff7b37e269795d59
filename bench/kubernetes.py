"""Measure a fleet on Kubernetes, as root: `python -m bench.kubernetes [--pods N] [--rounds N] [--json FILE]`.

Needs what `scripts/kubernetes.sh` makes. A cluster of two nodes of this machine (tests/harness/kubernetes_cluster.py)
with so many ready pods. In turns: a program that claims a pod, with its claim; one on the pod that is held; a bare
patch of a pod's label, guarded by its version. The controllers are stopped meanwhile: the pods that they would make
start on the same processors. Then some turns with them, each when all pods are ready again. Beside it a Job for each
program, and `kubectl exec` in a pod. Then as many claims at once by several processes, and the requests of all to the
API server for them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloche
from cloche.fleets.kubernetes.api import KubernetesApi
from cloche.fleets.leases import IDLE_S
from tests.harness import kubernetes_calls
from tests.harness.kubernetes_calls import SMALL
from tests.harness.kubernetes_cluster import IMAGE, PAUSE, PROGRAMS, KubernetesCluster

CODE, WARM_UP, REST_S, PATIENCE_S = "print(1)", 3, 0.5, 400
WITH_CONTROLLERS, JOBS, EXECS, PROCESSES, QUIET_S = 10, 10, 20, 5, 15.0
MOST_S = 2_000_000_000
TARGETS = {"ratio": 1.5, "claimed, ms": 60.0, "at once, s": 3.0, "requests": 6.0}
SPARE = {
    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "spare", "namespace": "cloche"},
    "spec": {"containers": [{"name": "spare", "image": PAUSE}], "terminationGracePeriodSeconds": 0},
}  # fmt: skip


def turns(count: int) -> list[dict[str, float]]:
    """Return seconds of each turn: a program with its claim, one on the pod that is held, a bare patch."""
    return asyncio.run(_turns(count))


async def _turns(count: int) -> list[dict[str, float]]:
    patch = await _Patch.of_spare()
    rows = []
    for _ in range(count):
        await asyncio.sleep(IDLE_S + REST_S)  # the pod of the turn before is given back
        row = {}
        pods = set()
        for name in ("claimed", "held"):
            began = time.perf_counter()
            result = await cloche.arun(CODE, **SMALL)
            row[name] = time.perf_counter() - began
            assert result.stdout == "1\n", result
            pods.add(result.meta["remote"]["node"])
        assert len(pods) == 1
        row["patch"] = await patch.once()
        rows.append(row)
    await patch.api.close()
    return rows


class _Patch:
    """Patch the label of a pod that nobody claims, as a claim does."""

    def __init__(self, api: KubernetesApi, version: str):
        self.api, self._version, self._number = api, version, 0

    @classmethod
    async def of_spare(cls) -> _Patch:
        """Return one that is connected."""
        api = KubernetesApi()
        return cls(api, (await api.get(_PATH))["metadata"]["resourceVersion"])

    async def once(self) -> float:
        """Return how long one takes."""
        self._number += 1
        meta = {"resourceVersion": self._version, "labels": {"turn": str(self._number)}}
        began = time.perf_counter()
        spec = {"activeDeadlineSeconds": MOST_S - int(1e3 * time.monotonic())}  # it may only become less
        row = await self.api.patch(_PATH, {"metadata": meta, "spec": spec})
        seconds = time.perf_counter() - began
        self._version = row["metadata"]["resourceVersion"]
        return seconds


_PATH = "/api/v1/namespaces/cloche/pods/spare"


def jobs(count: int) -> list[float]:
    """Return how long a program takes as a Job: made, waited for by a watch, its output read."""
    return asyncio.run(_jobs(count))


async def _jobs(count: int) -> list[float]:
    api, times = KubernetesApi(), []
    for number in range(count):
        began = time.perf_counter()
        assert await _job(api, f"job-{number}") == "1\n"
        times.append(time.perf_counter() - began)
    await api.close()
    return times


async def _job(api: KubernetesApi, name: str) -> str:
    container = {"name": "job", "image": IMAGE, "command": ["python3", "-c", CODE]}
    pod = {"restartPolicy": "Never", "containers": [container]}
    spec = {"template": {"spec": pod}, "backoffLimit": 0}
    path, pods = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/pods"
    made = await api.create(path, {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
    query = {"fieldSelector": f"metadata.name={name}", "resourceVersion": made["metadata"]["resourceVersion"]}
    async for event in api.lines(path, timeout_s=PATIENCE_S, watch="1", **query):
        if event["object"].get("status", {}).get("succeeded"):
            break
    (row,) = (await api.get(pods, labelSelector=f"job-name={name}"))["items"]
    printed = await api.text(f"{pods}/{row['metadata']['name']}/log")
    await api.ask("DELETE", f"{path}/{name}", body={"propagationPolicy": "Background"})
    return printed


def execs(count: int) -> list[float]:
    """Return how long a program takes by `kubectl exec` in a pod that is ready, with the start of kubectl."""
    pod = kubernetes_calls.kubectl("get", "pods", "--selector=cloche/state=ready", "--output=name").split()[0]
    command = [str(PROGRAMS / "kubectl"), "--namespace=cloche", "exec", pod, "--", "python3", "-c", CODE]
    times = []
    for _ in range(count):
        began = time.perf_counter()
        assert subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL) == "1\n"
        times.append(time.perf_counter() - began)
    return times


class Measured:
    """A fleet whose figures are taken; `report` has them."""

    def __init__(self, cluster: KubernetesCluster, pods: int):
        self.cluster, self.pods = cluster, pods
        self.report: dict[str, Any] = {"pods": pods}
        settings = {"IMAGE": IMAGE, "PODS": str(pods), "POD_CPUS": "0.03", "POD_MEMORY": "128m"}
        variables = cluster.environment() | {f"CLOCHE_FLEET_{name}": value for name, value in settings.items()}
        up = [sys.executable, "-m", "cloche", "fleet", "up", "--engine", "kubernetes", "--apply"]
        done = cluster.run(up, env=variables, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        self._caller = {"KUBECONFIG": str(cluster.kubeconfig_for("cloche-caller", "cloche"))}
        cluster.apply(SPARE)
        cluster.kubectl("wait", "pod/spare", "--namespace=cloche", "--for=condition=Ready", "--timeout=100s")
        self.wait()

    def wait(self) -> None:
        """Wait until all pods are ready, and the ones that were given back are gone."""
        words = ("rollout", "status", "deployment/cloche-default", f"--timeout={PATIENCE_S}s")
        self.cluster.kubectl("--namespace=cloche", *words)
        gone = ("wait", "pods", "--selector=cloche/state=claimed", "--for=delete", f"--timeout={PATIENCE_S}s")
        self.cluster.kubectl("--namespace=cloche", *gone, check=False)
        time.sleep(QUIET_S)

    def call(self, function: Callable[..., Any], *values: object) -> Any:  # noqa: ANN401 - its answer
        """Call a function as a caller of the fleet."""
        return self.cluster.call(function, *values, variables=self._caller)

    def turns(self, rounds: int) -> None:
        """Measure turns without the controllers, until the pods of each round are used up; then some with them."""
        rows: list[dict[str, float]] = []
        for _ in range(rounds):
            self.cluster.kill_program(CONTROLLERS)
            rows += self.call(turns, self.pods - 2)[WARM_UP:]
            self.cluster.start_program(CONTROLLERS)
            self.wait()
        self.report["turns"] = rows
        self.report["turns with controllers"] = self.call(turns, WITH_CONTROLLERS)

    def at_once(self) -> None:
        """Measure claims at once, without and with controllers; the API server's counts are of all its clients."""
        self.wait()
        self.cluster.kill_program(CONTROLLERS)
        self.report["at once, alone"] = self.call(kubernetes_calls.claims, PROCESSES, (self.pods - 10) // PROCESSES)
        self.cluster.start_program(CONTROLLERS)
        self.wait()
        idle = self._requests_per_s()
        began, before = time.monotonic(), self._requests()
        self.report["at once"] = self.call(kubernetes_calls.claims, PROCESSES, self.pods // PROCESSES)
        self.wait()
        made, seconds = self._requests() - before, time.monotonic() - began
        self.report["requests of all"] = {"made": made, "idle, a second": idle, "seconds": seconds}

    def _requests_per_s(self) -> float:
        before = self._requests()
        time.sleep(QUIET_S)
        return (self._requests() - before) / QUIET_S

    def _requests(self) -> float:
        lines = self.cluster.kubectl("get", "--raw", "/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("apiserver_request_total{"))


CONTROLLERS = "kube-controller-manager"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kubernetes", description=__doc__)
    parser.add_argument("--pods", type=int, default=50, help="that are ready (default 50)")
    parser.add_argument("--rounds", type=int, default=2, help="of turns, a pod for each (default 2)")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    with KubernetesCluster() as cluster:
        cluster.start(1, 2)
        measured = Measured(cluster, options.pods)
        report = measured.report
        try:
            report["jobs"], report["execs"] = cluster.call(jobs, JOBS), cluster.call(execs, EXECS)
            measured.turns(options.rounds)
            measured.at_once()
        finally:
            if options.json:
                Path(options.json).write_text(f"{json.dumps(report)}\n")
    show(report)
    return 0


def show(report: dict[str, Any]) -> None:
    """Print medians, p99 and each ratio with its target."""
    print(f"{os.cpu_count()} processors, {report['pods']} pods")
    for name in ("turns", "turns with controllers"):
        rows = report[name]
        print(f"{name}: {len(rows)}")
        for each in rows[0]:
            print(f"  {each:8} {_ms([row[each] for row in rows])}")
        ratio = statistics.median(row["claimed"] / (row["patch"] + row["held"]) for row in rows)
        wanted = f"wanted {TARGETS['ratio']:g}, or {TARGETS['claimed, ms']:g} ms"
        print(f"  claimed / (patch + held): {ratio:.2f} ({wanted})")
    for name, key in (("a Job for each program", "jobs"), ("kubectl exec", "execs")):
        print(f"{name}: {_ms(report[key])}")
    for name in ("at once, alone", "at once"):
        at_once = report[name]
        count, pods = len(at_once["pods"]), len(set(at_once["pods"]))
        ours = at_once["requests"] / count
        print(f"{count} claims {name}: {at_once['seconds']:.2f} s (wanted {TARGETS['at once, s']:g}), {pods} pods")
        print(f"  requests of ours for a pod: {ours:.1f} (wanted {TARGETS['requests']:g})")
    of_all = report["requests of all"]
    made = (of_all["made"] - of_all["idle, a second"] * of_all["seconds"]) / report["pods"]
    print(f"requests of all for a pod, with its start: {made:.1f}")


def _ms(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p99 = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    return f"p50 {statistics.median(ordered) * 1e3:7.1f} ms, p99 {p99 * 1e3:7.1f} ms, of {len(ordered)}"


if __name__ == "__main__":
    from bench.kubernetes import main as run  # processes beside the API server import its functions by this name

    sys.exit(run())
