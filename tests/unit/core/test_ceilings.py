"""The most that an operator lets anyone ask for, where it is no amount."""

from typing import Any

import pytest

from cloche.core.ceilings import NetworkCeiling, allowed_by_both, covers, packages_above, packages_in_both
from cloche.core.errors import InvalidRequest
from cloche.core.network import NetworkMode, NetworkRules, parse_network_range, parse_rule


@pytest.mark.parametrize(
    ("outer", "inner", "is_covered"),
    [
        ("a.example", "a.example", True),
        ("a.example", "A.example.:443", True),
        ("a.example:443", "a.example", False),
        ("a.example", "b.a.example", False),
        ("a.example", "*.a.example", False),
        ("*.a.example", "b.a.example", True),
        ("*.a.example", "*.b.a.example", True),
        ("*.b.a.example", "*.a.example", False),
        ("*.a.example", "a.example", False),
        ("*.a.example", "ba.example", False),
        ("a.example", "a.example@10.0.0.0/8", False),
        ("a.example@10.0.0.0/8", "a.example", True),
        ("a.example@10.0.0.0/8", "a.example@10.1.0.0/16", True),
        ("a.example@10.1.0.0/16", "a.example@10.0.0.0/8", False),
        ("a.example@10.0.0.0/8", "a.example@fd00::/8", False),
        ("*.a.example@10.0.0.0/8", "b.a.example:80@10.0.0.1", True),
        ("10.0.0.5", "10.0.0.5:80", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("8.8.8.8", "8.8.8.8", True),
        ("10.0.0.0/8", "10.1.0.0/16", True),
        ("10.0.0.0/8", "10.0.0.5:80", True),
        ("10.0.0.0/8", "db.example@10.1.0.0/16", False),
        ("10.1.0.0/16", "10.0.0.0/8", False),
    ],
)
def test_a_rule_is_within_another_one(outer: str, inner: str, is_covered: bool) -> None:
    """Its hosts, its ports and the addresses that it opens are all among those of the other one."""
    rules = NetworkRules.parse(mode="allowlist", allow=(outer,))
    assert covers(rules, parse_rule(inner)) == is_covered


def test_a_rule_is_within_several_ones() -> None:
    """One port may be allowed by one rule, and the next by another."""
    rules = NetworkRules.parse(mode="allowlist", allow=("a.example:80", "*.example.org:443", "a.example:443"))
    assert covers(rules, parse_rule("a.example"))
    assert not covers(rules, parse_rule("b.example.org"))


@pytest.mark.parametrize(
    ("mode", "inner", "is_covered"),
    [
        ("off", "a.example", False),
        ("open", "a.example", True),
        ("open", "*.a.example", True),
        ("open", "a.example:22", True),
        ("open", "a.example:23", False),
        ("open", "8.8.8.8", True),
        ("open", "10.0.0.5", False),
        ("open", "10.0.0.0/8", False),
        ("open", "8.8.8.0/24", True),
        ("open", "a.example@10.0.0.0/8", False),
        ("open", "db.example:5432", True),
        ("bridge", "10.0.0.5:9", True),
    ],
)
def test_a_rule_is_within_a_mode(mode: NetworkMode, inner: str, is_covered: bool) -> None:
    """Mode `open` has every public host on its ports, and `bridge` everything."""
    rules = NetworkRules.parse(mode=mode, allow=("db.example:5432@10.0.0.0/8",), ports=(22,))
    assert covers(rules, parse_rule(inner)) == is_covered


def test_an_address_is_within_networks_that_are_given() -> None:
    """Networks that may be opened hold literal addresses as well as the @CIDR of names that are covered."""
    rules, networks = NetworkRules.parse(mode="open"), (parse_network_range("10.0.0.0/8", name="x"),)
    assert covers(rules, parse_rule("10.0.0.5:5432"), networks=networks)
    assert covers(rules, parse_rule("db@10.1.0.0/16"), networks=networks)
    assert not covers(rules, parse_rule("db:5432@10.1.0.0/16"), networks=networks)


def test_what_two_lists_allow_is_what_both_have() -> None:
    """The narrower rule of each pair stays."""
    one = NetworkRules.parse(mode="allowlist", allow=("*.a.example", "b.example", "c.example"))
    other = NetworkRules.parse(mode="allowlist", allow=("x.a.example", "b.example:443", "d.example"))
    assert allowed_by_both(one, other) == ("x.a.example", "b.example:443")


HOSTS = NetworkCeiling(mode="allowlist", hosts=("*.a.example", "db.example:5432@10.0.0.0/8"))
FREE = NetworkCeiling(mode="allowlist", networks=("10.0.0.0/8",))


@pytest.mark.parametrize(
    ("ceiling", "mode", "allow", "above"),
    [
        (HOSTS, "off", ("z.example",), ""),
        (HOSTS, "allowlist", (), ""),
        (HOSTS, "allowlist", ("b.a.example", "db.example:5432@10.1.0.0/16"), ""),
        (HOSTS, "allowlist", ("b.a.example", "z.example"), "z.example"),
        (HOSTS, "allowlist", ("b.a.example:8443",), "b.a.example:8443"),
        (HOSTS, "allowlist", ("b.a.example@10.0.0.0/8",), "b.a.example@10.0.0.0/8"),
        (HOSTS, "open", (), "open"),
        (HOSTS, "bridge", (), "bridge"),
        (FREE, "allowlist", ("z.example:9", "z.example@10.1.0.0/16", "10.0.0.5:22"), ""),
        (FREE, "allowlist", ("z.example@192.168.0.0/16",), "z.example@192.168.0.0/16"),
        (FREE, "open", (), "open"),
        (NetworkCeiling(mode="open"), "open", ("z.example:22",), ""),
        (NetworkCeiling(mode="open"), "allowlist", ("10.0.0.5",), "10.0.0.5"),
        (NetworkCeiling(mode="open"), "bridge", (), "bridge"),
        (NetworkCeiling(mode="bridge"), "bridge", (), ""),
        (NetworkCeiling(mode="bridge"), "allowlist", ("10.0.0.5",), ""),
        (NetworkCeiling(mode="off"), "allowlist", (), "allowlist"),
        (NetworkCeiling(mode="allowlist", hosts=()), "allowlist", ("a.example",), "a.example"),
    ],
)
def test_what_is_above_a_ceiling_of_the_network(
    ceiling: NetworkCeiling, mode: NetworkMode, allow: tuple[str, ...], above: str
) -> None:
    """The mode, or the first host that the ceiling does not let through."""
    assert ceiling.excess(NetworkRules.parse(mode=mode, allow=allow)) == above


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        (HOSTS, NetworkCeiling(mode="open"), {"mode": "allowlist", "hosts": ("*.a.example",)}),
        (HOSTS, NetworkCeiling(mode="off"), {"mode": "off"}),
        (
            HOSTS,
            NetworkCeiling(mode="allowlist", hosts=("x.a.example", "y.example")),
            {"mode": "allowlist", "hosts": ("x.a.example",)},
        ),
        (FREE, NetworkCeiling(mode="bridge"), {"mode": "allowlist", "networks": ("10.0.0.0/8",)}),
        (
            FREE,
            NetworkCeiling(mode="open", networks=("10.1.0.0/16",)),
            {"mode": "allowlist", "networks": ("10.1.0.0/16",)},
        ),
        (FREE, NetworkCeiling(mode="open"), {"mode": "allowlist"}),
    ],
)
def test_two_ceilings_of_the_network_join(one: NetworkCeiling, other: NetworkCeiling, joined: dict[str, Any]) -> None:
    """What is left is what both let through, in either order."""
    assert one.joined(other) == other.joined(one) == NetworkCeiling(**joined)
    assert one.joined(one) == one


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "lan"}, "mode: 'lan' is unknown"),
        ({"mode": "open", "hosts": ("a.example",)}, "hosts: mode 'open' has no list of hosts"),
        ({"mode": "allowlist", "hosts": ("*",)}, "hosts: '*' means every host"),
        (
            {"mode": "open", "networks": ("127.0.0.0/8",)},
            "networks: '127.0.0.0/8' has the network 127.0.0.0/8, which is",
        ),
        ({"mode": "open", "networks": ("10.0.0.0/8,fd00::/8",)}, "has no network"),
    ],
)
def test_a_ceiling_that_says_nothing_is_refused(fields: dict[str, Any], reason: str) -> None:
    """A wrong mode, hosts that a mode does not have, a network that nothing opens."""
    with pytest.raises(InvalidRequest) as caught:
        NetworkCeiling(**fields)
    assert reason in str(caught.value)


