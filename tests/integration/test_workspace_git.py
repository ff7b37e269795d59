"""A guest's commits become references of the host's repository, changes a new branch; a hostile `.git` is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.workspace.git import base_of, fetch_commits, merge_text, touched_files
from cloche.workspace.git_branch import commit_to_branch
from tests.harness.workspaces import (
    Wanted,
    content_of,
    file,
    folder,
    link,
    removed,
    snapshot_between,
    snapshot_of,
)

pytestmark = pytest.mark.user_soak
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{
        f"GIT_{role}_{what}": value
        for role in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "A"), ("EMAIL", "a@b"))
    },
}


def git(where: Path, *words: str, data: bytes = b"") -> str:
    """Run git as a user does."""
    done = subprocess.run(["git", *words], cwd=where, env=ENVIRONMENT, input=data, capture_output=True, check=True)
    return done.stdout.decode().rstrip("\n")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Give a repository with one commit."""
    host = tmp_path / "host"
    host.mkdir()
    git(host, "init", "-q", "-b", "main")
    (host / "sub").mkdir()
    for name in ("one", "two", "sub/three"):
        (host / name).write_text(f"{name}\n")
    git(host, "add", ".")
    git(host, "commit", "-qm", "first")
    return host


@pytest.fixture
def guest(tmp_path: Path, host: Path) -> Path:
    """Give what a sandbox sees of it: the same, to be written to."""
    shutil.copytree(host, tmp_path / "guest", symlinks=True)
    return tmp_path / "guest"


def fetched(host: Path, guest: Path, name: str = "box") -> dict[str, str]:
    """Bring the guest's commits to the host."""
    snapshot = snapshot_between(content_of(host), content_of(guest))
    at = os.open(host, os.O_RDONLY)
    try:
        return dict(fetch_commits(at, snapshot, name)[0])
    finally:
        os.close(at)
        snapshot.close()


def branched(
    where: Path, wanted: list[Wanted], name: str = "made", author: str = "An Agent <a@example.org>"
) -> dict[str, str]:
    """Write changes to a new branch."""
    snapshot = snapshot_of(wanted)
    at = os.open(where, os.O_RDONLY)
    try:
        changes = [change for change, _ in wanted]
        return dict(commit_to_branch(at, snapshot, changes, name, author=author, message="What was done\n\nAnd why."))
    finally:
        os.close(at)
        snapshot.close()


def committed(guest: Path, text: str = "guest\n") -> str:
    """Commit in the guest; return the commit."""
    (guest / "one").write_text(text)
    git(guest, "commit", "-qam", "by the guest")
    return git(guest, "rev-parse", "HEAD")


# A guest's commits.


def test_a_guests_commit_becomes_a_reference(host: Path, guest: Path) -> None:
    """Its branch has the commit, under a name of its own; the host's branch and files are as they were."""
    before = git(host, "rev-parse", "main")
    made = committed(guest)
    assert fetched(host, guest) == {"refs/cloche/box/main": made}
    assert git(host, "show", "refs/cloche/box/main:one") == "guest"
    assert git(host, "rev-parse", "main") == before
    assert git(host, "status", "--porcelain") == ""
    assert not (host / ".git/FETCH_HEAD").exists()
    git(host, "fsck", "--strict")


def test_packs_new_branches_and_a_detached_head_are_taken(host: Path, guest: Path) -> None:
    """A guest that has packed everything, made a branch with a slash, and is on none, loses nothing."""
    first = committed(guest)
    git(guest, "branch", "topic/deep")
    git(guest, "gc", "-q")
    git(guest, "checkout", "-q", "--detach")
    last = committed(guest, "again\n")
    assert fetched(host, guest) == {
        "refs/cloche/box/main": first, "refs/cloche/box/topic/deep": first, "refs/cloche/box/HEAD": last,
    }  # fmt: skip
    assert git(host, "show", "refs/cloche/box/HEAD:one") == "again"


def test_a_second_fetch_moves_the_reference(host: Path, guest: Path) -> None:
    """Also where the guest has rewritten its commit."""
    committed(guest)
    fetched(host, guest)
    (guest / "one").write_text("better\n")
    git(guest, "commit", "-qa", "--amend", "-m", "rewritten")
    made = git(guest, "rev-parse", "HEAD")
    assert fetched(host, guest) == {"refs/cloche/box/main": made}
    assert git(host, "rev-parse", "refs/cloche/box/main") == made


