"""`cloche agent install` and `cloche agent list`: where each coding agent is from, and whether it can log in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest

from ._agents import agent
from .options import argument, json_option, option
from .output import show, showing_progress

if TYPE_CHECKING:
    from cloche.coding_agents.row import CodingAgent


@agent.command("install")
@argument("name", metavar="NAME", help="An agent of `cloche agent list`.")
@option("--version", metavar="VERSION", default="", help="This version. Default: the newest.")
def _install(name: str, version: str) -> int:
    """Install an agent for this user, from npm or PyPI.

    Its files are read-only. Install scripts run for packages that the agent's row names alone, each in a sandbox
    without a network. An agent on your PATH is used before an installed one.
    """
    import asyncio

    from cloche.coding_agents.install import install_agent
    from cloche.coding_agents.own_rows import agent_named

    row = agent_named(name)
    with showing_progress():
        installed = asyncio.run(install_agent(row, version))
    print(f"installed {row.title} {installed.version}; start it with: cloche agent {name}")
    return 0


@agent.command("list")
@json_option()
def _list(as_json: bool) -> int:
    """List the agents, with keys, logins and sandboxes here."""
    from cloche.coding_agents.own_rows import known_agents
    from cloche.coding_agents.places import project_folder
    from cloche.coding_agents.running import open_agents

    here = open_agents(project_folder(os.getcwd()))
    rows = [_row(row, [place.sandbox for place in here if place.agent == row.name]) for row in known_agents().values()]
    show(rows, as_json=as_json)
    return 0


def _row(row: CodingAgent, sandboxes: list[str]) -> dict[str, object]:
    from cloche.coding_agents.find import find_program
    from cloche.coding_agents.installed import newest

    installed, path = newest(row.name), find_program(row.program, os.environ.get("PATH", ""))
    where = path or (f"cloche agent install ({installed.version})" if installed is not None else "not installed")
    keys = [name for secret in row.secrets if os.environ.get(name := secret.partition("@")[0])]
    return {
        "agent": row.name, "title": row.title, "installed": where, "keys": ", ".join(keys),
        "login": _login_of(row.name), "sandboxes": ", ".join(sandboxes),
    }  # fmt: skip


def _login_of(name: str) -> str:
    from cloche.coding_agents.logins import login_state

    try:
        state = login_state(name)
    except InvalidRequest:
        return "cannot be read"
    return "" if state is None else f"of {state[1][:16].replace('T', ' ')}"
