"""An operator's ceilings on the network, on packages and on images. Pure.

Requests are compared by what they allow, not by their text: `a.example.org` is within `*.example.org`,
`db.example@10.1.0.0/16` within `db.example@10.0.0.0/8`, and `a.example/GET:/b/c` within `a.example/*:/b/*`. Packages
are compared by their names, in any version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal, get_args

from .enforcement import NetworkMode
from .errors import InvalidRequest
from .escape import escape_name
from .hosts import Network, has_only
from .network import NetworkRules, Rule, parse_network_range, parse_rule
from .record import dataclass

NPM_PREFIX = "npm:"
PRESENT = "present"  # among the allowed images: those that the daemon has
PackageList = tuple[str, ...] | Literal["auto"]

_MODES: tuple[NetworkMode, ...] = get_args(NetworkMode)
_PUBLIC = frozenset({"public"})
# A requirement that is no more than a name with versions, extras and a marker; an address or a path is another thing.
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[[^\]]*\])?\s*([<>=!~;].*)?")
# The same of npm's, whose names have one spelling.
_NPM_REQUIREMENT = re.compile(r"(npm:(?:@[A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*)(?:@[^@:/]*)?")

_DIGEST = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._/:-]*@)?sha256:[0-9a-f]{64}")


def is_digest(image: str) -> bool:
    """Tell whether an image is named by its digest, which stands for one content: `NAME@sha256:...`, or an id."""
    return _DIGEST.fullmatch(image) is not None


def image_digest(image: str) -> str:
    """Return the digest of an image that `is_digest`, whatever its name is."""
    return f"image:{image[image.rindex('sha256:') :]}"


def mode_rank(mode: str) -> int:
    """Return how much a mode of the network reaches; more is more."""
    return _MODES.index(mode)


def covers(rules: NetworkRules, rule: Rule, *, networks: Iterable[Network] = ()) -> bool:
    """Tell whether all that `rule` allows is allowed by `rules` too, or lies in `networks`. Denials are ignored."""
    if rules.mode in ("off", "bridge"):
        return rules.mode == "bridge"
    if rule.is_wildcard and any(_has_hosts_of(rule, limited) for limited in rules.limited):
        return False
    opened = _opened(rule)
    if (rule.is_address or rule.is_network) and opened and _are_inside(opened, networks):
        return True
    return all(_covers_port(rules, rule, port, opened, networks) for port in rule.ports)


def _covers_port(
    rules: NetworkRules, rule: Rule, port: int, opened: tuple[Network, ...], networks: Iterable[Network]
) -> bool:
    outer = [outer_rule for outer_rule in rules.allow if outer_rule.covers(port) and _has_hosts_of(outer_rule, rule)]
    if not outer and port not in rules.open_ports:
        return False
    requests = [request for outer_rule in outer for request in outer_rule.requests]
    if requests and not (rule.requests and all(request.is_within(requests) for request in rule.requests)):
        return False
    return _are_inside(opened, (*networks, *(network for outer_rule in outer for network in outer_rule.networks)))


def _has_hosts_of(outer: Rule, inner: Rule) -> bool:
    if outer.host == inner.host:
        return outer.is_wildcard == inner.is_wildcard
    if outer.is_network:
        return (inner.is_network or inner.is_address) and _is_inside(inner.networks[0], outer.networks[0])
    return outer.is_wildcard and inner.host.endswith(f".{outer.host}")


def _opened(rule: Rule) -> tuple[Network, ...]:
    """Return the networks of a rule that hold addresses which are not public."""
    return tuple(network for network in rule.networks if not has_only(network, _PUBLIC))


def _are_inside(inner: Iterable[Network], outer: Iterable[Network]) -> bool:
    around = tuple(outer)
    return all(any(_is_inside(network, outer_network) for outer_network in around) for network in inner)


def _is_inside(inner: Network, outer: Network) -> bool:
    return inner.version == outer.version and inner.prefixlen >= outer.prefixlen and inner.network_address in outer


def allowed_by_both(first: NetworkRules, second: NetworkRules) -> tuple[str, ...]:
    """Return the rules of each that the other one covers, as they are written."""
    allowed = [rule.text for rule in first.allow if covers(second, rule)]
    allowed += [rule.text for rule in second.allow if covers(first, rule)]
    return tuple(dict.fromkeys(allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCeiling:
    """Bound what any source may ask of the network.

    `mode` is the most. `hosts`: an allowlist may have no others; None leaves it free to name public ones. `networks`:
    further addresses that are not public and that rules may open, beside those that `hosts` open themselves.
    """

    mode: NetworkMode
    hosts: tuple[str, ...] | None = None
    networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise InvalidRequest(f"mode: {self.mode!r} is unknown; use one of {', '.join(_MODES)}")
        if self.hosts is not None and self.mode != "allowlist":
            raise InvalidRequest(
                f"hosts: mode {self.mode!r} has no list of hosts; use mode allowlist, or leave them out"
            )
        self.as_rules()
        self._networks()

    def __str__(self) -> str:
        hosts = () if self.hosts is None else self.hosts or ("no host",)
        listed = ", ".join((*hosts, *(f"addresses in {network}" for network in self.networks)))
        return f"{self.mode}: {listed}" if listed else self.mode

    def as_rules(self) -> NetworkRules:
        """Return the ceiling as network rules, with no request applied."""
        mode: NetworkMode = "open" if self.mode == "bridge" else self.mode
        return NetworkRules(mode=mode, allow=tuple(parse_rule(host, name="hosts") for host in self.hosts or ()))

    def excess(self, rules: NetworkRules) -> str:
        """Return what these rules ask for above the ceiling, empty for nothing."""
        if mode_rank(rules.mode) > mode_rank(self.mode):
            return rules.mode
        if rules.mode in ("off", "bridge"):
            return ""
        return next((escape_name(rule.text) for rule in rules.allow if not self._permits(rule)), "")

    def grants(self, rule: Rule) -> bool:
        """Tell whether the ceiling itself names the hosts of a rule: a mode without hosts names only `open`."""
        return covers(self.as_rules(), rule, networks=self._networks())

    def joined(self, ceiling: NetworkCeiling) -> NetworkCeiling:
        """Return the ceiling that lets through what both do."""
        if "bridge" in (self.mode, ceiling.mode):  # which lets through everything
            return ceiling if self.mode == "bridge" else self
        if "off" in (self.mode, ceiling.mode):
            return NetworkCeiling(mode="off")
        networks = [
            str(inner)
            for network in self._networks()
            for two in ceiling._networks()
            for inner, outer in ((network, two), (two, network))
            if _is_inside(inner, outer)
        ]
        hosts = [host for host in self.hosts or () if ceiling._permits(parse_rule(host))]
        hosts += [host for host in ceiling.hosts or () if self._permits(parse_rule(host))]
        is_free = self.hosts is None and ceiling.hosts is None
        return NetworkCeiling(
            mode=min(self.mode, ceiling.mode, key=mode_rank),
            hosts=None if is_free else tuple(dict.fromkeys(hosts)),
            networks=tuple(dict.fromkeys(networks)),
        )

    def _permits(self, rule: Rule) -> bool:
        if self.mode == "bridge":
            return True
        if self.hosts is None:
            return self.mode != "off" and _are_inside(_opened(rule), self._networks())
        return self.grants(rule)

    def _networks(self) -> tuple[Network, ...]:
        return tuple(parse_network_range(network, name="networks") for network in self.networks)


def packages_above(packages: PackageList, ceiling: tuple[str, ...]) -> str:
    """Return the first package outside of the ceiling, "" if there is none. `*` in a ceiling stands for any characters.

    `auto` exceeds every ceiling, because the packages are not known yet. So does text that is not a name with versions.
    """
    if packages == "auto":
        return "auto"
    names = ((text, _package_name(text)) for text in packages)
    return next((escape_name(text) for text, name in names if name is None or not matches_package(name, ceiling)), "")


def packages_in_both(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of each list that the other one has, too. A star is only within another one's star."""
    allowed = [name for name in first if matches_package(_normalized(name), second)]
    allowed += [name for name in second if matches_package(_normalized(name), first)]
    patterns: dict[str, str] = {}
    for name in allowed:
        patterns.setdefault(_normalized(name), name)
    return tuple(patterns.values())


def matches_package(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a normalized name is meant; one of npm's by a pattern that begins with `npm:`, or by `*` alone."""
    return any(
        pattern == "*"
        or (pattern.startswith(NPM_PREFIX) == name.startswith(NPM_PREFIX) and fnmatchcase(name, _normalized(pattern)))
        for pattern in patterns
    )


def _normalized(pattern: str) -> str:
    """Return a name, or a pattern of names, as indexes compare names; npm's have one spelling."""
    if pattern.startswith(NPM_PREFIX):
        return pattern
    return "*".join(normalize_package(literal) for literal in pattern.split("*"))


def normalize_package(name: str) -> str:
    """Return the name of a package of Python's as indexes compare it: lower case, with single hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _package_name(text: str) -> str | None:
    """Return the normalized name that a requirement begins with; None for an address, a path or an option."""
    if npms := _NPM_REQUIREMENT.fullmatch(text.strip()):
        return npms[1]
    match = _REQUIREMENT.fullmatch(text.strip())
    return normalize_package(match[1]) if match is not None else None
