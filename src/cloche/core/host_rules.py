"""The rules about hosts, one by one: their form as text, and what one names. Pure.

A rule is `[*.]host[:port,...][@CIDR,...][/METHOD,...:/path]`. `core/network.py` decides by them; the part about
requests is in `core/request_rules.py`.
"""

from __future__ import annotations

import functools
import re
from ipaddress import IPv4Network, IPv6Address, ip_network

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
    normalize_host,
    parse_address,
    parts_of,
    registry_row,
    shown,
)
from .record import dataclass
from .request_rules import PART, RequestRule, parse_request_rule

DEFAULT_PORTS = (80, 443)
MOST_RULE_CHARACTERS = 2000
NAME_SERVER_PORT = 53  # the sandbox's own name server listens there
ALWAYS_LOOPBACK = "localhost"

_NAMES_RANGE = IPv4Network("198.18.0.0/15")  # a sandbox gives each name an address of it
_PUBLIC = frozenset({"public"})
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_METHOD = re.compile(r"(?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT|TRACE)\s", re.IGNORECASE)
_PREFIX_LENGTH = re.compile(r"[0-9]{1,3}")
_WITH_REQUESTS = "Write the host alone, or with methods and a path, as in api.example.org/GET,POST:/repos/me/*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Name a host, and the ports that it is allowed or denied on.

    `host` is a name in lower-case A-labels without a trailing dot, or the canonical text of an address or a network.
    `is_wildcard`: names at any depth below `host`, and not `host` itself. `ports` of a denying rule may be empty: all.
    `networks`: where it allows, the addresses that are not public and that this name may resolve to, or the literal or
    network itself; where it denies, the addresses. `text` is the rule as it was written.
    """

    host: str
    is_wildcard: bool = False
    ports: tuple[int, ...] = DEFAULT_PORTS
    networks: tuple[Network, ...] = ()
    requests: tuple[RequestRule, ...] = ()
    text: str

    def covers(self, port: int) -> bool:
        return not self.ports or port in self.ports

    @property
    def is_address(self) -> bool:
        """Tell whether it names an address itself, and not a name or a network."""
        return bool(self.networks) and self.host == str(self.networks[0].network_address)

    @property
    def is_network(self) -> bool:
        """Tell whether it names the addresses of a network, and no name that resolves to them."""
        return "/" in self.host

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
    text_of_host, requests = _split_requests(text)
    target, separator, networks_text = text_of_host.partition("@")
    if "/" in target or "?" in target or "#" in target:
        network_text, colon, ports_text = target.partition(":")
        network = _parse_network(network_text)
        if network is not None and not separator and not requests:
            return _network_rule(network, _parse_ports(ports_text) if colon else (), text)
        raise _Wrong(f"has a path without methods, or methods without a path. {_WITH_REQUESTS}")
    host, is_wildcard, ports = _split_target(target)
    networks = tuple(dict.fromkeys(map(_opened_network, networks_text.split(",")))) if separator else ()
    address = parse_address(host)
    if address is not None:
        _check_literal(address, is_wildcard=is_wildcard, has_networks=bool(separator))
        networks = (IPv4Network(int(address)),)
    normalized = str(address) if address is not None else _checked_name(host)
    if normalized == ALWAYS_LOOPBACK or normalized.endswith("." + ALWAYS_LOOPBACK):
        raise _Wrong(
            "is always the sandbox itself, which is reached without a rule; no rule can allow the host's loopback"
        )
    if is_wildcard and "." not in normalized:
        raise _Wrong(
            f"is too wide: it allows everything below .{normalized}; name a domain, as in *.example.{normalized}"
        )
    if requests and (is_wildcard or address is not None):
        raise _Wrong("has methods and a path, which go with the whole name of one host")
    if requests and not set(ports) <= set(DEFAULT_PORTS):
        raise _Wrong("has methods and a path, which go with the ports 80 and 443 alone")
    return Rule(
        host=normalized,
        is_wildcard=is_wildcard,
        ports=_checked_ports(ports) or DEFAULT_PORTS,
        networks=networks,
        requests=requests,
        text=text,
    )


def _network_rule(network: Network, ports: tuple[int, ...], text: str) -> Rule:
    """Return the rule that allows the addresses of a network. Raises _Wrong."""
    if network.version != 4:
        raise _Wrong("is an IPv6 network, and sandboxes have IPv4 inside; allow the host's name")
    if has_only(network, NEVER_OPENED):
        raise _Wrong(f"is {with_article(registry_row(network.network_address)[1])} network, which no rule can allow")
    if parts_of(network, _PUBLIC) not in ((), (network,)):
        raise _Wrong("has both public and other addresses; use network 'open' for all public ones, or list networks")
    return Rule(host=str(network), ports=_checked_ports(ports) or DEFAULT_PORTS, networks=(network,), text=text)


def _split_requests(text: str) -> tuple[str, tuple[RequestRule, ...]]:
    """Take the part about requests off a rule. Raises _Wrong."""
    part = PART.search(text)
    if part is None:
        return text, ()
    try:
        return text[: part.start()], (parse_request_rule(part[1], text[part.end() :]),)
    except ValueError as error:
        raise _Wrong(str(error)) from None


@functools.lru_cache(maxsize=4096)
def _deny_rule(text: str) -> Rule:
    _check_text(text)
    if PART.search(text):
        raise _Wrong(
            "has methods or a path, of which servers know other spellings; list in network_allow what is allowed, as "
            "in api.example.org/GET:/repos/*"
        )
    if "@" in text:
        raise _Wrong("has an @; write a denied network alone, as in 203.0.113.0/24")
    if "/" in text or "?" in text or "#" in text:
        network = _parse_network(text)
        if network is None:
            raise _Wrong(
                "has a path or is not a network. A rule that denies sees host and port. Write the host alone, or a "
                "CIDR network"
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
        raise _Wrong(f"has a scheme. {_WITH_REQUESTS}")
    if _METHOD.match(text):
        raise _Wrong(f"has a method before the host. {_WITH_REQUESTS}")
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
        raise _Wrong(f"is {with_article(kind)} address, which no rule can allow")
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


def denied_by(rule: Rule) -> tuple[str, str]:
    """Return the reason and the remedy of what a rule denies."""
    return f"network_deny has {escape_name(rule.text)}", "take that rule out to allow it"


def with_article(kind: str) -> str:
    """Return the kind of an address with its article."""
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
