"""`cloche agent NAME --print PROMPT`: one run of an agent without a terminal, for scripts and continuous integration.

The exit code is the agent's own, if it failed; else EXIT_CHANGED if the project would change or has changed, and 0 if
the agent changed nothing. Nothing is written without --commit or --branch, and never a dangerous change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cloche.core.escape import escape, escape_name

from ._attached import run_in
from .output import exit_code_of, say

if TYPE_CHECKING:
    from cloche.coding_agents.launch import Launch
    from cloche.core.changes import Change, Committed, Diff
    from cloche.core.result import Result
    from cloche.execution.sandbox import AsyncSandbox

EXIT_CHANGED = 10
MOST_TOLD = 20


def counted(count: int) -> str:
    """Return a number of changes as words."""
    return f"{count} {'change' if count == 1 else 'changes'}"


class Ending(NamedTuple):
    """Say what happens to the changes at the end: they are written, become a commit on a branch, or stay."""

    commits: bool = False
    branch: str | None = None


async def run_once(sandbox: AsyncSandbox, launch: Launch, ending: Ending, *, as_json: bool) -> int:
    """Run the agent with its prompt, deal with its changes, and return the exit code."""
    result = await _run(sandbox, launch, as_json=as_json)
    diff = await sandbox.diff()
    committed = await _settle(sandbox, diff, launch, ending)
    held = [change for change in diff.changes if change.dangers or change.conflict]
    if as_json:
        print(json.dumps(_as_dict(launch, result, diff, committed), default=str))
    else:
        _tell(launch, diff, held, committed)
    code = exit_code_of(result)
    return code or (EXIT_CHANGED if diff.changes else 0)


async def _run(sandbox: AsyncSandbox, launch: Launch, *, as_json: bool) -> Result:
    if not as_json:
        return await run_in(
            sandbox, launch.command(), cwd=launch.cwd, env=launch.environment(), has_terminal=False, reads=False
        )
    process = await sandbox.start(launch.command(), cwd=launch.cwd, env=launch.environment())
    async with process:
        await process.close_stdin()
        return await process.wait()


async def _settle(sandbox: AsyncSandbox, diff: Diff, launch: Launch, ending: Ending) -> Committed | None:
    """Write the changes that need no question, or make a commit of all of them on a branch."""
    if not diff.changes or not (ending.commits or ending.branch):
        return None
    if ending.branch is not None:
        message = f"{launch.row.title}: {launch.options.prompt}"
        paths = [change.path for change in diff.changes if not change.conflict]
        return await sandbox.commit(diff, paths=paths, dangerous=True, branch=ending.branch, message=message)
    paths = [change.path for change in diff.changes if not (change.dangers or change.conflict)]
    skipped = [change.path for change in diff.changes if change.dangers or change.conflict]
    return await sandbox.commit(diff, theirs=skipped) if paths else None


def _as_dict(launch: Launch, result: Result, diff: Diff, committed: Committed | None) -> dict[str, Any]:
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
        "network": result.meta.get("network", []),
    }


def _row(change: Change) -> dict[str, Any]:
    return {
        "path": change.path, "what": change.what, "dangers": list(change.dangers), "conflict": change.conflict,
    }  # fmt: skip


def _tell(launch: Launch, diff: Diff, held: Sequence[Change], committed: Committed | None) -> None:
    name = launch.place.sandbox
    if not diff.changes:
        say("nothing was changed")
        return
    if committed is None:
        say(f"{counted(len(diff.changes))} kept: cloche agent review {name}")
    else:
        say(f"wrote {len(committed.written)} of {counted(len(diff.changes))}")
        for ref, commit in committed.refs.items():
            say(f"{escape_name(ref)} is {commit}")
    for change in held[:MOST_TOLD]:
        reason = change.conflict or ", ".join(change.dangers)
        say(f"needs a review: {escape_name(change.path)}: {escape(reason)}")
