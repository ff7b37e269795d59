"""A server for the Model Context Protocol: the tools of an agent, for whichever client speaks it.

`create_server` makes one, `create_app` an HTTP application of it; `cloche mcp` runs either. Needs `cloche[mcp]`.

The packages that only this door needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cloche.core.errors import BackendUnavailable

if TYPE_CHECKING:
    from .http import create_app
    from .server import create_server

__all__ = ["create_app", "create_server"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of whatever kind the name has
    """Load what the extra brings when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra()
    from . import http, server

    return {"create_app": http.create_app, "create_server": server.create_server}[name]


def require_extra() -> None:
    """Raise BackendUnavailable, which names the extra, unless its packages are here."""
    try:
        import_module("mcp.server.mcpserver")
    except ImportError as error:
        raise BackendUnavailable(
            f"The MCP server needs the package mcp, version 2.3 or later ({error}).",
            remedy='Install it with "pip install cloche[mcp]".',
        ) from error
