"""Named bundles of limits and policy."""

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.limits import MIB, Limits
from cloche.core.policy import PRESETS, Policy, preset_named


@pytest.mark.parametrize(
    ("name", "memory", "cpus", "pids", "timeout", "network", "user"),
    [
        ("standard", 512, 1.0, 256, 300, "off", None),
        ("minimal", 128, 0.25, 64, 30, "off", None),
        ("locked-down", 256, 0.5, 64, 60, "off", "nobody"),
        ("network-open", 512, 1.0, 256, 300, "open", None),
        ("network-allowlist", 512, 1.0, 256, 300, "allowlist", None),
    ],
)
def test_the_table_of_the_mission(
    name: str, memory: int, cpus: float, pids: int, timeout: float, network: str, user: str | None
) -> None:
    """Each preset has the source's amounts, and ours where the source is silent."""
    preset = preset_named(name)
    limits, policy = Limits().with_changes(**preset.limits), Policy().with_changes(**preset.policy)
    assert (limits.memory_bytes, limits.cpus, limits.pids, limits.timeout_s) == (
        memory * MIB,
        cpus,
        pids,
        timeout,
    )
    assert (policy.network, policy.user) == (network, user)
    assert policy.read_only_root
    assert policy.seccomp


def test_every_preset_says_the_same_words() -> None:
    """All presets name the same limits and their network, so that one takes back all of another."""
    assert len({frozenset(preset.limits) for preset in PRESETS.values()}) == 1
    assert all("network" in preset.policy for preset in PRESETS.values())


def test_an_unknown_preset_is_named() -> None:
    """An unknown name is refused with the known ones."""
    with pytest.raises(InvalidRequest, match="unknown preset 'big'; known presets: standard, minimal"):
        preset_named("big")
