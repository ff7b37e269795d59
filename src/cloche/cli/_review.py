"""Shows the changes of a sandbox to a folder of the host and asks about them. All names and contents are escaped."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_name

from .output import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cloche.core.changes import Change, Committed, Diff
    from cloche.execution.sandbox import AsyncSandbox
    from cloche.sync import Sandbox

SIGNS: Mapping[str, str] = {"added": "A", "removed": "D", "modified": "M", "renamed": "R", "mode": "m"}
STYLES: Mapping[str, str] = {"+": "green", "-": "red", "@": "cyan"}
MOST_ROWS, MOST_LINES, MOST_LINE_CHARS, MOST_NAMES = 200, 2000, 400, 5
FOLDER_OPTIONS = ("workspace", "workspace_at", "workspace_disk", "workspace_hide", "workspace_read")


class ReviewAnswer(NamedTuple):
    """Hold the paths to write, the confirmed dangerous paths, and the declined paths.

    A path includes everything below it, so declined paths must be passed on by name.
    """

    paths: tuple[str, ...]
    dangerous: tuple[str, ...]
    declined: tuple[str, ...] = ()


def check_review(options: Mapping[str, Any], *, review: bool, name: str | None = None) -> None:
    """Raise InvalidRequest if --review has no folder or no terminal, or if the sandbox is a named one."""
    if not review:
        return
    if name is not None:
        raise InvalidRequest(
            f"--review is for a throwaway sandbox; for the changes of {name}: cloche commit {name} --review"
        )
    if options.get("workspace") is None:
        raise InvalidRequest("--review asks about changes in a folder; give one: --workspace DIR")
    if not os.isatty(0):
        raise InvalidRequest(
            "--review needs a terminal, and standard input is not one; without a terminal: cloche sandbox create NAME "
            "--workspace DIR, then cloche diff NAME and cloche commit NAME --id ID"
        )


def show_diff(diff: Diff, *, with_patch: bool = True, to_stderr: bool = True) -> None:
    """Print one line per change, then the diffs of text files, then the paths that are left out."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=to_stderr, soft_wrap=True, highlight=False)
    rows = diff.changes  # if there are too many, dangerous ones and conflicts first
    if len(rows) > MOST_ROWS:
        first = list(islice((change for change in rows if change.dangers or change.conflict), MOST_ROWS))
        rows = [*first, *islice((change for change in rows if not (change.dangers or change.conflict)), MOST_ROWS)]
    for shown in rows[:MOST_ROWS]:
        console.print(Text(row_of(shown), style="yellow" if shown.dangers or shown.conflict else ""))
    if len(diff.changes) > MOST_ROWS:
        console.print(f"and {len(diff.changes) - MOST_ROWS} more changes; --json has all")
    if with_patch and diff.patch:
        lines = diff.patch.removesuffix("\n").split("\n")  # str.splitlines would split at more characters than git does
        console.print()
        for line in lines[:MOST_LINES]:
            console.print(Text(cut_line(line), style=STYLES.get(line[:1], "")))
        if len(lines) > MOST_LINES or diff.is_cut:
            console.print("the diff is longer; cloche diff NAME --patch prints more of it")
    if len(diff.dangerous) > 1:
        console.print("changes that need their own confirmation, by their gravest reason:")
        for question in diff.questions:
            console.print(Text(f"  {question.reason}: {len(question.paths)}", style="yellow"))
    for skipped in diff.left_out[:MOST_ROWS]:
        # Text, since a name may look like markup.
        console.print(Text(f"left out: {escape_name(skipped.path)}: {escape(skipped.reason)}"))
    if len(diff.left_out) > MOST_ROWS:
        console.print(f"and {len(diff.left_out) - MOST_ROWS} more are left out; --json has all")


def cut_line(line: str) -> str:
    """Escape a line of a diff; a long line is cut and says so, since the change may come after many blanks."""
    shown = escape(line[:MOST_LINE_CHARS])
    over = len(line) - MOST_LINE_CHARS
    return shown if over <= 0 else f"{shown} [and {over} more characters, which are not shown]"


def row_of(change: Change) -> str:
    """Return the line that shows a change, escaped."""
    name = escape_name(change.path) + ("/" if change.kind == "directory" else "")
    if change.what == "renamed":
        name = f"{escape_name(change.old_path)} -> {name}"
    if change.kind == "link" and change.what != "removed":
        name += f" -> {escape_name(change.target)}"
    if change.mode_note:
        name += f" ({change.mode_note})"
    notes = [f"needs its own confirmation: {', '.join(change.dangers)}"] if change.dangers else []
    if change.reached_as:
        notes.append(f"on the host also by: {', '.join(map(escape_name, change.reached_as[:MOST_NAMES]))}")
    notes += [f"conflict: {change.conflict}"] if change.conflict else []
    return f"{SIGNS[change.what]} {name}" + (f"   [{escape('; '.join(notes))}]" if notes else "")


