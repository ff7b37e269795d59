"""`cloche node`: the server of a node of a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cloche.core.errors import InvalidRequest

from .app import root
from .options import flag, option, sandbox_options

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions

MOST_PORT = 65_535


@root.command("node")
@option("--listen", metavar="HOST:PORT", help="The address at which callers reach it; port 0: a free one.")
@flag("--all-addresses", help="Listen at every address of this machine, and tell HOST. A port-forward needs it.")
@option("--public-key", metavar="KEY", help="The key of the fleet's coordinator: 32 bytes in base64url.")
@option("--ttl", metavar="TIME", default="60s", help="All leases end when the coordinator is silent for so long.")
@option("--state", metavar="DIR", help="A private folder: its file node.json says where the node is.")
@option("--waits", is_flag=True, help="Serve on until a coordinator calls for the first time, however long it takes.")
@option("--copy-to", metavar="DIR", help="Only copy Cloche and what a node needs there, for another image's Python.")
@option("--secrets-from", metavar="DIR", help="A folder with secrets that callers use by name: a file for each value.")
@sandbox_options(but=("fallback", "trusted", "secrets"))
def _node(
    listen: str | None,
    all_addresses: bool,
    public_key: str | None,
    ttl: str,
    state: str | None,
    waits: bool,
    copy_to: str | None,
    secrets_from: str | None,
    options: SandboxOptions,
) -> int:
    """Serve sandboxes to the leases of a fleet.

    An engine, such as Ray, starts this on each of its machines. When it serves, it prints one line of JSON: its
    address, the SHA-256 of its certificate, which callers must compare, its process id, an id of this start, and its
    version. The
    options of a sandbox are its defaults; ceilings of the configuration bound what callers may ask for. It needs the
    extra `node`.
    """
    from cloche.config.settings import given_options
    from cloche.core.limits import parse_duration
    from cloche.node import require_extra

    require_extra()
    if copy_to is not None:
        return _copy(copy_to)
    if not listen or not public_key:
        raise InvalidRequest("--listen and --public-key: a node needs its address, and the key of its coordinator")
    host, port = read_listen(listen)
    ttl_s = parse_duration(ttl, name="--ttl")
    from cloche.node.command import NodeCommand, run_node

    command = NodeCommand(
        host=host, port=port, public_key=public_key, state=state or "", ttl_s=ttl_s, waits=waits,
        is_everywhere=all_addresses, secrets_from=secrets_from or "",
        options=cast("SandboxOptions", given_options(options)),
    )  # fmt: skip
    return run_node(command)


def _copy(target: str) -> int:
    from pathlib import Path

    from cloche.node.copying import copy_to

    copy_to(Path(target))
    return 0


def read_listen(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[HOST]:PORT`. Raises InvalidRequest."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > MOST_PORT:
        raise InvalidRequest(f"--listen {text}: write it as HOST:PORT, such as 10.0.0.7:8471; port 0 takes a free one")
    return host.removeprefix("[").removesuffix("]"), int(port)
