"""The network of sandboxes: E2B's fields as rules of ours, at creation and later, within the operator's settings.

E2B's rules allow everything but `denyOut`, and what `allowOut` has beats that. Ours deny before they allow. So
addresses that are both are taken out of the denied networks, and a denial of all traffic is an allowlist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from cloche.core.enforcement import NetworkMode
from cloche.core.host_headers import parse_headers
from cloche.core.hosts import Network as IPNetwork
from cloche.core.hosts import parts_of
from cloche.core.policy import Policy
from cloche.core.record import dataclass, field
from cloche.execution.sandbox import AsyncSandbox
from cloche.records import sandboxes as records
from cloche.wire.callers import Caller
from cloche.wire.uses import using

from .calls import Call, Row
from .errors import E2BError
from .new_sandbox import Network, NewSandbox
from .ports import MASK_PORT
from .target import ENVD, MOST_PORT

ALL = ip_network("0.0.0.0/0")
CHANGEABLE = ("allowlist", "open")  # modes of a sandbox that has a network
DEFAULT_DNS = ["8.8.8.8"]
OF_PORTS = ("allowPublicTraffic", "maskRequestHost", "httpsPorts")  # which no update changes
PLACEHOLDER = "${e2b."
NEEDS_DENY_ALL = (
    "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other "
    "traffic."
)
_ADDRESS = re.compile(r"[0-9.]+(?:/[0-9]{1,2})?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:/[0-9]{1,3})?")
_HOST = re.compile(r"(?:[A-Za-z0-9.-]|\$\{PORT\})+(?::(?:[0-9]{1,5}|\$\{PORT\}))?")


class NetworkUpdate(Network):
    """New rules of a sandbox, in place of all others."""

    allow_internet_access: Annotated[bool | None, Field(alias="allow_internet_access")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Hold what a request asks for: a mode of ours, and its lists. Mode `open` is what the operator permits."""

    mode: NetworkMode = "open"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def rules_of(network: Network | None, allow_internet_access: bool | None) -> Rules:
    """Return the rules that E2B's fields mean. Raises E2BError (400) for what is wrong or not supported."""
    network = network or Network()
    check_fields(network)
    denied = [_network(text, "denied CIDR") for text in network.deny_out or ()]
    allowed = [_network(text, "allowed address") if _is_address(text) else text for text in network.allow_out or ()]
    names = [host for host in allowed if isinstance(host, str)]
    networks = [host for host in allowed if not isinstance(host, str)]
    denies_all = ALL in denied or allow_internet_access is False
    if names and not denies_all:
        raise E2BError(400, NEEDS_DENY_ALL)
    headers = headers_of(network)
    if ALL in networks or "*" in names:
        return Rules(headers=headers)
    if denies_all:
        parts = [part for network in networks for part in _one_kind(network)]
        texts = [str(part.network_address if part.num_addresses == 1 else part) for part in parts]
        return Rules(mode="allowlist", allow=(*names, *texts), headers=headers)
    parts = [part for network in denied for part in without(network, networks)]
    return Rules(deny=tuple(map(str, parts)), headers=headers)


def headers_of(network: Network) -> dict[str, dict[str, str]]:
    """Return the headers that `rules` put into requests, by host. Raises E2BError (400), InvalidRequest."""
    found: dict[str, dict[str, str]] = {}
    for host, rules in (network.rules or {}).items():
        if len(rules) > 1:
            raise E2BError(400, f"Domain {host[:128]!r} can have at most 1 transform rule.")
        headers = rules[0].transform.headers if rules and rules[0].transform else None
        if any(PLACEHOLDER in value for value in (headers or {}).values()):
            raise E2BError(400, "network.rules: there are no workload identities, whose placeholder a header has")
        if headers:
            found[host] = headers
    parse_headers(found)
    return found


def check_fields(network: Network) -> None:
    """Raise E2BError (400) for a field that is wrong, or not supported. Default values are accepted."""
    if network.egress_proxy is not None:
        raise E2BError(400, "network.egressProxy: this server has no proxies of its users; its operator may set one")
    if network.dns_servers not in (None, [], DEFAULT_DNS):
        raise E2BError(
            400, "network.dnsServers: names are resolved by this server; no other name server can be reached"
        )
    if any(port == ENVD or not 0 < port <= MOST_PORT for port in network.https_ports or ()):
        raise E2BError(400, f"network.httpsPorts: give ports from 1 to {MOST_PORT}, other than {ENVD}")
    mask = network.mask_request_host
    if mask is not None and (_HOST.fullmatch(mask) is None or not mask.replace(MASK_PORT, "").strip(":.-")):
        raise E2BError(400, f"mask request host is not valid: {mask[:100]}")


def _is_address(text: str) -> bool:
    return _ADDRESS.fullmatch(text) is not None


def _network(text: str, what: str) -> IPNetwork:
    try:
        network = ip_network(text, strict=False)
        if not _is_address(text) or (network.prefixlen and not int(network.network_address)):
            raise ValueError
    except ValueError:
        raise E2BError(400, f"invalid {what} {text[:100]}") from None
    return network


