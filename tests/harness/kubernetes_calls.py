"""What tests do beside the API server of a Kubernetes cluster: each function runs there (`KubernetesCluster.call`)."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import cloche
from cloche.backends.cloche.kubernetes import KubernetesBackend
from cloche.backends.cloche.links import link_to
from cloche.core.errors import BackendUnavailable, ClocheError, OutcomeUnknown
from cloche.core.fleet import LeaseSpec
from cloche.core.fleet_settings import FleetSettings
from cloche.core.record import replace
from cloche.core.remote import RemoteAccount
from cloche.fleets.coordinator import Coordinator
from cloche.fleets.kubernetes.fleet import connect

from .kubernetes_cluster import PROGRAMS
from .namespace_calls import order

MIB, TURNS = 1 << 20, 50
CPUS = 0.02
SPEC = LeaseSpec(cpus=CPUS, memory_bytes=32 * MIB, wait_s=120)
SMALL: dict[str, Any] = {"backend": "kubernetes", "cpus": CPUS, "memory": "32m"}
PATIENCE_S, GONE_S = 120.0, 400.0
HOLDS = f"""
import time
import cloche
with cloche.Sandbox(live=True, **{SMALL}) as sandbox:
    print(sandbox.exec(shell="true").meta["remote"]["node"], flush=True)
    time.sleep(1000)
"""


def with_fleet(work: Callable[[Coordinator], Coroutine[Any, Any, Any]]) -> Any:
    """Do something with a coordinator, and return the answer; what it claimed is given back."""

    async def main() -> Any:
        fleet = await connect(FleetSettings(), link_to)
        try:
            await fleet.start()
            return await work(fleet)
        finally:
            await fleet.close()

    return asyncio.run(main())


def used() -> dict[str, Any]:
    """Run a program, and use all that a live sandbox has."""
    seen = cloche.run("print(6 * 7)", **SMALL)
    with cloche.Sandbox(live=True, **SMALL) as sandbox:
        sandbox.write_file("new.txt", b"made outside")
        shown = sandbox.exec(["cat", "new.txt"]).stdout
        with sandbox.session() as session:
            session.run("x = 6")
            cell = session.run("x * 7").value
        with sandbox.terminal(["bash", "--norc"], rows=30, columns=100) as terminal:
            terminal.write("stty size; exit\n")
            size = b"30 100" in terminal.stdout.read_all(10_000)
        refused = [_refused(work) for work in (sandbox.ports, lambda: sandbox.forward(8000))]
    return {
        "stdout": seen.stdout, "engine": seen.meta["remote"]["provider"], "level": str(seen.enforcement.level),
        "source": seen.enforcement.level_source, "file": shown, "cell": cell, "terminal": size,
        "no servers": ["level confined has no servers" in text for text in refused],
    }  # fmt: skip


def with_image(image: str) -> dict[str, Any]:
    """Run a program in a pod of an image, twice, or return how that is refused."""
    began = time.monotonic()
    try:
        seen = cloche.run("import sys; print(sys.version_info[:2])", image=image, **SMALL)
        first_s = time.monotonic() - began
        cloche.run("print(1)", image=image, **SMALL)
    except BackendUnavailable as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {
        "text": seen.stdout,
        "level": str(seen.enforcement.level),
        "pod": seen.meta["remote"]["node"],
        "seconds": first_s,
        "second": time.monotonic() - began - first_s,
    }


def forwarded() -> dict[str, Any]:
    """Use a sandbox through the API server's port-forward; say how long a program takes so, and by the address."""
    data = os.urandom(8 * MIB)
    with _reached("address") as near, _reached("forward") as far:
        far.write_file("data", data)
        is_same = far.read_file("data") == data
        with far.terminal(["bash", "--norc"], rows=30, columns=100) as terminal:
            terminal.write("stty size; exit\n")
            size = b"30 100" in terminal.stdout.read_all(10_000)
        times: dict[str, list[float]] = {"address": [], "forward": []}
        for _ in range(TURNS):
            for name, sandbox in (("address", near), ("forward", far)):
                began = time.perf_counter()
                sandbox.run("print(1)")
                times[name].append(1e3 * (time.perf_counter() - began))
    return {"same": is_same, "terminal": size} | {name: statistics.median(each) for name, each in times.items()}


