"""The group `cloche agent`: a command for each agent, and the subcommands in the modules `_agent_*`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import click

from cloche.core.errors import ClocheError

from .app import root
from .options import CommandGroup
from .output import exit_code_of_error, say

if TYPE_CHECKING:
    from cloche.coding_agents.row import CodingAgent


class _Agents(CommandGroup):
    """Have a command for each agent of the table, beside the subcommands in the modules `_agent_*`.

    `command_of` makes the command of an agent from its name and its title; `agent.py` sets it.
    """

    command_of: Callable[[str, str], click.Command]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of an agent, or a subcommand."""
        agents = _known() if cmd_name not in self.commands else {}
        if cmd_name in agents:
            return self.command_of(cmd_name, agents[cmd_name].title)
        if cmd_name not in self.commands:
            _import_subcommands()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the agents, then the subcommands."""
        _import_subcommands()
        return [*_known(), *(name for name in super().list_commands(ctx) if not name.startswith("_"))]


def _known() -> Mapping[str, CodingAgent]:
    """Return all agents by name. A wrong configuration ends the command with one line, as it ends every other one."""
    from cloche.coding_agents.own_rows import known_agents

    try:
        return known_agents()
    except ClocheError as error:  # `guarded` would handle signals, also where commands are only listed
        say(str(error))
        raise click.exceptions.Exit(exit_code_of_error(error)) from error


def _import_subcommands() -> None:
    import pkgutil

    for module in pkgutil.iter_modules(import_module(str(__package__)).__path__):
        if module.name.startswith("_agent_"):
            import_module(f"{__package__}.{module.name}")


agent = _Agents("agent", help="Run a coding agent in a sandbox, on the current folder.")
root.add_command(agent)
