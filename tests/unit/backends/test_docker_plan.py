"""What a container is made of: decided purely, the same for the daemon's API and for `docker run`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from cloche.backends.containers.program import ENVIRONMENT
from cloche.backends.docker.plan import PROFILE_FILE, ContainerPlan, plan_container
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.jail.setup.seccomp import profile
from cloche.jail.setup.syscall_table import ALLOWED

USER = 1_950_000_042


def a_plan(policy: Policy | None = None, *, is_watched: bool = False, is_id_mapped: bool = False) -> ContainerPlan:
    """Return the plan of an ordinary container."""
    return plan_container(
        policy or Policy(),
        Limits(memory_bytes=256 * MIB, cpus=0.5, pids=64, disk_bytes=16 * MIB, tmp_bytes=8 * MIB),
        image="some-image",
        command=("sh", "-c", "true"),
        user=USER,
        is_watched=is_watched,
        is_id_mapped=is_id_mapped,
        labels={"cloche.owner": "me"},
    )


def test_the_words_of_docker_run_are_these() -> None:
    """The argument list of a run's container, word by word (M6b)."""
    words = a_plan().arguments()
    assert words[:2] == ["docker", "run"]
    assert {
        "--rm", "--network=none", f"--memory={256 * MIB}", f"--memory-swap={256 * MIB}", "--cpus=0.5",
        "--pids-limit=66",
        "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--security-opt=seccomp={PROFILE_FILE}", "--read-only",
        f"--user={USER}:{USER}", "--log-driver=none", "--ulimit=nofile=1024:1024", "--label=cloche.owner=me",
        f"--tmpfs=/tmp:size={8 * MIB},nr_inodes=32768,mode=1777,nosuid,nodev,exec",
    } <= set(words)  # fmt: skip
    assert words[-4:] == ["--entrypoint=sh", "some-image", "-c", "true"]
    mounts = [word for word in words if word.startswith(("--mount", "--volume", "-v"))]
    assert len(mounts) == 1
    assert "dst=/workspace" in mounts[0]
    assert f"size={16 * MIB},nr_inodes=32768,mode=0700,uid={USER},gid={USER},nosuid,nodev" in mounts[0]


def test_nothing_loosens_a_container() -> None:
    """No privilege, no capability, no mount of the host, no namespace of the host."""
    words = a_plan().arguments()
    loose = (
        "--privileged",
        "--cap-add",
        "--device",
        "--pid=",
        "--userns",
        "--uts",
        "--publish",
        "type=bind",
        "unconfined",
    )
    assert not [word for word in words for one in loose if one in word]
    host = a_plan().api()["HostConfig"]
    assert (host["Privileged"], host["CapDrop"], host["ReadonlyRootfs"]) == (False, ["ALL"], True)
    assert [mount["Type"] for mount in host["Mounts"]] == ["volume"]


def test_the_api_is_told_the_same() -> None:
    """What is shown as words is what the daemon is asked for."""
    body = a_plan().api()
    host = body["HostConfig"]
    assert (host["AutoRemove"], host["NetworkMode"], host["PidsLimit"]) == (True, "none", 66)
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (256 * MIB, 256 * MIB, 500_000_000)
    assert json.loads(host["SecurityOpt"][1].removeprefix("seccomp=")) == profile()
    assert body["User"] == f"{USER}:{USER}"
    assert body["Env"] == [f"{name}={value}" for name, value in ENVIRONMENT.items()]


def test_a_watched_container_has_room_for_its_files() -> None:
    """Where memory is watched inside, the cap leaves room for what the file systems in memory may hold."""
    assert a_plan(is_watched=True).memory_bytes >= (256 + 16 + 2 * 8) * MIB
    assert a_plan(is_watched=False).memory_bytes == 256 * MIB


@pytest.mark.parametrize(("network", "mode"), [("off", "none"), ("bridge", "bridge"), ("open", "none")])
def test_the_bridge_is_there_only_when_the_policy_names_it(network: str, mode: str) -> None:
    """Off means no interface but loopback."""
    policy = Policy(network=network)  # type: ignore[arg-type]
    assert a_plan(policy).api()["HostConfig"]["NetworkMode"] == mode


@pytest.mark.parametrize(("runtime", "is_gvisor"), [("runc", False), ("runsc", True)])
def test_a_runtime_is_told_by_name(runtime: str, is_gvisor: bool) -> None:
    """Docker's own one too, which needs none of the room that gVisor takes."""
    plan = plan_container(
        Policy(), Limits(), image="some-image", command=("sh",), user=USER, is_watched=True, runtime=runtime
    )
    assert plan.api()["HostConfig"]["Runtime"] == runtime
    assert f"--runtime={runtime}" in plan.arguments()
    assert (plan.pids > 66, "nproc" in plan.ulimits()) == (is_gvisor, is_gvisor)


def test_nobody_and_mapped_ids() -> None:
    """`locked-down` is nobody; where a daemon maps ids, only low ones exist and the mapped root owns the workspace."""
    assert a_plan(Policy(user="nobody")).user == 65_534
    mapped = a_plan(is_id_mapped=True)
    assert (mapped.user, "mode=0777" in mapped.workspace_options()) == (65_534, True)


def test_the_shipped_profile_is_the_one_in_use() -> None:
    """`seccomp.json` is for whoever calls docker by hand, and says the same."""
    assert json.loads(Path(PROFILE_FILE).read_text()) == profile()


def test_the_profile_allows_what_the_jail_allows() -> None:
    """One table serves both, and what it leaves out is refused."""
    rules = profile()
    allowed = {name for rule in rules["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert rules["defaultAction"] == "SCMP_ACT_ERRNO"
    assert set(ALLOWED["x86_64"]) - {"clone3"} <= allowed
    assert not allowed & {"mount", "unshare", "setns", "ptrace", "bpf", "keyctl", "io_uring_setup", "open_by_handle_at"}


def allows(name: str, *arguments: int) -> bool:
    """Tell whether the profile has a rule that allows a call with these registers."""

    def holds(condition: Mapping[str, int]) -> bool:
        assert condition["op"] == "SCMP_CMP_MASKED_EQ"
        return arguments[condition["index"]] & condition["value"] == condition["valueTwo"]

    rules = [rule for rule in profile()["syscalls"] if name in rule["names"]]
    return any(rule["action"] == "SCMP_ACT_ALLOW" and all(map(holds, rule["args"])) for rule in rules)


@pytest.mark.parametrize("name", ["sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"])
def test_any_thread_is_scheduled_but_for_the_first_process(name: str) -> None:
    """Every number that the kernel gives, whatever the upper half of its register holds."""
    others = [0, 2, 3, *(1 << bit for bit in range(1, 22)), *(1 << bit | 1 for bit in range(1, 22)), (1 << 22) - 1]
    assert all(allows(name, number | half << 32) for number in others for half in (0, 1, 0xFFFFFFFF))
    assert not any(allows(name, 1 | half << 32) for half in (0, 1, 0xFFFFFFFF))


@pytest.mark.parametrize(("name", "process"), [("setpriority", 0), ("ioprio_set", 1)])
def test_a_priority_is_set_by_process_and_group_and_not_by_user(name: str, process: int) -> None:
    """A user's processes include the first one, which is named by no number here."""
    for which in (process, process + 1, process | 1 << 32):
        assert all(allows(name, which, who) for who in (0, 2, 3, 4_194_303))
        assert not allows(name, which, 1)
        assert not allows(name, which, 1 | 1 << 32)
    assert not any(allows(name, process + 2, who) for who in (0, 2, 1000))
