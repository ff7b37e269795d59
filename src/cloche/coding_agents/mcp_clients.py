"""The entries by which clients of the Model Context Protocol on this host start `cloche mcp`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass

from . import json_text, toml_text
from .host_config import FileEdit, edited, undone

NAME = "cloche"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    """Say where a client keeps its servers: a file in the user's home, or in a project; the table in it.

    `extra` are further keys of an entry; with `is_list` the command is one list of words.
    """

    user_file: str = ""
    project_file: str = ""
    table: tuple[str, ...] = ("mcpServers",)
    extra: Mapping[str, Any] | None = None
    is_list: bool = False


CLIENTS: Mapping[str, ClientRow] = {
    "claude-desktop": ClientRow(user_file=".config/Claude/claude_desktop_config.json"),
    "claude": ClientRow(user_file=".claude.json", project_file=".mcp.json"),
    "cursor": ClientRow(user_file=".cursor/mcp.json", project_file=".cursor/mcp.json"),
    "vscode": ClientRow(
        user_file=".config/Code/User/mcp.json", project_file=".vscode/mcp.json", table=("servers",),
        extra={"type": "stdio"},
    ),
    "codex": ClientRow(user_file=".codex/config.toml", project_file=".codex/config.toml", table=("mcp_servers",)),
    "gemini": ClientRow(user_file=".gemini/settings.json", project_file=".gemini/settings.json"),
    "opencode": ClientRow(
        user_file=".config/opencode/opencode.json", project_file="opencode.json", table=("mcp",),
        extra={"type": "local", "enabled": True}, is_list=True,
    ),
}  # fmt: skip


def file_of(client: str, home: str, project: str | None) -> str:
    """Return the file with a client's servers. Raises InvalidRequest."""
    row = CLIENTS.get(client)
    if row is None:
        raise InvalidRequest(f"mcp install: {client!r} is unknown; known ones: {', '.join(CLIENTS)}")
    name = row.user_file if project is None else row.project_file
    if not name:
        raise InvalidRequest(f"mcp install: {client} has no such file for a project; leave --project out")
    return f"{home if project is None else project}/{name}"


def installed(client: str, home: str, project: str | None, words: Sequence[str]) -> FileEdit:
    """Return the edit that adds the server, or replaces it, by the words that start it."""
    path = file_of(client, home, project)
    row = CLIENTS[client]
    command: dict[str, Any] = {"command": list(words)} if row.is_list else {"command": words[0], "args": [*words[1:]]}
    entry = {**(row.extra or {}), **command}

    def add(text: str, name: str) -> str:
        if path.endswith(".toml"):
            return toml_text.with_table(toml_text.without(text, [[*row.table, NAME]]), [*row.table, NAME], entry)
        return json_text.put(text, [*row.table, NAME], entry, name)

    return edited(path, add, below=project or "")


def removed(client: str, home: str, project: str | None) -> FileEdit:
    """Return the edit that takes the server out."""
    path = file_of(client, home, project)
    place = [*CLIENTS[client].table, NAME]

    def take(text: str, name: str) -> str:
        if path.endswith(".toml"):
            return toml_text.without(text, [place])
        present = json_text.parse(text or "{}", name).at(place)
        return json_text.remove(text, place, name) if present is not None else text

    return undone(path, take, below=project or "")
