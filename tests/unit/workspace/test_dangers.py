"""Changes that run something on the host are told, by one table, by executables, and by links."""

from __future__ import annotations

from typing import Any

import pytest

from cloche.core.changes import Change
from cloche.workspace.danger_table import (
    AGENT,
    BUILD,
    CLOCHE,
    EDITOR,
    EXECUTABLE,
    GIT,
    HOOKS,
    INTO_GIT,
    LEAVES,
    RANKED,
    READABLE,
    SHELL,
    TABLE,
    WINDS,
    WRITABLE,
    DangerRow,
)
from cloche.workspace.dangers import dangers_of, may_steer_git


def change(path: str, what: Any = "added", kind: Any = "file", **more: Any) -> Change:
    """Make a change."""
    return Change(path=path, what=what, kind=kind, **{"mode": 0o644, **more})


def example(row: DangerRow) -> str:
    """Return a path that a row is for."""
    return {
        "name": f"some/{row.pattern}",
        "folder": f"some/{row.pattern}/below/file",
        "prefix": f"some/{row.pattern}rest",
        "suffix": f"some/file{row.pattern}",
        "glob": f"some/{row.pattern.replace('*', 'rest')}",
        "path": f"some/{row.pattern.replace('*', 'file')}",
    }[row.form]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.form}-{row.pattern}")
def test_each_row_is_told_in_any_case(row: DangerRow) -> None:
    """A file of that name is a danger for that reason at any depth, in capitals, and removed where it guards."""
    path = example(row)
    assert row.pattern == row.pattern.casefold()
    assert row.reason in dangers_of(change(path))
    assert row.reason in dangers_of(change(path.upper(), "modified"))
    assert row.reason in dangers_of(change(path.removeprefix("some/")))
    assert row.guards <= (row.reason in dangers_of(change(path, "removed")))


@pytest.mark.parametrize(
    "path",
    [
        "README.md", "src/main.py", "package.json.md", "my-package.json", "setup.py.txt", "vscode/settings.json",
        "workflows/ci.yml",
        ".github/ISSUE_TEMPLATE.md", "docs/agents.md.html", "claude.py", "test_conftest.py", "file.pth.txt",
        "makefile-notes",
        "dockerfiles/a", "github/workflows/x.yml", ".gitignore", "cloche/x.py", "envrc", "git/config", "a.git/x",
        "profile",
    ],
)  # fmt: skip
def test_a_near_miss_is_no_danger(path: str) -> None:
    """What only looks like a name of the table needs no yes."""
    assert dangers_of(change(path)) == ()


def test_what_becomes_executable_is_told() -> None:
    """A new program, one with other content, and a file that gains the right, are; one that loses it is not."""
    assert dangers_of(change("a", mode=0o755)) == (EXECUTABLE,)
    assert dangers_of(change("a", "mode", mode=0o744, old_mode=0o644)) == (EXECUTABLE,)
    assert dangers_of(change("a", "modified", mode=0o755, old_mode=0o777, old_kind="link")) == (EXECUTABLE,)
    assert dangers_of(change("a", "modified", mode=0o755, old_mode=0o755)) == (EXECUTABLE,)
    assert dangers_of(change("a", "modified", mode=0o644, old_mode=0o755)) == (EXECUTABLE,)
    assert dangers_of(change("a", "modified", mode=0o644, old_mode=0o777, old_kind="link")) == ()
    assert dangers_of(change("a", "renamed", mode=0o755, old_mode=0o755)) == ()
    assert dangers_of(change("a", "mode", mode=0o644, old_mode=0o755)) == ()
    assert dangers_of(change("a", "removed", mode=0, old_mode=0o755)) == ()
    assert dangers_of(change("a", kind="directory", mode=0o755)) == ()


