"""Commits that come out of a review: signed on the host by the user's own key, and those that were made inside."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.cli._agent_review import review
from cloche.coding_agents.review import review_changes
from cloche.core.errors import BackendUnavailable
from cloche.execution.sandbox import AsyncSandbox

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "own_places")
AGENT = """
echo two >> a.txt
git config user.signingkey stolen; git config gpg.ssh.program /workspace/sign; git config commit.gpgsign true
printf '#!/bin/sh\\ntouch /tmp/ran-by-guest\\n' > sign; chmod 755 sign
"""
COMMITS = """
git config user.name Agent; git config user.email a@b; git checkout -qb work
echo one >> b; git add b; git commit -qm 'Add b

With a reason.'; echo x > .envrc; git add .envrc; git commit -qm "$(printf 'y\\033[2J')"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a repository with one commit, and a home with a git configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / ".gitconfig").write_text("[user]\nname = Ada\nemail = ada@example.org\n")
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.txt").write_text("one\n")
    git(project, "init", "-q", "-b", "main")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    yield project
    if (tmp_path / ".gnupg").exists():
        subprocess.run(["gpgconf", "--kill", "all"], check=True)


def git(where: Path, *words: str) -> str:
    """Run git as the user does."""
    return subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True).stdout.rstrip("\n")


def ssh_key(home: Path, *, is_broken: bool = False) -> str:
    """Make a key of SSH, and say how it is checked; return git's settings."""
    key = home / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (home / "signers").write_text(f"ada@example.org {key.with_suffix('.pub').read_text()}")
    if is_broken:
        key.write_text("no key\n")
    return f'[gpg]\nformat = ssh\n[gpg "ssh"]\nallowedSignersFile = {home}/signers\n[user]\nsigningKey = {key}.pub\n'


def gpg_key(home: Path) -> str:
    """Make a key of OpenPGP in a keyring of the home; return git's settings."""
    (home / ".gnupg").mkdir(mode=0o700)
    words = ["--batch", "--quiet", "--passphrase", "", "--quick-gen-key", "Ada <ada@example.org>", "ed25519", "sign"]
    subprocess.run(["gpg", *words], check=True, capture_output=True)
    return ""


def x509_key(home: Path) -> str:
    """Make a key of X.509 with a certificate of its own, which is trusted; return git's settings."""
    folder = home / ".gnupg"
    folder.mkdir(mode=0o700)
    (folder / "gpgsm.conf").write_text("disable-crl-checks\n")
    lines = "Key-Type: RSA", "Key-Length: 2048", "Key-Usage: sign", "Serial: random", "Name-DN: CN=Ada"
    (folder / "asked").write_text("\n".join((*lines, "Name-Email: ada@example.org", "")))
    words = ["gpgsm", "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
    made = ["--armor", "--output", f"{folder}/pem", "--generate-key", f"{folder}/asked"]
    subprocess.run([*words, *made], check=True, capture_output=True)
    subprocess.run([*words, "--import", f"{folder}/pem"], check=True, capture_output=True)
    listed = subprocess.run([*words, "-k", "--with-colons"], text=True, check=True, capture_output=True).stdout
    (number,) = (line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))
    (folder / "trustlist.txt").write_text(f"{number} S relax\n")
    return f"[gpg]\nformat = x509\n[user]\nsigningKey = {number}\n"


PROGRAMS = {ssh_key: "ssh-keygen", gpg_key: "gpg", x509_key: "gpgsm"}


