"""`cloche agent login` and `cloche agent logout`: one login of an agent for all projects of a user."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape

from ._agents import agent
from .options import argument
from .output import say

ENDS_S = 3.0  # of an agent that only logs in


@agent.command("login")
@argument("name", metavar="NAME", help="An agent of `cloche agent list`.")
def _login(name: str) -> int:
    """Log an agent in, once for all projects.

    The agent's own login runs in a sandbox without a project. Its link opens in your browser, or is printed. The tokens
    are kept outside, encrypted; every sandbox of the agent has placeholders.
    """
    import asyncio

    return asyncio.run(_log_in(name))


@agent.command("logout")
@argument("name", metavar="NAME", help="An agent of `cloche agent list`.")
def _logout(name: str) -> int:
    """Forget an agent's login, in all sandboxes. Its provider still has it: revoke it there."""
    from cloche.coding_agents.logins import forget_login
    from cloche.coding_agents.own_rows import agent_named

    if not forget_login(agent_named(name).name):
        raise InvalidRequest(f"agent logout: there is no login of {name}")
    print(f"forgotten: the login of {name}; end it at its provider, too, if others may have it")
    return 0


async def _log_in(name: str) -> int:
    import asyncio

    from cloche.coding_agents.login_sandbox import opened_to_log_in
    from cloche.coding_agents.logins import login_state

    from ._attached import run_in

    before = None
    with suppress(InvalidRequest):  # it cannot be read, and is replaced
        before = login_state(name)
    async with opened_to_log_in(name) as opened:
        links = asyncio.gather(opened.pass_links_on(_tell), _tell_when_kept(name, before))
        try:
            await run_in(opened.sandbox, opened.command, cwd=opened.home, env=opened.env, has_terminal=os.isatty(0))
        finally:
            links.cancel()
    if login_state(name) in (None, before):
        say(f"no login of {name} was made")
        return 1
    say(f"logged in: {name}, for all projects of this user")
    return 0


async def _tell_when_kept(name: str, before: tuple[int, str] | None) -> None:
    """Say when there is a login, for an agent that goes on then."""
    import asyncio

    from cloche.coding_agents.logins import login_state

    while True:
        await asyncio.sleep(1)
        if login_state(name) not in (None, before):
            break
    await asyncio.sleep(ENDS_S)
    _tell("there is a login now; leave the agent")


def _tell(text: str) -> None:
    """Print a line, also while the terminal is the agent's."""
    print(f"\r\ncloche: {escape(text)}\r", file=sys.stderr, flush=True)
