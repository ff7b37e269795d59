"""Which hosts a sandbox may reach: rules, and the decision on one connection. Pure; nothing is resolved here.

A rule is `[*.]host[:port,...][@CIDR,...]`. Deciding takes two steps, because only the second one knows an address:

- `NetworkRules.decide(host, port)` decides on the name, or the literal address, in a guest's request.
- `NetworkRules.decide_address(rule, address)` decides on the address that the name was resolved to. Each spelling of an
  address is first turned into the address that it means, so that an IPv6 form of 127.0.0.1 is 127.0.0.1.

Rules are kept in a dictionary by host, denied networks in one per prefix length: a decision does not scan the rules.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network, IPv6Address, ip_network
from itertools import islice
from typing import Any, get_args

from .enforcement import NetworkMode
from .errors import InvalidRequest
from .escape import escape_name
from .hosts import (
    DEVIATIONS,
    NEVER_OPENED,
    Address,
    Network,
    address_kind,
    has_only,
    means_ipv4,
    meant_address,
    normalize_host,
    parse_address,
    registry_row,
    shown,
)
from .record import dataclass, field, replace

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

DEFAULT_PORTS = (80, 443)
NO_RULE_OPENS = "no rule can allow that"
MOST_RULES = 1000  # of both lists together
MOST_SERVED_PORTS = 64  # each is a socket in every sandbox
MOST_RULE_CHARACTERS = 2000
NAME_SERVER_PORT = 53  # the sandbox's own name server listens there

_NAMES_RANGE = IPv4Network("198.18.0.0/15")  # a sandbox gives each name an address of it

_PORT = re.compile(r"[1-9][0-9]{0,4}")
_METHOD = re.compile(r"(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT|TRACE)\s", re.IGNORECASE)
_PREFIX_LENGTH = re.compile(r"[0-9]{1,3}")
_ALWAYS_LOOPBACK = "localhost"


# --- rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Name a host, and the ports that it is allowed or denied on.

    `host` is a name in lower-case A-labels without a trailing dot, the canonical text of an address, or, where a
    network is denied, that network. `is_wildcard`: names at any depth below `host`, and not `host` itself. `ports` of a
    denying rule may be empty: all. `networks`: where it allows, the addresses that are not public and that this name
    may resolve to, or the literal itself; where it denies, the addresses. `text` is the rule as it was written.
    """

    host: str
    is_wildcard: bool = False
    ports: tuple[int, ...] = DEFAULT_PORTS
    networks: tuple[Network, ...] = ()
    text: str

    def covers(self, port: int) -> bool:
        return not self.ports or port in self.ports

    @property
    def is_address(self) -> bool:
        """Tell whether it names an address itself, and not a name or a network."""
        return bool(self.networks) and self.host == str(self.networks[0].network_address)

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


class _Wrong(Exception): ...


def parse_rule(text: str, *, name: str = "network_allow") -> Rule:
    """Read a rule that allows a host. Raises InvalidRequest with the fault and a valid form."""
    return _parsed(text, name, is_deny=False)


def parse_deny_rule(text: str, *, name: str = "network_deny") -> Rule:
    """Read a rule that denies a host, an address or a network. Without ports it denies all of them."""
    return _parsed(text, name, is_deny=True)


def _parsed(text: object, name: str, *, is_deny: bool) -> Rule:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}: {shown(repr(text))} must be text like example.org, *.example.org or host:5432")
    try:
        return (_deny_rule if is_deny else _allow_rule)(text)
    except _Wrong as wrong:
        raise InvalidRequest(f"{name}: {shown(text)} {wrong}") from None


@functools.lru_cache(maxsize=4096)
def _allow_rule(text: str) -> Rule:
    _check_text(text)
    target, separator, networks_text = text.partition("@")
    if "/" in target or "?" in target or "#" in target:
        if _parse_network(target) is not None:
            raise _Wrong("is a network; write host@CIDR for a name that resolves into it, or list the addresses")
        raise _Wrong("has a path. A rule sees host and port; methods and paths come with secrets. Write the host alone")
    host, is_wildcard, ports = _split_target(target)
    networks = tuple(dict.fromkeys(map(_opened_network, networks_text.split(",")))) if separator else ()
    address = parse_address(host)
    if address is not None:
        _check_literal(address, is_wildcard=is_wildcard, has_networks=bool(separator))
        networks = (IPv4Network(int(address)),)
    normalized = str(address) if address is not None else _checked_name(host)
    if normalized == _ALWAYS_LOOPBACK or normalized.endswith("." + _ALWAYS_LOOPBACK):
        raise _Wrong(
            "is always the sandbox itself, which is reached without a rule; no rule can allow the host's loopback"
        )
    if is_wildcard and "." not in normalized:
        raise _Wrong(
            f"is too wide: it allows everything below .{normalized}; name a domain, as in *.example.{normalized}"
        )
    return Rule(
        host=normalized,
        is_wildcard=is_wildcard,
        ports=_checked_ports(ports) or DEFAULT_PORTS,
        networks=networks,
        text=text,
    )


