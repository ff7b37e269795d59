"""What differs from a mark, where a part of the folder could not be looked at."""

from __future__ import annotations

from cloche.server.marks import NOT_IN_MARK, compare, entry_text
from cloche.workspace.snapshot import Snapshot, SnapshotEntry

FOLDER = SnapshotEntry(path=b"d", kind="directory", mode=0o755)


def test_what_was_not_looked_at_is_not_removed() -> None:
    """Nothing is, where the report is partial; nothing below a folder that could not be entered; the rest is."""
    before = {b"d": entry_text(FOLDER), b"d/x": "file 0644", b"f": "file 0644"}
    unreadable = SnapshotEntry(path=b"d", kind="directory", mode=0o000, problem="it cannot be read inside")
    found = compare(before, Snapshot(entries={b"d": unreadable}, is_whole=True))
    assert [(row.path, row.what) for row in found.rows] == [(b"f", "removed")]
    assert found.left_out == {b"d": "it cannot be read inside"}
    partial = compare(before, Snapshot(entries={b"d": FOLDER}, is_whole=True, is_partial=True))
    assert (partial.rows, partial.is_partial) == ((), True)
    new = {name: SnapshotEntry(path=name, kind="directory") for name in (b"x" * 200, b"y")}
    cut = compare(before, Snapshot(entries=new, is_whole=True), most_bytes=600)
    assert ([(row.path, row.what) for row in cut.rows], cut.is_partial) == ([(b"x" * 200, "created")], True)


def test_what_the_mark_does_not_have_is_told() -> None:
    """A file without a change since the mark that the mark does not have is in no list of changes, and not silent."""
    found = compare({}, Snapshot(entries={b"f": SnapshotEntry(path=b"f", kind="unchanged")}, is_whole=True))
    assert (found.rows, found.left_out) == ((), {b"f": NOT_IN_MARK})


def test_the_depth_of_a_path_costs_nothing() -> None:
    """A mark is the client's: a path of a million folders that is no longer there is looked at once for each length."""
    before = {b"a/" * 1_000_000: "directory 0755", b"d/x": "file 0644", b"dd/x": "file 0644"}
    unreadable = SnapshotEntry(path=b"d", kind="directory", problem="it cannot be read inside")
    found = compare(before, Snapshot(entries={b"d": unreadable}, is_whole=True))
    assert [row.path[:4] for row in found.rows] == [b"a/a/", b"dd/x"]
