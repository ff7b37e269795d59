"""`cloche mcp install`: let a client of the Model Context Protocol start `cloche mcp`."""

from __future__ import annotations

import os

import click

from ._acts import yes_option
from ._host_files import settle
from .options import Command, argument, flag

COMMAND_SETTINGS = {"allow_interspersed_args": True, "ignore_unknown_options": True}


@click.command("install", cls=Command, context_settings=COMMAND_SETTINGS)
@argument("client", metavar="CLIENT", help="claude, claude-desktop, cursor, vscode, codex, gemini or opencode.")
@argument("words", nargs=-1, metavar="[-- OPTIONS]", help="Options of `cloche mcp`, for example --workspace .")
@flag("--project", help="In the current project's file, not in the user's.")
@flag("--remove", help="Take the entry out again.")
@flag("--print", "only_prints", help="Show what would be written, and write nothing.")
@yes_option
def install(client: str, words: tuple[str, ...], project: bool, remove: bool, only_prints: bool, yes: bool) -> int:
    """Add `cloche mcp` to a client's configuration, and show the difference first.

    All else in the file stays as it is, comments too. An entry called cloche is replaced.
    """
    from cloche.coding_agents import mcp_clients
    from cloche.coding_agents.host_hooks import own_words
    from cloche.coding_agents.places import project_folder

    home, folder = os.path.expanduser("~"), project_folder(os.getcwd()) if project else None
    if remove:
        edit = mcp_clients.removed(client, home, folder)
    else:
        edit = mcp_clients.installed(client, home, folder, [*own_words(), "mcp", *words])
    return settle([edit], yes=yes, only_prints=only_prints, is_undo=remove)