@pytest.mark.parametrize(
    ("key", "shown"),
    [(ssh_key, 'Good "git" signature for ada@'), (gpg_key, "Good signature"), (x509_key, "Good signature")],
)
def test_a_branch_is_signed_by_the_users_key_whatever_the_repository_says(
    project: Path, tmp_path: Path, key: Callable[[Path], str], shown: str
) -> None:
    """The author is the user, git accepts the signature, and no program that the guest has named ran."""
    if shutil.which(PROGRAMS[key]) is None:
        pytest.skip(f"missing: {PROGRAMS[key]} (make setup-system)")
    with (tmp_path / ".gitconfig").open("a") as file:
        file.write(f"{key(tmp_path)}[commit]\ngpgSign\n")
    programs = {f"gpg.{kind}program": "/bin/false" for kind in ("", "ssh.", "openpgp.", "x509.")}
    for name, value in {**programs, "user.signingkey": "none"}.items():
        git(project, "config", name, value)

    async def main() -> None:
        async with AsyncSandbox(workspace=project) as sandbox:
            assert (await sandbox.exec(shell=AGENT)).ok
            answers = iter(["b", "fix", "f", "n", "y"])
            end = await review(sandbox, folder=str(project), read=lambda _: next(answers))
            assert end.how == "committed"

    asyncio.run(main())
    (project / ".git/config").write_text("")
    assert git(project, "log", "-1", "--format=%an %ae %cn", "fix") == "Ada ada@example.org Ada"
    verified = subprocess.run(["git", "verify-commit", "fix"], cwd=project, capture_output=True, text=True, check=True)
    assert shown in verified.stderr
    assert git(project, "show", "fix:a.txt") == "one\ntwo"
    assert not os.path.exists("/tmp/ran-by-guest")


def test_a_commit_that_cannot_be_signed_is_not_made(project: Path, tmp_path: Path) -> None:
    """The error says why, and no branch appears."""
    with (tmp_path / ".gitconfig").open("a") as file:
        file.write(f"{ssh_key(tmp_path, is_broken=True)}[commit]\ngpgSign = true\n")

    async def main() -> None:
        async with AsyncSandbox(workspace=project) as sandbox:
            await sandbox.exec(shell="echo two >> a.txt")
            with pytest.raises(BackendUnavailable, match="could not be signed"):
                await sandbox.commit(branch="fix", as_user=True)

    asyncio.run(main())
    assert git(project, "branch", "--format=%(refname:short)") == "main"


@pytest.mark.parametrize("is_signed", [False, True])
def test_commits_of_an_agent_are_shown_and_taken_over_with_their_messages(
    project: Path, tmp_path: Path, is_signed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Author and message stay; where the user signs, the user is the committer, and each commit is signed."""
    with (tmp_path / ".gitconfig").open("a") as file:
        file.write(f"{ssh_key(tmp_path)}[commit]\ngpgSign = {str(is_signed).lower()}\n")

    async def main() -> None:
        async with AsyncSandbox(workspace=project) as sandbox:
            assert (await sandbox.exec(shell=COMMITS)).ok
            asked: list[str] = []
            answers = iter(["t", "n", "t", "y", "theirs", ""])

            def read(question: str) -> str:
                asked.append(question)
                return next(answers)

            await review(sandbox, folder=str(project), read=read)
            assert "dangerous" in asked[1]
            left = (await review_changes(sandbox)).branches
            assert [(branch.name, branch.count) for branch in left] == [("work", 2)] * is_signed

    asyncio.run(main())
    shown = capsys.readouterr().err
    assert "2 commits were made inside on work" in shown
    assert "y\\x1b[2J" in shown
    assert "A .envrc" in shown
    assert git(project, "log", "--format=%an %cn|%B", "-1", "theirs^") == (
        f"Agent {'Ada' if is_signed else 'Agent'}|Add b\n\nWith a reason."
    )
    verified = [subprocess.run(["git", "verify-commit", name], cwd=project, check=False).returncode == 0
                for name in ("theirs", "theirs^")]  # fmt: skip
    assert verified == [is_signed, is_signed]
    assert git(project, "merge-base", "main", "theirs") == git(project, "rev-parse", "main")
    assert git(project, "status", "--porcelain") == ""


def test_a_git_folder_that_is_anything_does_not_hide_the_changes(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The review says what is wrong with it, and the files can be written."""

    async def main() -> None:
        async with AsyncSandbox(workspace=project) as sandbox:
            await sandbox.exec(shell="echo two >> a.txt; printf '\\033[2Jx' > .git/refs/heads/broken")
            end = await review(sandbox, folder=str(project), read=lambda _: "a")
            assert (end.how, end.left) == ("committed", 0)

    asyncio.run(main())
    assert (project / "a.txt").read_text() == "one\ntwo\n"
    assert "commits made inside cannot be read" in capsys.readouterr().err
