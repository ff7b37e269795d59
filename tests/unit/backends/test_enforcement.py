"""What each backend says of each control, and the refusal where a policy asks for more."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from cloche.backends import enforcement
from cloche.backends.enforcement import Controls, DaemonFacts, check_policy
from cloche.backends.host import Host
from cloche.core.enforcement import ABSENT, Control, Enforcement, Level, State
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.policy import Policy

ROOT = Host(
    uid=0, owns_ids=True, lists_children=True, landlock_abi=6, seccomp="", namespaces="", idmapped="", processes="",
    can_switch_identity=True, cgroup_version=2,
)  # fmt: skip
DAEMON = cast(
    "DaemonFacts",
    SimpleNamespace(
        info=dict.fromkeys(("MemoryLimit", "SwapLimit", "CpuCfsQuota", "PidsLimit"), True),
        has_seccomp=True,
        is_id_mapped=False,
    ),
)
CASES: Mapping[str, tuple[Level, Controls]] = {
    "jail": (Level.JAIL, enforcement.local_controls(Level.JAIL, ROOT)),
    "confined": (Level.CONFINED, enforcement.local_controls(Level.CONFINED, ROOT)),
    "docker": (Level.JAIL, enforcement.docker_controls(DAEMON, Policy())),
    "docker on gVisor": (Level.GVISOR, enforcement.docker_controls(DAEMON, Policy(), Level.GVISOR)),
    "gVisor": (Level.GVISOR, enforcement.gvisor_controls(ROOT)),
    "QEMU": (Level.VM, enforcement.microvm_controls("kvm", is_root=True)),
    "Firecracker": (Level.VM, enforcement.microvm_controls("kvm", is_root=True, monitor="firecracker")),
    "microsandbox": (Level.VM, enforcement.microsandbox_controls()),
}


def lacks(missing: str) -> BackendUnavailable:
    """Make the error of what is missing."""
    return BackendUnavailable(f"it lacks: {missing}")


def check(policy: Policy, held: Enforcement) -> None:
    """Check as a backend would that has one level, and no network."""
    check_policy(policy, held, network="it has none", level="this gives", lacks=lacks)


@pytest.mark.parametrize(("level", "controls"), CASES.values(), ids=CASES)
def test_every_control_has_a_row(level: Level, controls: Controls) -> None:
    """By which mechanism it is in force, and why not further where it is not."""
    assert set(controls) == set(Control), level
    assert all(row.mechanism for row in controls.values())
    assert all(bool(row.reason) == (row.state is not State.ENFORCED) for row in controls.values())


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(), ""),
        (Policy(level=Level.JAIL, require_level=Level.JAIL), ""),
        (Policy(network="open"), "network 'open': it has none, in this version; leave network off, or pass"),
        (Policy(level=Level.VM), "level vm is not what this gives"),
        (Policy(require_level=Level.VM), "it lacks: level vm is required but only jail can be reached"),
        (Policy(require_controls=(Control.TIME, Control.CPU)), "it lacks: cpu is required but would be absent; pids"),
        (Policy(best_effort=(Control.CPU,)), "it lacks: pids would not be enforced"),
        (Policy(best_effort=(Control.CPU, Control.PIDS)), ""),
    ],
)
def test_what_is_missing_is_refused(policy: Policy, said: str) -> None:
    """In the backend's own words, the network first."""
    rows = {**CASES["jail"][1]}
    del rows[Control.CPU], rows[Control.PIDS]
    held = Enforcement(level=Level.JAIL, controls=rows if said or policy.best_effort else CASES["jail"][1])
    if not said:
        check(policy, held)
        return
    with pytest.raises(BackendUnavailable) as refused:
        check(policy, held)
    assert str(refused.value).startswith(said)


def test_dockers_bridge_is_refused_elsewhere() -> None:
    """It is a mistake of the request, not something that this host lacks."""
    with pytest.raises(InvalidRequest, match="network 'bridge' is docker's own, which only backend \"docker\""):
        check(Policy(network="bridge"), Enforcement(level=Level.JAIL, controls=CASES["jail"][1]))


def test_what_was_asked_for_is_no_shortfall() -> None:
    """Docker's bridge is in force in part, and a level below confined lacks what it lacks."""
    policy = Policy(network="bridge")
    bridged = Enforcement(level=Level.JAIL, controls=enforcement.docker_controls(DAEMON, policy))
    assert bridged["network"].state is State.PARTIAL
    check_policy(policy, bridged, network="no lists", networks=("off", "bridge"), lacks=lacks)
    with pytest.raises(BackendUnavailable, match="network is required but would be partial"):
        check(Policy(require_controls=(Control.NETWORK,)), bridged)
    opened = Enforcement(level=Level.JAIL, controls={**CASES["jail"][1], Control.NETWORK: ABSENT})
    with pytest.raises(BackendUnavailable, match="network would not be enforced"):
        check_policy(Policy(network="open"), opened, network="no lists", networks=("off", "open"), lacks=lacks)
    process = Enforcement(level=Level.PROCESS, controls=enforcement.local_controls(Level.PROCESS, ROOT))
    check(Policy(level=Level.PROCESS), process)
