"""The microsandbox backend: what its package is asked for, and whole runs over a stand-in for its machines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import microsandbox
import pytest

from cloche.backends import host
from cloche.backends.containers.program import REAPERS
from cloche.backends.microsandbox import backend
from cloche.backends.microsandbox.backend import MicrosandboxBackend
from cloche.backends.microsandbox.machine import OWNER_LABEL, plan_machine
from cloche.core.enforcement import Level, State
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import OpenSandbox
from cloche.core.request import InputFile, Request
from cloche.core.result import Status
from cloche.execution.registry import capabilities_of
from tests.harness.microsandboxes import Recorded, StandIn, check_call

pytestmark = [pytest.mark.soak, pytest.mark.timeout(120)]


def tried(work: Callable[[OpenSandbox], Awaitable[None]], **limits: float) -> None:
    """Do some work in a sandbox over the stand-in; no machine is left."""

    async def main() -> None:
        async with MicrosandboxBackend(given=StandIn()).open(Policy(), Limits(**limits)) as sandbox:  # type: ignore[arg-type]
            await work(sandbox)

    asyncio.run(main())
    assert not Recorded.machines


def test_a_run_goes_through() -> None:
    """Files, input, environment, output, value, exit code; and the workspace is there for the next."""

    async def work(sandbox: OpenSandbox) -> None:
        code = (
            "import os, sys; print(open('a.txt').read(), sys.stdin.read(), os.environ['B']); open('c', 'w').write('d')"
        )
        files = (InputFile(path="a.txt", data=b"one"),)
        result = await sandbox.run(Request(code=f"{code}\n1 + 1", files=files, stdin=b"two", env={"B": "three"}))
        assert (result.status, result.stdout, result.value) == (Status.OK, "one two three\n", 2), result.stderr
        assert [file.path for file in result.files] == ["c"]
        assert result.meta["backend"] == "microsandbox"
        again = await sandbox.run(Request(code="print(open('c').read()); raise SystemExit(3)"))
        assert (again.stdout, again.exit_code) == ("d\n", 3)
        assert await sandbox.read_file("c", max_bytes=9) == b"d"

    tried(work)


def test_time_and_memory_end_a_run() -> None:
    """The first is watched from the outside, the other a limit of each process, and of the machine."""

    async def work(sandbox: OpenSandbox) -> None:
        slow = await sandbox.run(Request(code="print('up', flush=True)\nwhile True: pass", timeout_s=10))
        assert (slow.status, slow.stdout) == (Status.TIMEOUT, "up\n")
        large = await sandbox.run(Request(code="bytearray(1 << 30)"))
        assert (large.status, "MemoryError" in large.stderr) == (Status.ERROR, True)

    tried(work, memory_bytes=64 << 20)


def test_limits_become_the_machines() -> None:
    """Memory, processors, sizes and numbers are those of its package's calls."""
    limits = Limits(memory_bytes=64 << 20, disk_bytes=32 << 20, tmp_bytes=16 << 20, cpus=1.5, pids=20)
    plan = plan_machine(Policy(), limits, image="some:1", labels={OWNER_LABEL: "me"})
    given = plan.creation(microsandbox)
    check_call("Sandbox.create", 1, given)
    assert given["cpus"] == 2
    assert given["memory"] >= 64 + 32 + 2 * 16
    sizes = {place: mount._to_dict() for place, mount in given["volumes"].items()}
    assert {place: row["size_mib"] for place, row in sizes.items()} == {"/workspace": 32, "/tmp": 16, "/dev/shm": 16}
    assert given["network"]._to_dict() == microsandbox.Network.none()._to_dict()
    assert given["security"] is microsandbox.SecurityProfile.RESTRICTED
    assert given["ephemeral"]
    assert not given["detached"]
    done = plan.execution(microsandbox)
    check_call("Sandbox.exec_stream", 2, done)
    assert done["user"] == "1000"
    assert {row.resource.value: row.hard for row in done["rlimits"]}["nproc"] == 20 + REAPERS


def test_the_package_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its native part reads every word of a creation; it only finds no image then, for none can be fetched."""
    monkeypatch.setenv("MSB_HOME", str(tmp_path))
    named = plan_machine(Policy(), Limits(), image="localhost:1/none", labels={}).creation(microsandbox)

    async def create(**more: object) -> None:
        call = microsandbox.Sandbox.create(
            "cloche-never", **{**named, "pull_policy": microsandbox.PullPolicy.NEVER, **more}
        )
        await asyncio.wait_for(call, 60)

    with pytest.raises(microsandbox.MicrosandboxError, match=r"(?i)image|pull|cache"):
        asyncio.run(create())
    with pytest.raises(TypeError):
        asyncio.run(create(no_such_word=1))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import time; time.sleep(60)", "it hangs"),
        ("raise SystemExit('no machine')", "no machine"),
        ("pass", ""),
    ],
)
def test_a_probe_says_why(script: str, said: str) -> None:
    """What hangs is killed, what fails is told, what works is nothing to tell of."""
    assert backend.probe(script, 1.0 if "sleep" in script else 20.0) == said


def test_it_refuses_without_kvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the reason and the remedy, and nothing else is taken instead."""
    monkeypatch.setattr(host, "KVM", tmp_path / "kvm")
    found = capabilities_of("microsandbox")
    assert not found.available
    assert "no /dev/kvm" in found.reason
    assert "nested" in found.remedy
    with pytest.raises(BackendUnavailable, match="no /dev/kvm"):
        asyncio.run(_open())


async def _open() -> None:
    async with MicrosandboxBackend().open(Policy(), Limits()):
        pass


def test_what_was_never_tried_is_not_called_enforced() -> None:
    """So requiring a control refuses it, while its level stands."""
    found = MicrosandboxBackend(given=StandIn()).capabilities()
    assert (found.available, found.level) == (True, Level.VM)
    states = {control.value for control, measure in found.controls.items() if measure.state is State.ENFORCED}
    assert states == {"time", "output"}


def test_another_image_is_another_sandbox() -> None:
    """One machine has one image."""

    async def work(sandbox: OpenSandbox) -> None:
        await sandbox.run(Request(code="1"))
        with pytest.raises(InvalidRequest, match="open another sandbox"):
            await sandbox.run(Request(code="1", language="bash"))

    async def main() -> None:
        backend = MicrosandboxBackend({"bash": "other"}, given=StandIn())
        async with backend.open(Policy(), Limits()) as sandbox:
            await work(sandbox)

    asyncio.run(main())


def test_machines_of_dead_callers_are_cleared() -> None:
    """And those of living ones stay."""
    from cloche.backends.garbage_collection import owner

    async def main() -> None:
        for name, whose in (("alive", owner()), ("dead", owner().rsplit(":", 1)[0] + ":0")):
            plan = plan_machine(Policy(), Limits(), image="some", labels={OWNER_LABEL: whose})
            await StandIn.Sandbox.create(name, **plan.creation(microsandbox))

    asyncio.run(main())
    try:
        assert MicrosandboxBackend(given=StandIn()).collect_garbage() == ["machine dead"]
        assert list(Recorded.machines) == ["alive"]
    finally:
        for machine in list(Recorded.machines.values()):
            asyncio.run(machine.destroy())
