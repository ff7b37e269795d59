"""Tiers of trust."""

from typing import Any

import pytest

from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest
from cloche.core.policy import BACKENDS, TIERS, check_backend, parse_backend, parse_tier, tier_numbered


def test_the_table_of_the_mission() -> None:
    """Tiers 1 and 2 run nothing, 3 runs in a jail or stronger, 4 on the host unless asked."""
    assert [tier.runs_code for tier in TIERS.values()] == [False, False, True, True]
    assert [tier.backends[0] for tier in TIERS.values()] == ["none", "none", "local", "none"]
    assert {"docker", "firecracker", "e2b", "local"} <= set(TIERS[3].backends)
    assert TIERS[3].least_level is Level.JAIL


@pytest.mark.parametrize(("number", "backend"), [(1, "docker"), (2, "local"), (3, "none"), (3, "subprocess")])
def test_a_backend_outside_the_list(number: int, backend: str) -> None:
    """A backend that a tier does not list is refused with the tier, both sources and the list."""
    with pytest.raises(InvalidRequest, match=rf"tier {number} \(here\) does not allow backend '{backend}' \(there\)"):
        check_backend(tier_numbered(number), backend, tier_origin="here", backend_origin="there")


@pytest.mark.parametrize("backend", BACKENDS)
def test_tier_4_allows_everything(backend: str) -> None:
    """Tier 4 may choose any backend."""
    check_backend(TIERS[4], backend)


@pytest.mark.parametrize("value", [0, 5, "x", "", None, 3.0, True, [3]])
def test_wrong_tiers_are_named(value: Any) -> None:
    """What is no tier is refused with the known ones."""
    with pytest.raises(InvalidRequest, match=r"^tier: unknown tier .*; known tiers: 1, 2, 3, 4"):
        parse_tier(value, name="tier")


def test_tiers_and_backends_as_text() -> None:
    """A number may be text; a backend's case does not matter."""
    assert parse_tier(" 3 ", name="tier") == 3
    assert parse_backend(" GVisor ", name="backend") == "gvisor"
    with pytest.raises(InvalidRequest, match="unknown tier 7"):
        tier_numbered(7)