def _reached(reach: Literal["address", "forward"]) -> cloche.Sandbox:
    account = RemoteAccount(provider="kubernetes", fleet=FleetSettings(reach=reach))
    return cloche.Sandbox(live=True, **{**SMALL, "backend": KubernetesBackend(account)})


def forward_refused() -> str:
    """Ask for a sandbox through the API server, and return how that is refused."""

    def work() -> None:
        with _reached("forward"):
            pass

    return _refused(work)


def _refused(work: Callable[[], object]) -> str:
    try:
        work()
    except ClocheError as error:
        return str(error)
    return "it was done"


def claims(processes: int, each: int) -> dict[str, Any]:
    """Claim pods at once, by several processes; return them, after how long all had theirs, and those requests."""
    words = [sys.executable, "-c", f"from {__name__} import claim; claim({each})"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(words, **pipes) for _ in range(processes)]
    try:
        for child in children:
            _line_of(child)
        began = time.monotonic()
        for child in children:
            _tell(child)
        rows = [json.loads(_line_of(child)) for child in children]
        seconds = time.monotonic() - began
        for child in children:
            _tell(child)
        requests = [json.loads(_line_of(child))["requests"] for child in children]
    finally:
        for child in children:
            child.communicate()
    return {
        "pods": [pod for row in rows for pod in row["pods"]], "seconds": seconds,
        "each": [row["seconds"] for row in rows], "requests": sum(requests),
    }  # fmt: skip


