"""Changes that are dangerous are asked about by reason: once, and what runs without anybody building first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloche.agent.catalog import FOLDER_TOOLS
from cloche.agent.host_folder import ShownDiffs
from cloche.agent.queue import QueueEntry
from cloche.agent.terminal import describe_rules
from cloche.cli._review import ask, show_diff
from cloche.core.changes import Change, Diff
from cloche.server.pages import show_approval
from cloche.workspace.compare import questions_of
from cloche.workspace.danger_table import BUILD, EDITOR
from cloche.workspace.dangers import dangers_of

PATHS = [f"p{number}/Makefile" for number in range(20)]


@pytest.fixture
def diff() -> Diff:
    """Return twenty build files, two of an editor, and a harmless one."""
    paths = [*PATHS, ".vscode/tasks.json", ".vscode/settings.json", "a.txt"]
    plain = [Change(path=path, what="added", kind="file", mode=0o644) for path in paths]
    changes = tuple(replace(one, dangers=dangers_of(one)) for one in plain)
    return Diff(id="x" * 64, changes=changes, questions=questions_of(changes))


def test_twenty_build_files_are_one_question(diff: Diff) -> None:
    """A yes to all, one by one for the editor's, and a yes for the rest: each path that was agreed to is named."""
    asked: list[str] = []

    def read(question: str) -> str:
        asked.append(question)
        return "o" if "2 are dangerous" in question else "n" if ".vscode/settings" in question else "y"

    answer = ask(diff, "folder", read)
    assert answer is not None
    assert (set(answer.dangerous), answer.declined) == ({*PATHS, ".vscode/tasks.json"}, (".vscode/settings.json",))
    assert set(answer.paths) == {*PATHS, ".vscode/tasks.json", "a.txt"}
    assert [EDITOR in question for question in asked] == [False, True, False, False, False]
    assert f"these 20 are dangerous ({BUILD})" in asked[-1]


def test_who_chooses_file_by_file_is_asked_once_for_each_reason(diff: Diff) -> None:
    """The yes for a reason is for those that were chosen, and a no takes them alone."""
    asked: list[str] = []

    def read(question: str) -> str:
        asked.append(question)
        if "[f]ile" in question:
            return "f"
        return "n" if "p0/" in question or ".vscode" in question or "dangerous" in question else "y"

    answer = ask(diff, "folder", read)
    assert answer is not None
    assert (answer.paths, answer.dangerous) == (("a.txt",), ())
    assert [question for question in asked if "dangerous" in question] == [
        f"these 19 are dangerous ({BUILD}). Write them anyway? [y]es, [N]o, [o]ne by one: "
    ]


def test_reasons_are_counted_where_changes_are_shown(diff: Diff, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, and to whoever approves a model's commit, at a terminal or on the page, in one order."""
    show_diff(diff, to_stderr=False)
    shown = capsys.readouterr().out
    assert shown.index(f"  {EDITOR}: 2") < shown.index(f"  {BUILD}: 20")
    diffs = ShownDiffs("folder")
    diffs.note(diff)
    request = diffs.request(FOLDER_TOOLS["commit_changes"], {"id": diff.id})
    assert request.rules["dangers"] == [f"{EDITOR}: 2", f"{BUILD}: 20"]
    assert f"dangerous: {EDITOR}: 2; {BUILD}: 20" in describe_rules(request)
    assert [".vscode" in row for row in request.rules["changes"]] == [True, True, *[False] * 21]
    shown_on_page = show_approval(QueueEntry(number=1, asked_at=0, expires_at=1, request=request))
    names = [name for name, _ in (*shown_on_page["short"], *shown_on_page["long"])]
    assert names[-2:] == ["dangerous", "changes to the folder"]
    assert not any("dangers" in name for name, _ in shown_on_page["rules"])
