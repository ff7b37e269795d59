"""The rules of a run."""

import subprocess
import sys
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
    assert policy.writable_paths == ("/workspace", "/tmp", "/dev/shm")
    assert "csharp" not in policy.languages


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"screen": "maybe"}, "screen: 'maybe' is unknown; use one of off, warn, block"),
        ({"network": "lan"}, "network: 'lan' is unknown; use one of off, allowlist, open, bridge"),
        ({"on_network": "maybe"}, "on_network: 'maybe' is unknown; use refuse or ask"),
        ({"network_allow": ("https://a.example",)}, "network_allow: 'https://a.example' has a scheme"),
        ({"network_deny": ("a.example/x",)}, "network_deny: 'a.example/x' has a path"),
        ({"network_deny": "a.example"}, "network_deny: 'a.example' must be a list"),
        ({"network_ports": (0,)}, "network_ports: '0' is not a port"),
        ({"network": "bridge", "network_deny": ("a.example",)}, "network_deny: docker's own bridge enforces no rules"),
        ({"writable_paths": ("/workspace", "/tmp")}, "writable_paths: /workspace and /dev/shm always are"),
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
        ("bridge", "bridge"),
        (" On ", "open"),
        ("true", "open"),
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


def test_a_policy_has_rules_of_the_network() -> None:
    """What is allowed, denied and open is decided by the rules that a policy returns."""
    policy = Policy(network="open", network_deny=("evil.example",), network_ports=(8443,))
    rules = policy.network_rules()
    assert rules.served_ports == (80, 443, 8443)
    assert rules.decide("good.example", 8443).is_allowed
    assert not rules.decide("evil.example", 443).is_allowed


def test_a_policy_without_rules_does_not_load_them() -> None:
    """Every run makes a policy: what parses addresses is not imported for one that names none."""
    code = (
        "import sys; from cloche.core.policy import Policy; Policy(); print('ipaddress' in sys.modules);"
        "Policy(network_allow=('a.example',)); print('ipaddress' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["False", "True"]
