"""Show what would change in configuration files of the host, and write it after a yes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._acts import require_yes
from .output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cloche.coding_agents.host_config import FileEdit


def settle(edits: Sequence[FileEdit], *, yes: bool, only_prints: bool, is_undo: bool = False) -> int:
    """Print the differences of some edits, and write them unless the user says no. Return the exit code."""
    from cloche.coding_agents.host_config import differences, write

    changed = [edit for edit in edits if edit.before != edit.after]
    if not changed:
        say("nothing is to be changed")
        return 0
    for line in differences(changed):
        print(line)
    if only_prints:
        return 0
    require_yes("Write this?", yes=yes, otherwise="nothing was written")
    write(changed, is_undo=is_undo)
    for edit in changed:
        say(f"{'removed' if edit.after is None else 'wrote'} {edit.path}")
    return 0
