"""`cloche node`: the wire alone, for the leases of a fleet, over TLS with a certificate that each lease pins.

Input: calls over the wire, each with a credential that the fleet's coordinator signed. Output: as of the service.
A node has no database: leases, their sandboxes and workspaces are in memory, and end with the process. It starts by
clearing what an earlier node of this machine left.

- `command.py`: the process; `server.py`: TLS (`cloche.serving.certificate`), web sockets, and who may connect;
  `admission.py`: bounds on strangers.
- `leases.py`: which leases there are, and when they end; pure.
- `host.py`: what the wire needs (`cloche.wire.host.WireHost`); `sandboxes.py`: live sandboxes of leases.
- `digests.py`: which packages and images this machine has.
- `copying.py`: copy Cloche and what a node needs to a folder; `start.py` there starts it with another image's Python.
- `verbs.py`: the verbs of role coordinator.

Needs the extra `node`.
"""

from __future__ import annotations

PACKAGES = ("cryptography", "pydantic", "websockets")


def require_extra() -> None:
    """Raise BackendUnavailable where the packages of a node's server are not installed."""
    from importlib import util

    from cloche.core.errors import BackendUnavailable

    missing = [name for name in PACKAGES if util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"cloche node: missing packages: {', '.join(missing)}.",
            remedy='Install the extra that brings them: "pip install cloche[node]", or "pip install cloche[ray]".',
        )
