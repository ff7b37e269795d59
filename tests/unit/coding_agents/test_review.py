"""What is reviewed first, and what a choice writes."""

from __future__ import annotations

import pytest

from cloche.coding_agents.review import (
    Choice,
    Review,
    asked_files,
    choice_of,
    everything,
    questions_for,
    review_of,
)
from cloche.core.changes import Change, Diff
from cloche.core.record import replace
from cloche.execution.commits import CommitChoice
from cloche.workspace.compare import questions_of
from cloche.workspace.dangers import dangers_of

PATCH = "".join(
    f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n{hunks}"
    for path, hunks in (
        ("src/a.py", "@@ -1 +1,2 @@\n one\n+two\n@@ -20 +21 @@\n-old\n+new\n"),
        ("conftest.py", "@@ -1 +1 @@\n-x\n+y\n"),
    )
)


@pytest.fixture
def review() -> Review:
    """Return a review of a source file, a build file, an editor's, new folders and a conflict."""
    plain = [
        Change(path=".vscode", what="added", kind="directory", mode=0o755),
        Change(path=".vscode/tasks.json", what="added", kind="file", mode=0o644, size=2000),
        Change(path="conftest.py", what="modified", kind="file", mode=0o644, old_mode=0o644),
        Change(path="empty", what="added", kind="directory", mode=0o755),
        Change(path="lost", what="modified", kind="file", mode=0o644, old_mode=0o644, conflict="changed"),
        Change(path="src/a.py", what="modified", kind="file", mode=0o644, old_mode=0o644),
    ]
    changes = tuple(replace(change, dangers=dangers_of(change)) for change in plain)
    return review_of(Diff(id="1", changes=changes, patch=PATCH, questions=questions_of(changes)))


def test_dangerous_files_come_first_each_with_its_counts(review: Review) -> None:
    """What runs without a build is first; a conflict comes before harmless files, and is not asked about."""
    assert [(file.change.path, file.note) for file in review.files] == [
        (".vscode/tasks.json", "2,000 bytes"), ("conftest.py", "+1 -1"), ("lost", "0 bytes"), (".vscode", ""),
        ("empty", ""), ("src/a.py", "+2 -1"),
    ]  # fmt: skip
    assert review.counts == (4, 3, 2)
    asked = [file.change.path for file in asked_files(review)]
    assert asked == [".vscode/tasks.json", "conftest.py", "empty", "src/a.py"]
    shown = review.as_dict()["files"]
    assert [(bool(file["dangers"]), len(file["hunks"])) for file in shown] == [
        (True, 0), (True, 1), (False, 0), (False, 0), (False, 0), (False, 2)
    ]  # fmt: skip


def test_a_choice_writes_what_was_chosen_and_no_more(review: Review) -> None:
    """A path stands for all below it, so the others are declined by name; some hunks are a part, all are the file."""
    hunks = next(file.hunks for file in review.files if file.change.path == "src/a.py")
    part = choice_of({"src/a.py": [hunks[1].id], ".vscode/tasks.json": None, "conftest.py": []}, review)
    assert part.hunks == {"src/a.py": (hunks[1].id,)}
    keywords = part.keywords(review)
    assert (keywords["paths"], keywords["theirs"]) == (
        [".vscode/tasks.json", "src/a.py"], ["conftest.py", "lost", "empty"]
    )  # fmt: skip
    chosen = CommitChoice(dangerous=True, ours=(), **keywords).check(review.diff)
    assert [change.path for change in chosen] == [".vscode", ".vscode/tasks.json", "src/a.py"]
    whole = choice_of({"src/a.py": [hunk.id for hunk in hunks]}, review)
    assert whole == Choice(paths=frozenset({"src/a.py"}))


def test_only_chosen_dangers_are_asked_about_and_a_no_takes_them_out(review: Review) -> None:
    """One question for each reason, until it is answered."""
    choice = everything(review)
    assert "lost" not in choice.paths
    first, second = questions_for(review, choice)
    choice = choice.agreed(second.paths).without(first.paths)
    assert not questions_for(review, choice)
    assert choice.dangerous == {"conftest.py"}
    assert choice.paths == {"conftest.py", ".vscode", "empty", "src/a.py"}
