"""A worktree or a submodule as a sandbox's folder: git works in it, and nothing of another repository is shown."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cloche
from cloche.backends.local import LocalBackend
from cloche.core.errors import InvalidRequest
from cloche.workspace.git import fetch_commits
from cloche.workspace.git_branch import commit_to_branch
from cloche.workspace.git_folder import find_git_folder
from tests.harness.workspaces import content_of, file, folder, snapshot_of

pytestmark = [pytest.mark.user_soak, pytest.mark.usefixtures("own_places")]
ENVIRONMENT = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "3", "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "Ada",
    "GIT_CONFIG_KEY_1": "user.email", "GIT_CONFIG_VALUE_1": "ada@example.org",
    "GIT_CONFIG_KEY_2": "protocol.file.allow", "GIT_CONFIG_VALUE_2": "always",
}  # fmt: skip
AGENT = """
set -e
git status --porcelain; test ! -e .git/hooks; echo two >> a.txt; git add -A; git -c user.name=x commit -qm second
git checkout -qb topic; echo three > new; git add new; git commit -qm third; git gc -q; git status --porcelain
git log --format=%s
mkdir .git/hooks; echo evil | tee .git/hooks/post-commit .git/info/attributes >> .git/config
"""


def git(where: Path, *words: str) -> str:
    """Run git as a user does."""
    return subprocess.run(
        ["git", *words], cwd=where, env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout.rstrip("\n")


def made(root: Path, name: str) -> Path:
    """Make a repository with one commit, and a hook."""
    git(root, "init", "-q", "-b", "main", name)
    (root / name / "a.txt").write_text("one\n")
    git(root / name, "add", ".")
    git(root / name, "commit", "-qm", "first")
    (root / name / ".git/hooks").mkdir(exist_ok=True)
    (root / name / ".git/hooks/pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (root / name / ".git/hooks/pre-commit").chmod(0o755)
    return root / name


@pytest.fixture
def root() -> Iterator[Path]:
    """Give a folder for repositories."""
    with tempfile.TemporaryDirectory(prefix="project-") as made:
        yield Path(made).resolve()


def worktree(root: Path) -> tuple[Path, Path]:
    """Return a worktree below its repository, and the common directory."""
    git(made(root, "main"), "worktree", "add", "-q", ".agents/one", "-b", "one")
    return root / "main/.agents/one", root / "main/.git"


def worktree_of_bare(root: Path) -> tuple[Path, Path]:
    """Return a worktree inside of a bare repository."""
    made(root, "origin")
    git(root, "clone", "-q", "--bare", "origin", "bare.git")
    git(root / "bare.git", "worktree", "add", "-q", "one")
    return root / "bare.git/one", root / "bare.git"


def submodule(root: Path) -> tuple[Path, Path]:
    """Return a submodule, and its repository."""
    made(root, "library")
    git(made(root, "main"), "submodule", "add", "-q", os.fspath(root / "library"), "sub")
    return root / "main/sub", root / "main/.git/modules/sub"


Making = Callable[[Path], tuple[Path, Path]]
KINDS = pytest.mark.parametrize("making", [worktree, worktree_of_bare, submodule])


def kept(common: Path) -> dict[str, object]:
    """Return all of a repository but objects, and what commits of sandboxes add."""
    parts = ("objects", "refs/cloche", "one", "logs/refs/cloche", "refs/heads/made", "logs/refs/heads/made")
    facts = content_of(common)
    return {path: facts[path] for path in facts if not path.startswith(parts) and facts[path][3]}


@KINDS
@pytest.mark.parametrize("is_copy", [False, True], ids=["view", "copy"])
def test_git_works_in_it_and_its_commits_come_back(
    root: Path, making: Making, is_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status is clean, commits become references, files are written; branches, hooks and configuration stay."""
    if is_copy:
        monkeypatch.setattr(LocalBackend, "why_no_view", lambda *_: "this is a test")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.fspath(root / "gitconfig"))
    (root / "gitconfig").write_text("[user]\n\tname = Ada\n\temail = ada@example.org\n")
    where, common = making(root)
    before, branch = kept(common), git(where, "branch", "--show-current")
    whole = content_of(common)
    with cloche.Sandbox(workspace=where, timeout=60) as sandbox:
        done = sandbox.exec(shell=AGENT)
        assert done.stdout.split() == ["third", "second", "first"], done.stderr
        diff = sandbox.diff()
        assert {one.path for one in diff.changes} == {"a.txt", "new"}
        assert content_of(common) == whole
        written = sandbox.commit(diff)
        assert (set(written.written), written.left) == ({"a.txt", "new"}, {})
        assert {name.partition("/")[2].split("/", 2)[2] for name in written.refs} == {branch, "topic"}
        other = sandbox.commit(branch="made").refs
        assert "refs/heads/made" in other
    assert kept(common) == before
    assert git(where, "log", "--format=%an %s", "-2", *(one for one in written.refs if one.endswith("/topic"))) == (
        "Ada third\nx second"
    )
    assert (where / "a.txt").read_text() == "one\ntwo\n"
    assert git(where, "fsck", "--strict", "--no-dangling") == ""


