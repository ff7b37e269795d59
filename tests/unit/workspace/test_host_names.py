"""A change is judged by every name through which the host reaches the file: its links, and what its settings name."""

from __future__ import annotations

import os
import subprocess
import time
import tracemalloc
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from cloche.core.changes import Change
from cloche.workspace.compare import make_diff
from cloche.workspace.danger_table import (
    AGENT,
    BUILD,
    CI,
    EDITOR,
    GIT,
    HOOKS,
    INTO_GIT,
    LEAVES,
    SHELL,
    TO_HIDDEN,
    TWIN,
    UNKNOWN,
)
from cloche.workspace.host_links import ANYWHERE, HostLinks, Resolver, find_links
from cloche.workspace.host_names import find_names
from cloche.workspace.snapshot import Snapshot, SnapshotEntry
from tests.harness.changes import opened

pytestmark = pytest.mark.both_users


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder of the host, below an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "home/project").mkdir(parents=True)
    return tmp_path / "home/project"


def judged(host: Path, *paths: str, hidden: tuple[str, ...] = (), **links: str) -> Mapping[str, Change]:
    """Return what a diff says of new files at some paths, removed ones (`-a`), and new links (`a__b` is `a/b`)."""
    entries: dict[bytes, SnapshotEntry] = {}
    for path, target in [*((path, "") for path in paths), *links.items()]:
        key = path.replace("__", "/").removeprefix("-").encode()
        for depth in range(1, key.count(b"/") + 1):
            above = b"/".join(key.split(b"/")[:depth])
            entries[above] = SnapshotEntry(path=above, kind="directory", mode=0o755)
        more = {"kind": "link", "target": target.encode()} if target else {"kind": "file", "sha256": "new"}
        if path.startswith("-"):
            more = {"kind": "removed"}
        entries[key] = SnapshotEntry(path=key, mode=0o644, **more)  # type: ignore[arg-type]
    with opened(host) as fd, open(os.devnull, "rb") as nothing:
        snapshot = Snapshot(entries=entries, contents=os.dup(nothing.fileno()))
        diff = make_diff(snapshot, fd, hidden=hidden)
        snapshot.close()
    return {one.path: one for one in diff.changes}


def link(host: Path, path: str, target: str) -> None:
    """Make a link of the host's."""
    (host / path).parent.mkdir(parents=True, exist_ok=True)
    (host / path).symlink_to(target)


@pytest.mark.parametrize(
    ("links", "path", "reason", "name"),
    [
        ({"CLAUDE.md": "docs/guide.md"}, "docs/guide.md", AGENT, "CLAUDE.md"),
        ({"sub/CLAUDE.md": "../a", "a": "docs/guide.md"}, "docs/guide.md", AGENT, "sub/CLAUDE.md"),
        ({"Makefile": "scripts/common.mk.txt"}, "scripts/common.mk.txt", BUILD, "Makefile"),
        ({".vscode": ".vs-real"}, ".vs-real/tasks.json", EDITOR, ".vscode"),
        ({".cursor": "cfg/cursor", "cfg": "real"}, "real/cursor/rules/x.mdc", AGENT, ".cursor"),
        ({".github": "gh"}, "gh/workflows/ci.yml", CI, ".github"),
        ({".github": "gh", "gh/workflows": "../wf"}, "wf/ci.yml", CI, ".github"),
        ({"a/.github/workflows": "../../wf"}, "wf/deep/ci.yml", CI, "a/.github/workflows"),
        ({".vscode": "cfg", "cfg/tasks.json": "../tasks.txt"}, "tasks.txt", EDITOR, "cfg/tasks.json"),
        ({".config": "c"}, "c/git/config", GIT, ".config"),
        ({"conf/.envrc": "/HOST/env.sh"}, "env.sh", SHELL, "conf/.envrc"),
        ({".envrc": "../project/env.sh"}, "env.sh", SHELL, ".envrc"),
        ({"../other": "project/in", ".envrc": "../other/env.sh"}, "in/env.sh", SHELL, ".envrc"),
        ({"../.bashrc": "project/rc/bash"}, "rc/bash", SHELL, ".bashrc"),
        ({"../.config/fish": "../project/fish"}, "fish/config.d/x", SHELL, ".config/fish"),
        ({".git/hooks/pre-commit": "../../tools/check"}, "tools/check", GIT, ".git/hooks/pre-commit"),
        ({"CLAUDE.md": "Docs/GUIDE.md"}, "docs/guide.md", AGENT, "CLAUDE.md"),
    ],
)  # fmt: skip
def test_a_file_counts_by_each_link_that_leads_to_it(
    host: Path, links: Mapping[str, str], path: str, reason: str, name: str
) -> None:
    """Be the link to it or to a folder above it, through others, by an absolute path, or from the home."""
    for place, target in links.items():
        link(host, place, target.replace("/HOST", str(host)))
    found = judged(host, path, "docs/other.md", "unrelated/tasks.json")
    assert reason in found[path].dangers
    assert name in found[path].reached_as or reason == EDITOR
    assert not found["docs/other.md"].dangers
    assert not found["unrelated/tasks.json"].dangers


