"""Differences between texts are right, short where that is cheap, and bounded where it is not."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cloche.workspace.lines import Work, changed_regions

LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "}\n"]), max_size=40)


def rebuilt(old: list[str], new: list[str], work: Work) -> list[str]:
    """Return the new lines, made of the old ones and of what the regions say."""
    made: list[str] = []
    at = 0
    for i1, i2, j1, j2 in changed_regions(old, new, work):
        made += old[at:i1] + new[j1:j2]
        at = i2
    return made + old[at:]


def edits(old: list[str], new: list[str]) -> int:
    """Return how many lines are removed and added."""
    return sum(i2 - i1 + j2 - j1 for i1, i2, j1, j2 in changed_regions(old, new, Work(10**9, 10**9)))


def fewest(old: list[str], new: list[str]) -> int:
    """Return how many must be, by the table of all pairs."""
    row = list(range(len(new) + 1))
    for i, one in enumerate(old, 1):
        before, row = row, [i]
        for j, other in enumerate(new, 1):
            row.append(before[j - 1] if one == other else 1 + min(before[j], row[j - 1]))
    return row[-1]


@given(LINES, LINES)
def test_regions_make_the_new_text_with_the_fewest_lines(old: list[str], new: list[str]) -> None:
    """Whatever two texts are, the regions lead from one to the other, and no shorter ones would."""
    assert rebuilt(old, new, Work(10**6)) == new
    assert edits(old, new) == fewest(old, new)


def test_hostile_texts_take_bounded_work() -> None:
    """Lines that are all alike, and in no order, are given up on after so many steps, and the result is right."""
    chance = random.Random(1)
    old, new = ([chance.choice("ab") + "\n" for _ in range(20_000)] for _ in range(2))
    work = Work(10**6, at_once=50_000)
    assert rebuilt(old, new, work) == new
    assert work.done <= 50_000 + 20_000
    assert work.budget == 10**6 - work.done


def test_what_is_used_up_is_used_up() -> None:
    """When no steps are left, a pair is one region between what both begin and end with."""
    old, new = ["1\n", *"abcabc", "9\n"], ["1\n", *"cbacba", "9\n"]
    assert changed_regions(old, new, Work(0)) == [(1, 7, 1, 7)]
