"""List the commits that were made inside, with their dangerous changes, and make a branch of the host's of them.

They are read in the quarantine of `git.py`, and reach the host's repository only by its fetch, which checks them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from cloche.core.changes import Change, FileKind, InsideBranch, InsideCommit
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import replace

from .dangers import dangers_of
from .git import HEADS, Check, Git, Quarantine, fetch_commits, nothing, quarantine_variables, quarantined
from .git_branch import check_new_branch, people_of, write_commit
from .git_identity import author_of, signs_commits
from .snapshot import Snapshot

MOST_COMMITS, MOST_SIGNED = 100, 200  # of one branch: shown, and signed anew
MOST_FILES, MOST_TARGET_BYTES = 20_000, 4096
_KINDS: Mapping[bytes, FileKind] = {b"100": "file", b"120": "link", b"160": "directory"}
_FIELDS = "%H%x00%an%x00%ae%x00%at%x00%s"


def inside_branches(folder: int, snapshot: Snapshot, check: Check = nothing) -> tuple[InsideBranch, ...]:
    """Return the branches that the guest has made or moved, with their new commits. Raises as `fetch_commits` does."""
    with quarantined(folder, snapshot, check) as quarantine:
        if quarantine is None:
            return ()
        branches = (_branch(quarantine, name, tip) for name, tip in sorted(quarantine.moved.items()))
        return tuple(branch for branch in branches if branch.count)


def _branch(quarantine: Quarantine, name: str, tip: str) -> InsideBranch:
    git, inside = quarantine.git, quarantine_variables(quarantine.path)
    revisions = _new(git, tip)
    logged = git.run(
        "log",
        "--ignore-missing",
        f"--max-count={MOST_COMMITS}",
        f"--format={_FIELDS}",
        "--stdin",
        data=revisions,
        more=inside,
    )
    count = int(git.run("rev-list", "--count", "--ignore-missing", "--stdin", data=revisions, more=inside))
    rows = (line.decode(errors="replace").split("\0", 4) for line in logged.split(b"\n") if line)
    commits = tuple(
        InsideCommit(id=row[0], author=f"{row[1]} <{row[2]}>", time_s=int(row[3]), subject=row[4]) for row in rows
    )
    return InsideBranch(name=name, tip=tip, count=count, commits=commits, dangerous=tuple(_dangerous(git, tip, inside)))


def _new(git: Git, tip: str) -> bytes:
    """Return the input of rev-list for the commits that the host does not have."""
    known = git.run("for-each-ref", "--format=^%(objectname)", "refs/heads", "refs/remotes")
    head = git.call("rev-parse", "--verify", "--quiet", "HEAD^{commit}")[1].strip()
    return b"\n".join((*known.split(), *([b"^" + head] if head else []), tip.encode(), b""))


def _dangerous(git: Git, tip: str, inside: Mapping[str, str]) -> Iterator[Change]:
    """Yield the dangerous changes of the tip since the commit that it shares with the checked-out one."""
    head = git.call("rev-parse", "--verify", "--quiet", "HEAD^{commit}")[1].decode().strip()
    base = git.call("merge-base", head, tip, more=inside)[1].decode().strip() if head else ""
    before = base or git.run("hash-object", "-t", "tree", "--stdin").decode().strip()
    raw = git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", before, tip, more=inside)
    fields = raw.split(b"\0")[:-1]
    if len(fields) > 2 * MOST_FILES:
        raise InvalidRequest(f"the guest's commits change more than {MOST_FILES} files; they are not looked through")
    for facts, path in zip(fields[::2], fields[1::2], strict=True):
        change = _change(git, facts, os.fsdecode(path), inside)
        if dangers := dangers_of(change):
            yield replace(change, target="", dangers=dangers)


def _change(git: Git, facts: bytes, path: str, inside: Mapping[str, str]) -> Change:
    old_mode, mode, _, blob, status = facts.lstrip(b":").split(b" ")
    kind = _KINDS.get((mode if status != b"D" else old_mode)[:3], "file")
    target = b""
    if kind == "link" and status != b"D":
        target = git.run("cat-file", "blob", blob.decode(), more=inside)[:MOST_TARGET_BYTES]
    return Change(
        path=path, what="added" if status == b"A" else "removed" if status == b"D" else "modified", kind=kind,
        mode=int(mode, 8) & 0o777, old_mode=int(old_mode, 8) & 0o777, target=os.fsdecode(target),
    )  # fmt: skip


def take_branch(
    folder: int,
    snapshot: Snapshot,
    source: str,
    branch: str,
    *,
    name: str,
    tip: str | None,
    hidden: Sequence[str],
    settings: Mapping[str, str],
) -> Mapping[str, str]:
    """Make a branch of the host's repository with a guest's commits, their authors and messages; return its reference.

    If the caller's `settings` say so, each commit is written anew, signed by the caller as its committer. Raises
    InvalidRequest for a name that is taken, or a branch that the guest has not moved or that is refused, and the errors
    of `fetch_commits`.
    """
    refs, refused = fetch_commits(folder, snapshot, name, hidden=hidden)
    fetched = refs.get(f"refs/cloche/{name}/{source}")
    if fetched is None or tip not in (None, fetched):
        why = refused.get(source, "the sandbox has no new commit on it" if fetched is None else "it has moved")
        raise InvalidRequest(f"the branch {escape_name(source)} is not taken: {why}")
    with quarantined(folder, snapshot) as quarantine:
        if quarantine is None:
            raise InvalidRequest(f"the branch {escape_name(source)} is gone")
        git = quarantine.git
        check_new_branch(git, branch)
        made = _signed(git, fetched, settings) if signs_commits(settings) else fetched
        git.run("update-ref", f"{HEADS}{branch}", made, "0" * len(made), more=people_of("Cloche <cloche@localhost>"))
    return {f"{HEADS}{branch}": made}


def _signed(git: Git, tip: str, settings: Mapping[str, str]) -> str:
    """Write the new commits below a tip anew, signed; return the new tip."""
    listed = git.run("rev-list", "--topo-order", "--reverse", "--ignore-missing", "--stdin", data=_new(git, tip))
    commits = listed.decode().split()
    if len(commits) > MOST_SIGNED:
        raise InvalidRequest(f"more than {MOST_SIGNED} commits are not signed anew; take them without a signature")
    committer = people_of(author_of(settings) or "Cloche <cloche@localhost>")
    new: dict[str, str] = {}
    for commit in commits:
        head, _, message = git.run("cat-file", "commit", commit).partition(b"\n\n")
        lines = [line.partition(b" ") for line in head.split(b"\n")]
        parents = [value.decode() for key, _, value in lines if key == b"parent"]
        fields = {key: value for key, _, value in reversed(lines)}  # the first of a key counts
        people = {**committer, **_author(fields[b"author"])}
        new[commit] = write_commit(
            git, fields[b"tree"].decode(), [new.get(parent, parent) for parent in parents], people, message, settings
        )
    return new[tip]


def _author(line: bytes) -> dict[str, str]:
    """Return git's variables for the author of a commit, from its line."""
    identity, _, time = os.fsdecode(line).rpartition("> ")
    name, _, email = identity.partition(" <")
    return {"GIT_AUTHOR_NAME": name or email, "GIT_AUTHOR_EMAIL": email, "GIT_AUTHOR_DATE": f"@{time}"}
