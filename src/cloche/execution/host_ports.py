"""Give a live sandbox ports of this host's loopback, which it reaches at its own 127.0.0.1: `give_host_ports`.

A debugger, an IDE's server or a database of the user's, that listens on loopback alone. The egress process connects to
exactly these ports; it counts the connections as those of host 127.0.0.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied
from cloche.core.network import parse_ports
from cloche.core.record import replace

from .home_folder import why_no_home
from .sandbox import AsyncSandbox

LOOPBACK = "127.0.0.1"
MOST_PORTS = 16


def read_host_ports(texts: Iterable[str], *, name: str = "--host-port") -> tuple[int, ...]:
    """Return the ports of `PORT`, `127.0.0.1:PORT` and `localhost:PORT`. Raises InvalidRequest."""
    ports = parse_ports([_read(text, name) for text in texts], name=name)
    if len(ports) > MOST_PORTS:
        raise InvalidRequest(f"{name}: {len(ports)} ports; at most {MOST_PORTS} are given")
    return ports


def _read(text: str, name: str) -> int:
    host, _, port = text.rpartition(":")
    if host not in ("", LOOPBACK, "localhost"):
        raise InvalidRequest(
            f"{name}: {text!r} is not a port of this host's loopback; write 127.0.0.1:PORT. Other hosts are allowed by "
            "rules of the network"
        )
    if not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise InvalidRequest(f"{name}: {text!r} has no port; write 127.0.0.1:PORT")
    return int(port)


def give_host_ports(sandbox: AsyncSandbox, ports: tuple[int, ...]) -> None:
    """Let a sandbox that is not open yet reach ports of this host's 127.0.0.1.

    It needs network `allowlist` or `open` on backend `local`, at level `jail`. Raises InvalidRequest,
    BackendUnavailable, and PolicyDenied where the operator has a ceiling of the network.
    """
    if not ports:
        return
    policy, prepared = sandbox.policy, sandbox._prepared
    if policy.network not in ("allowlist", "open"):
        raise InvalidRequest(f"host_ports: the network of this sandbox is {policy.network!r}; use 'allowlist'")
    if why := why_no_home(sandbox):
        raise BackendUnavailable(f"host_ports: {why}.", remedy="Use backend local, at level jail.")
    if prepared.settings.ceilings.get("network") is not None:
        raise PolicyDenied("host_ports: the operator's ceiling of the network (ceilings.network) allows none")
    sandbox._prepared = replace(prepared, policy=policy.with_changes(host_ports=ports))
