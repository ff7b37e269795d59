"""The state of a git repository is what git itself says of it, and nothing that the repository names is run or read."""

import os
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Mapping
from hashlib import sha1
from pathlib import Path

import pytest

from cloche.hostfs import open_folder
from cloche.records import git_objects, git_state
from cloche.records.git_ignore import is_ignored, parse_rules
from cloche.records.git_state import GitState, read_git_state

BASE = """
git init -q -b main .
mkdir -p src/deep docs
echo one > a.py; echo two > src/b.py; echo three > src/deep/c.py; printf '#!/bin/sh\\n' > run.sh; chmod +x run.sh
seq 1 400 > docs/long.txt; ln -s a.py link; printf '*.log\\nbuild/\\n' > .gitignore
git add -A && git commit -q -m first
"""
CASES = {
    "clean": "true",
    "modified": "echo changed >> a.py; echo more >> src/deep/c.py",
    "same size": "printf 'eno\\n' > a.py; touch -d '2001-01-01' a.py",
    "staged": "echo changed >> src/b.py; git add src/b.py",
    "staged, then modified": "echo x >> a.py; git add a.py; echo y >> a.py",
    "added": "echo new > new; git add new; mkdir -p n/m; echo x > n/m/x; git add n",
    "added, then deleted": "echo new > new; git add new; rm new",
    "deleted": "rm a.py; rm -r src",
    "deleted and staged": "git rm -q a.py; git rm -rq src/deep",
    "deleted from the index alone": "git rm -q --cached a.py src/deep/c.py",
    "renamed": "git mv a.py renamed.py; git mv docs texts",
    "executable": "chmod +x a.py; chmod -x run.sh; git add run.sh",
    "modes that do not count": "git config core.fileMode false; chmod +x a.py",
    "link changed": "ln -sf src/b.py link",
    "type changed": "rm a.py; ln -s src a.py; rm link; echo file > link",
    "type changed and staged": "rm a.py; ln -s src a.py; git add a.py",
    "a folder in place of a file": "rm a.py; mkdir a.py; echo x > a.py/x",
    "a file in place of a folder": "rm -r src; echo x > src",
    "a link in place of a folder": "mv src elsewhere; ln -s elsewhere src",
    "a file in place of a folder, staged": "rm -r src; echo x > src; git add -A",
    "a FIFO in place of a file": "rm a.py; mkfifo a.py pipe",
    "untracked": "echo x > new; mkdir -p one/two empty src/more; echo x > one/two/x; echo x > src/more/y; ln -s / out",
    "ignored": "echo x > x.log; mkdir build other; echo x > build/x; echo x > other/y.log; echo x > src/z.log",
    "ignored, and taken back": """
        printf '*\\n!*/\\n!*.md\\n/docs/private.md\\n' > .gitignore; echo x > src/read.md; echo x > src/no
        echo x > docs/private.md; echo x > docs/public.md""",
    "ignored in a folder": "printf '/only\\n' > src/.gitignore; touch src/only src/deep/only only",
    "ignored by the repository": "echo 'secret*' >> .git/info/exclude; touch secret1 src/secret2 other",
    "patterns": """
        printf 'a?c\\n[x-z]*.t\\ndocs/**/q\\n**/w/v\\nu/**\\n\\\\#h\\n' > .gitignore
        printf 'trail\\\\ \\n[!k]k\\n\\\\!n\\nlit[\\nd*e*f\\n' >> .gitignore
        mkdir -p docs/1/2 w s/w u; touch abc abbc y1.t a1.t docs/q docs/1/2/q w/v s/w/v u/x '#h' 'trail ' jk kk '!n'
        touch 'lit[' def daeaf dea""",
    "tracked in an ignored folder": """
        mkdir build; echo x > build/k; git add -f build/k; echo y > build/l; echo z >> build/k""",
    "odd names": """
        touch 'a b' 'q"t' "$(printf 'n\\nl')" "$(printf 'u\\303\\274')" "$(printf 'bad\\377')" 'b\\s'; git add 'a b'""",
    "another repository inside": "git init -q inner; echo x > inner/x; mkdir -p not/.git; echo x > not/y",
    "intended": "echo new > new; git add -N new",
    "told not to look": """
        git update-index --assume-unchanged a.py; echo x >> a.py; git update-index --skip-worktree run.sh; rm run.sh""",
    "index of version 4": "echo n > src/deep/n; git add -A; git update-index --index-version 4; echo x >> src/b.py",
    "detached": "git commit -q --allow-empty -m second; git checkout -q --detach HEAD~1; echo x >> a.py",
    "unborn": "git checkout -q --orphan other; git rm -q --cached a.py",
    "packed": """
        for n in 1 2 3; do seq $n 400 > docs/long.txt; seq $n 90 > src/many$n; git add -A; git commit -q -m n; done
        git tag t; git gc -q; git pack-refs --all; rm -f .git/refs/heads/*; echo x >> src/b.py; git rm -q a.py""",
    "unmerged": """
        git checkout -q -b other; echo other > a.py; git rm -q src/b.py; git commit -q -am o; git checkout -q main
        echo main > a.py; echo main > src/b.py; git commit -q -am m; git merge -q other > /dev/null || true""",
    "line ends": """
        printf '*.txt text\\n' > .gitattributes; printf '1\\n2\\n' > w.txt; git add -A; git commit -q -m w
        printf '1\\r\\n2\\r\\n' > w.txt; git add w.txt; touch -d '2001-01-01' w.txt""",
}  # fmt: skip