@functools.lru_cache(maxsize=4096)
def _deny_rule(text: str) -> Rule:
    _check_text(text)
    if "@" in text:
        raise _Wrong("has an @; write a denied network alone, as in 203.0.113.0/24")
    if "/" in text or "?" in text or "#" in text:
        network = _parse_network(text)
        if network is None:
            raise _Wrong(
                "has a path or is not a network. A rule sees host and port. Write the host alone, or a CIDR network"
            )
        _check_plain(network)
        return Rule(host=str(network), ports=(), networks=(network,), text=text)
    host, is_wildcard, ports = _split_target(text)
    address = parse_address(host)
    if address is None:
        return Rule(host=_checked_name(host), is_wildcard=is_wildcard, ports=ports, text=text)
    if is_wildcard:
        raise _Wrong("is a wildcard below an address; write a CIDR network")
    networks = (ip_network(address),)
    return Rule(host=str(address), ports=ports, networks=networks, text=text)


def _check_text(text: str) -> None:
    """Raise _Wrong for text that is no rule, with the part that shows it."""
    if len(text) > MOST_RULE_CHARACTERS:
        raise _Wrong(f"has more than {MOST_RULE_CHARACTERS} characters")
    if "://" in text:
        raise _Wrong(
            "has a scheme. A rule sees host and port; methods and paths come with secrets. Write the host alone"
        )
    if _METHOD.match(text):
        raise _Wrong(
            "has a method. A rule sees host and port; methods and paths come with secrets. Write the host alone"
        )
    if not text or any(char.isspace() or not char.isprintable() for char in text if char not in DEVIATIONS):
        raise _Wrong("is empty or has blanks or control characters; write a host like example.org")


def _split_target(target: str) -> tuple[str, bool, tuple[int, ...]]:
    """Take `*.host:port,port` apart."""
    if target.startswith("["):
        inside, closed, port_text = target.partition("]")
        host, colon, ports = (inside + closed, port_text[:1], port_text[1:])
        if not closed or (port_text and colon != ":"):
            raise _Wrong("is not an IPv6 address in brackets")
    elif target.count(":") > 1:
        host, colon, ports = target, "", ""
        if parse_address(host) is None:
            raise _Wrong("has more than one colon; ports follow one colon, as in host:80,8443")
    else:
        host, colon, ports = target.partition(":")
    if host == "*":
        raise _Wrong("means every host; use network 'open' for that, or name a domain, as in *.example.org")
    is_wildcard = host.startswith("*.")
    host = host.removeprefix("*.")
    if "*" in host:
        raise _Wrong("has a * that is not at the beginning; write *.example.org, which matches at any depth")
    return host, is_wildcard, _parse_ports(ports) if colon else ()


def _parse_ports(text: str) -> tuple[int, ...]:
    ports = text.split(",")
    for port in ports:
        if not _PORT.fullmatch(port) or int(port) > 65535:
            raise _Wrong(f"has no port {shown(port)}; ports are numbers from 1 to 65535, as in host:80,8443")
    return tuple(sorted(set(map(int, ports))))


def _checked_ports(ports: tuple[int, ...]) -> tuple[int, ...]:
    if NAME_SERVER_PORT in ports:
        raise _Wrong(
            f"has port {NAME_SERVER_PORT}, which only the sandbox's own name server uses; queries to other name "
            "servers are not possible"
        )
    return ports


def _checked_name(host: str) -> str:
    try:
        return normalize_host(host)
    except ValueError as error:
        raise _Wrong(f"has no host name: {error}") from None


