"""The sandbox and port that a request is meant for, by its headers or its host name, as E2B's proxy reads them.

Headers count where the host is `localhost`, an IP address, or begins with `sandbox.`; any other host is read as
`PORT-ID.DOMAIN`. A host of that form whose headers name another sandbox is refused, since the two readers could
disagree (RFC 9112, 3.2).
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers

from cloche.core.record import dataclass

from .errors import E2BError

ENVD, CODE, MCP = 49983, 49999, 50005
SANDBOX_HEADER, PORT_HEADER = "e2b-sandbox-id", "e2b-sandbox-port"
MOST_PORT = 65_535
ID = re.compile(r"[a-z0-9]{1,63}")
_NAME = re.compile(r"([0-9]{1,5})-([a-z0-9]{1,63})\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Name a port of a sandbox; `by_name` if the host name named it."""

    sandbox_id: str
    port: int
    by_name: bool = False


def target_of(headers: Headers, domain: str | None) -> Target | None:
    """Return the target of a request; None for the control plane. Raises E2BError (400) for a contradiction."""
    for name in ("host", SANDBOX_HEADER, PORT_HEADER):
        if len(headers.getlist(name)) > 1:
            raise E2BError(400, f"{name}: give this header once")
    by_name, by_header = _by_name(headers.get("host", ""), domain), _by_headers(headers)
    if by_name is None:
        return by_header
    if by_header is not None and (by_header.sandbox_id, by_header.port) != (by_name.sandbox_id, by_name.port):
        raise E2BError(400, "the host name and the headers of the request name different sandboxes or ports")
    return by_name


def _by_headers(headers: Headers) -> Target | None:
    sandbox_id = headers.get(SANDBOX_HEADER)
    if sandbox_id is None:
        return None
    if ID.fullmatch(sandbox_id) is None:
        raise E2BError(400, f"{SANDBOX_HEADER}: this is not an id of a sandbox")
    return Target(sandbox_id=sandbox_id, port=_port(headers.get(PORT_HEADER, str(ENVD))))


def _by_name(host: str, domain: str | None) -> Target | None:
    name = _without_port(host).lower()
    if name == "localhost" or name.startswith("sandbox.") or _is_address(name):
        return None
    match = _NAME.fullmatch(name)
    if match is None or (domain is not None and match[3] != _without_port(domain).lower()):
        return None
    return Target(sandbox_id=match[2], port=_port(match[1]), by_name=True)


def _without_port(host: str) -> str:
    return host if host.endswith("]") else re.sub(r":[0-9]*$", "", host)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= MOST_PORT):
        raise E2BError(400, f"{PORT_HEADER}: this is not a port; give a number from 1 to {MOST_PORT}")
    return int(text)
