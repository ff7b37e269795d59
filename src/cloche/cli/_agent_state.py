"""Ask about what earlier sessions of an agent have left in its home folder, before the next one loads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_line, escape_name

from .output import say

if TYPE_CHECKING:
    from cloche.coding_agents.kept_state import StateChanges
    from cloche.coding_agents.places import AgentPlace
    from cloche.coding_agents.row import CodingAgent

MOST_ROWS, MOST_LINES = 50, 40
SIGNS = {"added": "A", "removed": "D", "modified": "M"}
KEYS = "[a]ccept, [r]estore the accepted version, [c]ontinue without accepting, [d]iff, [q]uit: "
HELP = """\
a  accept: the agent may obey the files as they are now
r  restore: put the accepted version back, and save what is there
c  continue: start with the files as they are, and ask again the next time
d  show the differences in $PAGER
q  start nothing"""
REFUSED = "the agent was not started; nothing was changed"


def settle_state(place: AgentPlace, row: CodingAgent, read: Callable[[str], str] = input) -> None:
    """Show what an agent's earlier sessions have changed in its home, and ask; without a terminal, tell it.

    Raises InvalidRequest if the agent is not to be started.
    """
    from cloche.coding_agents.kept_state import state_changes

    found = state_changes(place, row)
    if not found.changes and not found.cut:
        return
    number = "1 file" if len(found.changes) == 1 else f"{len(found.changes)} files"
    say(f"{row.title}: earlier sessions have changed {number} in its home folder that the next one would obey")
    for change in found.changes[:MOST_ROWS]:
        say(f"{SIGNS[change.what]} {escape_name(change.path)}{f' ({escape_line(change.note)})' if change.note else ''}")
    for pattern in found.cut:
        say(f"{pattern} has more files than are compared, or a folder that cannot be read; not all is shown")
    if read is input and not os.isatty(0):
        return
    _ask(place, row, found, read)


def _ask(place: AgentPlace, row: CodingAgent, found: StateChanges, read: Callable[[str], str]) -> None:
    from cloche.coding_agents.kept_state import accept_state, restore_state

    from ._agent_review import interrupting, show_lines
    from ._pager import page

    for line in islice(_lines(found), MOST_LINES):
        show_lines(line)
    while True:
        try:
            with interrupting():
                answer = read(KEYS).strip().lower()
        except (EOFError, KeyboardInterrupt):
            answer = "q"
        if answer == "a":
            accept_state(place, found)
        elif answer == "r":
            archive, left = restore_state(place, row)
            say(f"the accepted version is back; what was there is saved in {escape_name(archive)}")
            for path, why in left.items():
                say(f"not restored: {escape_name(path)}: {escape_line(why)}")
        elif answer == "d":
            page(_lines(found))
        if answer in ("a", "r", "c"):
            return
        if answer == "q":
            raise InvalidRequest(REFUSED)
        if answer != "d":
            print(HELP)


def _lines(found: StateChanges) -> Iterator[str]:
    for change in found.changes:
        yield f"{SIGNS[change.what]} {escape_name(change.path)}"
        yield from change.diff.removesuffix("\n").split("\n") if change.diff else ()
