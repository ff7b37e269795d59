"""Git inside a sandbox with a folder of the host: a hidden file is not missed, and commits are the caller's."""

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
from cloche.workspace.git_identity import author_config

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("own_places")]
LOG = "git log -1 --format='%an <%ae> %s' --name-status"
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Give the host's git, with an author and nothing else of its own configuration."""
    (tmp_path / "gitconfig").write_text(
        '[user]\n\tname = "Ada \\"A\\" L\\\\ovelace"\n\temail = ada@example.org\n[alias]\n\tst = status\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.fspath(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def run(where: Path, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True)
        return done.stdout.rstrip("\n")

    return run


@pytest.fixture
def project(git: Git) -> Iterator[Path]:
    """Give a repository that tracks a file that is hidden, and wants commits signed."""
    with tempfile.TemporaryDirectory(prefix="project-") as folder:
        root = Path(folder).resolve() / "project"
        (root / "sub").mkdir(parents=True)
        for path in (".env", "sub/.env", "a.txt"):
            (root / path).write_text("KEY=1\n")
        git(root.parent, "init", "-q", "-b", "main", "project")
        git(root, "add", ".")
        git(root, "commit", "-qm", "first")
        git(root, "config", "commit.gpgSign", "true")
        yield root


@pytest.mark.parametrize("is_copy", [False, True], ids=["view", "copy"])
def test_a_hidden_file_is_not_missed_and_a_commit_is_the_callers(
    project: Path, is_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status is clean, `add -A` leaves it, and a commit is made unsigned, by the caller's name and address alone."""
    if is_copy:
        monkeypatch.setattr(LocalBackend, "why_no_view", lambda *_: "this is a test")
    with cloche.Sandbox(workspace=project) as sandbox:
        assert "hidden from the sandbox: .env, sub/.env" in sandbox.notes["workspace"]["warnings"][0]
        assert sandbox.exec(shell="git status --porcelain; git config alias.st").stdout == ""
        assert sandbox.run("import os; os.system('git status --porcelain')").stdout == ""
        done = sandbox.exec(shell=f"echo two >> a.txt && git add -A && git commit -qm second && {LOG}")
        assert done.stdout.split("\n")[0] == 'Ada "A" L\\ovelace <ada@example.org> second', done.stderr
        assert done.stdout.split("\n")[2:] == ["M\ta.txt", ""]
        own = "git config user.name Own && echo three >> a.txt && git commit -qam third"
        assert sandbox.exec(shell=f"{own} && {LOG}").stdout.startswith("Own <ada@example.org> third")
        assert [one.path for one in sandbox.diff().changes] == ["a.txt"]
        assert len(sandbox.commit().refs) == 1


def test_a_commit_that_deletes_a_hidden_file_needs_a_yes_of_its_own(project: Path, git: Git) -> None:
    """It is named in the diff, and its branch is fetched only where that is named; files are written without it."""
    with cloche.Sandbox(workspace=project) as sandbox:
        deletes = "git rm -q --cached --sparse .env && git commit -qm deletes && echo two >> a.txt"
        assert sandbox.exec(shell=f"git branch good && {deletes} && git checkout -q good -- && git commit -qam good").ok
        diff = sandbox.diff()
        (named,) = diff.dangerous
        assert (named.path, named.dangers) == (
            ".git/refs/heads/main", ("it deletes .env, which is hidden from the sandbox",),
        )  # fmt: skip
        with pytest.raises(InvalidRequest, match=r"confirmation: it deletes \.env, [^;]*: '\.git/refs/heads/main'"):
            sandbox.commit(diff)
        assert git(project, "for-each-ref", "refs/cloche") == ""
        done = sandbox.commit(diff, theirs=[named.path])
        assert [name.rpartition("/")[2] for name in done.refs] == ["good"]
        assert "it deletes .env" in done.left[named.path]
        done = sandbox.commit(dangerous=[named.path])
        assert [name.rpartition("/")[2] for name in done.refs] == ["good", "main"]
        assert sandbox.diff().changes == ()
    assert (project / ".env").read_text() == "KEY=1\n"


def test_the_author_is_what_git_says_in_that_folder(tmp_path: Path, git: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git's own choice by location holds, what the repository itself has is not read, and without an author is none."""
    (tmp_path / "work").write_text("[user]\n\temail = ada@work.example\n\tsigningKey = secret\n")
    with (tmp_path / "gitconfig").open("a") as file:
        file.write(f'[includeIf "gitdir:{tmp_path.resolve()}/project/"]\n\tpath = {tmp_path}/work\n')
    git(tmp_path, "init", "-q", "project")
    git(tmp_path / "project", "config", "user.name", "Repository")
    at = os.open(tmp_path / "project", os.O_RDONLY)
    try:
        assert author_config(at) == '[user]\n\temail = "ada@work.example"\n\tname = "Ada \\"A\\" L\\\\ovelace"\n'
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        assert author_config(at) == ""
    finally:
        os.close(at)
