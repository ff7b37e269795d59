"""`cloche agent`: a coding agent in a sandbox, on the current folder."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from cloche.core.errors import InvalidRequest

from .app import root
from .options import Command, CommandGroup, argument, flag, json_option, option, sandbox_options
from .output import exit_code_of, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cloche.coding_agents.launch import Launch

    from ._unattended import Ending


class _Agents(CommandGroup):
    """Have a command for each agent of the table, beside the subcommands in the modules `_agent_*`."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of an agent, or a subcommand."""
        from cloche.coding_agents.table import TABLE

        if cmd_name not in self.commands and cmd_name in TABLE:
            title = TABLE[cmd_name].title
            return Command(
                cmd_name, params=_run.params, callback=partial(_call, cmd_name), help=_run.help,
                short_help=f"{title}, on the current folder.", context_settings=_run.context_settings,
            )  # fmt: skip
        if cmd_name not in self.commands:
            _import_subcommands()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the agents, then the subcommands."""
        from cloche.coding_agents.table import TABLE

        _import_subcommands()
        return [*TABLE, *(name for name in super().list_commands(ctx) if not name.startswith("_"))]


def _import_subcommands() -> None:
    import pkgutil

    for module in pkgutil.iter_modules(import_module(str(__package__)).__path__):
        if module.name.startswith("_agent_"):
            import_module(f"{__package__}.{module.name}")


@root.group("agent", cls=_Agents, help="Run a coding agent in a sandbox, on the current folder.")
def agent() -> None:
    """Hold the subcommands."""


@agent.command("_run", hidden=True)
@argument("arguments", nargs=-1, metavar="-- ARGUMENTS", help="Words for the agent itself.")
@option("--print", "prompt", metavar="PROMPT", help="Run it once with this prompt, without a terminal.")
@flag("--ask", help="Leave the agent's own questions on.")
@option("--allow", metavar="HOST", multiple=True, help="Also reach this host. Repeatable.")
@option("--also", metavar="DIR", multiple=True, help="Also show this folder, read-only. Repeatable.")
@sandbox_options("secrets", "memory", "cpus", "pids", "disk")
@flag("--commit", "commits", help="With --print: write the changes that need no review to the project.")
@option("--branch", metavar="BRANCH", help="With --print: make the changes a commit on this new git branch.")
@json_option("Print what happened as JSON, with --print.")
def _run(**_: Any) -> int:  # noqa: ANN401 - see _call
    """Run the agent in a sandbox, on a view of the current project.

    The project is the folder of the git repository, or the current one. Nothing is written to it before you have seen
    the changes.
    """
    raise NotImplementedError


def _call(
    name: str,
    arguments: tuple[str, ...],
    prompt: str | None,
    ask: bool,
    allow: tuple[str, ...],
    also: tuple[str, ...],
    options: Mapping[str, Any],
    commits: bool,
    branch: str | None,
    as_json: bool,
) -> int:
    import asyncio

    from cloche.coding_agents.launch import prepare
    from cloche.coding_agents.plan import AgentOptions

    from ._unattended import Ending

    if prompt is None and (as_json or commits or branch):
        raise InvalidRequest("--json, --commit and --branch are for a run without a terminal: --print PROMPT")
    if commits and branch:
        raise InvalidRequest("--commit writes to the project, --branch to a git branch; give one of them")
    settings = {key: value for key, value in options.items() if value is not None and key != "secrets"}
    chosen = AgentOptions(
        also=also, hosts=allow, secrets=tuple(options.get("secrets") or ()), settings=settings, asks=ask, prompt=prompt,
        arguments=arguments,
    )  # fmt: skip
    return asyncio.run(_run_agent(prepare(name, os.getcwd(), chosen), Ending(commits, branch), as_json=as_json))


async def _run_agent(launch: Launch, ending: Ending, *, as_json: bool) -> int:
    from cloche.coding_agents.launch import opened

    from ._attached import run_in
    from ._review import settle_attached
    from ._unattended import counted, run_once

    async with opened(launch, say) as sandbox:
        if launch.options.prompt is not None:
            return await run_once(sandbox, launch, ending, as_json=as_json)
        has_terminal = os.isatty(0)
        result = await run_in(
            sandbox, launch.command(), cwd=launch.cwd, env=launch.environment(), has_terminal=has_terminal
        )
        if has_terminal:
            await settle_attached(sandbox, review=True)
        elif changes := (await sandbox.diff()).changes:
            say(f"{counted(len(changes))} kept: cloche agent review {launch.place.sandbox}")
    return exit_code_of(result)
