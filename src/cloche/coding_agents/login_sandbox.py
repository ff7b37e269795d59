"""A sandbox in which an agent logs in for its user: no project is in it, whose files could have another login made."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, replace
from cloche.execution.home_folder import give_home
from cloche.execution.sandbox import AsyncSandbox

from . import plan
from .launch import Launch, prepare
from .login_links import SCRIPT, SCRIPT_PATH, LinkFolder, callback_port, open_on_host
from .logins import login_of
from .row import Login

LOOK_S = 0.3
_OF_A_PROJECT = ("name", "keep", "lifetime", "workspace", "workspace_disk", "workspace_read")
_WRITES = 'mkdir -p "$(dirname "$0")" && cat > "$0" && chmod 755 "$0" && printenv PATH'


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginSandbox:
    """Hold an open sandbox to log in: the agent's command, its variables, its home inside and on the host."""

    sandbox: AsyncSandbox
    login: Login
    command: list[str]
    env: dict[str, str]
    home: str
    host_home: str

    async def pass_links_on(self, tell: Callable[[str], None]) -> None:
        """Open links of the agent on the host, and let their answers in, until this is cancelled."""
        links = LinkFolder(self.host_home, self.login, tell)
        async with AsyncExitStack() as forwards:
            while True:
                for link in links.take():
                    await self._let_answer_in(link, forwards, tell)
                    if not await asyncio.to_thread(open_on_host, link):
                        tell(f"open this link in a browser of this machine: {link}")
                await asyncio.sleep(LOOK_S)

    async def _let_answer_in(self, link: str, forwards: AsyncExitStack, tell: Callable[[str], None]) -> None:
        port = callback_port(link, self.login)
        if port is None:
            return
        try:
            await forwards.enter_async_context(await self.sandbox.forward(port, port))
        except InvalidRequest as error:
            tell(f"the browser's answer cannot be passed on ({error}); paste the code instead")


@asynccontextmanager
async def opened_to_log_in(name: str) -> AsyncIterator[LoginSandbox]:
    """Open a sandbox that takes the login of an agent. Raises InvalidRequest for one without a known login."""
    launch = prepare(name, "/", plan.AgentOptions())
    if launch.row.login is None:
        keys = ", ".join(launch.row.secrets)
        raise InvalidRequest(f"agent login: no login of {launch.row.title} is known; set one of its keys: {keys}")
    agent_login = await asyncio.to_thread(login_of, launch.row, takes_login=True)
    keywords: Any = {key: value for key, value in launch.keywords().items() if key not in _OF_A_PROJECT}
    keywords |= {"secrets": agent_login.secrets, "on_network": "refuse"}
    sandbox = AsyncSandbox(**keywords)
    place = replace(launch.place, agent="login", number=secrets.randbits(32))
    try:
        give_home(sandbox, place.home, launch.home)
        async with sandbox:
            env = await _environment(sandbox, launch, launch.row.login)
            yield LoginSandbox(
                sandbox=sandbox, login=launch.row.login, command=[*launch.program.words, *launch.row.login.command],
                env=env, home=launch.home, host_home=place.home,
            )  # fmt: skip
    finally:
        await asyncio.to_thread(shutil.rmtree, place.state, ignore_errors=True)


async def _environment(sandbox: AsyncSandbox, launch: Launch, login: Login) -> dict[str, str]:
    """Write the script that has the host open links, and return the variables of the agent."""
    script = f"{launch.home}/{SCRIPT_PATH}"
    path = (await sandbox.exec(["sh", "-c", _WRITES, script], stdin=SCRIPT)).stdout.strip()
    env = plan.environment(launch.row, launch.program, launch.home, launch.home, path, os.environ)
    return {**env, **login.env, "BROWSER": script}