def ask(diff: Diff, folder: str, read: Callable[[str], str] = input) -> ReviewAnswer | None:
    """Ask which changes to write, all or one by one, and once per reason for dangerous ones; return None for none."""
    show_diff(diff)
    if diff.conflicts:
        say("the host has changed some of these files as well; those are not written (see cloche commit --ours)")
    chosen = [change for change in diff.changes if not change.conflict]
    if not chosen:
        return None
    answer = ask_letter(read, f"Write these changes to {escape_name(folder)}? [y]es, [N]o, [f]ile by file: ", "ynf")
    if answer == "n":
        return None
    if answer == "f":
        chosen = [change for change in chosen if ask_letter(read, f"{row_of(change)}: write it? [y/N]: ", "yn") == "y"]
    dangerous: list[str] = []
    for question in diff.questions:
        among = set(question.paths)
        dangerous += agreed_paths(question.reason, [change for change in chosen if change.path in among], read)
    agreed = set(dangerous)
    paths = tuple(change.path for change in chosen if not change.dangers or change.path in agreed)
    accepted = set(paths)
    declined = tuple(change.path for change in diff.changes if change.path not in accepted)
    return ReviewAnswer(paths, tuple(dangerous), declined) if paths else None


def agreed_paths(reason: str, changes: Sequence[Change], read: Callable[[str], str]) -> list[str]:
    """Ask about the changes that are dangerous for one reason, together or one by one; return the confirmed paths."""
    if not changes:
        return []
    for change in changes:
        say(row_of(change))
    if len(changes) == 1:
        question = f"{escape_name(changes[0].path)} is dangerous ({reason}). Write it anyway? [y/N]: "
        return [changes[0].path] if ask_letter(read, question, "yn") == "y" else []
    question = f"these {len(changes)} are dangerous ({reason}). Write them anyway? [y]es, [N]o, [o]ne by one: "
    answer = ask_letter(read, question, "yno")
    if answer == "o":
        return [
            change.path
            for change in changes
            if ask_letter(read, f"{escape_name(change.path)}: write it? [y/N]: ", "yn") == "y"
        ]
    return [change.path for change in changes] if answer == "y" else []


def ask_letter(read: Callable[[str], str], question: str, answers: str) -> str:
    """Return the first letter of an answer; `n` for an empty one and at the end of input."""
    try:
        answer = read(question).strip().lower()[:1]
    except EOFError:
        return "n"
    return answer if answer and answer in answers else "n"


def is_confirmed(question: str) -> bool:
    """Ask for a yes on the terminal."""
    return ask_letter(input, question, "yn") == "y"


def tell_committed(committed: Committed) -> None:
    """Print the number of written paths, the reason for each path that was not written, and the new references."""
    if committed.written or not committed.refs:  # a branch has them otherwise
        say(f"wrote {len(committed.written)} {'path' if len(committed.written) == 1 else 'paths'}")
    for path, why in committed.left.items():
        say(f"not written: {escape_name(path)}: {why}")
    for ref, commit in committed.refs.items():
        say(f"{escape_name(ref)} is {commit}")


def without_folder(options: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the sandbox's options without the folder's, and the folder's; None without --workspace."""
    folder_options = {name: value for name, value in options.items() if name in FOLDER_OPTIONS and value is not None}
    sandbox_options = {name: value for name, value in options.items() if name not in FOLDER_OPTIONS}
    if folder_options and "workspace" not in folder_options:
        raise InvalidRequest(
            f"--{next(iter(folder_options)).replace('_', '-')} is for a folder; give one: --workspace DIR"
        )
    return sandbox_options, folder_options or None


def tell_folder(notes: Mapping[str, Any]) -> None:
    """Print the warnings about the folder of a sandbox."""
    for line in notes.get("workspace", {}).get("warnings", ()):
        say(str(line))


def settle_changes(sandbox: Sandbox, *, review: bool) -> None:
    """Ask which changes of a throwaway sandbox to write to its folder; without `review`, report them as dropped."""
    diff = sandbox.diff()
    answer = _settled(diff, sandbox.notes, review=review)
    if answer is not None:
        tell_committed(sandbox.commit(diff, dangerous=answer.dangerous, theirs=answer.declined))


async def settle_attached(sandbox: AsyncSandbox, *, review: bool) -> None:
    """Do the same for an AsyncSandbox."""
    diff = await sandbox.diff()
    answer = _settled(diff, sandbox.notes, review=review)
    if answer is not None:
        tell_committed(await sandbox.commit(diff, dangerous=answer.dangerous, theirs=answer.declined))


def _settled(diff: Diff, notes: Mapping[str, Any], *, review: bool) -> ReviewAnswer | None:
    folder = str(notes.get("workspace", {}).get("path", ""))
    if not diff.changes:
        return None
    if not review:
        count = len(diff.changes)
        say(
            f"{count} {'change' if count == 1 else 'changes'} to {escape_name(folder)} "
            f"{'is' if count == 1 else 'are'} dropped; --review shows them and asks, a named sandbox keeps them"
        )
        return None
    answer = ask(diff, folder)
    if answer is None:
        say("nothing was written")
    return answer