def without(network: IPNetwork, taken: Sequence[IPNetwork]) -> tuple[IPNetwork, ...]:
    """Return the parts of a network that lie in none of the others."""
    parts: tuple[IPNetwork, ...] = (network,)
    for other in taken:
        parts = tuple(part for whole in parts for part in _excluding(whole, other))
    return parts


def _excluding(whole: IPNetwork, other: IPNetwork) -> Iterable[IPNetwork]:
    if whole.version != other.version or not whole.overlaps(other):
        return (whole,)
    if whole.prefixlen >= other.prefixlen:
        return ()
    if isinstance(whole, IPv4Network):
        assert isinstance(other, IPv4Network)  # noqa: S101 - compared above
        return whole.address_exclude(other)
    assert isinstance(other, IPv6Network)  # noqa: S101 - as above
    return whole.address_exclude(other)


def _one_kind(network: IPNetwork) -> tuple[IPNetwork, ...]:
    """Return a network, or of one that also has addresses that are not public, the public parts."""
    return parts_of(network, frozenset({"public"})) or (network,)


async def allowed(call: Call, caller: Caller, rules: Rules) -> dict[str, Any]:
    """Return rules as options of a sandbox, within the settings. Raises PolicyDenied for more, InvalidRequest."""
    base = (await call.service.settings()).policy
    if rules.mode == "allowlist":
        if base.network == "off" and not rules.allow:
            return {"network": "off"}
        own = {"network": "allowlist", "network_allow": list(rules.allow)}
        options = await call.service.allowed_options(caller, own)
        return {name: options[name] for name in (*own, "network_deny") if name in options}
    return {"network_deny": [*base.network_deny, *rules.deny]} if rules.deny else {}


async def network_options(call: Call, caller: Caller, body: NewSandbox) -> dict[str, Any]:
    """Return the options of a new sandbox's network, which the caller may have. Raises E2BError, PolicyDenied."""
    rules = rules_of(body.network, body.allow_internet_access)
    options = await allowed(call, caller, rules)
    base = (await call.service.settings()).policy
    if rules.headers and options.get("network", base.network) in CHANGEABLE:
        options["secrets"] = {}  # for a certificate authority of the sandbox's own
    return options


async def begin_network(body: NewSandbox, sandbox: AsyncSandbox) -> None:
    """Set the headers of a new sandbox's requests, which are no options."""
    rules = rules_of(body.network, body.allow_internet_access)
    if rules.headers and sandbox.policy.network in CHANGEABLE:
        now = sandbox.network.rules
        allow, deny = ([rule.text for rule in listed] for listed in (now.allow, now.deny))
        await sandbox.network.replace(mode=now.mode, allow=allow, deny=deny, headers=rules.headers)


async def update(call: Call) -> Response:
    """Replace the rules of a running sandbox."""
    caller, facts = await call.sandbox("network")
    body: NetworkUpdate = await call.body(NetworkUpdate)
    if set(body.model_dump(by_alias=True, exclude_none=True)) & {*OF_PORTS}:
        raise E2BError(400, f"{', '.join(OF_PORTS)}: these are set when a sandbox is created, and stay")
    rules = rules_of(body, body.allow_internet_access)
    base, options = (await call.service.settings()).policy, await allowed(call, caller, rules)
    async with using(call.service, caller, facts.id) as use:
        await _set_rules(use.sandbox, base, rules, options)
    await call.service.write(partial(records.amend, sandbox_id=facts.id, change=partial(_amended, body=body)))
    return Response(status_code=204)


async def _set_rules(sandbox: AsyncSandbox, base: Policy, rules: Rules, options: Mapping[str, Any]) -> None:
    if sandbox.policy.network not in CHANGEABLE:
        if rules.allow:
            raise E2BError(400, "allowOut: this sandbox was created without a network; create one with these rules")
        return
    is_own = rules.mode == "allowlist"
    mode, allow = ("allowlist", rules.allow) if is_own else (base.network, base.network_allow)
    deny = options.get("network_deny", base.network_deny)
    if mode == "open":
        await sandbox.network.replace(mode="open", allow=allow, deny=deny, headers=rules.headers)
    else:
        allow = allow if mode == "allowlist" else ()
        await sandbox.network.replace(allow=allow, deny=deny, headers=rules.headers)


def _amended(document: dict[str, Any], body: NetworkUpdate) -> dict[str, Any]:
    """Return a sandbox's document with the rules of an update, which has nothing about its ports."""
    own, sent = document["e2b"], body.model_dump(by_alias=True, exclude_none=True)
    access = sent.pop("allow_internet_access", None)
    kept = {name: value for name, value in (own["network"] or {}).items() if name in OF_PORTS}
    return {**document, "e2b": {**own, "network": {**sent, **kept}, "allowInternetAccess": access}}


ROWS = (Row(method="PUT", path="/sandboxes/{sandbox_id}/network", handler=update),)