def test_nothing_is_fetched_where_nothing_was_committed(tmp_path: Path, host: Path, guest: Path) -> None:
    """Neither without a repository nor without a new commit."""
    (guest / "one").write_text("not committed\n")
    git(guest, "add", ".")
    assert fetched(host, guest) == {}
    (tmp_path / "plain").mkdir()
    assert fetched(tmp_path / "plain", guest) == {}


def test_no_program_of_either_side_is_started(tmp_path: Path, host: Path, guest: Path) -> None:
    """Hooks, fsmonitor and filters of the guest's repository and of the host's are not run by us."""
    marker = tmp_path / "started"
    for where in (host, guest):
        for name in ("reference-transaction", "post-commit", "pre-commit", "post-update", "post-index-change"):
            hook = where / ".git/hooks" / name
            hook.parent.mkdir(exist_ok=True)
            hook.write_text(f"#!/bin/sh\necho {name} >> {marker}\n")
            hook.chmod(0o755)
    made = committed(guest)
    assert marker.exists()  # they work
    for where in (host, guest):
        for key in (
            "core.fsmonitor",
            "filter.x.clean",
            "filter.x.smudge",
            "uploadpack.packObjectsHook",
            "core.sshCommand",
        ):
            git(where, "config", key, f"touch {marker};")
        git(where, "config", "core.alternateRefsCommand", f"touch {marker};")
        git(where, "config", "filter.x.required", "true")
        (where / ".gitattributes").write_text("* filter=x\n")
        (where / ".git/info").mkdir(exist_ok=True)
        (where / ".git/info/attributes").write_text("* filter=x\n")
    marker.unlink()
    assert fetched(host, guest) == {"refs/cloche/box/main": made}
    branched(host, [file("one", b"new\n", "modified")])
    assert not marker.exists()


def set_ref(name: str, text: str | bytes) -> Callable[[Path], None]:
    """Return what writes a file of the guest's git."""

    def act(guest: Path) -> None:
        path = guest / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return act


def link_head(guest: Path) -> None:
    """Make HEAD a link out."""
    (guest / ".git/HEAD").unlink()
    (guest / ".git/HEAD").symlink_to("/etc/passwd")


def link_branch(guest: Path) -> None:
    """Make a branch a link out."""
    (guest / ".git/refs/heads/evil").symlink_to("../../../../secret")


def dot_git_tree(guest: Path) -> None:
    """Commit a tree that would write a hook where it is checked out."""
    blob = git(guest, "hash-object", "-w", "--stdin", data=b"#!/bin/sh\n")
    body = b"100755 .git\0" + bytes.fromhex(blob)
    tree = git(guest, "hash-object", "-w", "-t", "tree", "--stdin", "--literally", data=body)
    made = git(guest, "commit-tree", tree, "-m", "evil")
    git(guest, "update-ref", "refs/heads/evil", made)


def name_a_blob(guest: Path) -> None:
    """Make a branch of what is no commit."""
    blob = git(guest, "hash-object", "-w", "--stdin", data=b"blob")
    set_ref("refs/heads/evil", blob)(guest)


def _object(guest: Path, name: str, content: bytes) -> None:
    path = guest / ".git/objects" / name[:2] / name[2:]
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def lying_object(guest: Path) -> None:
    """Put a commit under the name of another."""
    tree = git(guest, "rev-parse", "HEAD^{tree}")
    body = f"tree {tree}\nauthor A <a@b> 1 +0000\ncommitter A <a@b> 1 +0000\n\nlie\n".encode()
    _object(guest, "ab" * 20, zlib.compress(b"commit %d\0" % len(body) + body))
    set_ref("refs/heads/evil", "ab" * 20)(guest)


def hostile_loose(guest: Path) -> None:
    """Damage a loose object that a branch needs."""
    made = committed(guest, "evil\n")
    _object(guest, made, b"\x78\x9c" + os.urandom(200))


def hostile_pack(guest: Path) -> None:
    """Write a pack that says that it has a billion objects."""
    committed(guest, "evil\n")
    set_ref(f"objects/pack/pack-{'0' * 40}.pack", b"PACK\0\0\0\2\x3b\x9a\xca\x00" + os.urandom(400))(guest)


