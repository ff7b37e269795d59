"""The group `cloche agent`: a command for each agent, and the subcommands in the modules `_agent_*`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import click

from .app import root
from .options import CommandGroup


class _Agents(CommandGroup):
    """Have a command for each agent of the table, beside the subcommands in the modules `_agent_*`.

    `command_of` makes the command of an agent from its name and its title; `agent.py` sets it.
    """

    command_of: Callable[[str, str], click.Command]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of an agent, or a subcommand."""
        from cloche.coding_agents.own_rows import known_agents

        agents = known_agents() if cmd_name not in self.commands else {}
        if cmd_name in agents:
            return self.command_of(cmd_name, agents[cmd_name].title)
        if cmd_name not in self.commands:
            _import_subcommands()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the agents, then the subcommands."""
        from cloche.coding_agents.own_rows import known_agents

        _import_subcommands()
        return [*known_agents(), *(name for name in super().list_commands(ctx) if not name.startswith("_"))]


def _import_subcommands() -> None:
    import pkgutil

    for module in pkgutil.iter_modules(import_module(str(__package__)).__path__):
        if module.name.startswith("_agent_"):
            import_module(f"{__package__}.{module.name}")


agent = _Agents("agent", help="Run a coding agent in a sandbox, on the current folder.")
root.add_command(agent)