def test_a_ceiling_is_shown_on_one_line() -> None:
    """Its mode, hosts and networks."""
    assert str(HOSTS) == "allowlist: *.a.example, db.example:5432@10.0.0.0/8"
    assert str(FREE) == "allowlist: addresses in 10.0.0.0/8"
    assert (str(NetworkCeiling(mode="open")), str(NetworkCeiling(mode="allowlist", hosts=()))) == (
        "open", "allowlist: no host",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "most", "above"),
    [
        ((), (), ""),
        (("numpy",), ("numpy",), ""),
        (("NumPy>=2,<3",), ("numpy",), ""),
        (("my_package[extra]==1.0; python_version > '3'",), ("My.Package",), ""),
        (("numpy", "rich"), ("numpy",), "rich"),
        (("numpy-evil",), ("numpy",), "numpy-evil"),
        (("numpy",), (), "numpy"),
        ("auto", ("numpy",), "auto"),
        (("npm:left-pad@^1 || 3",), ("npm:left-pad",), ""),
        (("npm:left-pad@npm:evil",), ("npm:left-pad",), "npm:left-pad@npm:evil"),
        (("npm:left.pad",), ("npm:left-pad",), "npm:left.pad"),
        (("npm:@a/left-pad@1",), ("npm:left-pad", "npm:@b/left-pad"), "npm:@a/left-pad@1"),
        (("./numpy",), ("./pandas",), "./numpy"),
        (("npm:left-pad",), ("npm:left-pad",), ""),
        (("left-pad",), ("npm:left-pad",), "left-pad"),
        (("numpy @ https://evil.example/n.whl",), ("numpy",), "numpy @ https://evil.example/n.whl"),
        (("git+https://evil.example/numpy",), ("numpy",), "git+https://evil.example/numpy"),
        (("./numpy",), ("numpy",), "./numpy"),
        (("-r requirements.txt",), ("numpy",), "-r requirements.txt"),
        (("My_tool>=2", "mine"), ("my.*", "*"), ""),
        (("my-tool", "mine"), ("my.*",), "mine"),
        (("npm:@a/b@1", "npm:@b/c"), ("npm:@a/*", "b*"), "npm:@b/c"),
        (("numpy",), ("npm:*",), "numpy"),
        (("./numpy",), ("*",), "./numpy"),
    ],
)
def test_what_is_above_a_ceiling_of_packages(asked: Any, most: tuple[str, ...], above: str) -> None:
    """The first that is not listed by its normalized name; an address is above every list, and so is `auto`."""
    assert packages_above(asked, most) == above


def test_two_ceilings_of_packages_join() -> None:
    """What is left is in both."""
    assert packages_in_both(("numpy", "Rich"), ("rich", "pandas")) == ("Rich",)
    assert packages_in_both(("numpy", "my-*"), ("my-a*", "my-*-x", "*z")) == ("my-a*", "my-*-x")
    assert packages_in_both(("*",), ("a", "npm:b")) == ("a", "npm:b")
