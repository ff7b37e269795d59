"""The way out: a name is resolved when a connection comes, its addresses are checked, and one of them is connected to.

The checked address is the connected one: the name is not looked up again. Where the operator's environment names an
upstream proxy, the name is sent on to it, and the proxy chooses the address.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, unquote, urlsplit

from cloche.core.network import NO_RULE_OPENS, NetworkRules, Rule
from cloche.core.refusals import not_allowed

from .errors import Failed, Refused
from .own_addresses import is_elsewhere

Address = IPv4Address | IPv6Address
RESOLVE_S, CONNECT_S, PROXY_S = 15.0, 10.0, 15.0
MOST_ADDRESSES = 16
RESOLVERS = 256  # threads: so many lookups of as many sandboxes as one process serves, each with all that it may have
MOST_PROXY_HEAD = 16_384
PRIVATE_SUFFIXES = (
    ".internal",
    ".local",
    ".localhost",
    ".lan",
    ".home",
    ".corp",
    ".intranet",
    ".private",
    ".home.arpa",
)
_resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolve")


class Proxies:
    """Hold the operator's upstream proxies: `http`, `https`, and `no`, a list of names that are reached without."""

    def __init__(self, settings: Mapping[str, str]):
        self._urls = {scheme: settings[scheme] for scheme in ("http", "https") if settings.get(scheme)}
        self._without = [name.strip().lower().lstrip(".") for name in settings.get("no", "").split(",") if name.strip()]

    def url_for(self, host: str, port: int) -> str | None:
        """Return the proxy for a host, None where it is connected to directly."""
        proxy_url = self._urls.get("http" if port == 80 else "https")
        if proxy_url is None or "*" in self._without:
            return None
        is_without = any(host == suffix or host.endswith(f".{suffix}") for suffix in self._without)
        return None if is_without else proxy_url


async def connect(
    host: str, port: int, *, rules: NetworkRules, rule: Rule | None, proxies: Proxies, lookups: asyncio.Semaphore
) -> tuple[socket.socket, Address | None]:
    """Return a socket that is connected to `host`, and its address; None if a proxy chose the address.

    `lookups` bounds the concurrent lookups of one sandbox. Raises Refused or Failed, with a sentence.
    """
    url = proxies.url_for(host, port)
    if url is not None:
        return await _connect_by_proxy(url, host, port, lookups), None
    addresses = _checked(host, port, await _resolve(host, port, lookups), rules, rule)
    return await _connect_to_first(host, addresses, port)


async def _connect_to_first(host: str, addresses: list[Address], port: int) -> tuple[socket.socket, Address]:
    why = "it has no address"
    for address in addresses:
        try:
            return await connect_to(address, port), address
        except TimeoutError:
            why = f"{address} did not answer within {CONNECT_S:.0f} s"
        except OSError as error:
            why = f"{address}: {error.strerror or error}"
    raise Failed(f"{host}:{port} cannot be connected to: {why}")


def _checked(host: str, port: int, addresses: list[Address], rules: NetworkRules, rule: Rule | None) -> list[Address]:
    """Return the addresses of a host that may be connected to. Raises Refused if no address may."""
    allowed: list[Address] = []
    why = f"{host} has no address"
    for address in addresses[:MOST_ADDRESSES]:
        reason = rules.decide_address(rule, address, host=host, port=port)
        if not reason and not is_elsewhere(address):
            why_not = f"{address} is one of this host's own addresses, or is not reachable from it"
            reason = not_allowed(f"{host}:{port}", why_not, NO_RULE_OPENS)
        if reason:
            why = reason
        else:
            allowed.append(address)
    if not allowed:
        raise Refused(why)
    return allowed


async def _resolve(host: str, port: int, lookups: asyncio.Semaphore) -> list[Address]:
    """Return the addresses of a host. A thread that still waits for an answer cannot be ended, and counts as busy."""
    try:
        return [ip_address(host)]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    name = host.encode("ascii")
    await lookups.acquire()
    lookup = _resolvers.submit(
        lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    )
    lookup.add_done_callback(lambda _: loop.call_soon_threadsafe(lookups.release))
    try:
        async with asyncio.timeout(RESOLVE_S):
            rows = await asyncio.wrap_future(lookup)
    except TimeoutError:
        raise Failed(f"{host} was not resolved within {RESOLVE_S:.0f} s") from None
    except socket.gaierror as error:
        raise Failed(f"{host} cannot be resolved: {error.strerror or error}") from None
    return list(dict.fromkeys(ip_address(str(row[4][0]).partition("%")[0]) for row in rows))


async def connect_to(address: Address, port: int) -> socket.socket:
    """Return a socket that is connected to an address, whatever it is. Raises OSError, TimeoutError too."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    upstream_socket = socket.socket(family, socket.SOCK_STREAM)
    upstream_socket.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(upstream_socket, (str(address), port))
        upstream_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        upstream_socket.close()
        raise
    return upstream_socket


async def _connect_by_proxy(url: str, host: str, port: int, lookups: asyncio.Semaphore) -> socket.socket:
    """Connect to the operator's proxy, and have it make a tunnel, unless it takes plain requests."""
    try:
        ip_address(host)
    except ValueError:
        pass
    else:
        raise Refused(not_allowed(f"{host}:{port}", "addresses are not sent to an upstream proxy", "use a name"))
    if "." not in host or host.endswith(PRIVATE_SUFFIXES):
        why = "a name that looks private is not sent to an upstream proxy"
        raise Refused(not_allowed(f"{host}:{port}", why, "name it in NO_PROXY to connect without the proxy"))
    address, proxy_port = _split(url)
    proxy = address.hostname or ""
    upstream_socket, _ = await _connect_to_first(proxy, await _resolve(proxy, 0, lookups), proxy_port)
    if port == 80:
        return upstream_socket
    try:
        async with asyncio.timeout(PROXY_S):
            await _open_tunnel(upstream_socket, host, port, _credentials(address.username, address.password))
    except (OSError, TimeoutError) as error:
        upstream_socket.close()
        raise Failed(f"the upstream proxy did not open a tunnel: {str(error) or 'no answer in time'}") from error
    except BaseException:
        upstream_socket.close()
        raise
    return upstream_socket


def _split(url: str) -> tuple[SplitResult, int]:
    """Return the parts of the proxy's address, and its port. Raises Refused, without any of it: it has a password."""
    try:
        address = urlsplit(url if "//" in url else f"http://{url}")
        is_whole = address.path in ("", "/") and not (address.query or address.fragment)
        if address.scheme == "http" and address.hostname and is_whole:
            return address, address.port or 8080
    except ValueError:  # whose words are parts of the address
        pass
    raise Refused("the operator's upstream proxy is not a plain HTTP proxy (http://HOST:PORT)")


def _credentials(user: str | None, password: str | None) -> str:
    if not user:
        return ""
    pair = f"{unquote(user)}:{unquote(password or '')}".encode()
    return f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}\r\n"


async def _open_tunnel(proxy: socket.socket, host: str, port: int, credentials: str) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(
        proxy, f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{credentials}\r\n".encode("ascii")
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        more = await loop.sock_recv(proxy, 1)  # nothing of what follows the head may be taken
        head += more
        if not more or len(head) > MOST_PROXY_HEAD:
            raise Failed("the answer of the upstream proxy cannot be parsed")
    status = head.split(None, 2)[1:2]
    if status != [b"200"]:
        raise Refused(
            f"the upstream proxy refused {host}:{port}: {head.splitlines()[0][:80].decode('ascii', 'replace')}"
        )
