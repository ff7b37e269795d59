"""The packages that only this door needs."""

from __future__ import annotations

from importlib import import_module

from cloche.core.errors import BackendUnavailable


def require_extra() -> None:
    """Raise BackendUnavailable, which names the extra, unless its packages are here."""
    try:
        import_module("mcp.server.mcpserver")
    except ImportError as error:
        raise BackendUnavailable(
            f"The MCP server needs the package mcp, version 2.3 or later ({error}).",
            remedy='Install it with "pip install cloche[mcp]".',
        ) from error