@pytest.fixture
def git(tmp_path: Path) -> Mapping[str, str]:
    """Return an environment in which git knows nobody's settings."""
    who = {f"GIT_{role}_{what}": "x@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    return {"PATH": os.environ["PATH"], **who, **quiet}


@pytest.fixture
def repository(tmp_path: Path, git: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a repository of one commit."""
    made = tmp_path_factory.getbasetemp() / "first"
    if not made.exists():
        made.mkdir()
        run(made, BASE, git)
    return Path(shutil.copytree(made, tmp_path / "repository", symlinks=True))


def run(folder: Path, script: str, git: Mapping[str, str]) -> None:
    """Run a script in a folder."""
    subprocess.run(["sh", "-ec", script], cwd=folder, env=git, check=True, stdin=subprocess.DEVNULL)


def state_of(folder: Path, *, deadline: float | None = None) -> GitState:
    """Return what is read of a folder."""
    fd = open_folder(folder)
    try:
        return read_git_state(fd, deadline=deadline)
    finally:
        os.close(fd)


def said(folder: Path, git: Mapping[str, str], *command: str) -> list[str]:
    """Return the lines of a git command."""
    done = subprocess.run(["git", *command], cwd=folder, env=git, stdout=subprocess.PIPE, check=False)
    return done.stdout.decode().splitlines()


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_what_git_says(case: str, repository: Path, git: Mapping[str, str]) -> None:
    """Branch, commit and each line of the status, for a change of each kind."""
    run(repository, CASES[case], git)
    found = state_of(repository)  # before git: it would write its index anew
    assert list(found.status) == said(repository, git, "status", "--porcelain", "--no-renames")
    assert found.branch == next(iter(said(repository, git, "symbolic-ref", "-q", "--short", "HEAD")), None)
    assert found.head == next(iter(said(repository, git, "rev-parse", "-q", "--verify", "HEAD")), None)
    assert (found.is_repository, found.is_partial, found.reason) == (True, False, None)


def test_files_that_nobody_touched_are_not_read(
    repository: Path, git: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As git does it: size, times and inode say enough, once the index is younger than the files."""
    run(repository, "touch -hd 2001-01-01 * .gitignore */* */*/*; git status; touch -d 2001-01-02 .git/index", git)
    monkeypatch.setattr(git_state, "_MOST_COMPARED", -1)
    assert state_of(repository).as_dict()["isPartial"] is False


def test_nothing_that_the_repository_names_is_run(tmp_path: Path, repository: Path, git: Mapping[str, str]) -> None:
    """A monitor of files, and a filter of contents: git runs both, we neither."""
    ran = tmp_path / "ran"
    script = f"""
    git config core.fsmonitor 'touch {ran}.monitor; false'
    git config filter.x.clean 'touch {ran}.filter; cat'; echo '*.py filter=x' > .gitattributes
    printf 'eno\\n' > a.py"""
    run(repository, script, git)
    found = state_of(repository)
    assert list(tmp_path.glob("ran.*")) == []
    assert found.status == (" M a.py", "?? .gitattributes")
    assert found.reason == "filters of the repository were not run: files are compared as they are"
    assert said(repository, git, "status", "--porcelain") == list(found.status)
    assert sorted(path.name for path in tmp_path.glob("ran.*")) == ["ran.filter", "ran.monitor"]


LED_OUT = {
    "a file that names another folder": ("mv .git ../other; echo 'gitdir: ../other' > .git", ".git is a file"),
    "a link": ("mv .git ../other; ln -s ../other .git", ".git is a file or a link"),
    "files elsewhere": ("git config core.worktree ../x; mkdir ../x", "names another working tree"),
    "objects of another repository": (
        "mv .git/objects ../o; mkdir -p .git/objects/info; echo ../../o > .git/objects/info/alternates",
        "is not in this repository's own folder",
    ),
    "objects by a link": ("mv .git/objects ../o; ln -s ../../o .git/objects", "cannot be read"),
    "an index by a link": ("mv .git/index ../i; ln -s ../../i .git/index", "index cannot be read"),
    "HEAD that leaves the folder": ("echo 'ref: refs/../../../secret' > .git/HEAD", "HEAD is damaged"),
    "a branch by a link": ("mv .git/refs/heads/main ../m; ln -s ../../../../m .git/refs/heads/main", "cannot be read"),
    "HEAD that never ends": ("rm .git/HEAD; mkfifo .git/HEAD", "HEAD cannot be read"),
    "an index in two files": ("git update-index --split-index", "the index is split over two files"),
}  # fmt: skip


@pytest.mark.parametrize("case", LED_OUT)
def test_nothing_outside_of_the_folder_is_read(case: str, repository: Path, git: Mapping[str, str]) -> None:
    """What points elsewhere, or waits for ever, is said to be missing."""
    script, reason = LED_OUT[case]
    run(repository, script, git)
    found = state_of(repository)
    assert found.is_repository
    assert found.is_partial
    assert reason in str(found.reason)
    assert [line for line in found.status if line.startswith("A")] == []


def test_what_is_no_repository_is_said_to_be_none(tmp_path: Path) -> None:
    """Nor is a folder inside of one: what is above it is not looked at."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "below").mkdir()
    assert state_of(tmp_path) == GitState(is_repository=False, reason=".git has no HEAD")
    assert state_of(tmp_path / "below") == GitState(is_repository=False, reason="there is no .git in this folder")


def test_time_and_number_are_bounded(repository: Path, git: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is up, or there are too many files or lines, what was found stands, and that is said."""
    run(repository, "for n in $(seq 1200); do : > new$n; done; echo x >> a.py", git)
    found = state_of(repository)
    assert len(found.status) == git_state.MOST_LINES
    assert found.reason == "there are 1201 lines of status, of which 1000 are kept"
    late = state_of(repository, deadline=time.monotonic() - 1)
    assert late.head == found.head
    assert late.reason == "there was not enough time to compare all files"
    monkeypatch.setattr(git_state, "ReadBudget", lambda deadline: git_objects.ReadBudget(deadline=deadline, names=50))
    assert state_of(repository).reason == "there are too many files to compare all"


DAMAGED = {
    "a bomb": zlib.compress(b"tree 9999999999\0" + bytes(git_objects.MOST_OBJECT_BYTES)),
    "no end": zlib.compress(b"tree 10\0" + bytes(1000))[:20],
    "no format": b"nothing",
    "no tree": zlib.compress(b"blob 1\0a"),
    "half a row": zlib.compress(b"tree 20\0100644 a\0abc"),
    "modes that are none": zlib.compress(b"tree 30\0999999 a\0" + bytes(20)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_objects_are_said(case: str, repository: Path, git: Mapping[str, str]) -> None:
    """Branch, commit and what differs from the index are told all the same, in bounded memory."""
    run(repository, "git rm -q run.sh; echo x >> a.py", git)
    name = said(repository, git, "rev-parse", "HEAD^{tree}")[0]
    tree = repository / ".git/objects" / name[:2] / name[2:]
    tree.chmod(0o600)
    tree.write_bytes(DAMAGED[case])
    found = state_of(repository)
    assert (found.branch, found.status, found.is_partial) == ("main", (" M a.py",), True)


def test_a_damaged_pack_or_index_is_said(repository: Path, git: Mapping[str, str]) -> None:
    """Whatever byte of them is another one: an answer, and no other exception."""
    run(repository, CASES["packed"], git)
    for path in [*(repository / ".git/objects/pack").glob("*.[ip][da][xc]*"), repository / ".git/index"]:
        path.chmod(0o600)
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            assert state_of(repository).is_repository
            path.write_bytes(whole[:at])
            assert state_of(repository).is_repository
        path.write_bytes(whole)


def test_an_index_leads_to_no_name_outside(repository: Path, git: Mapping[str, str]) -> None:
    """A path with `..` in it, which git would never write, is refused as a whole."""
    entry = struct.pack(">10I20sH", *[0] * 6, 0o100644, 0, 0, 0, bytes(20), 9) + b"../secret"
    data = b"DIRC" + struct.pack(">II", 2, 1) + entry + bytes(8 - len(entry) % 8)
    (repository / ".git/index").write_bytes(data + sha1(data, usedforsecurity=False).digest())
    assert state_of(repository).reason == "the index has a path that git would refuse"


def test_no_pattern_takes_for_ever() -> None:
    """A pattern that makes a matcher with backtracking try each division of a name is answered at once."""
    rules, is_whole = parse_rules(b"*a" * 60 + b"b\n" + b"**/a*/" * 40 + b"b\n", b"")
    started = time.process_time()
    assert not is_ignored([rules], b"/".join([b"a" * 200] * 15), is_folder=False, check=lambda: None)
    assert (is_whole, time.process_time() - started < 2) == (True, True)


def test_folders_of_an_index_are_bounded(repository: Path) -> None:
    """A megabyte of paths that share no folder is refused before it has become a hundred times as much."""
    rows = []
    for number in range(4_000):
        path = b"%x/" % number + b"a/" * 95 + b"f"
        entry = struct.pack(">10I20sH", *[0] * 6, 0o100644, 0, 0, 0, bytes(20), len(path)) + path
        rows.append(entry + bytes(8 - len(entry) % 8))
    data = b"DIRC" + struct.pack(">II", 2, len(rows)) + b"".join(rows)
    (repository / ".git/index").write_bytes(data + sha1(data, usedforsecurity=False).digest())
    assert state_of(repository).reason == "the index has more than 50000 folders"


def test_no_line_of_the_configuration_takes_for_ever(repository: Path) -> None:
    """Blanks within a value are looked at once, not once from each of them."""
    lines = "".join(f"a{number} = x{' ' * 4080}x\n" for number in range(60))
    (repository / ".git/config").write_text(f"[core]\n{lines}fileMode = false  \n")
    started = time.process_time()
    assert state_of(repository).reason is None
    assert time.process_time() - started < 2