def test_sandboxes_with_a_name_and_forks_have_the_repository_too(root: Path) -> None:
    """Who attaches gets the commits; a session with checkpoints has a repository in its copy."""
    where, _ = worktree(root)
    name, author = f"tree-{os.getpid()}", "git config user.name A; git config user.email a@b"
    with cloche.Sandbox(workspace=where, name=name, keep="1m") as sandbox:
        assert sandbox.exec(shell=f"{author}; echo two >> a.txt; git commit -qam second").ok
    with cloche.Sandbox.attach(name) as sandbox:
        try:
            assert sandbox.commit().refs == {
                f"refs/cloche/{name}/one": git(where, "rev-parse", f"refs/cloche/{name}/one")
            }
        finally:
            sandbox.kill()
    with cloche.Sandbox(workspace=where) as sandbox:
        session = sandbox.session(checkpoints=True)
        code = (
            f"import subprocess; print(subprocess.getoutput('{author}; git commit -qam forked; git log --format=%s'))"
        )
        assert session.run(code).stdout.split() == ["forked", "first"]
        assert [ref.rpartition("/")[2] for ref in session.sandbox.commit().refs] == ["one"]


def test_what_has_no_repository_inside_stops_no_git(root: Path) -> None:
    """A submodule of a worktree is no error of `git status`; a hidden `.git` and a folder to read have none at all."""
    made(root, "library")
    git(made(root, "main"), "submodule", "add", "-q", os.fspath(root / "library"), "sub")
    git(root / "main", "commit", "-qnm", "with a submodule")
    for name in ("one", "two"):
        git(root / "main", "worktree", "add", "-q", os.fspath(root / name))
    git(root / "one", "submodule", "update", "-q", "--init")
    with cloche.Sandbox(workspace=root / "one", workspace_read=[root / "two"]) as sandbox:
        (said,) = sandbox.notes["workspace"]["warnings"]
        assert said == "Git does not work inside in sub: the repository is not in the folder."
        done = sandbox.exec(shell=f"git status --porcelain && cat sub/a.txt && cat {root}/two/a.txt")
        assert (done.stdout, done.stderr) == ("one\none\n", "")
    with cloche.Sandbox(workspace=root / "one", workspace_hide=["/.git"]) as sandbox:
        assert "warnings" not in sandbox.notes["workspace"]
        assert ".git" not in {one.name for one in sandbox.list_dir(".")}


# What is not this folder's.


def point(where: Path, at: object) -> None:
    """Make a folder's `.git` name something."""
    (where / ".git").unlink(missing_ok=True)
    (where / ".git").write_text(f"gitdir: {at}\n")