def test_links_that_lead_nowhere_new_ask_nothing(host: Path) -> None:
    """Circles, links to themselves, to the top, out of the folder, and a workspace whose packages link each other."""
    for path, target in {
        "loop": "loop",
        "a": "b",
        "b": "a",
        "self": ".",
        "out": "/usr",
        "up": "../..",
        "d/back": "..",
    }.items():
        link(host, path, target)
    for package in range(20):
        for other in range(20):
            link(host, f"packages/{package}/node_modules/{other}", f"../../{other}")
    found = judged(host, "packages/3/index.js", "src/a.py", "workflows/x", "b/c")
    assert [one.path for one in found.values() if one.dangers] == []
    link(host, "packages/7/node_modules/.vscode", "../../3")
    assert judged(host, "packages/3/index.js")["packages/3/index.js"].dangers == (EDITOR,)


SETTINGS = {
    ".git/config": """
[include] path = ../dev/git.inc
[core]
	hooksPath = "tools/hooks" ; a comment
	fsmonitor = sh tools/watch.txt \\
		--all
# path = dev/comment.inc
[includeIf "onbranch:never"]
	path = "../dev/branch.inc"
[filter "x"]
	clean = python3 ./tools/filter.txt %f
""",
    "dev/git.inc": "[alias]\n\tx = !sh -c 'tools/alias.txt'\n[include]\n\tpath = more.inc\n",
    "../.gitconfig": "[include]\npath=~/project/dev/home.inc\n",
    "sub/.git": "gitdir: ../.git/modules/sub\n",
    ".git/modules/sub/config": "[core]\n\tworktree = ../../../sub\n\thooksPath = hooks.d\n",
    "CLAUDE.md": "Read @docs/style.md first, and write to me@docs/mail.md.\n",
    "docs/style.md": "@../docs/more.md\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "reasons"),
    [
        ("dev/git.inc", (GIT,)), ("dev/more.inc", (GIT,)), ("dev/branch.inc", (GIT,)), ("dev/home.inc", (GIT,)),
        ("tools/hooks/deep/x", (GIT,)), ("tools/watch.txt", (GIT,)), ("tools/filter.txt", (GIT,)),
        ("tools/alias.txt", (GIT,)), ("sub/hooks.d/pre-push", (GIT,)), ("docs/style.md", (AGENT,)),
        ("docs/more.md", (AGENT,)),
        ("dev/comment.inc", ()), ("dev/other.inc", ()), ("tools/x.txt", ()), ("sub/code.c", ()), ("docs/mail.md", ()),
        ("hooks.d/x", ()),
    ],
)  # fmt: skip
def test_what_settings_and_instructions_name_counts_as_theirs(host: Path, path: str, reasons: tuple[str, ...]) -> None:
    """Git's includes, met or not, its hooks, programs and filters, those of submodules and of the home; `@file`."""
    for place, text in SETTINGS.items():
        (host / place).parent.mkdir(parents=True, exist_ok=True)
        (host / place).write_text(text)
    assert judged(host, path)[path].dangers == reasons


def test_git_reads_these_settings_as_we_do(host: Path) -> None:
    """What git lists of a file is what is found in it: sections in one line, quotes, escapes, lines that go on."""
    from cloche.workspace.host_settings import settings_in

    text = (
        SETTINGS[".git/config"]
        + '[a "B \\"c"] x = 1 # y\n\tlong = one\\\n two "; three" \\t.\n[a.b]\nk\nq="a\\\\b" c\n'
    )
    (host / "config").write_text(text)
    command = ["git", "config", "--file", "config", "--list", "-z", "--no-includes"]
    listed = subprocess.run(command, cwd=host, check=True, capture_output=True, text=True).stdout
    wanted = [tuple(row.split("\n", 1)) for row in listed.split("\0") if "\n" in row]
    assert [(key, value.split()) for key, value in settings_in(text)] == [
        (key.lower(), value.split()) for key, value in wanted
    ]


