"""Compare two texts by lines with bounded work: Myers' greedy algorithm, abandoned if it takes too many steps.

The common beginning and end are removed first, then each line that only one text has, since it is in no common
subsequence. An abandoned comparison is one region from the first differing line to the last: correct, but longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

MOST_STEPS = 300_000  # for one pair of texts; each may take an entry of the trace
LINES_A_STEP = 8  # equal lines skipped per step
CONTEXT = 3

Region = tuple[int, int, int, int]  # lines [0]:[1] of the old text become lines [2]:[3] of the new one


class Work:
    """A budget of steps: `budget` in all, at most `at_once` for one pair of texts. `done` counts the steps used."""

    def __init__(self, budget: int, at_once: int = MOST_STEPS):
        self.budget, self.at_once = budget, at_once
        self.done = 0


def changed_regions(old: Sequence[str], new: Sequence[str], work: Work) -> list[Region]:
    """Return the regions that differ, in order; the lines between two regions are equal."""
    shorter = min(len(old), len(new))
    start = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    end = next((i for i in range(shorter - start) if old[-1 - i] != new[-1 - i]), shorter - start)
    old_end, new_end = len(old) - end, len(new) - end
    if start == old_end and start == new_end:
        return []
    single_region = [(start, old_end, start, new_end)]
    if start in (old_end, new_end):
        return single_region
    common = set(old[start:old_end]) & set(new[start:new_end])
    old_at = [i for i in range(start, old_end) if old[i] in common]
    new_at = [j for j in range(start, new_end) if new[j] in common]
    pairs = _common_subsequence([old[i] for i in old_at], [new[j] for j in new_at], work)
    if pairs is None:
        return single_region
    regions: list[Region] = []
    i, j = start, start
    for x, y in [(old_at[x], new_at[y]) for x, y in pairs] + [(old_end, new_end)]:
        if x > i or y > j:
            regions.append((i, x, j, y))
        i, j = x + 1, y + 1
    return regions


def _common_subsequence(old: Sequence[str], new: Sequence[str], work: Work) -> list[tuple[int, int]] | None:
    """Return the index pairs of a longest common subsequence; None if the budget does not suffice."""
    rows, columns = len(old), len(new)
    numbers: dict[str, int] = {}
    a, b = ([numbers.setdefault(line, len(numbers)) for line in lines] for lines in (old, new))
    allowed = min(work.budget, work.at_once)
    furthest = {1: 0}  # by diagonal, the furthest line reached in the old text
    trace: list[dict[int, int]] = []
    steps = 0
    for edits in count():
        reached: dict[int, int] = {}
        for diagonal in range(-edits + 2 * max(0, edits - columns), edits + 1 - 2 * max(0, edits - rows), 2):
            below, above = furthest.get(diagonal + 1, -1), furthest.get(diagonal - 1, -1) + 1
            x = first = max(below, above)
            y = x - diagonal
            while x < rows and y < columns and a[x] == b[y]:
                x, y = x + 1, y + 1
            reached[diagonal] = x
            steps += 1 + (x - first) // LINES_A_STEP
            if x >= rows and y >= columns:
                _count(work, steps)
                return _follow([*trace, reached], rows, columns)
            if steps > allowed:
                _count(work, steps)
                return None
        trace.append(reached)
        furthest = reached
    return None


def _count(work: Work, steps: int) -> None:
    work.budget -= steps
    work.done += steps


def _follow(trace: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for edits in range(len(trace) - 1, -1, -1):
        before = trace[edits - 1] if edits else {1: 0}
        diagonal = x - y
        below, above = before.get(diagonal + 1, -1), before.get(diagonal - 1, -1) + 1
        first = max(below, above)
        while x > first:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if below >= above:
            y -= 1
        else:
            x -= 1
    return pairs[::-1]


def hunks(old: Sequence[str], new: Sequence[str], regions: Sequence[Region]) -> list[str]:
    """Return the lines of unified hunks, with CONTEXT lines around the regions."""
    shown: list[str] = []
    group: list[Region] = []
    for region in regions:
        if group and region[0] - group[-1][1] > 2 * CONTEXT:
            shown += _hunk(old, new, group)
            group = []
        group.append(region)
    return shown + _hunk(old, new, group) if group else shown


def _hunk(old: Sequence[str], new: Sequence[str], group: Sequence[Region]) -> list[str]:
    before = min(CONTEXT, group[0][0])
    after = min(CONTEXT, len(old) - group[-1][1])
    i, old_end = group[0][0] - before, group[-1][1] + after
    j, new_end = group[0][2] - before, group[-1][3] + after
    shown = [f"@@ -{_range(i, old_end)} +{_range(j, new_end)} @@\n"]
    for i1, i2, j1, j2 in group:
        shown += _marked(" ", old[i:i1])
        shown += _marked("-", old[i1:i2])
        shown += _marked("+", new[j1:j2])
        i = i2
    return shown + _marked(" ", old[i:old_end])


def _marked(mark: str, lines: Sequence[str]) -> list[str]:
    return [mark + line if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n" for line in lines]


def _range(start: int, end: int) -> str:
    size = end - start
    return f"{start + 1 if size else start},{size}" if size != 1 else str(start + 1)
