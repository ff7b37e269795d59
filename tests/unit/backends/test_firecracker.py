"""What Firecracker is asked for, held against what it publishes of its API, and what is said where it cannot run."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from cloche.backends import host
from cloche.backends.microvm.backend import FirecrackerBackend
from cloche.backends.microvm.firecracker import (
    VARIABLE,
    Deadline,
    Firecracker,
    calls,
    find_firecracker,
    processors,
    put,
)
from cloche.backends.microvm.guest_init import VSOCK_PORTS
from cloche.backends.microvm.plan import (
    CONTAINERS,
    DISK,
    FORMAT,
    INITRD,
    KERNEL,
    MANIFEST,
    HostAcceleration,
    plan_machine,
)
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.execution.registry import capabilities_of
from tests.harness.stand_in.schema import fault


def bodies(**limits: float) -> dict[str, Any]:
    """Return what is asked for, by path, in order."""
    plan = plan_machine(Policy(), Limits(**limits), "kvm")  # type: ignore[arg-type]
    return {call.path: dict(call.body) for call in calls(plan)}


@pytest.mark.parametrize("cpus", [0.5, 1, 1.5, 3, 5, 16])
def test_all_calls_are_as_published(cpus: float) -> None:
    """Each has the fields that must be there, no other ones, of their types and within their ranges."""
    asked = bodies(cpus=cpus)
    assert {path: fault(path, body) for path, body in asked.items()} == dict.fromkeys(asked, "")
    assert list(asked)[-1] == "/actions"


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("/machine-config", {"vcpu_count": 3}, "even"),
        ("/machine-config", {"vcpu_count": 0}, "range"),
        ("/machine-config", {"mem_size_mib": "512"}, "no int"),
        ("/machine-config", {"memory": 1}, "unknown field"),
        ("/boot-source", {"kernel_image_path": None}, "missing field"),
        ("/drives/root", {"is_read_only": None}, "missing field"),
        ("/drives/root", {"drive_id": "other"}, "path"),
        ("/vsock", {"guest_cid": 2}, "range"),
        ("/actions", {"action_type": "Start"}, "none of"),
        ("/network", {}, "Invalid request"),
    ],
)
def test_the_check_can_fail(path: str, change: dict[str, Any], said: str) -> None:
    """What Firecracker would refuse is found here, too."""
    body = {**copy.deepcopy(bodies()).get(path, {}), **change}
    assert said in fault(path, {key: value for key, value in body.items() if value is not None})


def test_a_machine_has_one_processor_or_an_even_number() -> None:
    """As many as are asked for, or one more."""
    counts = {cpus: processors(plan_machine(Policy(), Limits(cpus=cpus), "kvm")) for cpus in (0.5, 1, 2, 3, 16)}
    assert counts == {0.5: 1, 1: 1, 2: 2, 3: 4, 16: 16}


def test_nothing_leads_out_and_the_disk_is_for_reading() -> None:
    """No network device is asked for, and no path of the host's."""
    asked = bodies()
    assert set(asked) == {"/machine-config", "/boot-source", "/drives/root", "/vsock", "/actions"}
    assert asked["/drives/root"]["is_read_only"] is True
    paths = [asked["/drives/root"]["path_on_host"], asked["/boot-source"]["kernel_image_path"]]
    assert paths == ["/image/root.ext4", "/image/kernel"]
    assert "pci=off" in asked["/boot-source"]["boot_args"]


def test_memory_is_that_of_the_limits() -> None:
    """With what the machine's places may hold."""
    few, more = (bodies(memory_bytes=size * MIB)["/machine-config"]["mem_size_mib"] for size in (64, 128))
    assert few > 64
    assert more - few >= 64


def test_both_sides_know_the_same_ports() -> None:
    """The agent listens on as many as there are places."""
    assert len(VSOCK_PORTS) == CONTAINERS


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an image to look at, and nothing remembered."""
    for name in (KERNEL, INITRD, DISK):
        (tmp_path / name).write_bytes(b"")
    manifest = {"format": FORMAT, "id": "ab" * 32, "python": "3.11"}
    manifest |= {"programs": {"python3": "/usr/bin/python3"}, "versions": {"python3": "3.11.2"}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def program(folder: Path, text: str) -> Path:
    """Write a program that stands for Firecracker."""
    file = folder / "firecracker"
    file.write_text(text)
    file.chmod(0o755)
    return file


def test_a_missing_program_has_its_remedy(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PATH, or named."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv(VARIABLE, raising=False)
    found = capabilities_of("firecracker")
    assert not found.available
    assert "not on PATH" in found.reason
    assert VARIABLE in found.remedy
    monkeypatch.setenv(VARIABLE, "/no/such")
    with pytest.raises(BackendUnavailable, match="/no/such"):
        find_firecracker()
    found = capabilities_of("firecracker")
    assert (found.available, "/no/such" in found.reason, bool(found.remedy)) == (False, True, True)


def test_no_kvm_is_no_firecracker(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with the reason, and QEMU is named but never taken instead."""
    monkeypatch.setenv(VARIABLE, str(program(image, "#!/bin/sh\n")))
    monkeypatch.setattr(host, "KVM", image / "kvm")
    found = capabilities_of("firecracker")
    assert not found.available
    assert "no /dev/kvm" in found.reason
    assert '"microvm"' in found.remedy
    with pytest.raises(BackendUnavailable, match="no /dev/kvm"):
        asyncio.run(_open(FirecrackerBackend()))


async def _open(backend: FirecrackerBackend) -> None:
    async with backend.open(Policy(), Limits()):
        pass


def test_a_monitor_that_fails_is_quoted(image: Path) -> None:
    """Its last words are in the error, and it is dead."""
    file = program(image, "#!/bin/sh\necho it is broken\nexit 1\n")
    given = (Firecracker(program=str(file)), HostAcceleration(kind="kvm"))

    async def main() -> None:
        async with FirecrackerBackend(given).open(Policy(), Limits()) as sandbox:
            await sandbox.run(Request(code="1"))

    with pytest.raises(StartFailed, match="it is broken"):
        asyncio.run(main())


def test_a_refused_call_is_told_in_its_own_words() -> None:
    """With the path, the number, and the reason that it gives."""
    ours, theirs = socket.socketpair()
    console, said = os.pipe()

    def refuse() -> None:
        theirs.recv(4096)
        body = b'{"fault_message": "no such disk"}'
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    thread = threading.Thread(target=refuse)
    thread.start()
    try:
        with pytest.raises(StartFailed, match=r"PUT /drives/root \(400\): no such disk"):
            put(ours, "/drives/root", {}, Deadline(console=console, s=10))
    finally:
        thread.join()
        for one in (ours, theirs):
            one.close()
        os.close(console)
        os.close(said)