def test_a_new_link_is_judged_by_where_it_leads(host: Path) -> None:
    """To what is hidden or holds it, through the host's links out of the folder or into git's own; else nothing."""
    for path, target in {"ext": "/usr", "lib": "src/lib", "g": ".git"}.items():
        link(host, path, target)
    (host / "src/lib").mkdir(parents=True)
    found = judged(
        host, hidden=(".env", "conf/keys/id_rsa"), public__readme="../.env", a="conf", b="lib/x", c="ext/passwd",
        d="g/config", e="public/readme", f="src",
    )  # fmt: skip
    told = {path: one.dangers for path, one in found.items() if one.kind == "link"}
    assert told == {
        "public/readme": (TO_HIDDEN,), "a": (TO_HIDDEN,), "b": (), "c": (LEAVES,), "d": (INTO_GIT,),
        "e": (TO_HIDDEN,), "f": (),
    }  # fmt: skip


def test_a_new_link_brings_what_lies_elsewhere(host: Path) -> None:
    """In the way to what a link of the host leads to, and as a name for what is changed with it."""
    link(host, "CLAUDE.md", "docs/guide.md")
    (host / "docs").mkdir()
    (host / "docs/guide.md").touch()
    assert AGENT in judged(host, docs="other")["docs"].dangers
    found = judged(host, "notes.txt", "docs/other.md", GEMINI__md="x", sub__x="../notes.txt")
    assert not found["docs/other.md"].dangers
    assert judged(host, "notes.txt", **{"WARP.md": "notes.txt"})["notes.txt"].dangers == (AGENT,)


def test_names_that_differ_in_case_alone_are_told(host: Path) -> None:
    """Beside the host's and beside each other; a file that takes another case is none."""
    for name in ("Readme", "other", "License"):
        (host / name).touch()
    found = judged(host, "README", "a/x", "a/X", "other2", "a/y", "-License", "LICENSE")
    assert {path for path, one in found.items() if one.dangers == (TWIN,)} == {"README", "a/x", "a/X"}


def test_a_repository_at_the_top_is_told_by_each_of_its_names(host: Path) -> None:
    """A yes to `HEAD` alone would make one of what came before; elsewhere they count beside one."""
    found = judged(host, "config", "objects/x", "refs/heads/main", "d/config", "d/refs/x")
    assert {path for path, one in found.items() if GIT in one.dangers} == {"config", "objects", "refs"}
    (host / "d").mkdir()
    (host / "d/HEAD").touch()
    assert GIT in judged(host, "d/config")["d/config"].dangers
    assert HOOKS in judged(host, "lefthook.toml")["lefthook.toml"].dangers


def test_what_cannot_be_looked_at_whole_leaves_nothing_unasked(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many links, or too little time, each change needs a yes."""
    for number in range(5):
        link(host, f"d/l{number}", "x")
    assert judged(host, "a")["a"].dangers == ()
    with opened(host) as fd:
        assert not find_links(fd, lambda: None, most_s=-1).is_complete
    monkeypatch.setattr("cloche.workspace.host_links.MOST_LINKS", 3)
    assert judged(host, "a")["a"].dangers == (UNKNOWN,)


def test_the_walk_ends_where_nobody_waits(host: Path) -> None:
    """It asks between folders, and closes what it has opened."""
    (host / "a/b/c").mkdir(parents=True)
    before, asked = len(os.listdir("/proc/self/fd")), []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise KeyError

    with opened(host) as fd, pytest.raises(KeyError):
        find_links(fd, check)
    assert len(os.listdir("/proc/self/fd")) == before
    with opened(host) as fd:
        assert find_links(fd, lambda: None) == HostLinks()


def test_settings_of_blank_lines_alone_are_soon_read() -> None:
    """A checkout's bare repository may have a configuration of a mebibyte of them: each is looked at once."""
    from cloche.workspace.host_settings import settings_in

    began = time.process_time()
    assert list(settings_in("[a]\nb = c" + "\n" * (1 << 15))) == [("a.b", "c")]
    assert time.process_time() - began < 1


def test_one_long_setting_ends_where_nobody_waits(host: Path) -> None:
    """A value of very many words is as cancellable as very many files."""
    (host / "bare").mkdir()
    (host / "bare/HEAD").write_text("ref: refs/heads/main\n")
    (host / "bare/config").write_text("[a]\n\tb = " + " ".join(map(str, range(50_000))))
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks > 1000:
            raise TimeoutError

    with opened(host) as folder, pytest.raises(TimeoutError):
        find_names(folder, [], check)


def test_a_link_through_very_many_twins_of_a_name_is_not_followed_through_all() -> None:
    """A guest may make a link by each way to write a name in large and small letters, and very many links by these."""
    names = ["".join(letters) for letters in product(*((one, one.upper()) for one in "abcdefghijklm"))]
    resolver = Resolver("/project", [], [(name, "x") for name in names])
    tracemalloc.start()
    try:
        assert resolver.follow("", f"{names[0]}/y", is_trusted=False) == ANYWHERE
        assert tracemalloc.get_traced_memory()[1] < 256 << 10
    finally:
        tracemalloc.stop()
