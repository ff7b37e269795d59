"""Which hosts a sandbox may reach: rules, and the decision on one connection. Pure; nothing is resolved here.

Rules are those of `host_rules`. Deciding takes two steps, because only the second one knows an address:

- `NetworkRules.decide(host, port)` decides on the name, or the literal address, in a guest's request.
- `NetworkRules.decide_address(rule, address)` decides on the address that the name was resolved to. Each spelling of an
  address is first turned into the address that it means, so that an IPv6 form of 127.0.0.1 is 127.0.0.1.

A rule with `requests` allows no other ones at its host, whoever carries them must check them (`egress/requests.py`).

Rules are kept in a dictionary by host, denied networks in one per prefix length: a decision does not scan the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from typing import Any, get_args

from .enforcement import NetworkMode
from .errors import InvalidRequest
from .escape import escape_name
from .host_headers import Headers, HostHeaders, headers_for, parse_headers
from .host_rules import (
    ALWAYS_LOOPBACK,
    DEFAULT_PORTS,
    NAME_SERVER_PORT,
    Rule,
    denied_by,
    parse_deny_rule,
    parse_network_range,
    parse_rule,
    with_article,
)
from .hosts import (
    NEVER_OPENED,
    Address,
    Network,
    address_kind,
    meant_address,
    normalize_host,
    parse_address,
    registry_row,
    shown,
)
from .record import dataclass, field, replace
from .refusals import allowed_by, listed, not_allowed

__all__ = [
    "DEFAULT_PORTS",
    "Address",
    "HostDecision",
    "Network",
    "NetworkMode",
    "NetworkRules",
    "Rule",
    "address_kind",
    "meant_address",
    "normalize_host",
    "parse_address",
    "parse_deny_rule",
    "parse_network_range",
    "parse_ports",
    "parse_rule",
]

NO_RULE_OPENS = "no rule can allow that"
MOST_RULES = 1000  # of both lists together
MOST_SERVED_PORTS = 64  # each is a socket in every sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDecision:
    """Say whether a host may be reached on a port, with a sentence for the caller, and the rule that decided."""

    is_allowed: bool
    why: str
    rule: Rule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Find the rules for a name or an address by dictionary lookups: one per label, or per prefix length in use."""

    exact: Mapping[str, tuple[Rule, ...]]
    below: Mapping[str, tuple[Rule, ...]]
    networks: Mapping[tuple[int, int], Mapping[int, tuple[Rule, ...]]]

    @classmethod
    def of(cls, rules: Iterable[Rule], *, by_network: bool) -> _Index:
        exact: dict[str, tuple[Rule, ...]] = {}
        below: dict[str, tuple[Rule, ...]] = {}
        networks: dict[tuple[int, int], dict[int, tuple[Rule, ...]]] = {}
        for rule in rules:
            named = below if rule.is_wildcard else exact
            named[rule.host] = (*named.get(rule.host, ()), rule)
            for network in rule.networks if by_network or rule.is_network else ():
                same_length = networks.setdefault((network.version, network.prefixlen), {})
                key = int(network.network_address)
                same_length[key] = (*same_length.get(key, ()), rule)
        return cls(exact=exact, below=below, networks=networks)

    def named(self, host: str) -> Iterator[Rule]:
        """Yield the rules for a name or an address as it is written, the exact ones first."""
        yield from self.exact.get(host, ())
        suffix = host
        while self.below and (dot := suffix.find(".") + 1):
            suffix = suffix[dot:]
            yield from self.below.get(suffix, ())

    def containing(self, address: Address) -> Iterator[Rule]:
        """Yield the rules whose networks have this address."""
        for (version, length), same_length in self.networks.items():
            if version == address.version:
                host_bits = address.max_prefixlen - length
                yield from same_length.get(int(address) >> host_bits << host_bits, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRules:
    """Decide which hosts a sandbox may reach. `ports` are those of mode `open` beside 80 and 443.

    `headers` are put into requests to some hosts, whose connections are opened for that.
    `host_ports` are ports of this host's loopback, which the sandbox reaches at its own; no rule names these.

    In mode `open` the allow list adds further ports of a host, or addresses that are not public. Several rules that
    allow a host on a port add up. A denying rule wins over all of them. Modes `off` and `bridge` allow nothing:
    docker's own bridge is outside of these rules. `served_ports` are the ports on which the egress process accepts a
    guest's connections.
    """

    mode: NetworkMode = "off"
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    ports: tuple[int, ...] = ()
    host_ports: tuple[int, ...] = ()
    headers: tuple[HostHeaders, ...] = ()
    served_ports: tuple[int, ...] = field(init=False)
    _allowed: _Index = field(init=False, repr=False, compare=False)
    _denied: _Index = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(NetworkMode):
            modes = ", ".join(get_args(NetworkMode))
            raise InvalidRequest(f"network: {self.mode!r} is unknown; use one of {modes}")
        count = len(self.allow) + len(self.deny)
        if count > MOST_RULES:
            raise InvalidRequest(f"network_allow and network_deny: {count} rules; at most {MOST_RULES} are taken")
        if self.mode == "bridge" and self.deny:
            raise InvalidRequest(
                "network_deny: docker's own bridge enforces no rules; use network 'open' or 'allowlist'"
            )
        served: set[int] = set()
        if self.mode in ("allowlist", "open"):  # whose rules may change, so the usual ports are always among them
            served.update(DEFAULT_PORTS, self.open_ports, (port for rule in self.allow for port in rule.ports))
            served.update(self.host_ports)
        if len(served) > MOST_SERVED_PORTS:
            raise InvalidRequest(
                f"network_allow: {len(served)} different ports; a sandbox serves at most {MOST_SERVED_PORTS}"
            )
        object.__setattr__(self, "served_ports", tuple(sorted(served)))
        object.__setattr__(self, "_allowed", _Index.of(self.allow, by_network=False))
        object.__setattr__(self, "_denied", _Index.of(self.deny, by_network=True))
        for rule in self.limited:
            self._check_alone(rule)

    def _check_alone(self, limited: Rule) -> None:
        """Raise InvalidRequest where another rule allows every request of a rule's host."""
        for rule in self._allowed.named(limited.host):
            if not rule.requests and set(rule.ports) & set(limited.ports):
                raise InvalidRequest(
                    f"network_allow: {shown(rule.text)} allows every request to {limited.host}, so that "
                    f"{shown(limited.text)} would limit nothing; leave one of them out"
                )

    @property
    def limited(self) -> tuple[Rule, ...]:
        """Return the rules with methods and paths."""
        return tuple(rule for rule in self.allow if rule.requests)

    @classmethod
    def parse(
        cls, *, mode: NetworkMode, allow: Iterable[str] = (), deny: Iterable[str] = (), ports: Iterable[int] = (),
        host_ports: Iterable[int] = (), headers: Mapping[str, Mapping[str, str]] | None = None,
    ) -> NetworkRules:  # fmt: skip
        """Read rules from their texts. Raises InvalidRequest for the first wrong one."""
        return cls(
            mode=mode,
            allow=tuple(map(parse_rule, allow)),
            deny=tuple(map(parse_deny_rule, deny)),
            ports=parse_ports(ports),
            host_ports=parse_ports(host_ports, name="host_ports"),
            headers=parse_headers(headers or {}),
        )

    def with_further(self, *, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> NetworkRules:
        """Return these rules and some more, each once. Raises InvalidRequest for a wrong one, and for too many."""
        return replace(
            self,
            allow=tuple(dict.fromkeys((*self.allow, *map(parse_rule, allow)))),
            deny=tuple(dict.fromkeys((*self.deny, *map(parse_deny_rule, deny)))),
        )

    def replaced(
        self, *, mode: NetworkMode, allow: Iterable[str] = (), deny: Iterable[str] = (),
        headers: Mapping[str, Mapping[str, str]] | None = None,
    ) -> NetworkRules:  # fmt: skip
        """Return other rules with the same ports. Raises InvalidRequest for a wrong one, and for too many."""
        rules = NetworkRules.parse(mode=mode, allow=allow, deny=deny, headers=headers)
        return replace(rules, ports=self.ports, host_ports=self.host_ports)

    def as_wire(self) -> dict[str, Any]:
        """Return what `parse` takes, as plain values."""
        return {
            "mode": self.mode,
            "allow": [rule.text for rule in self.allow],
            "deny": [rule.text for rule in self.deny],
            "ports": list(self.ports),
            "host_ports": list(self.host_ports),
            **({"headers": {row.text: row.as_wire() for row in self.headers}} if self.headers else {}),
        }

    def headers_for(self, host: str) -> Headers:
        """Return what requests to a host get in their heads."""
        return headers_for(self.headers, host) if self.headers else ()

    def denies(self, host: str, port: int) -> bool:
        """Tell whether a rule of the deny list, or one with methods and paths, refuses a host whatever is approved."""
        address = parse_address(host)
        name = str(address) if address is not None else host
        is_limited = any(rule.requests for rule in self._allowed.named(name))
        return is_limited or self._denying(name, address, port) is not None

    def decide(self, host: str, port: int) -> HostDecision:
        """Say whether a host may be reached, before it is resolved; `host` is a name or an address in any spelling.

        A name's addresses are decided on afterwards, each by `decide_address` with the rule of this decision.
        """
        address = parse_address(host)
        try:
            name = str(address) if address is not None else normalize_host(host)
        except ValueError as error:
            return _refused(not_allowed(shown(host), f"it is not a host: {error}", "use a name, or an address"))
        matching = (*self._allowed.named(name), *(self._allowed.containing(address) if address is not None else ()))
        where = f"{name}:{port}"
        listing = allowed_by(where if matching else _listing(name, port))
        if self.mode in ("off", "bridge"):
            return _refused(not_allowed(where, f"the network of this sandbox is {self.mode!r}", listing))
        denying = self._denying(name, address, port)
        if denying is not None:
            return _refused(not_allowed(where, *denied_by(denying)), denying)
        rule = _added_up([rule for rule in matching if rule.covers(port)])
        if rule is not None:
            return HostDecision(is_allowed=True, why=f"{name}:{port} is allowed by {escape_name(rule.text)}", rule=rule)
        if self.mode == "open" and not any(rule.requests for rule in matching):
            return self._decide_open(name, address, port)
        return _refused(not_allowed(where, _rules_told(matching, self.allow), listing))

    def knows(self, host: str) -> bool:
        """Tell whether a name may be allowed on some port: then the name server answers for it."""
        if parse_address(host) is not None:
            return False
        try:
            name = normalize_host(host)
        except ValueError:
            return False
        ports = set(self.open_ports) if not _is_loopback_name(name) else set()
        if self.mode in ("allowlist", "open"):
            ports.update(port for rule in self._allowed.named(name) for port in rule.ports)
        denying = tuple(self._denied.named(name))
        return any(not any(rule.covers(port) for rule in denying) for port in ports)

    def decide_address(self, rule: Rule | None, address: Address, *, host: str = "", port: int = 0) -> str:
        """Return "" where this address may be connected to, else the reason.

        `rule` is that of the decision on the name; `host` and `port` are those of the request, and appear in the
        reason. Without a port, a denied address is refused for every port of that rule.
        """
        meant = meant_address(address)
        name = host or (rule.host if rule is not None and not rule.is_wildcard else "the host")
        where = f"{name}:{port}" if port else name
        resolved = f"it resolves to {address}, " if name != str(address) else "it is "
        for denying in (*self._denied.containing(meant), *self._denied.containing(address)):
            if not port or denying.covers(port):
                why, remedy = denied_by(denying)
                return not_allowed(where, f"{resolved}and {why}" if name != str(address) else why, remedy)
        network, kind = registry_row(meant)
        if kind == "public" or (kind not in NEVER_OPENED and rule is not None and rule.has_address(meant)):
            return ""
        is_never = kind in NEVER_OPENED
        remedy = NO_RULE_OPENS if is_never else allowed_by(_opening_rule(name, port, meant, network))
        return not_allowed(where, f"{resolved}{with_article(kind)} address", remedy)

    def reaches(self, address: Address) -> bool:
        """Tell whether a guest may connect to an address on some port, also by a name that resolves to it."""
        meant = meant_address(address)
        if next(self._denied.containing(meant), None) is not None:  # most of a fleet's, and fast
            return False
        rule = next((rule for rule in self.allow if rule.has_address(meant)), None)
        return not self.decide_address(rule, address)

    @property
    def open_ports(self) -> tuple[int, ...]:
        """Return the ports on which mode `open` reaches any public host; none in another mode."""
        return tuple(sorted({*DEFAULT_PORTS, *self.ports})) if self.mode == "open" else ()

    def _denying(self, name: str, address: Address | None, port: int) -> Rule | None:
        rules = (*self._denied.named(name), *(self._denied.containing(address) if address is not None else ()))
        return next((rule for rule in rules if rule.covers(port)), None)

    def _decide_open(self, name: str, address: Address | None, port: int) -> HostDecision:
        if _is_loopback_name(name):
            why = "it is the sandbox itself, which is reached on its own loopback"
            return _refused(not_allowed(f"{name}:{port}", why, NO_RULE_OPENS))
        if address is not None and (reason := self.decide_address(None, address, host=name, port=port)):
            return _refused(reason)
        ports = self.open_ports
        if port not in ports:
            why = f"network 'open' has the ports {listed(map(str, ports), len(ports))}"
            remedy = f'{allowed_by(_listing(name, port))}, or "{port}" in network_ports'
            return _refused(not_allowed(f"{name}:{port}", why, remedy))
        condition = "" if address is not None else ", if its address is public"
        return HostDecision(is_allowed=True, why=f"{name}:{port} is allowed by network 'open'{condition}")


def parse_ports(ports: object, *, name: str = "network_ports") -> tuple[int, ...]:
    """Check the further ports of mode `open`."""
    if isinstance(ports, str | bytes) or not isinstance(ports, Iterable):
        raise InvalidRequest(f"{name}: {ports!r} must be a list of port numbers")
    checked = set()
    for port in ports:
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            raise InvalidRequest(f"{name}: {shown(repr(port))} is not a port; use numbers from 1 to 65535")
        if port == NAME_SERVER_PORT:
            raise InvalidRequest(
                f"{name}: {port} is used by the sandbox's own name server; queries to other name servers are not "
                "possible"
            )
        checked.add(port)
    return tuple(sorted(checked))


def _refused(why: str, rule: Rule | None = None) -> HostDecision:
    return HostDecision(is_allowed=False, why=why, rule=rule)


def _added_up(rules: list[Rule]) -> Rule | None:
    """Return one rule that allows what these do together; None for no rule."""
    if len(rules) <= 1:
        return rules[0] if rules else None
    return replace(
        rules[0],
        networks=tuple(dict.fromkeys(network for rule in rules for network in rule.networks)),
        requests=tuple(dict.fromkeys(request for rule in rules for request in rule.requests)),
        text=", ".join(dict.fromkeys(rule.text for rule in rules)),
    )


def _is_loopback_name(name: str) -> bool:
    return name == ALWAYS_LOOPBACK or name.endswith("." + ALWAYS_LOOPBACK)


def _rules_told(of_host: tuple[Rule, ...], rules: tuple[Rule, ...]) -> str:
    """Name the rules that a host is compared with: its own, else all of them."""
    told = of_host or rules
    if not told:
        return "there are no rules"
    texts = listed((escape_name(rule.text) for rule in told), len(told))
    return f"the rules for this host are {texts}" if of_host else f"the rules are {texts}"


def _listing(name: str, port: int) -> str:
    """Write the rule that would list a host; without a port it means 80 and 443."""
    return name if port in DEFAULT_PORTS else f"{name}:{port}"


def _opening_rule(name: str, port: int, address: Address, network: Network) -> str:
    """Write the rule that would open this address."""
    listing = _listing(name, port or DEFAULT_PORTS[0])
    if name == str(address):
        return listing
    return f"{listing}@{network if network.prefixlen else ip_network(address)}"
