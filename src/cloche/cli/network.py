"""Tests rules of the network, and changes those of a sandbox; lists and revokes what approvers allowed for folders."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_line

from .app import root
from .options import argument, flag, json_option, option, sandbox_options
from .output import Row, say, show

if TYPE_CHECKING:
    from cloche.agent.network_grants import NetworkGrant
    from cloche.config.keys import Settings
    from cloche.config.options import SandboxOptions
    from cloche.core.network import Address, HostDecision, NetworkRules

EXIT_REFUSED = 1
_TLS_PORT = 443

network = root.group("network", help="The network: test and allow hosts; grants.")(lambda: None)


@network.command("test")
@argument("target", metavar="HOST[:PORT,...]", help="A name or an address; also HOST/GET:/PATH. Without a port: 443.")
@flag("--resolve", help="Resolve the name here, and decide on each of its addresses.")
@sandbox_options("network", "network_allow", "network_deny", "network_ports", "preset", "config")
@json_option()
def _test(target: str, resolve: bool, options: SandboxOptions, as_json: bool) -> int:
    """Show whether a host may be reached, and which rule decides it.

    No connection is opened, and without --resolve no name is resolved. The exit code is 0 if every port is allowed for
    at least one address, else 1.
    """
    return decide_on(target, options, is_resolved=resolve, as_json=as_json)


@network.command("allow")
@argument("hosts", metavar="HOST", nargs=-1, required=True, help="As in network_allow: a.example, b.example:8443.")
@option("--in", "name", metavar="NAME", required=True, help="The sandbox.")
def _allow(hosts: tuple[str, ...], name: str) -> int:
    """Allow further hosts in a sandbox with a name.

    They hold until it ends, also for a host that was asked about and refused.
    """
    from cloche.sync import Sandbox

    with Sandbox.attach(name) as sandbox:
        sandbox.network.allow(*hosts)
    say(f"allowed in {name}: {', '.join(map(escape_line, hosts))}")
    return 0


@network.command("replace")
@argument("hosts", metavar="HOST", nargs=-1, help="As in network_allow. None: no host.")
@option("--in", "name", metavar="NAME", required=True, help="The sandbox.")
@flag("--open", "is_open", help="Allow every public host.")
@option("--deny", metavar="HOST", multiple=True, help="As in network_deny. Repeatable.")
def _replace(hosts: tuple[str, ...], name: str, is_open: bool, deny: tuple[str, ...]) -> int:
    """Replace all rules of a sandbox with a name.

    Connections that the new rules do not allow are closed.
    """
    from cloche.sync import Sandbox

    with Sandbox.attach(name) as sandbox:
        sandbox.network.replace(mode="open" if is_open else "allowlist", allow=hosts, deny=deny)
    said = "every public host" if is_open else ", ".join(map(escape_line, hosts)) or "no host"
    say(f"allowed in {name} from now on: {said}")
    return 0


@network.command("grants")
@json_option()
def _grants(as_json: bool) -> int:
    """List the hosts that were allowed for a folder, always.

    A sandbox in that folder with on_network "ask" is not asked about them.
    """
    from cloche.agent.network_grants import read_grants

    rows = [
        {"host": f"{grant.host}:{grant.port}", "since": _time(grant.since), "last_used": _time(grant.last_used),
         "folder": grant.folder}
        for grant in read_grants()
    ]  # fmt: skip
    if rows or as_json:
        show(rows, as_json=as_json, below=("folder",))
    else:
        say("there are no grants")
    return 0


@network.command("revoke")
@argument("target", metavar="HOST[:PORT,...]", help="Only this host, on these ports or all.", default="")
@option("--folder", metavar="DIR", help="The folder. Default: the current one.")
@flag("--all-folders", help="In every folder.")
def _revoke(target: str, folder: str | None, all_folders: bool) -> int:
    """Take back what was allowed for a folder. An open sandbox keeps it until it ends.

    The exit code is 0 if there was a grant, else 1.
    """
    from cloche.agent.network_grants import revoke_grants

    path = None if all_folders else os.path.realpath(folder or os.curdir)
    host, ports = _split(target) if target else ("", ())
    is_any_port = ":" not in target

    def is_meant(grant: NetworkGrant) -> bool:
        is_host = not host or (grant.host == host and (is_any_port or grant.port in ports))
        return is_host and path in (None, grant.folder)

    count = revoke_grants(is_meant)
    say(f"revoked {count} grants" if count != 1 else "revoked 1 grant")
    return 0 if count else EXIT_REFUSED


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="minutes")


def decide_on(target: str, options: SandboxOptions, *, is_resolved: bool = False, as_json: bool = False) -> int:
    """Print the decision for a host and its ports, and return the exit code."""
    from cloche.config.settings import load_settings

    settings = load_settings(options)
    target, request = _without_request(target)
    host, ports = _split(target)
    rows = [row for port in ports for row in _rows(host, port, settings, is_resolved=is_resolved)]
    rows = [_with_request(row, request, settings) for row in rows] if request else rows
    show([dict(row) for row in rows], as_json=as_json, below=("why",))
    allowed = {row["port"] for row in rows if row["allowed"]}
    return 0 if allowed == set(ports) else EXIT_REFUSED


def _without_request(target: str) -> tuple[str, tuple[str, str] | None]:
    """Return the host, and the method and target of a request to it, if there is one."""
    from cloche.core.request_rules import PART

    part = PART.search(target)
    return (target, None) if part is None else (target[: part.start()], (part[1], target[part.end() :]))


def _with_request(row: Row, request: tuple[str, str], settings: Settings) -> Row:
    """Return the decision on a request to an allowed host."""
    from cloche.core.request_rules import RequestRefused, check_request

    rule = settings.policy.network_rules().decide(row["host"], row["port"]).rule
    if not row["allowed"] or rule is None or not rule.requests:
        return row
    try:
        check_request(*request, (), rule.requests, row["host"])
    except RequestRefused as refused:
        why = f"{row['host']}:{row['port']}: {refused.what} is not allowed; {refused.why}"
        return {**row, "allowed": False, "why": why}
    return row


def _split(target: str) -> tuple[str, tuple[int, ...]]:
    """Return the host in canonical form, and the ports."""
    from cloche.core.network import parse_deny_rule  # the same form, plus wildcards and networks

    rule = parse_deny_rule(target, name="HOST")
    if rule.is_wildcard or "/" in rule.host:
        raise InvalidRequest(f"HOST: {target!r} stands for several hosts; name one")
    return rule.host, rule.ports or (_TLS_PORT,)


def _rows(host: str, port: int, settings: Settings, *, is_resolved: bool) -> Iterator[Row]:
    """Yield the decision for the host, or for each of its addresses if it was resolved."""
    policy, origins = settings.policy, settings.origins
    if policy.network == "bridge":
        why = f"network 'bridge' has no rules: {host}:{port} is reached where this host's firewall lets it through"
        yield _row(host, port, is_allowed=True, why=why, origin=origins.get("network", ""))
        return
    rules = policy.network_rules()
    decision = rules.decide(host, port)
    origin = {"rule": decision.rule.text if decision.rule is not None else "", "origin": _origin(decision, settings)}
    if not is_resolved or not decision.is_allowed:
        yield _row(host, port, is_allowed=decision.is_allowed, why=decision.why, **origin)
        return
    for address, why in _decided_addresses(rules, decision, host, port):
        yield _row(host, port, is_allowed=not why, why=why or decision.why, address=address, **origin)


def _decided_addresses(rules: NetworkRules, decision: HostDecision, host: str, port: int) -> Iterator[tuple[str, str]]:
    """Yield each address of a name with the reason for its refusal, empty if it is allowed."""
    try:
        addresses = _addresses(host, port)
    except OSError as error:
        yield "", f"{host} cannot be resolved here: {error.strerror}"
        return
    for address in addresses:
        yield str(address), rules.decide_address(decision.rule, address, host=host, port=port)


def _addresses(host: str, port: int) -> list[Address]:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ip_address(text) for text in dict.fromkeys(str(entry[4][0]) for entry in addresses)]


def _origin(decision: HostDecision, settings: Settings) -> str:
    """Return the source of the rule that decided; without a rule, the source of the mode."""
    if decision.rule is None:
        return settings.origins.get("network", "")
    return settings.origins.get("network_allow" if decision.is_allowed else "network_deny", "")


def _row(
    host: str, port: int, *, is_allowed: bool, why: str, rule: str = "", origin: str = "", address: str = ""
) -> Row:
    return {
        "host": host, "port": port, "address": address, "allowed": is_allowed, "rule": escape_line(rule),
        "from": escape_line(origin), "why": why,
    }  # fmt: skip
