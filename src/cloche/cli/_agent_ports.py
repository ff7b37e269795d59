"""`cloche agent ports`: servers that an agent has started, listed or forwarded to this host's loopback."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from ._agents import agent
from .options import argument, flag, json_option
from .output import say, show


@agent.command("ports")
@argument("name", metavar="[NAME]", required=False, help="An agent on this project, or a sandbox.")
@flag("--forward", "forwards", help="Forward each to 127.0.0.1 here while it listens, until Ctrl-C.")
@json_option()
def _command(name: str | None, forwards: bool, as_json: bool) -> int:
    """List the servers that an agent has started in its sandbox.

    With --forward each is reached at 127.0.0.1 of this machine, at the same port if that is free, also those that are
    started later. Its pages are the agent's work, and run in your browser.
    """
    from cloche.coding_agents.running import named_here

    with suppress(KeyboardInterrupt):
        return asyncio.run(_ports(named_here(name, os.getcwd()), forwards=forwards, as_json=as_json))
    return 0


async def _ports(name: str, *, forwards: bool, as_json: bool) -> int:
    from cloche.coding_agents.dev_servers import dev_servers, forward_all
    from cloche.execution.sandbox import AsyncSandbox

    async with AsyncSandbox.attach(name) as sandbox:
        if forwards:
            await forward_all(sandbox, say)
        ports = dev_servers(await sandbox.ports(), sandbox.policy)
    if ports or as_json:
        show([{"port": port} for port in ports], as_json=as_json)
    else:
        say("no server listens in the sandbox")
    return 0
