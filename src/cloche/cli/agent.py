"""`cloche agent`: a coding agent in a sandbox, on the current folder."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import replace

from ._agents import agent
from .options import Command, argument, flag, json_option, option, sandbox_options
from .output import exit_code_of, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cloche.coding_agents.launch import Launch
    from cloche.execution.sandbox import AsyncSandbox

    from ._unattended import Ending

OURS = ("secrets", "toolchains")  # options that add to what the agent's row has


@agent.command("_run", hidden=True)
@argument("arguments", nargs=-1, metavar="-- ARGUMENTS", help="Words for the agent itself.")
@option("--print", "prompt", metavar="PROMPT", help="Run it once with this prompt, without a terminal.")
@flag("--ask", "asks", help="Leave the agent's own questions on.")
@option("--allow", "hosts", metavar="HOST", multiple=True, help="Also reach this host. Repeatable.")
@option(
    "--host-port", "host_ports", metavar="127.0.0.1:PORT", multiple=True,
    help="Also reach this port of this machine's loopback, at the same address. Repeatable.",
)  # fmt: skip
@option("--also", metavar="DIR", multiple=True, help="Also show this folder, read-only. Repeatable.")
@flag("--fork", "forks", help="Start another one on this folder, with changes and a home folder of its own.")
@option("--number", type=int, default=0, metavar="N", help="Go on in fork N of this folder.")
@sandbox_options("secrets", "toolchains", "memory", "cpus", "pids", "disk")
@option("--check", metavar="COMMAND", help="Before the review: run this line of shell on the result, in a copy.")
@option("--branch", metavar="BRANCH", help="Make the changes a commit on this new git branch, and write no file.")
@flag("--commit", "commits", help="With --print: write the changes that need no review to the project.")
@json_option("With --print: print what happened as JSON.")
def _run(**_: Any) -> int:  # noqa: ANN401 - see _call
    """Run the agent in a sandbox, on a view of the current project.

    The project is the folder of the git repository, or the current one. Nothing is written to it before you have seen
    the changes.
    """
    raise NotImplementedError


def _command_of(name: str, title: str) -> Command:
    """Return the command of an agent: `_run` with its name."""
    return Command(
        name, params=_run.params, callback=partial(_call, name), help=_run.help,
        short_help=f"{title}, on the current folder.", context_settings=_run.context_settings,
    )  # fmt: skip


agent.command_of = _command_of


def _call(name: str, *, options: Mapping[str, Any], as_json: bool, **values: Any) -> int:  # noqa: ANN401 - see _run
    import asyncio

    from cloche.coding_agents.forks import with_number
    from cloche.coding_agents.launch import prepare
    from cloche.coding_agents.plan import AgentOptions
    from cloche.execution.host_ports import read_host_ports

    from ._unattended import Ending

    ending = Ending(commits=values.pop("commits"), branch=values.pop("branch"), check=values.pop("check"))
    if values["prompt"] is None and (as_json or ending.commits):
        raise InvalidRequest("--json and --commit are for a run without a terminal: --print PROMPT")
    if ending.commits and ending.branch:
        raise InvalidRequest("--commit writes to the project, --branch to a git branch; give one of them")
    values["host_ports"] = read_host_ports(values["host_ports"])
    settings = {key: value for key, value in options.items() if value is not None and key not in OURS}
    values |= {key: tuple(options.get(key) or ()) for key in OURS}
    number = values.pop("number")
    is_new = values.pop("forks")
    launch = prepare(name, os.getcwd(), AgentOptions(settings=settings, **values))
    launch = replace(launch, place=with_number(launch.place, number, is_new=is_new))
    if is_new:
        say(f"fork {launch.place.number} is {launch.place.sandbox}; again: --number {launch.place.number}")
    return asyncio.run(_run_agent(launch, ending, as_json=as_json))


async def _run_agent(launch: Launch, ending: Ending, *, as_json: bool) -> int:
    from cloche.coding_agents.launch import is_open, opened

    from ._agent_state import settle_state
    from ._attached import run_in
    from ._unattended import counted, run_once

    has_terminal = launch.options.prompt is None and os.isatty(0)
    is_settled = not (has_terminal and is_open(launch.place))  # the agent may run in it, and is only attached to
    if is_settled:
        settle_state(launch.place, launch.row)
    async with opened(launch, say) as sandbox:
        if launch.options.prompt is not None:
            return await run_once(sandbox, launch, ending, as_json=as_json)
        if has_terminal:
            return await _run_with_terminal(sandbox, launch, ending, is_settled=is_settled)
        result = await run_in(sandbox, launch.command(), cwd=launch.cwd, env=launch.environment(), has_terminal=False)
        if changes := (await sandbox.diff()).changes:
            say(f"{counted(len(changes))} kept: cloche agent review {launch.place.sandbox}")
    return exit_code_of(result)


async def _run_with_terminal(sandbox: AsyncSandbox, launch: Launch, ending: Ending, *, is_settled: bool) -> int:
    """Start the agent on this terminal, or attach to the one that runs; then review what it has changed."""
    from cloche.coding_agents.conversations import has_conversation
    from cloche.coding_agents.terminal_note import process_of

    from ._agent_attach import tell_end
    from ._agent_state import settle_state
    from ._kept_terminal import Detached, attach_agent_terminal, run_agent_terminal, tell_detached

    place, kept = launch.place, process_of(launch.place.state)
    runs = any(process.id == kept and process.exit_code is None for process in await sandbox.processes())
    if runs and launch.options.arguments:
        raise InvalidRequest(
            f"{launch.row.name} runs in this project already; attach to it without arguments, end it (cloche agent "
            f"stop {place.sandbox}), or start another one beside it: --fork"
        )
    began = time.monotonic()
    if runs:
        end = await attach_agent_terminal(sandbox, state=place.state)
    else:
        if not is_settled:
            settle_state(place, launch.row)
        resumes = bool(kept) and not launch.options.arguments and has_conversation(place.home, launch.row)
        command, env = launch.command(resumes=resumes), launch.environment()
        end = await run_agent_terminal(sandbox, command, env, launch.cwd, state=place.state)
    if isinstance(end, Detached):
        return tell_detached(end, place.sandbox)
    await tell_end(sandbox, place, seconds=time.monotonic() - began)
    await _review(sandbox, launch, ending)
    return end


async def _review(sandbox: AsyncSandbox, launch: Launch, ending: Ending) -> None:
    import asyncio

    from cloche.coding_agents import archives

    from ._agent_review import review

    place = launch.place
    end = await review(
        sandbox, folder=place.folder, check=ending.check, branch=ending.branch, saved=place.saved,
        env=launch.check_environment(),
    )  # fmt: skip
    if not end.left:
        await asyncio.to_thread(archives.settle, place)
