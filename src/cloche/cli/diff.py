"""`cloche diff`, `commit` and `discard`: the changes of a named sandbox to a folder of the host."""

from __future__ import annotations

import json
import sys

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_name

from ._acts import require_yes, yes_option
from .app import root
from .options import argument, flag, json_option, option
from .output import say, showing_progress

_name = argument("name", metavar="NAME", help="A sandbox that was created with --workspace.")
_paths = argument(
    "paths", nargs=-1, metavar="[PATH]...", help="Paths in the folder, with everything below. Default: all."
)


@root.command("diff", no_args_is_help=True)
@_name
@flag("--patch", help="Print the diffs of text files alone, as git apply takes them.")
@flag("--stat", help="Print one line for each change, and no diffs.")
@json_option()
def _diff(name: str, patch: bool, stat: bool, as_json: bool) -> int:
    """Show the changes of a sandbox to its folder.

    The last line is the id of these changes: `cloche commit NAME --id ID` writes exactly them, or nothing.
    """
    from cloche.sync import Sandbox

    from ._review import show_diff

    if patch and (stat or as_json):
        raise InvalidRequest("--patch prints diffs alone; leave out --stat and --json")
    with showing_progress(), Sandbox.attach(name) as sandbox:
        diff = sandbox.diff()
    if as_json:
        print(json.dumps(diff.as_dict(), default=str))
    elif patch:
        text = escape(diff.patch) if sys.stdout.isatty() else diff.patch
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
    elif not diff.changes and not diff.left_out:
        print("nothing was changed")
    else:
        show_diff(diff, with_patch=not stat, to_stderr=False)
        print(f"id {diff.id}")
    return 0


@root.command("commit", no_args_is_help=True)
@_name
@_paths
@option(
    "--id",
    "wanted",
    metavar="ID",
    help="Write exactly the changes that `cloche diff` showed under this id, or nothing.",
)
@option("--dangerous", metavar="PATH", multiple=True, help="Write this dangerous change, too. Repeatable.")
@option("--ours", metavar="PATH", multiple=True, help="Resolve a conflict with the sandbox's version. Repeatable.")
@option("--theirs", metavar="PATH", multiple=True, help="Resolve a conflict with the host's version. Repeatable.")
@option(
    "--merge", metavar="PATH", multiple=True, help="Resolve a conflict in a text file: merge both versions. Repeatable."
)
@option("--branch", metavar="BRANCH", help="Make a commit on this new git branch, and write no file.")
@option("--author", metavar="AUTHOR", help="The author of that commit: NAME <EMAIL>. Default: you, as git knows you.")
@option("--message", metavar="TEXT", help="The message of that commit.")
@flag("--review", help="Show the changes, and ask which to write.")
@json_option()
def _commit(
    name: str,
    paths: tuple[str, ...],
    wanted: str | None,
    dangerous: tuple[str, ...],
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    merge: tuple[str, ...],
    branch: str | None,
    author: str | None,
    message: str | None,
    review: bool,
    as_json: bool,
) -> int:
    """Write the changes of a sandbox to its folder.

    Nothing is written if the host has also changed one of the files (--ours, --theirs, --merge), or if a dangerous
    change is not named (--dangerous). Commits made in the sandbox become references below refs/cloche/NAME.
    """
    from cloche.sync import Sandbox

    from ._review import ask, tell_committed

    if branch is None and (author is not None or message is not None):
        raise InvalidRequest("--author and --message are for a commit; give --branch, too")
    chosen = paths or None
    with showing_progress(), Sandbox.attach(name) as sandbox:
        if review:
            diff = sandbox.diff()
            answer = ask(diff, str(sandbox.notes.get("workspace", {}).get("path", "")))
            if answer is None:
                say("nothing was written")
                return 0
            wanted, chosen, dangerous = diff.id, None, (*dangerous, *answer.dangerous)
            theirs = (*theirs, *(path for path in answer.declined if path not in ours))
        committed = sandbox.commit(
            wanted, paths=chosen, dangerous=dangerous, ours=ours, theirs=theirs, merge=merge, branch=branch,
            author=author, message=message, as_user=True,
        )  # fmt: skip
    if as_json:
        print(json.dumps({"written": committed.written, "left": committed.left, "refs": committed.refs}))
    else:
        tell_committed(committed)
    return 0


@root.command("discard", no_args_is_help=True)
@_name
@_paths
@yes_option
@json_option()
def _discard(name: str, paths: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """Undo the changes of a sandbox to its folder.

    The sandbox then has the host's current files. Without a PATH all changes are undone.
    """
    from cloche.sync import Sandbox

    which = f"its changes to {', '.join(map(escape_name, paths))}" if paths else "all its changes"
    require_yes(f"Have {escape_name(name)} lose {which}?", yes=yes)
    with showing_progress(), Sandbox.attach(name) as sandbox:
        discarded = sandbox.discard(paths or None)
    if as_json:
        print(json.dumps({"discarded": discarded}))
    else:
        say(f"discarded {len(discarded)} {'change' if len(discarded) == 1 else 'changes'}")
    return 0