def missing_object(guest: Path) -> None:
    """Commit a tree without a blob of it."""
    committed(guest, "evil\n")
    blob = git(guest, "rev-parse", "HEAD:one")
    (guest / ".git/objects" / blob[:2] / blob[2:]).unlink()


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (set_ref("refs/heads/evil", "x" * (10 << 20)), "more than 512 bytes"),
        (set_ref("refs/heads/evil", "../../../etc/passwd\n"), "not a reference"),
        (set_ref("refs/heads/evil", "ref: refs/heads/main\n"), "not a reference"),
        (set_ref("refs/heads/evil", "12" * 20), "names no commit"),
        (set_ref("refs/heads/bad..name", "HEAD"), "not a name"),
        (set_ref("refs/heads/a\nb", "HEAD"), "not a name"),
        (set_ref("refs/heads/-x~1", "HEAD"), "not a name"),
        (set_ref("packed-refs", "12" * 20 + " refs/heads/../../config\n"), "not a name"),
        (set_ref("packed-refs", "12" * 20 + " refs/heads/x y\n"), "not as git writes"),
        (set_ref("HEAD", "ref: ../../../etc/passwd\n"), "not as git writes"),
        (link_head, "not a file"),
        (link_branch, "not a file"),
        (dot_git_tree, "failed"),
        (name_a_blob, "names no commit"),
        (lying_object, "failed|names no commit"),
        (hostile_loose, "failed|names no commit"),
        (hostile_pack, "failed"),
        (missing_object, "failed"),
    ],
)
def test_a_hostile_repository_is_refused(
    tmp_path: Path, host: Path, guest: Path, attack: Callable[[Path], None], why: str
) -> None:
    """It is refused with a sentence, and the host's repository has no new reference and no damage."""
    (tmp_path / "secret").write_text("12" * 20)
    made = committed(guest)
    attack(guest)
    for path in (guest / ".git/refs/heads").rglob("*"):
        if path.is_file() and not path.is_symlink() and path.read_bytes() == b"HEAD":
            path.write_text(made)
    with pytest.raises(InvalidRequest, match=why):
        fetched(host, guest)
    assert git(host, "for-each-ref", "refs/cloche") == ""
    assert set(os.listdir(tmp_path)) == {"host", "guest", "secret"}
    git(host, "fsck", "--strict")


def test_nobody_waits_for_gits_look_at_commits_for_ever(host: Path, guest: Path) -> None:
    """Whoever asks is asked back all the time while git works on what the guest has made, and can end it."""
    committed(guest)
    git(guest, "gc", "-q")
    snapshot = snapshot_between(content_of(host), content_of(guest))
    at, asked = os.open(host, os.O_RDONLY), list[int]()

    def check() -> None:
        asked.append(1)
        if len(asked) == 6:
            raise KeyError("nobody waits")

    try:
        with pytest.raises(KeyError):
            touched_files(at, snapshot, ["one"], check)
        assert touched_files(at, snapshot, ["one"]).keys() == {"main"}
    finally:
        os.close(at)
        snapshot.close()


def test_what_is_no_object_file_is_not_copied(host: Path, guest: Path) -> None:
    """Names beside the strict patterns, alternates above all, are left where they are."""
    made = committed(guest)
    for name in ("info/alternates", "info/http-alternates", "aa/../../evil", "zz/x", f"pack/pack-{'1' * 40}.idx"):
        set_ref(f"objects/{name}", "/etc\n")(guest)
    assert fetched(host, guest) == {"refs/cloche/box/main": made}
    assert not (host / ".git/objects/info/alternates").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "x..y", "", "a b", "x.lock"])
def test_a_name_that_git_does_not_take_is_refused(host: Path, guest: Path, name: str) -> None:
    """The sandbox's name is part of the reference's."""
    committed(guest)
    with pytest.raises(InvalidRequest, match="not a name"):
        fetched(host, guest, name)


def test_without_git_the_error_says_how_to_get_it(host: Path, guest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the environment's fault, and has a remedy."""
    committed(guest)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BackendUnavailable, match="Install git"):
        fetched(host, guest)


@pytest.mark.root
def test_what_root_fetches_is_the_owners(tmp_path: Path, host: Path, guest: Path) -> None:
    """Git runs as the owner of the repository, so that all that it writes is the owner's."""
    committed(guest)
    tmp_path.chmod(0o755)
    for above in takewhile(lambda one: one != Path(tempfile.gettempdir()), tmp_path.parents):
        above.chmod(0o755)
    for above, folders, files in os.walk(host):
        for name in (".", *folders, *files):
            os.lchown(os.path.join(above, name), 12345, 12345)
    fetched(host, guest)
    branched(host, [file("one", b"new\n", "modified")])
    owners = {os.lstat(os.path.join(above, one)).st_uid for above, ds, fs in os.walk(host) for one in (*ds, *fs)}
    assert owners == {12345}


# A branch.


