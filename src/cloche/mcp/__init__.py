"""A server for the Model Context Protocol: the tools of an agent, for whichever client speaks it.

`create_server` makes one, `create_app` an HTTP application of it; `cloche mcp` runs either. Needs `cloche[mcp]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .http import create_app as create_app
    from .server import create_server as create_server

__all__ = ["create_app", "create_server"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of whatever kind the name has
    """Load what the extra brings when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .extra import require_extra

    require_extra()
    from . import http, server

    return {"create_app": http.create_app, "create_server": server.create_server}[name]
