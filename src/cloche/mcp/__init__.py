"""The MCP server: the tools of an agent over the Model Context Protocol. Needs `cloche[mcp]`.

In: calls of a client, which are hostile; the operator's options. Out: answers of the protocol.

`create_server` makes a server, `create_app` an HTTP application of it; `cloche mcp` runs either (`command`: standard
streams, signals). `table` describes server and tools as data; `early` answers a client's first messages from it while
the protocol package is not imported. `server` joins sandbox, approvers and bearer tokens; `tools` offers the catalog's
tools and runs a call, with progress and cancellation; `sessions` keeps a toolbox per client; `approvals` asks the human
behind the client; `http` has allowed hosts and origins, and limits of bodies and connections.

To be kept: a client gets no more than the operator set; its memory, files and sessions are bounded; tokens are in no
log; without the packages every way in names the extra. All else may be changed without asking.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cloche.core.errors import BackendUnavailable

if TYPE_CHECKING:
    from .http import create_app
    from .server import create_server

__all__ = ["create_app", "create_server"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of whatever kind the name has
    """Import a module of the extra at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra()
    from . import http, server

    return {"create_app": http.create_app, "create_server": server.create_server}[name]


def has_extra() -> bool:
    """Return whether the extra's package seems to be here, without importing it."""
    spec = find_spec("mcp")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(os.path.isdir(os.path.join(folder, "server", "mcpserver")) for folder in folders or ())


def require_extra() -> None:
    """Raise BackendUnavailable, which names the extra, unless its packages are here."""
    try:
        import_module("mcp.server.mcpserver")
    except ImportError as error:
        raise BackendUnavailable(
            f"The MCP server needs the package mcp, version 2.3 or later ({error}).",
            remedy='Install it with "pip install cloche[mcp]".',
        ) from error