def test_changes_become_a_commit_on_a_new_branch(host: Path) -> None:
    """It has every change, author and message, on top of what is checked out; files and index are as they were."""
    before = content_of(host)
    del before[".git/refs/heads"]
    wanted = [
        file("one", b"changed\r\n", "modified"),
        removed("two"),
        file("renamed", b"sub/three\n", "renamed", old_path="sub/three"),
        folder("new"),
        file("new/script", b"#!/bin/sh\n", mode=0o755),
        link("new/link", "../../outside"),
        file("line\nfeed \u202e", b"x"),
    ]
    made = branched(host, wanted)["refs/heads/made"]
    assert git(host, "rev-parse", "made") == made
    assert git(host, "log", "-1", "--format=%an|%ae|%cn|%B|%P", "made") == (
        f"An Agent|a@example.org|An Agent|What was done\n\nAnd why.|{git(host, 'rev-parse', 'main')}"
    )
    rows = git(host, "ls-tree", "-rz", "made").split("\0")
    assert [(row[:6], row.partition("\t")[2]) for row in rows if row] == [
        ("100644", "line\nfeed \u202e"),
        ("120000", "new/link"),
        ("100755", "new/script"),
        ("100644", "one"),
        ("100644", "renamed"),
    ]
    assert git(host, "cat-file", "-p", "made:one").encode() == b"changed\r"
    now = content_of(host)
    assert {path: facts for path, facts in before.items() if not path.startswith(".git/objects")}.items() <= now.items()
    assert git(host, "status", "--porcelain") == ""


def test_a_subfolder_and_a_work_tree_have_branches_too(tmp_path: Path, host: Path) -> None:
    """Paths are those of the repository, also where `.git` is a file."""
    branched(host / "sub", [file("three", b"changed", "modified")])
    assert git(host, "show", "made:sub/three") == "changed"
    git(host, "worktree", "add", "-q", os.fspath(tmp_path / "beside"))
    branched(tmp_path / "beside", [file("one", b"beside", "modified")], "second")
    assert git(host, "show", "second:one") == "beside"


def test_a_repository_without_commits_gets_its_first(tmp_path: Path) -> None:
    """There is no parent then."""
    git(tmp_path, "init", "-q")
    branched(tmp_path, [file("one", b"first")])
    assert git(tmp_path, "log", "--format=%P|%s", "made") == "|What was done"


@pytest.mark.parametrize(
    "name", ["main", "-f", "@{-1}", "a..b", "x.lock", "", "HEAD", "a b", "refs/../x", "@", "x\n", "x\0y"]
)
def test_a_branch_that_is_there_or_has_no_good_name_is_refused(host: Path, name: str) -> None:
    """And none is made, or moved."""
    before = git(host, "for-each-ref")
    with pytest.raises(InvalidRequest):
        branched(host, [file("one", b"new", "modified")], name)
    assert git(host, "for-each-ref") == before


@pytest.mark.parametrize("author", ["", "name", "<a@b>", "A <a\n@b>", "A <>", "A <a@b> <c@d>", "A\n <a@b>"])
def test_an_author_is_a_name_and_an_address(host: Path, author: str) -> None:
    """Nothing else gets into a commit's head."""
    with pytest.raises(InvalidRequest, match="author"):
        branched(host, [file("one", b"new", "modified")], author=author)


def test_files_of_a_submodule_are_refused(tmp_path: Path, host: Path) -> None:
    """A branch must not have them in place of the submodule."""
    git(host, "clone", "-q", ".", "module")
    git(host, "-c", "advice.addEmbeddedRepo=false", "add", "module")
    git(host, "commit", "-qm", "with a module")
    with pytest.raises(InvalidRequest, match="submodule"):
        branched(host, [file("module/one", b"new", "modified")])


def test_a_folder_without_a_repository_has_no_branch(tmp_path: Path) -> None:
    """The error says so."""
    with pytest.raises(InvalidRequest, match="not in a git repository"):
        branched(tmp_path, [file("one")])


# Texts.


def test_a_text_is_merged_where_lines_differ() -> None:
    """Changes to different lines are both kept, to the same ones are not decided, and binaries never are."""
    base = b"".join(b"line %d\n" % n for n in range(20))
    ours, theirs = base.replace(b"line 2\n", b"ours\n"), base.replace(b"line 18\n", b"theirs\n")
    assert merge_text(base, ours, theirs) == ours.replace(b"line 18\n", b"theirs\n")
    assert merge_text(base, ours, base.replace(b"line 2\n", b"theirs\n")) is None
    assert merge_text(base + b"\0", ours, theirs) is None


def test_the_base_is_what_is_checked_out(host: Path) -> None:
    """A path is the folder's, also in a subfolder of the repository."""
    at = os.open(host / "sub", os.O_RDONLY)
    try:
        assert base_of(at, "three") == b"sub/three\n"
        assert base_of(at, "none") is None
    finally:
        os.close(at)
