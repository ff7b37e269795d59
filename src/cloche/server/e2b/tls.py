"""TLS for the host names of sandboxes: by the operator's certificate, or one of an authority of this service's own.

Behind a trusted proxy, which has TLS itself, there is none here.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl

from cloche.config.state import state_file
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.hosts import normalize_host, parse_address
from cloche.core.record import replace
from cloche.serving.authority import OwnAuthority, keep_authority
from cloche.serving.http import is_wildcard

from .options import E2BOptions

HTTPS = 443
PROTOCOLS = ("http/1.1",)
MOST_HOSTS = 512  # whose certificates are kept
_LABEL = re.compile(r"[a-z0-9-]{1,63}")
LOOK_EVERY_S = 12 * 3600.0


def with_tls(options: E2BOptions, port: int) -> tuple[E2BOptions, OwnAuthority | None]:
    """Return the options with a certificate, and the domain with the port that clients use. Blocks.

    The authority is this service's own, if the certificate is. Raises InvalidRequest, BackendUnavailable.
    """
    if options.domain is None:
        return options, None
    name, colon, public_port = options.domain.partition(":")
    name = _checked(name)
    if options.trusted_proxies:
        return replace(options, domain=f"{name}{colon}{public_port}"), None
    if colon:
        raise InvalidRequest("--domain: a port is for a proxy in front alone (--trusted-proxy); give the name")
    shown = name if port == HTTPS else f"{name}:{port}"
    if options.certificate is not None:
        return replace(options, domain=shown), None
    folder = state_file(os.path.join("e2b-authority", name))
    if folder is None:
        raise InvalidRequest("--domain: this user has no home folder for its authority; give --tls-certificate")
    authority = keep_authority(folder, name)
    return replace(options, domain=shown, certificate=authority.served, key=authority.served), authority


def _checked(name: str) -> str:
    try:
        if parse_address(name) is not None:
            raise ValueError("it is an address")
        return normalize_host(name)
    except ValueError as error:
        raise InvalidRequest(f"--domain {escape_name(name)}: this is not a host name: {error}") from error


def lines_for_clients(options: E2BOptions, authority: OwnAuthority | None) -> list[str]:
    """Return what a user has to know of host names: the domain, what to trust, and where the names must lead."""
    if options.domain is None:
        return []
    lines = [f"for ports by host name: export E2B_DOMAIN={options.domain}"]
    if authority is not None:
        trusts = f"SSL_CERT_FILE={authority.bundle} NODE_EXTRA_CA_CERTS={authority.certificate}"
        lines.append(f"its certificate is trusted by: export {trusts}")
    if not options.trusted_proxies:
        name, host = options.domain.partition(":")[0], reachable(options.host)
        lines.append(
            f"names below {name} must lead here; for dnsmasq: address=/{name}/{host} (/etc/hosts has each by its whole "
            f"name: {host} api.{name} 8000-ID.{name})"
        )
    return lines


class HostContexts:
    """Serve each host of a domain of one label by a certificate of its own: clients take no wildcard below that."""

    def __init__(self, authority: OwnAuthority):
        self._authority, self._contexts = authority, dict[str, ssl.SSLContext]()

    def choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, usual: ssl.SSLContext) -> None:
        """Take the certificate for the server name of a hello; the usual one for any other name."""
        del usual
        label, _, domain = (name or "").lower().partition(".")
        if domain != self._authority.domain or _LABEL.fullmatch(label) is None:
            return
        if label not in self._contexts and len(self._contexts) >= MOST_HOSTS:
            self._contexts.clear()
        if label not in self._contexts:
            self._contexts[label] = context = self._authority.context_for(f"{label}.{domain}")
            context.set_alpn_protocols(PROTOCOLS)
        connection.context = self._contexts[label]

    def forget(self) -> None:
        """Make new certificates from now on."""
        self._contexts.clear()


def reachable(host: str) -> str:
    """Return an address by which clients of this machine reach a listener."""
    return "127.0.0.1" if is_wildcard(host) else host


async def serve_names(authority: OwnAuthority, context: ssl.SSLContext) -> None:
    """Have each new connection of `context` use a certificate that is valid for its host, until cancelled."""
    hosts = HostContexts(authority)
    if "." not in authority.domain:
        context.sni_callback = hosts.choose
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        hosts.forget()
        if await asyncio.to_thread(authority.renew):
            context.load_cert_chain(authority.served)
