"""Write changes as a commit on a new branch of the host's repository, signed if the caller's settings say so."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from cloche.core.changes import Change
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name

from .git import HEADS, Git, check_name, discovered, objects_of, opened, shown, write_file
from .git_identity import signs_commits
from .git_signing import signed_commit
from .snapshot import Snapshot

_AUTHOR = re.compile(r"([^<>\n\0]*[^<>\s\0]) *<([^<>\s\0]+)>\Z")


def commit_to_branch(
    folder: int,
    snapshot: Snapshot,
    changes: Sequence[Change],
    branch: str,
    *,
    author: str,
    message: str,
    settings: Mapping[str, str] | None = None,
) -> Mapping[str, str]:
    """Write changes as one commit on a new branch, and no files; return the reference and the commit.

    The parent is the commit that is checked out. `author` is `NAME <MAIL>`. With the `settings` of a caller the commit
    is signed if they say so. Folders are skipped: git does not store them. Raises InvalidRequest for an existing
    branch, an invalid name or author, a folder outside of any repository, or a change in a submodule;
    BackendUnavailable without git, or if it cannot be signed; WorkspaceFailed.
    """
    facts = os.fstat(folder)
    people = people_of(author)
    with opened(folder, (facts.st_uid, facts.st_gid), discovered(folder)) as git:
        code, prefix, _ = git.call("rev-parse", "--show-prefix")
        if code or git.run("rev-parse", "--is-inside-work-tree") != b"true\n":
            raise InvalidRequest("the folder is not in a git repository of its owner, so no branch can be made")
        check_new_branch(git, branch)
        head = git.call("rev-parse", "--verify", "--quiet", "HEAD^{commit}")[1].decode().strip()
        tree = _write_tree(git, snapshot, changes, prefix.removesuffix(b"\n"), head)
        parents = [head] if head else []
        made_id = write_commit(git, tree, parents, people, message.encode(errors="replace"), settings or {})
        git.run("update-ref", f"{HEADS}{branch}", made_id, "0" * len(made_id), more=people)
    return {f"{HEADS}{branch}": made_id}


def people_of(author: str) -> dict[str, str]:
    """Return git's variables for `NAME <MAIL>` as author and committer. Raises InvalidRequest."""
    match = _AUTHOR.match(author)
    if match is None:
        raise InvalidRequest(f"write the author as NAME <MAIL>, not {escape_name(author)}")
    return {
        f"GIT_{role}_{field_name}": value
        for role in ("AUTHOR", "COMMITTER")
        for field_name, value in (("NAME", match[1]), ("EMAIL", match[2]))
    }


def check_new_branch(git: Git, branch: str) -> None:
    """Raise InvalidRequest for a name that is not one of a branch, or that a branch has."""
    check_name(git, f"{HEADS}{branch}", branch)
    if branch == "@" or git.call("check-ref-format", "--branch", branch)[1] != f"{branch}\n".encode():
        raise InvalidRequest(f"not a name of a branch: {escape_name(branch)}")
    if not git.call("rev-parse", "--verify", "--quiet", f"{HEADS}{branch}")[0]:
        raise InvalidRequest(f"there is a branch {escape_name(branch)} already; name another")


def write_commit(
    git: Git,
    tree: str,
    parents: Sequence[str],
    people: Mapping[str, str],
    message: bytes,
    settings: Mapping[str, str],
) -> str:
    """Write a commit, signed if the settings say so; return its id."""
    if not signs_commits(settings):
        above = [word for parent in parents for word in ("-p", parent)]
        return git.run("commit-tree", tree, *above, data=message, more=people).decode().strip()
    commit = signed_commit(*objects_of(git), tree, parents, people=people, message=message, settings=settings)
    return git.run("hash-object", "-t", "commit", "-w", "--stdin", data=commit).decode().strip()


def _write_tree(git: Git, snapshot: Snapshot, changes: Sequence[Change], prefix: bytes, head: str) -> str:
    """Return the tree object that results from applying the changes to a commit, through an index of its own."""
    index = {"GIT_INDEX_FILE": os.path.join(git.temporary, "index")}
    git.run("read-tree", *([head] if head else ["--empty"]), more=index)
    zero = "0" * (len(head) or 40)
    removed, written = [], []
    for change in changes:
        if change.what in {"removed", "renamed"}:
            removed.append(change.path if change.what == "removed" else change.old_path)
        if change.what != "removed" and change.kind != "directory":
            written.append(change)
    paths = [prefix + os.fsencode(path) for path in (*removed, *(change.path for change in written))]
    _refuse_submodules(git, paths, index)
    rows = [f"0 {zero}\t".encode() + path for path in paths[: len(removed)]]
    for change, path, blob in zip(written, paths[len(removed) :], _write_blobs(git, snapshot, written), strict=True):
        mode = "120000" if change.kind == "link" else "100755" if change.mode & 0o100 else "100644"
        rows.append(f"{mode} {blob}\t".encode() + path)
    git.run("update-index", "-z", "--index-info", data=b"".join(row + b"\0" for row in rows), more=index)
    return git.run("write-tree", more=index).decode().strip()


def _write_blobs(git: Git, snapshot: Snapshot, changes: Sequence[Change]) -> list[str]:
    """Write contents as blobs without filters, and return their object names."""
    paths = []
    for number, change in enumerate(changes):
        entry = snapshot.entries.get(os.fsencode(change.path))
        if entry is None or entry.kind != change.kind or entry.problem:
            raise InvalidRequest(f"the snapshot has no content for {escape_name(change.path)}; make a new diff")
        is_link = change.kind == "link"
        paths.append(os.path.join(git.temporary, f"blob{number}"))
        digest = write_file(git, paths[-1], [entry.target] if is_link else snapshot.read(entry))
        if not is_link and digest != (change.sha256 or entry.sha256):
            raise InvalidRequest(f"{escape_name(change.path)} has changed since the comparison; compare again")
    listed = "".join(f"{path}\n" for path in paths)
    return git.run("hash-object", "-w", "--no-filters", "--stdin-paths", data=listed.encode()).decode().split()


def _refuse_submodules(git: Git, paths: Sequence[bytes], index: Mapping[str, str]) -> None:
    """Refuse paths in a submodule, whose files belong to another repository."""
    rows = git.run("ls-files", "--stage", "-z", "--full-name", ":/", more=index).split(b"\0")
    submodules = tuple(row.partition(b"\t")[2] for row in rows if row.startswith(b"160000 "))
    for path in paths:
        if any(path == submodule or path.startswith(submodule + b"/") for submodule in submodules):
            raise InvalidRequest(f"{shown(path)} is in a submodule; commit it without a branch")
