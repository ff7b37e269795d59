"""`cloche agent attach`, `detach`, `status` and `stop`: agents that go on without this terminal."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from cloche.core.errors import ClocheError
from cloche.core.escape import escape_line, escape_name
from cloche.core.limits import format_size

from ._agents import agent
from .options import argument, json_option, option
from .output import say, show

if TYPE_CHECKING:
    from cloche.coding_agents.places import AgentPlace
    from cloche.coding_agents.running import AgentStatus
    from cloche.execution.sandbox import AsyncSandbox

NAME_HELP = "An agent on this project, or a sandbox of one. Default: the only one."


def _found(name: str | None) -> AgentPlace:
    from cloche.coding_agents.running import find_agent

    return find_agent(name, os.getcwd())


@agent.command("attach")
@argument("name", metavar="[NAME]", required=False, help=NAME_HELP)
@option("--detach-keys", metavar="KEYS", default="", help="Keys that detach. Default: ctrl-p,ctrl-q.")
def _attach(name: str | None, detach_keys: str) -> int:
    """Attach this terminal to an agent that runs.

    It is taken from any other terminal. Ctrl-P Ctrl-Q detaches again, and the agent goes on.
    """
    from ._attached import check_terminal

    check_terminal()
    return asyncio.run(_attached(_found(name), detach_keys))


async def _attached(place: AgentPlace, keys: str) -> int:
    from cloche.coding_agents.own_rows import agent_named
    from cloche.coding_agents.watch import WatchSettings, start_watch
    from cloche.execution.sandbox import AsyncSandbox

    from ._kept_terminal import Detached, attach_agent_terminal, tell_detached

    start_watch(place, WatchSettings(state_bytes=agent_named(place.agent).state_bytes))
    async with AsyncSandbox.attach(place.sandbox) as sandbox:
        end = await attach_agent_terminal(sandbox, state=place.state, keys=keys)
    if isinstance(end, Detached):
        return tell_detached(end, place.sandbox)
    say(f"the agent has ended; what it changed: cloche agent review {place.sandbox}")
    return end


@agent.command("detach")
@argument("name", metavar="[NAME]", required=False, help=NAME_HELP)
def _detach(name: str | None) -> int:
    """Detach an agent from its terminal; it goes on."""
    place = _found(name)

    async def detach() -> None:
        from cloche.execution.sandbox import AsyncSandbox

        from ._kept_terminal import detach_agent_terminal

        async with AsyncSandbox.attach(place.sandbox) as sandbox:
            await detach_agent_terminal(sandbox, state=place.state)

    asyncio.run(detach())
    print(place.sandbox)
    return 0


@agent.command("stop")
@argument("name", metavar="[NAME]", required=False, help=NAME_HELP)
def _stop(name: str | None) -> int:
    """Save an agent's work, and end its sandbox.

    The next start goes on from there.
    """
    from cloche.coding_agents.running import stop

    place = _found(name)
    archive = asyncio.run(stop(place))
    if archive is None:
        say("nothing was changed, so nothing was saved")
    else:
        count = "1 changed path is" if archive.changes == 1 else f"{archive.changes} changed paths are"
        say(f"{count} saved; cloche agent {place.agent} goes on from there")
        for path, reason in list(archive.left_out.items())[:10]:
            say(f"not saved: {escape_name(path)}: {escape_line(reason)}")
    print(place.sandbox)
    return 0


@agent.command("status")
@argument("name", metavar="[NAME]", required=False, help=NAME_HELP)
@json_option()
def _status(name: str | None, as_json: bool) -> int:
    """Show what the open agents do.

    One alone is shown with its changes, its network and its resources.
    """
    import json

    from cloche.coding_agents.running import open_agents, status

    if name is None:
        rows = [_short(asyncio.run(status(place))) for place in open_agents()]
        if not rows and not as_json:
            print("no agent is open")
            return 0
        show(rows, as_json=as_json, below=("folder", "problems"))
        return 0
    described = asyncio.run(status(_found(name)))
    if as_json:
        print(json.dumps(described.as_dict(), indent=2))
    else:
        print("\n".join(status_lines(described)))
    return 0


def _short(described: AgentStatus) -> dict[str, object]:
    from .ps import spelled

    return {
        "sandbox": described.sandbox, "state": described.state, "terminal": described.is_attached,
        "age": spelled(round(described.age_s)), "files": described.files, "dangers": described.dangers,
        "refused": len(described.network.refused), "memory": format_size(described.memory_bytes),
        "saved": _ago(described.saved_ago_s), "folder": escape_name(described.folder),
        "problems": "; ".join(described.problems),
    }  # fmt: skip


def _ago(seconds: float | None) -> str:
    from .ps import spelled

    return "never" if seconds is None else f"{spelled(round(seconds))} ago"


async def tell_end(sandbox: AsyncSandbox, place: AgentPlace, *, seconds: float) -> None:
    """Say how long an agent ran on this terminal, what it used and which hosts it reached, after its end."""
    from cloche.coding_agents.running import end_of
    from cloche.coding_agents.watch import read_watched

    from .ps import spelled

    try:
        cpu_s, network = await end_of(sandbox, place)
    except ClocheError:  # the sandbox has ended with it
        return
    watched = read_watched(place)
    if watched is not None and watched.stopped:
        say(watched.stopped)
    say(f"{place.agent} has ended after {spelled(round(seconds))}, with {spelled(round(cpu_s))} of processor")
    for line in network.lines():
        say(line)


def status_lines(described: AgentStatus) -> list[str]:
    """Return what is shown of one agent, a fact on each line, escaped."""
    from .ps import spelled

    terminal = "on a terminal" if described.is_attached else "without a terminal"
    processes = _counted(described.processes, "process", "processes")
    changes = f"{_counted(described.files, 'file', 'files')}, {described.dangers} dangerous"
    changes += f", {_counted(described.conflicts, 'conflict', 'conflicts')}" if described.conflicts else ""
    sizes = [format_size(size) for size in (described.memory_bytes, described.state_bytes)]
    return [
        f"{described.sandbox}: {described.state}, {terminal}, for {spelled(round(described.age_s))}",
        f"project: {escape_name(described.folder)}",
        f"changed: {changes}; cloche agent review {described.sandbox}",
        f"saved: {_ago(described.saved_ago_s)}",
        f"{processes}, {sizes[0]} of memory, {described.cpu_s:.0f} s of processor",
        f"home folder: {sizes[1]}",
        *described.network.lines(),
        *(f"refused {row.host}:{row.port}: {row.why}" for row in described.network.refused if row.why),
        *map(escape_line, described.problems),
    ]


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