def to_system(root: Path, where: Path) -> None:
    """Name a folder of the system."""
    point(where, "/etc")


def to_repository(root: Path, where: Path) -> None:
    """Name a repository of the same user's."""
    point(where, root / "secret/.git")


def to_worktree(root: Path, where: Path) -> None:
    """Name another worktree's directory."""
    git(root / "secret", "worktree", "add", "-q", os.fspath(root / "other"))
    point(where, root / "secret/.git/worktrees/other")


def to_submodule(root: Path, where: Path) -> None:
    """Name the repository of a submodule that is elsewhere."""
    git(root / "secret", "submodule", "add", "-q", os.fspath(root / "library"), "sub")
    point(where, root / "secret/.git/modules/sub")


def by_own_directory(root: Path, where: Path) -> None:
    """Bring a worktree's directory of one's own, which names the folder, and another's common directory."""
    own = root / "evil/worktrees/one"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    (own / "commondir").write_text(f"{root}/secret/.git\n")
    (own / "gitdir").write_text(f"{where}/.git\n")
    point(where, own)


def by_link(root: Path, where: Path) -> None:
    """Do the same with links on the way, so that words alone look right."""
    by_own_directory(root, where)
    for name in ("HEAD", "objects", "refs", "config"):
        (root / "evil" / name).symlink_to(root / "secret/.git" / name)
    (root / "evil/worktrees/one/commondir").write_text("../..\n")


def by_bytes(root: Path, where: Path) -> None:
    """Write what is no path."""
    (where / ".git").write_bytes(b"gitdir: \0\xff" * 10_000)


def by_pipe(root: Path, where: Path) -> None:
    """Name a directory whose files are pipes that nobody writes to."""
    (root / "evil").mkdir()
    for name in ("config", "HEAD", "commondir", "gitdir"):
        os.mkfifo(root / "evil" / name)
    point(where, root / "evil")


HOSTILE = (to_system, to_repository, to_worktree, to_submodule, by_own_directory, by_link, by_bytes, by_pipe)


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_file_that_names_another_repository_shows_nothing_of_it(
    root: Path, attack: Callable[[Path, Path], None]
) -> None:
    """It is refused with a sentence, also where git itself would follow it; nothing is read from or written to it."""
    made(root, "library")
    made(root, "secret")
    where = root / "folder"
    where.mkdir()
    attack(root, where)
    if attack in (to_repository, by_own_directory, by_link):
        assert git(where, "log", "--format=%s") == "first"  # which works
    before = content_of(root)
    at = os.open(where, os.O_RDONLY)
    snapshot = snapshot_of(
        [folder(".git"), file(".git/HEAD", b"ref: refs/heads/x\n"), file(".git/refs/heads/x", b"0" * 40)]
    )
    try:
        with pytest.raises(InvalidRequest, match="Git does not work inside"):
            find_git_folder(at)
        with pytest.raises(InvalidRequest, match="Git does not work inside"):
            fetch_commits(at, snapshot, "box")
        with pytest.raises(InvalidRequest, match="Git does not work inside"):
            commit_to_branch(at, snapshot, [], "made", author="A <a@b>", message="m")
    finally:
        os.close(at)
        snapshot.close()
    assert content_of(root) == before


def test_a_folder_with_such_a_file_is_opened_without_it(root: Path) -> None:
    """The sentence is in `warnings`, and inside neither the path nor a repository is there."""
    made(root, "secret")
    where = root / "folder"
    where.mkdir()
    to_repository(root, where)
    with cloche.Sandbox(workspace=where) as sandbox:
        (said,) = sandbox.notes["workspace"]["warnings"]
        assert "is not the repository of this folder" in said
        done = sandbox.exec(shell=f"ls {root}/secret; git log")
        assert (done.stdout, done.stderr.count("ot a git repository"), done.exit_code) == ("", 1, 128)
