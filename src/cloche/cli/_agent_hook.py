"""`cloche agent hook` and `cloche agent _rewrite`: commands of an agent on the host run in a sandbox."""

from __future__ import annotations

import json
import os
import sys

from cloche.core.errors import InvalidRequest

from ._acts import yes_option
from ._agents import agent
from ._host_files import settle
from .options import argument, flag, option, sandbox_options
from .output import say


def _options(allow: tuple[str, ...], secrets: tuple[str, ...]) -> list[str]:
    return [
        word for name, values in (("--allow", allow), ("--secret", secrets)) for one in values for word in (name, one)
    ]


@agent.command("hook")
@argument("name", metavar="AGENT", help="claude, codex, gemini or opencode.")
@flag("--project", help="For the current project alone.")
@flag("--no-questions", "no_questions", help="claude does not ask its user before each command.")
@flag("--remove", help="Undo it.")
@flag("--print", "only_prints", help="Show what would be written, and write nothing.")
@yes_option
@option("--allow", metavar="HOST", multiple=True, help="Commands may reach this host. Repeatable.")
@sandbox_options("secrets")
def _hook(
    name: str,
    project: bool,
    no_questions: bool,
    remove: bool,
    only_prints: bool,
    yes: bool,
    allow: tuple[str, ...],
    options: dict[str, tuple[str, ...]],
) -> int:
    """Have the commands of an agent run in a sandbox.

    This writes the configuration of an agent on this host, for all your projects, and shows the difference first. The
    agent edits the project's files itself. Its commands see them, and their harmless changes are written to them. If
    Cloche cannot run a command, the command is not run.
    """
    from cloche.coding_agents import host_hooks
    from cloche.coding_agents.places import project_folder

    home = os.path.expanduser("~")
    folder = project_folder(os.getcwd()) if project else None
    if remove:
        return settle(host_hooks.removed(name, home, folder), yes=yes, only_prints=only_prints, is_undo=True)
    words = _options(allow, tuple(options.get("secrets") or ()))
    edits = host_hooks.installed(name, home, folder, words, is_allowed=no_questions)
    code, row = settle(edits, yes=yes, only_prints=only_prints), host_hooks.hook_row(name)
    if row.start and not (folder and row.keeps_on):
        say(f"a project's own settings can switch hooks off; start it so: {row.start}")
    return code


@agent.command("_rewrite", hidden=True)
@argument("name", metavar="AGENT", help="The agent that asks.")
@flag("--no-questions", "no_questions", help="Tell it not to ask its user.")
@option("--allow", metavar="HOST", multiple=True, help="As in `hook`.")
@sandbox_options("secrets")
def _rewrite(name: str, no_questions: bool, allow: tuple[str, ...], options: dict[str, tuple[str, ...]]) -> int:
    """Answer an event of an agent's hook on standard input."""
    from cloche.coding_agents import host_hooks

    data = sys.stdin.buffer.read(host_hooks.MOST_EVENT_BYTES + 1)
    try:
        event = json.loads(data) if len(data) <= host_hooks.MOST_EVENT_BYTES else None
    except (ValueError, RecursionError):
        event = None
    words = _options(allow, tuple(options.get("secrets") or ()))
    answer = host_hooks.rewritten(name, event, words, is_allowed=no_questions)
    try:
        print(json.dumps(answer), flush=True)
    except OSError as error:
        raise InvalidRequest(f"hook: the answer cannot be written: {error.strerror}") from error
    return 0
