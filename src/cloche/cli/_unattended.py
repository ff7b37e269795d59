"""`cloche agent NAME --print PROMPT`: one run of an agent without a terminal, for scripts and continuous integration.

The exit code is the agent's own, if it failed; else EXIT_CHECK_FAILED if the check failed, EXIT_CHANGED if the agent
changed something, and 0 if it changed nothing. Nothing is written without --commit or --branch, and no dangerous change
without a review.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from cloche.coding_agents import archives
from cloche.core.escape import escape, escape_name

from ._attached import run_in
from .output import exit_code_of, say

if TYPE_CHECKING:
    from cloche.coding_agents.launch import Launch
    from cloche.core.changes import Change, Committed, Diff
    from cloche.core.result import Result
    from cloche.execution.sandbox import AsyncSandbox

EXIT_CHANGED, EXIT_CHECK_FAILED = 10, 11
MOST_TOLD = 20


def counted(count: int) -> str:
    """Return a number of changes as words."""
    return f"{count} {'change' if count == 1 else 'changes'}"


class Ending(NamedTuple):
    """Say what happens to the changes at the end: they are written, become a commit on a branch, or stay.

    `check` is a line of shell that is run on the result first.
    """

    commits: bool = False
    branch: str | None = None
    check: str | None = None


async def run_once(sandbox: AsyncSandbox, launch: Launch, ending: Ending, *, as_json: bool) -> int:
    """Run the agent with its prompt, deal with its changes, and return the exit code."""
    sandbox.network.ask(_nobody)
    result = await _run(sandbox, launch, as_json=as_json)
    diff = await sandbox.diff()
    chosen = _choose(diff, ending)
    check = None
    if ending.check and chosen.paths:
        check = await sandbox.try_commit(
            ending.check, diff, theirs=chosen.left, env=launch.check_environment(), timeout="1h"
        )
    committed = None
    if chosen.paths and (check is None or check.ok) and (ending.commits or ending.branch):
        message = f"{launch.row.title}: {launch.options.prompt}" if ending.branch else None
        committed = await sandbox.commit(
            diff,
            theirs=chosen.left,
            dangerous=bool(ending.branch),
            branch=ending.branch,
            message=message,
            as_user=True,
        )
        if not ending.branch and not chosen.left:
            await asyncio.to_thread(archives.settle, launch.place)
    if as_json:
        print(json.dumps(_as_dict(launch, result, diff, committed, check), default=str))
    else:
        _tell(launch, diff, chosen, committed, check)
    failed = EXIT_CHECK_FAILED if check is not None and not check.ok else 0
    return exit_code_of(result) or failed or (EXIT_CHANGED if diff.changes else 0)


async def _nobody(_host: str, _port: int) -> None:
    """Decide nothing: an unlisted host is refused at once, and asked about where a user is there again."""


class _Chosen(NamedTuple):
    """Hold the paths to write, and those that stay: a conflict, or a dangerous change of a file."""

    paths: tuple[str, ...]
    left: tuple[str, ...]


def _choose(diff: Diff, ending: Ending) -> _Chosen:
    """Choose what needs no question; a branch takes dangerous changes too, since no file is written."""
    stays = [bool(change.conflict) or bool(change.dangers and not ending.branch) for change in diff.changes]
    return _Chosen(
        tuple(change.path for change, is_left in zip(diff.changes, stays, strict=True) if not is_left),
        tuple(change.path for change, is_left in zip(diff.changes, stays, strict=True) if is_left),
    )


async def _run(sandbox: AsyncSandbox, launch: Launch, *, as_json: bool) -> Result:
    if not as_json:
        return await run_in(
            sandbox, launch.command(), cwd=launch.cwd, env=launch.environment(), has_terminal=False, reads=False
        )
    process = await sandbox.start(launch.command(), cwd=launch.cwd, env=launch.environment())
    async with process:
        await process.close_stdin()
        return await process.wait()


def _as_dict(
    launch: Launch, result: Result, diff: Diff, committed: Committed | None, check: Result | None
) -> dict[str, Any]:
    return {
        "agent": launch.row.name,
        "sandbox": launch.place.sandbox,
        "project": launch.place.folder,
        "status": str(result.status),
        "exit_code": result.exit_code,
        "output": result.stdout,
        "errors": result.stderr,
        "seconds": result.duration,
        "changes": [_row(change) for change in diff.changes],
        "diff": diff.id if diff.changes else None,
        "written": list(committed.written) if committed is not None else [],
        "refs": dict(committed.refs) if committed is not None else {},
        "check": None if check is None else {"passed": check.ok, "output": check.stdout + check.stderr},
        "network": result.meta.get("network", []),
    }


def _row(change: Change) -> dict[str, Any]:
    return {
        "path": change.path, "what": change.what, "dangers": list(change.dangers), "conflict": change.conflict,
    }  # fmt: skip


def _tell(launch: Launch, diff: Diff, chosen: _Chosen, committed: Committed | None, check: Result | None) -> None:
    if not diff.changes:
        say("nothing was changed")
        return
    if check is not None:
        lines = [*(check.stdout + check.stderr).splitlines()[-MOST_TOLD:]] if not check.ok else []
        say(f"the check {'passed' if check.ok else f'failed: {check.status}, exit code {check.exit_code}'}")
        for line in lines:
            say(f"  {escape(line)}")
    if committed is None:
        say(f"{counted(len(diff.changes))} kept: cloche agent review {launch.place.sandbox}")
    else:
        if committed.written or not committed.refs:  # a branch has them otherwise
            say(f"wrote {len(committed.written)} of {counted(len(diff.changes))}")
        for ref, commit in committed.refs.items():
            say(f"{escape_name(ref)} is {commit}")
    for change in [change for change in diff.changes if change.path in chosen.left][:MOST_TOLD]:
        reason = change.conflict or ", ".join(change.dangers)
        say(f"needs a review: {escape_name(change.path)}: {escape(reason)}")