def claim(count: int) -> None:
    """Connect, say so, claim so many pods when told, tell which, and give them back when told again."""

    async def main() -> None:
        fleet = await connect(FleetSettings(), link_to)
        engine: Any = fleet._engine
        try:
            await fleet.start()
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            began = time.monotonic()
            leases = await asyncio.gather(*(fleet.lease(SPEC) for _ in range(count)))
            seconds = time.monotonic() - began
            print(json.dumps({"pods": [lease.node for lease in leases], "seconds": seconds}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            for lease in leases:
                await fleet.release(lease)
        finally:
            await fleet.close()
        print(json.dumps({"requests": engine._api.requests}), flush=True)

    asyncio.run(main())


def _line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"a process has ended: {child.wait()}"
    return line


def _tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def machine_of(result: Any) -> int:
    """Return the number of the node that a result's pod is on."""
    return int(kubectl("get", "pod", result.meta["remote"]["node"], "--output=jsonpath={.spec.nodeName}")[-1])


def lost(how: str, *more: Any) -> dict[str, Any]:
    """Lose a node, by a method of the cluster, while a sandbox lives there; say when and how its holder is told.

    A method whose name ends in `container` gets the pod in place of the node's number.
    """

    async def main() -> dict[str, Any]:
        async with cloche.AsyncSandbox(live=True, **SMALL) as sandbox:
            first = await sandbox.exec(shell="true")
            number, pod = machine_of(first), first.meta["remote"]["node"]
            running = asyncio.create_task(sandbox.exec(shell="sleep 1000", timeout=2000))
            await asyncio.sleep(1)
            lost_at = time.monotonic()
            what = pod if how.endswith("container") else number
            ordered = asyncio.create_task(asyncio.to_thread(order, how, what, *more))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await running
            except OutcomeUnknown as error:
                seconds = time.monotonic() - lost_at
                kind, text = type(error).__name__, str(error)
            else:
                raise AssertionError("it ended")
            await ordered
        again = await cloche.arun("print(7)", **SMALL)
        return {
            "number": number, "seconds": seconds, "kind": kind, "text": text, "again": again.stdout,
            "elsewhere": machine_of(again) != number, "other pod": again.meta["remote"]["node"] != pod,
        }  # fmt: skip

    return asyncio.run(main())


def without_api_server(seconds: float) -> dict[str, Any]:
    """Use a sandbox while the API server is away, and ask for another one."""

    async def main() -> dict[str, Any]:
        async with cloche.AsyncSandbox(live=True, **SMALL) as sandbox:
            await sandbox.exec(shell="true")
            await asyncio.to_thread(order, "stop_apiserver")
            began = time.monotonic()
            asked = asyncio.create_task(cloche.arun("print(8)", **SMALL))
            answers = 0
            while time.monotonic() - began < seconds:
                answers += (await sandbox.exec(shell="echo 7")).stdout == "7\n"
                await asyncio.sleep(1)
            await asyncio.to_thread(order, "start_apiserver")
            async with asyncio.timeout(PATIENCE_S):
                later = (await asked).stdout
            return {"answers": answers, "after": (await sandbox.exec(shell="echo 9")).stdout, "later": later}

    return asyncio.run(main())


def without_controllers(count: int) -> dict[str, Any]:
    """Kill the controllers while a sandbox lives; claim ready pods and give them back, then start the controllers."""

    async def main() -> dict[str, Any]:
        async with cloche.AsyncSandbox(live=True, **SMALL) as sandbox:
            await sandbox.exec(shell="true")
            await asyncio.to_thread(order, "kill_program", "kube-controller-manager")
            try:
                runs = [cloche.arun(f"print({number})", **SMALL) for number in range(count)]
                printed = [result.stdout for result in await asyncio.gather(*runs)]
                lived = (await sandbox.exec(shell="echo 9")).stdout
            finally:
                await asyncio.to_thread(order, "start_program", "kube-controller-manager")
            return {"printed": printed, "lived": lived, "after": (await sandbox.exec(shell="echo 8")).stdout}

    return asyncio.run(main())


def refused(template: str = "default") -> dict[str, Any]:
    """Ask for a lease that is refused; return how, and after how long."""

    async def main() -> dict[str, Any]:
        began = time.monotonic()
        fleet = None
        try:
            fleet = await connect(replace(FleetSettings(), template=template), link_to)
            await fleet.start()
            began = time.monotonic()
            await fleet.lease(SPEC)
        except BackendUnavailable as error:
            return {"text": str(error), "seconds": time.monotonic() - began}
        finally:
            if fleet is not None:
                await fleet.close()
        raise AssertionError("it was granted")

    return asyncio.run(main())


def all_taken(count: int) -> dict[str, Any]:
    """Take all pods, and ask for one more by another coordinator; return how it is refused."""

    async def work(fleet: Coordinator) -> dict[str, Any]:
        await asyncio.gather(*(fleet.lease(SPEC) for _ in range(count)))
        return await asyncio.to_thread(refused)

    answer: dict[str, Any] = with_fleet(work)
    return answer


def drained() -> dict[str, Any]:
    """Drain a pod by `cloche fleet` while a sandbox lives there, and one that is ready; say what each is for."""
    with cloche.Sandbox(live=True, **SMALL) as sandbox:
        pod = sandbox.exec(shell="true").meta["remote"]["node"]
        draining = subprocess.Popen(_drain(pod), stdout=subprocess.PIPE, text=True)
        until_so(lambda: "cloche/leaving" in kubectl("get", "pod", pod, "--show-labels"))
        lived, is_waiting = sandbox.exec(shell="echo 7").stdout, draining.poll() is None
    printed, _ = draining.communicate(timeout=PATIENCE_S)
    selector = "--selector=cloche/state=ready"
    ready = kubectl("get", "pods", selector, "--output=jsonpath={.items[0].metadata.name}")
    subprocess.run(_drain(ready), check=True, capture_output=True, timeout=PATIENCE_S)
    left = kubectl("get", "pods", "--output=name")
    return {"lived": lived, "waited": is_waiting, "printed": printed, "left": pod in left or ready in left}


def _drain(pod: str) -> list[str]:
    return [sys.executable, "-m", "cloche", "fleet", "drain", pod, "--engine", "kubernetes"]


def holder_killed() -> dict[str, Any]:
    """Kill a process that holds a live sandbox; return its pod, and when."""
    child = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pod = child.stdout.readline().strip()
    child.kill()
    child.wait()
    return {"pod": pod, "at": time.monotonic(), "is there": pod in kubectl("get", "pods", "--output=name")}


def reaped(pod: str) -> float:
    """Wait, with a coordinator that does nothing else, until the pod of a dead one is gone; return when."""

    async def work(fleet: Coordinator) -> float:
        await asyncio.to_thread(until_so, lambda: pod not in kubectl("get", "pods", "--output=name"), GONE_S)
        return time.monotonic()

    answer: float = with_fleet(work)
    return answer


def until_so(is_so: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until something is so."""
    ends = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.2)


def doctor() -> str:
    """Return what `cloche doctor` says of the fleet."""
    command = [sys.executable, "-m", "cloche", "doctor", "--backend", "kubernetes"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def kubectl(*words: str) -> str:
    """Ask the API server as this caller."""
    command = [str(PROGRAMS / "kubectl"), "--namespace=cloche", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