def _check_literal(address: Address, *, is_wildcard: bool, has_networks: bool) -> None:
    if is_wildcard:
        raise _Wrong("is a wildcard below an address; list the addresses")
    if has_networks:
        raise _Wrong("is an address with @CIDR; write the address alone")
    kind = address_kind(address)
    if kind in NEVER_OPENED:
        raise _Wrong(f"is {_with_article(kind)} address, which no rule can allow")
    if isinstance(address, IPv6Address):
        raise _Wrong("is an IPv6 address, and sandboxes have IPv4 inside; allow the host's name")
    if address in _NAMES_RANGE:
        raise _Wrong(f"is in {_NAMES_RANGE}, which sandboxes use for names; allow the host's name")


def _opened_network(text: str) -> Network:
    """Read a network that a rule opens, or one address."""
    network = _parse_network(text if "/" in text else f"{text}/128" if ":" in text else f"{text}/32")
    if network is None:
        raise _Wrong(f"has no network {shown(text)}; write one like 10.0.0.0/8")
    _check_plain(network)
    if has_only(network, NEVER_OPENED):
        kind = registry_row(network.network_address)[1]
        raise _Wrong(f"has the network {network}, which is {kind}, which no rule can allow")
    if has_only(network, frozenset({"public"})):
        raise _Wrong(f"has the public network {network}; public addresses are allowed without it")
    return network


def parse_network_range(text: str, *, name: str) -> Network:
    """Read one network whose addresses a rule may open. Raises InvalidRequest."""
    try:
        return _opened_network(text)
    except _Wrong as wrong:
        raise InvalidRequest(f"{name}: {shown(text)} {wrong}") from None


def _parse_network(text: str) -> Network | None:
    """Read a network in CIDR notation; None for other text."""
    address, slash, length = text.partition("/")
    if not slash or not _PREFIX_LENGTH.fullmatch(length):
        return None
    try:
        network = ip_network(f"{address.strip('[]')}/{length}", strict=False)
    except ValueError:
        return None
    if str(network.network_address) != str(ip_network(address.strip("[]")).network_address):
        raise _Wrong(f"has host bits after its prefix; the network is {network}")
    return network


def _check_plain(network: Network) -> None:
    """Refuse IPv6 networks that mean IPv4 ones: their addresses are looked up as IPv4 addresses."""
    if means_ipv4(network):
        raise _Wrong(f"has the network {network}, whose addresses stand for IPv4 addresses; write the IPv4 network")


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


