"""What a container of gVisor is made of when there is no daemon: decided purely."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche.backends.gvisor.backend import find_engine
from cloche.backends.gvisor.container import PipeWire, reason_in
from cloche.backends.gvisor.plan import HostView, RunscEngine, RunscPlan, plan_container
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from tests.harness.processes import no_room

PYTHON = "/opt/python/bin/python3"


def a_plan(policy: Policy | None = None, *, is_rootless: bool = False) -> RunscPlan:
    """Return the plan of an ordinary container."""
    return plan_container(
        policy or Policy(),
        Limits(memory_bytes=256 * MIB, cpus=0.5, pids=64, disk_bytes=16 * MIB, tmp_bytes=8 * MIB),
        engine=RunscEngine(path="/usr/bin/runsc", version="1", platform="systrap", is_rootless=is_rootless),
        shown=HostView(python=PYTHON, binds=("/opt/python",)),
    )


def test_the_bundle_gives_nothing_away() -> None:
    """A read-only root, an ordinary id, no capability, no new privileges, namespaces of its own, an allowlist."""
    config = a_plan().config(1)
    process = config["process"]
    assert config["root"]["readonly"]
    assert process["user"] == {"uid": 1000, "gid": 1000}
    assert process["noNewPrivileges"]
    assert not any(process["capabilities"].values())
    assert {one["type"] for one in config["linux"]["namespaces"]} == {"pid", "ipc", "uts", "mount", "network"}
    assert all("path" not in one for one in config["linux"]["namespaces"])
    assert config["linux"]["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {name for rule in config["linux"]["seccomp"]["syscalls"] for name in rule["names"]}
    assert not allowed & {"ptrace", "mount", "unshare", "bpf", "io_uring_setup", "keyctl"}


def test_what_can_be_written_has_a_size() -> None:
    """The workspace of the place, /tmp and /dev/shm; nothing else of the host is mounted."""
    plan = a_plan()
    mounts = {one["destination"]: one for one in plan.config(1)["mounts"]}
    assert set(mounts) == {"/proc", "/dev", "/dev/shm", "/tmp", "/workspace"}
    assert {f"size={8 * MIB}", "nosuid", "nodev", "rw"} <= set(mounts["/tmp"]["options"])
    assert mounts["/workspace"]["source"] == f"{plan.top}/workspace"
    (workspace,) = [call for call in plan.open_calls() if call[0] == "mount" and call[1][1] == b"workspace"]
    assert workspace[1][4] == f"size={16 * MIB},nr_inodes=32768,mode=0700,uid=1000,gid=1000".encode()


def test_tmp_can_be_closed() -> None:
    """What the policy does not name cannot be written to."""
    plan = a_plan(Policy(writable_paths=("/workspace", "/dev/shm")))
    mounts = {one["destination"]: one for one in plan.config(1)["mounts"]}
    assert "ro" in mounts["/tmp"]["options"]


def test_the_limits_are_the_requests() -> None:
    """Processes are counted inside; the group around gVisor has room for its own threads and the files in memory."""
    plan = a_plan()
    rlimits = {one["type"]: one["hard"] for one in plan.config(1)["process"]["rlimits"]}
    assert (rlimits["RLIMIT_NPROC"], rlimits["RLIMIT_NOFILE"], rlimits["RLIMIT_CORE"]) == (65, 1024, 1)
    amounts = plan.amounts()
    assert amounts["cpus"] == 0.5
    assert amounts["pids"] > 64
    assert amounts["memory_bytes"] > (256 + 16 + 2 * 8) * MIB


def test_the_words_are_these() -> None:
    """No network, no control groups of runsc's own, the allowlist; rootless only for an ordinary user."""
    words = a_plan().argv(3)
    assert words[0] == "/usr/bin/runsc"
    assert {"--network=none", "--ignore-cgroups", "--oci-seccomp", "--platform=systrap"} <= set(words)
    assert words[-1] == "cloche-3"
    assert "--rootless" not in words
    assert "--rootless" in a_plan(is_rootless=True).argv(1)


def test_the_interpreter_is_shown_and_started() -> None:
    """The caller's own, which the first process needs."""
    plan = a_plan()
    assert plan.config(1)["process"]["args"][0] == PYTHON
    opened = [call[1][1] for call in plan.start_calls(1) if call[0] == "open_tree"]
    assert b"/opt/python" in opened
    assert b"/usr" in opened


def test_the_bundle_folder_covers_nothing_that_is_shown() -> None:
    """An interpreter below the folder that would be covered makes it another one."""
    engine = RunscEngine(path="/usr/bin/runsc", version="1", platform="systrap", is_rootless=False)
    shown = HostView(python="/dev/shm/python/bin/python3", binds=("/dev/shm/python",))
    assert plan_container(Policy(), Limits(), engine=engine, shown=shown).top != "/dev/shm"


def test_pipes_that_there_is_no_room_for_leave_none_open() -> None:
    """The descriptors of a process may run out in the middle."""
    before = len(os.listdir("/proc/self/fd"))
    for free in range(6):
        with no_room(free), pytest.raises(OSError, match="Too many open files"):
            PipeWire()
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_reason_names_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who names a runsc that is not there does not look for it on PATH."""
    monkeypatch.setenv("CLOCHE_RUNSC", f"{tmp_path}/runsc")
    assert f"CLOCHE_RUNSC is '{tmp_path}/runsc', no program to run" in str(find_engine())
    monkeypatch.setenv("CLOCHE_RUNSC", "none")
    assert "CLOCHE_RUNSC is 'none', so there is no program runsc" in str(find_engine())
    monkeypatch.delenv("CLOCHE_RUNSC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no program runsc on PATH" in str(find_engine())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("W1125 06:20:35.580658  2 util.go:64] FATAL ERROR: no platform: x\nno platform: x", "no platform: x"),
        ("flag provided but not defined: -oci\nUsage: runsc\n\tboot  launch", "flag provided but not defined: -oci"),
        (
            "I1125 06:20:35.580658  12 main.go:218] Args: [runsc]\nrunning container: no file",
            "running container: no file",
        ),
        ("W1125 06:20:35.580658  12 boot.go:1] nothing else", "nothing else"),
        ("", ""),
    ],
)
def test_an_error_says_why_gvisor_ended_without_its_log(said: str, reason: str) -> None:
    """One line, without what the log adds."""
    assert reason_in(said) == reason
    assert len(reason_in(said + "x" * 10_000)) <= 300
