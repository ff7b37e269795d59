"""The addresses of a fleet as rules of the network: exactly the same, few, or refused."""

from __future__ import annotations

import asyncio
import random
import time
from ipaddress import ip_address

import pytest

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.network import NetworkRules
from cloche.core.policy import Policy
from cloche.node.denied import MOST_RULES, DeniedHosts, fewest_rules

DENSE = [str(ip_address("10.20.0.5") + number) for number in range(4_950)]
DENSE += [str(ip_address("2600:1f00::5") + number) for number in range(50)]
SCATTERED = [str(ip_address("10.0.0.0") + number) for number in random.Random(1).sample(range(1 << 24), 5_000)]


def take(hosts: DeniedHosts, addresses: list[str]) -> tuple[str, ...]:
    """Take all addresses, and return the rules that are new."""
    return asyncio.run(hosts.take(addresses))


def test_five_thousand_addresses_are_few_rules_that_deny_exactly_them() -> None:
    """Also beside a name, and an address on one port; nothing that is next to them is denied."""
    rules = fewest_rules([*DENSE, "node.example", "10.20.0.1:22"])
    assert len(rules) < 40
    assert {"node.example", "10.20.0.1:22"} < set(rules)
    decide = NetworkRules.parse(mode="allowlist", allow=["x.example@10.0.0.0/8"], deny=rules)
    rule = decide.allow[0]
    denied = set(map(ip_address, DENSE))
    outside = [ip_address(first) - 1 for first in ("10.20.0.5", "2600:1f00::5")]
    outside += [ip_address(last) + 1 for last in (DENSE[4_949], DENSE[-1])]
    for address in (*denied, *outside):
        assert ("and network_deny has" in decide.decide_address(rule, address)) == (address in denied), address
    with pytest.raises(InvalidRequest):
        fewest_rules(["not an address!"])


def test_more_than_a_sandbox_takes_are_refused_or_denied_by_the_operator() -> None:
    """None is left out silently: a sandbox with a network is refused, unless the operator's own rules deny the rest."""
    hosts = DeniedHosts()
    with pytest.raises(PolicyDenied, match="does not know yet"):
        hosts.beside(())
    assert len(take(hosts, SCATTERED)) > MOST_RULES
    with pytest.raises(PolicyDenied, match=r"\d{4} addresses and ranges .*400 is the most; .*network_deny"):
        hosts.beside(())
    assert hosts.beside(["a.example"], own=["10.0.0.0/8"]) == ["a.example"]
    assert hosts.beside((), own=["10.0.0.0/9"] * 2 + ["10.128.0.0/9"]) == []
    with pytest.raises(PolicyDenied):
        hosts.beside((), own=["10.0.0.0/9"])


def test_a_change_adds_what_is_new_and_open_workspaces_are_checked() -> None:
    """The same addresses again change nothing; rules that reach a new machine run nothing more."""
    hosts = DeniedHosts()
    assert take(hosts, ["10.1.0.2"]) == ("10.1.0.2",)
    tag = hosts.tag
    reaches = Policy(network="allowlist", network_allow=("10.1.0.3:80",), network_deny=tuple(hosts.beside(())))
    hosts.check(reaches)
    assert (take(hosts, ["10.1.0.2"]), hosts.tag) == ((), tag)
    assert take(hosts, ["10.1.0.2", "10.1.0.3"]) == ("10.1.0.2/31",)
    assert hosts.tag != tag
    for _ in range(2):
        with pytest.raises(PolicyDenied, match="reach a machine"):
            hosts.check(reaches)
    hosts.check(Policy(network="open"))
    assert take(hosts, []) == ()
    hosts.check(reaches)


def test_an_open_workspace_is_checked_at_once_however_large_the_fleet_is() -> None:
    """Rules are a caller's: 256 that allow hosts, in a fleet of 5,000. And what the operator denies is found once."""
    hosts = DeniedHosts()
    take(hosts, DENSE)
    allowed = tuple(f"192.0.2.{number}:80" for number in range(256))
    policy = Policy(network="allowlist", network_allow=allowed, network_deny=tuple(hosts.beside(())))
    policy.network_rules()
    begun = time.thread_time()
    hosts.check(policy)
    assert time.thread_time() - begun < 0.25
    take(hosts, SCATTERED)
    hosts.beside((), own=["10.0.0.0/8"])
    begun = time.thread_time()
    hosts.beside((), own=["10.0.0.0/8"])
    assert time.thread_time() - begun < 0.02