# --- decisions ----------------------------------------------------------------------------------------------------


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
            for network in rule.networks if by_network else ():
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

    In mode `open` the allow list adds further ports of a host, or addresses that are not public. Several rules that
    allow a host on a port add up. A denying rule wins over all of them. Modes `off` and `bridge` allow nothing:
    docker's own bridge is outside of these rules. `served_ports` are the ports on which the egress process accepts a
    guest's connections.
    """

    mode: NetworkMode = "off"
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    ports: tuple[int, ...] = ()
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
        if len(served) > MOST_SERVED_PORTS:
            raise InvalidRequest(
                f"network_allow: {len(served)} different ports; a sandbox serves at most {MOST_SERVED_PORTS}"
            )
        object.__setattr__(self, "served_ports", tuple(sorted(served)))
        object.__setattr__(self, "_allowed", _Index.of(self.allow, by_network=False))
        object.__setattr__(self, "_denied", _Index.of(self.deny, by_network=True))

    @classmethod
    def parse(
        cls, *, mode: NetworkMode, allow: Iterable[str] = (), deny: Iterable[str] = (), ports: Iterable[int] = ()
    ) -> NetworkRules:
        """Read rules from their texts. Raises InvalidRequest for the first wrong one."""
        return cls(
            mode=mode,
            allow=tuple(map(parse_rule, allow)),
            deny=tuple(map(parse_deny_rule, deny)),
            ports=parse_ports(ports),
        )

    def with_further(self, *, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> NetworkRules:
        """Return these rules and some more, each once. Raises InvalidRequest for a wrong one, and for too many."""
        return replace(
            self,
            allow=tuple(dict.fromkeys((*self.allow, *map(parse_rule, allow)))),
            deny=tuple(dict.fromkeys((*self.deny, *map(parse_deny_rule, deny)))),
        )

    def as_wire(self) -> dict[str, Any]:
        """Return what `parse` takes, as plain values."""
        return {
            "mode": self.mode,
            "allow": [rule.text for rule in self.allow],
            "deny": [rule.text for rule in self.deny],
            "ports": list(self.ports),
        }

    def denies(self, host: str, port: int) -> bool:
        """Tell whether a rule of the deny list refuses a host; then the approver is not asked about it."""
        address = parse_address(host)
        return self._denying(str(address) if address is not None else host, address, port) is not None

    def decide(self, host: str, port: int) -> HostDecision:
        """Say whether a host may be reached, before it is resolved; `host` is a name or an address in any spelling.

        A name's addresses are decided on afterwards, each by `decide_address` with the rule of this decision.
        """
        address = parse_address(host)
        try:
            name = str(address) if address is not None else normalize_host(host)
        except ValueError as error:
            return _refused(f"{shown(host)} is not a host: {error}")
        if self.mode in ("off", "bridge"):
            return _refused(f"{name}:{port} cannot be reached: the network of this sandbox is {self.mode!r}")
        denying = self._denying(name, address, port)
        if denying is not None:
            return _refused(f"{name}:{port} is refused by {escape_name(denying.text)} of network_deny", denying)
        matching = tuple(self._allowed.named(name))
        rule = _added_up([rule for rule in matching if rule.covers(port)])
        if rule is not None:
            return HostDecision(is_allowed=True, why=f"{name}:{port} is allowed by {escape_name(rule.text)}", rule=rule)
        if self.mode == "open":
            return self._decide_open(name, address, port)
        return _refused(self._why_not_listed(name, port, matching))

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
        resolved = f"{name} resolves to {address}" if name != str(address) else name
        for denying in (*self._denied.containing(meant), *self._denied.containing(address)):
            if not port or denying.covers(port):
                return f"{resolved}, which is refused by {escape_name(denying.text)} of network_deny"
        network, kind = registry_row(meant)
        if kind == "public" or (kind not in NEVER_OPENED and rule is not None and rule.has_address(meant)):
            return ""
        refused = f"{resolved}, {_with_article(kind)} address" if name != str(address) else _literal_is(name, kind)
        if kind in NEVER_OPENED:
            return f"{refused}; {NO_RULE_OPENS}"
        return f"{refused}; the policy can allow it by {_opening_rule(name, port, meant, network)}"

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
            return _refused(f"{name} is the sandbox itself; it is reached on its own loopback only")
        if address is not None and (reason := self.decide_address(None, address, host=name, port=port)):
            return _refused(reason)
        ports = self.open_ports
        if port not in ports:
            return _refused(
                f"port {port} of {name} is not open: {_listed(map(str, ports), len(ports))} are; the policy can name it"
                f" in network_ports, or {name}:{port} in network_allow"
            )
        condition = "" if address is not None else ", if its address is public"
        return HostDecision(is_allowed=True, why=f"{name}:{port} is allowed by network 'open'{condition}")

    def _why_not_listed(self, name: str, port: int, matching: tuple[Rule, ...]) -> str:
        if matching:
            ports = sorted({port for rule in matching for port in rule.ports})
            return (
                f"{name} is in the allowlist for port {_listed(map(str, ports), len(ports))}, not {port};"
                f" the policy can allow it by {name}:{port}"
            )
        if not self.allow:
            return f"{name}:{port} is not in the allowlist, which is empty; ask for it"
        listed_rules = _listed((escape_name(rule.text) for rule in self.allow), len(self.allow))
        return f"{name}:{port} is not in the allowlist; ask for it or use one of: {listed_rules}"


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
    networks = tuple(dict.fromkeys(network for rule in rules for network in rule.networks))
    return replace(rules[0], networks=networks, text=", ".join(dict.fromkeys(rule.text for rule in rules)))


def _is_loopback_name(name: str) -> bool:
    return name == _ALWAYS_LOOPBACK or name.endswith("." + _ALWAYS_LOOPBACK)


def _literal_is(name: str, kind: str) -> str:
    return f"{name} is {_with_article(kind)} address"


def _opening_rule(name: str, port: int, address: Address, network: Network) -> str:
    """Write the rule that would open this address; a rule without a port means 80 and 443."""
    ports = f":{port}" if port and port not in DEFAULT_PORTS else ""
    if name == str(address):
        return f"{name}{ports}"
    within = network if network.prefixlen else ip_network(address)
    return f"{name}{ports}@{within}"


def _listed(texts: Iterable[str], count: int) -> str:
    """Join the first few of so many texts, within a bound, and say how many more there are. No other is looked at."""
    shown: list[str] = []
    for text in islice(texts, 5):
        if sum(map(len, shown)) + len(text) > 200:
            break
        shown.append(text)
    more = count - len(shown)
    if not shown:
        return f"{more} rules that are too long to list"
    return ", ".join(shown) + (f", and {more} more" if more else "")
