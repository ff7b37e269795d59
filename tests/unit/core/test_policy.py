"""The rules of a run."""

from typing import Any

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.policy import Policy, parse_network


def test_the_default_reaches_nothing() -> None:
    """No network, read-only root, all capabilities dropped, a seccomp profile, two writable paths."""
    policy = Policy()
    assert (policy.network, policy.network_allow, policy.packages) == ("off", (), ())
    assert policy.read_only_root
    assert policy.drop_capabilities
    assert policy.seccomp
    assert policy.writable_paths == ("/workspace", "/tmp")
    assert "csharp" not in policy.languages


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"screen": "maybe"}, "screen: 'maybe' is unknown; use one of off, warn, block"),
        ({"network": "lan"}, "network: 'lan' is unknown; use one of off, allowlist, open"),
        ({"writable_paths": ("/etc",)}, "writable_paths: '/etc' cannot be writable"),
        ({"languages": "python"}, "languages: 'python' must be a list"),
        ({"packages": "numpy"}, "packages: 'numpy' must be a list"),
        ({"network_allow": 3}, "network_allow: 3 must be a list"),
    ],
)
def test_wrong_rules_are_named(changes: dict[str, Any], named: str) -> None:
    """A wrong rule is refused with its name and what would do."""
    with pytest.raises(InvalidRequest) as caught:
        Policy(**changes)
    assert named in str(caught.value)


def test_lists_are_frozen() -> None:
    """A list that the caller keeps cannot change the policy afterwards."""
    hosts = ["packages.example"]
    policy = Policy(network_allow=hosts)  # type: ignore[arg-type]
    hosts.append("evil.example")
    assert policy.network_allow == ("packages.example",)


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (False, "off"),
        (True, "open"),
        ("none", "off"),
        (" OFF ", "off"),
        ("bridge", "open"),
        ("allowlist", "allowlist"),
    ],
)
def test_spellings_of_a_network(value: Any, mode: str) -> None:
    """Booleans and the seeds' words are modes."""
    assert parse_network(value, name="network") == mode


@pytest.mark.parametrize("value", [None, 1, 0, "yes please", []])
def test_no_guess_about_a_network(value: Any) -> None:
    """Anything else is refused by name, a number too."""
    with pytest.raises(InvalidRequest, match=r"^network: "):
        parse_network(value, name="network")
