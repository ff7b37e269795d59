"""The addresses of the fleet, which no guest may reach: as few rules of the network as are exactly the same."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses

from cloche.core.errors import PolicyDenied
from cloche.core.hosts import Address, Network, parse_address
from cloche.core.network import Rule, parse_deny_rule
from cloche.core.policy import Policy
from cloche.fleets.engine import denied_tag

MOST_RULES = 400  # a sandbox has 1,000 of all kinds, of which a caller may give 512
MOST_PASSED, FEW_ADDRESSES = 1_024, 256
_UNKNOWN = (
    "network: this node does not know yet which addresses of its fleet to deny; try again in a moment, or leave "
    "network out"
)
_REACHED = (
    "network: the rules of this workspace reach a machine that is of the fleet since it was opened; open another one"
)


class DeniedHosts:
    """Hold the addresses that the coordinator told last, and the rules that deny them; None before the first."""

    def __init__(self) -> None:
        self.rules: tuple[str, ...] | None = None
        self.tag = ""
        self._addresses: tuple[Address | None, ...] = ()  # None for a name
        self._passed: set[tuple[object, ...]] = set()  # rules that were checked
        self._further: tuple[tuple[str, ...], Sequence[str]] | None = None  # beside the operator's

    async def take(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Take all addresses, and return the rules that were not there before. Raises InvalidRequest."""
        tag = denied_tag(addresses)
        if self.rules is not None and tag == self.tag:
            return ()
        is_long = len(addresses) > FEW_ADDRESSES
        rules, parsed = await asyncio.to_thread(_read, addresses) if is_long else _read(addresses)
        before = set(self.rules or ())
        self.rules, self.tag, self._addresses, self._further = rules, tag, parsed, None
        self._passed.clear()
        return tuple(rule for rule in self.rules if rule not in before)

    def beside(self, rules: Iterable[str], own: Iterable[str] = ()) -> list[str]:
        """Return rules and those of the fleet, but for what `own`, the operator's, deny. Raises PolicyDenied."""
        if self.rules is None:
            raise PolicyDenied(_UNKNOWN)
        own = tuple(own)
        if self._further is None or self._further[0] != own:
            self._further = own, not_within(self.rules, own)
        further = self._further[1]
        if len(further) > MOST_RULES:
            raise PolicyDenied(
                f"network: {len(further)} addresses and ranges of the fleet are denied to each guest, and {MOST_RULES} "
                "is the most; leave network out, or let the operator name the networks of the machines in network_deny "
                "of each node's configuration"
            )
        return list(dict.fromkeys([*rules, *further]))

    def check(self, policy: Policy) -> None:
        """Raise PolicyDenied for a sandbox whose rules reach an address that is denied since it was opened."""
        key = policy.network, policy.network_allow, policy.network_deny, policy.network_ports
        if policy.network == "off" or key in self._passed:
            return
        rules = policy.network_rules()
        if any(address is None or rules.reaches(address) for address in self._addresses):
            raise PolicyDenied(_REACHED)
        if len(self._passed) < MOST_PASSED:
            self._passed.add(key)


def _read(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[Address | None, ...]]:
    return fewest_rules(texts), tuple(map(parse_address, texts))


def fewest_rules(texts: Iterable[str]) -> tuple[str, ...]:
    """Return rules that deny exactly what these do, fewer where addresses follow each other. Raises InvalidRequest."""
    rules = [parse_deny_rule(text, name="denied") for text in dict.fromkeys(texts)]
    named = [rule.text for rule in rules if not _is_whole(rule)]
    networks = [network for rule in rules if _is_whole(rule) for network in rule.networks]
    ranges: list[Network] = [*collapse_addresses(network for network in networks if isinstance(network, IPv4Network))]
    ranges += collapse_addresses(network for network in networks if isinstance(network, IPv6Network))
    return (*named, *(str(found.network_address if found.num_addresses == 1 else found) for found in ranges))


def not_within(rules: Sequence[str], own: Iterable[str]) -> Sequence[str]:
    """Return the rules whose addresses other rules do not deny."""
    wider = [network for text in own if _is_whole(rule := parse_deny_rule(text)) for network in rule.networks]
    return [text for text in rules if not _is_within(parse_deny_rule(text), wider)] if wider else rules


def _is_whole(rule: Rule) -> bool:
    """Tell whether a rule denies addresses on all ports."""
    return bool(rule.networks) and not rule.ports


def _is_within(rule: Rule, wider: Collection[Network]) -> bool:
    return bool(rule.networks) and all(any(_has(other, network) for other in wider) for network in rule.networks)


def _has(wider: Network, network: Network) -> bool:
    return wider.version == network.version and network.subnet_of(wider)  # type: ignore[arg-type]  # the same version