@pytest.mark.parametrize(
    ("path", "target", "reasons"),
    [
        ("a", "/etc", (LEAVES,)), ("a", "..", (LEAVES,)), ("d/a", "../../x", (LEAVES,)), ("d/a", "../b/../../d/x",
        (LEAVES,)),
        ("a", "../here/a", (LEAVES,)), ("a", ".GIT/hooks/x", (INTO_GIT,)), ("d/e/a", "../../.git", (INTO_GIT,)),
        ("d/a", "../x", ()), ("a", "b/../c", (WINDS,)), ("a", "d/l/../../etc", (WINDS,)),
        ("a", "..b", ()), ("a", "./b//c", ()), (".vscode", "x", None),
    ],
)  # fmt: skip
def test_links_that_lead_out_are_told(path: str, target: str, reasons: tuple[str, ...] | None) -> None:
    """An absolute one, one above the top, and one into git's folder are; a link in place of a folder counts as it."""
    found = dangers_of(change(path, kind="link", target=target))
    assert found == reasons if reasons is not None else found


def test_what_others_may_write_to_is_told() -> None:
    """Be it new or let go of, a file or a folder; what they could write to before is nothing new."""
    assert dangers_of(change("a", mode=0o666)) == (WRITABLE,)
    assert dangers_of(change("a", kind="directory", mode=0o777)) == (WRITABLE,)
    assert dangers_of(change("a", "mode", mode=0o602, old_mode=0o600)) == (WRITABLE,)
    assert dangers_of(change("a", "modified", mode=0o666, old_mode=0o666)) == ()
    assert dangers_of(change("a", mode=0o664)) == ()


def test_what_becomes_readable_for_all_is_told() -> None:
    """Be it a file that was private, a folder that nobody could enter, or a private file that is replaced."""
    assert dangers_of(change("a", "mode", mode=0o644, old_mode=0o600)) == (READABLE,)
    assert dangers_of(change("a", "modified", mode=0o644, old_mode=0o640)) == (READABLE,)
    assert dangers_of(change("a", "mode", kind="directory", mode=0o711, old_mode=0o700)) == (READABLE,)
    assert dangers_of(change("a", "mode", mode=0o640, old_mode=0o600)) == ()
    assert dangers_of(change("a", "modified", mode=0o644, old_mode=0o644)) == dangers_of(change("a")) == ()


@pytest.mark.parametrize("path", [".github", ".config", ".gitea", "a/.GitLab", ".config/git", ".forgejo", ".mise"])
def test_a_link_in_place_of_a_folder_with_rows_is_told(path: str) -> None:
    """What the folder elsewhere has is there by the link: none of it is a change."""
    assert dangers_of(change(path, kind="link", target="gh"))
    assert not dangers_of(change(path, kind="directory", mode=0o755))


@pytest.mark.parametrize(
    "path",
    ["opencode.jsonc", ".opencode/plugins/x.js", ".amp/settings.json", ".pnp.cjs", ".pnpmfile.mjs", "devenv.nix"],
)
def test_what_an_agent_or_a_package_tool_runs_by_itself_is_told(path: str) -> None:
    """Each of them names programs, or is one, that starts on the host with the tool alone."""
    assert dangers_of(change(path))


def test_what_makes_a_folder_a_repository_is_told() -> None:
    """A `HEAD` is by itself; what may be told by a look at the host is asked of files and folders of git's names."""
    assert dangers_of(change("d/HEAD")) == (GIT,)
    assert may_steer_git(change("d/config"))
    assert may_steer_git(change("objects", kind="directory"))
    assert not may_steer_git(change("d/config", "removed"))
    assert not any(map(may_steer_git, (change("d/other"), change("refs"), change("config", kind="directory"))))
    assert dangers_of(change("d/config")) == ()


def test_the_gravest_reason_comes_first() -> None:
    """Each reason has a rank: what runs without anybody building before what runs at a build."""
    assert {row.reason for row in TABLE} <= set(RANKED)
    assert dangers_of(change(".vscode/Makefile", mode=0o755)) == (EDITOR, EXECUTABLE, BUILD)
    assert RANKED.index(HOOKS) < RANKED.index(SHELL) < RANKED.index(AGENT) < RANKED.index(BUILD)


def test_both_names_of_a_moved_file_count() -> None:
    """To move an instruction file away is to remove it; a folder by itself is nothing."""
    assert AGENT in dangers_of(change("notes.txt", "renamed", old_path="AGENTS.md"))
    assert GIT in dangers_of(change(".gitattributes", "renamed", old_path="a"))
    assert CLOCHE in dangers_of(change(".clocheignore", "removed"))
    assert dangers_of(change("package.json", "removed")) == ()
    assert dangers_of(change(".vscode", kind="directory", mode=0o755)) == ()
