"""The verbs that start another door: the one place where the command line names any."""

from __future__ import annotations

from cloche.core.errors import InvalidRequest
from cloche.mcp.command import McpCommand, serve
from cloche.runtime.audit import switch_on

from .run import log_to_stderr


def serve_mcp(command: McpCommand, *, debug: bool) -> int:
    """Serve MCP as the command line says."""
    if debug:
        log_to_stderr()
    switch_on("mcp")
    return serve(command)


def read_roots(words: tuple[str, ...]) -> dict[str, str]:
    """Return the folders that --root gives. Raises InvalidRequest."""
    found = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise InvalidRequest(f"--root {word}: write it as /memory=FOLDER or /configs=FOLDER")
        found[name] = folder
    return found


__all__ = ["McpCommand", "read_roots", "serve_mcp"]
