"""`cloche agent compare`: what two sandboxes on one folder have changed, and how their versions differ."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape, escape_line, escape_name

from ._agents import agent
from .options import argument, flag, json_option
from .output import say

if TYPE_CHECKING:
    from cloche.coding_agents.compare import ComparedFile, Comparison, LinePair, Whose

MOST_FILES, MOST_PAIRS, MOST_NAMED = 500, 5000, 5
LEAST_COLUMNS, NUMBER_COLUMNS = 60, 5
SIGNS = {"added": "A", "removed": "D", "modified": "M", "renamed": "R", "mode": "m"}


@agent.command("compare")
@argument(
    "first",
    metavar="[A]",
    required=False,
    help="An agent on this project, or a sandbox with a folder. Default: the two here.",
)
@argument("second", metavar="[B]", required=False, help="Another one on the same folder.")
@flag("--stat", help="Say which files differ, and show no lines.")
@json_option()
def _compare(first: str | None, second: str | None, stat: bool, as_json: bool) -> int:
    """Compare what two sandboxes have changed in one folder."""
    import asyncio

    from cloche.coding_agents.compare import compare
    from cloche.coding_agents.running import named_here

    cwd = os.getcwd()
    names = (named_here(first, cwd), named_here(second, cwd)) if first and second else _two_here(first)
    comparison = asyncio.run(compare(*names))
    if as_json:
        print(json.dumps(comparison.as_dict(), default=str))
        return 0
    _print(comparison, with_lines=not stat)
    return 0


def _two_here(first: str | None) -> tuple[str, str]:
    """Return the names of the two agents on the current project. Raises InvalidRequest for another number."""
    from cloche.coding_agents.places import project_folder
    from cloche.coding_agents.running import open_agents

    names = [place.sandbox for place in open_agents(project_folder(os.getcwd()))]
    if len(names) == 2 and first in (None, *names):
        return names[0], names[1]
    raise InvalidRequest(f"agent compare: name two sandboxes; open on this project: {', '.join(names) or 'none'}")


async def tell_conflicts(folder: str, written: Collection[str], *, by: str) -> None:
    """Say which changes of other agents on a folder conflict with what was written there."""
    from cloche.coding_agents.compare import conflicts_with

    for name, paths in (await conflicts_with(folder, written, by=by)).items():
        more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
        say(f"{name} has changed {', '.join(map(escape_name, paths[:MOST_NAMED]))}{more}, too: now a conflict there")


def _print(comparison: Comparison, *, with_lines: bool) -> None:
    first, second = comparison.names
    titles: tuple[tuple[Whose, str], ...] = (
        ("first", f"changed by {first} alone"),
        ("second", f"changed by {second} alone"),
        ("same", "changed by both, to the same"),
        ("both", "changed by both, differently: once one version is written, it is a conflict of the other sandbox"),
    )
    print(escape_line(f"{first} and {second} on {escape_name(comparison.folder)}"))
    for whose, title in titles:
        files = comparison.of(whose)
        if files:
            print(f"\n{title}:")
        for file in files[:MOST_FILES]:
            print(f"  {_row(file)}")
        if files[MOST_FILES:]:
            print(f"  and {len(files) - MOST_FILES} more; --json has all")
    if not comparison.files:
        print("nothing was changed in either")
    for file in comparison.of("both")[:MOST_FILES] if with_lines else ():
        _print_beside(file, comparison.names)


def _row(file: ComparedFile) -> str:
    signs = "".join(SIGNS[change.what] for change in (file.first, file.second) if change is not None)
    conflict = next((change.conflict for change in (file.first, file.second) if change and change.conflict), "")
    notes = [note for note in (file.note, f"conflict: {conflict}" if conflict else "") if note]
    return f"{signs:2} {escape_name(file.path)}" + (f"   [{escape_line('; '.join(notes))}]" if notes else "")


def _print_beside(file: ComparedFile, names: tuple[str, str]) -> None:
    import shutil

    from rich.console import Console
    from rich.text import Text

    if not file.pairs:
        return
    width = (max(shutil.get_terminal_size((160, 24)).columns, LEAST_COLUMNS) - 3) // 2
    console = Console(soft_wrap=True, highlight=False)
    console.print()
    console.print(Text(escape_name(file.path), style="bold"))
    console.print(Text(f"{names[0][:width]:<{width}} | {names[1][:width]}", style="cyan"))
    left = MOST_PAIRS
    for number, region in enumerate(file.pairs):
        if number:
            console.print(" " * NUMBER_COLUMNS + "...")
        for pair in region[:left]:
            console.print(Text(_line(pair, width), style="" if pair.is_equal else "yellow"))
        left -= len(region)
        if left < 0:
            console.print("the rest is not shown")
            return


def _line(pair: LinePair, width: int) -> str:
    sides = _cell(pair.first, pair.first_number, width), _cell(pair.second, pair.second_number, width)
    return f"{sides[0]} {' ' if pair.is_equal else '|'} {sides[1]}".rstrip()


def _cell(line: str | None, number: int, width: int) -> str:
    """Return a line in a column of this width, escaped; a longer one is cut and says so."""
    if line is None:
        return " " * width
    text = escape(line.removesuffix("\n").expandtabs(4)[: 4 * width])
    room = width - NUMBER_COLUMNS
    shown = text if len(text) <= room else f"{text[: room - 3]}..."
    return f"{number:>{NUMBER_COLUMNS - 1}} {shown:<{room}}"
