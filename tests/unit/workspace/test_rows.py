"""Values by path that are kept in a temporary file: they come back as they were, in the order of the tree."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest

from cloche.core.changes import Change, Diff
from cloche.workspace.rows import PAGE, Rows, StoredValues

COUNT = 2 * PAGE + 10


def change(path: bytes) -> Change:
    """Return a change with values of all kinds."""
    shown = os.fsdecode(path)
    return Change(path=shown, what="added", kind="file", mode=0o644, size=1 << 40, is_text=True, dangers=("a", shown))


def test_values_come_in_the_order_of_the_tree_and_may_change_meanwhile() -> None:
    """A folder comes before what is in it, and that before another name; names of any bytes come back."""
    rows = Rows(Change)
    paths = [b"a.b", b"a", b"a/\xff", b"a/b/c", b"\xed\xa0\x80", b"a b"]
    for path in paths:
        rows[path] = change(path)
    assert list(rows) == [b"a", b"a/b/c", b"a/\xff", b"a b", b"a.b", b"\xed\xa0\x80"]
    for path, value in rows.items():
        assert value == change(path)
        rows[path] = replace(value, size=0)
        del rows[path]
    assert (len(rows), bool(rows), rows.get(b"a")) == (0, False, None)
    with pytest.raises(KeyError):
        del rows[b"a"]


def test_a_diff_of_very_many_changes_is_used_as_any_other() -> None:
    """Its changes have a length, indexes, slices and an order; they are equal to a tuple, and go by pickle."""
    rows, paths = Rows(Change), [b"%05d" % number for number in range(COUNT)]
    for path in reversed(paths):
        rows[path] = change(path)
    stored, held = StoredValues(rows), tuple(map(change, paths))
    assert stored == held
    assert [stored[at] for at in (0, PAGE - 1, PAGE, -1, 3)] == [held[at] for at in (0, PAGE - 1, PAGE, -1, 3)]
    assert stored[PAGE - 2 : PAGE + 2] == held[PAGE - 2 : PAGE + 2]
    with pytest.raises(IndexError):
        stored[COUNT]
    diff = Diff(id="x", changes=stored)
    assert diff.as_dict() == Diff(id="x", changes=held).as_dict()
    assert pickle.loads(pickle.dumps(diff)).changes == held
    assert diff.dangerous == held
