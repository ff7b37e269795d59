"""Import a guest's commits as references of the host's repository; never write below `.git`.

Theory of operation: everything that the guest wrote below its `.git` is data. Only object files and branch values are
taken from it, by strict patterns, into a bare repository made by Cloche (the quarantine), which borrows the host's
objects through `alternates`. Git then fetches from the quarantine, which recomputes every hash and checks every object
(`fsck`). So no git on the host ever reads a configuration, hook, attribute or index of the guest.

Every git process here runs with an environment built from scratch, as the repository's owner, in a new session, with a
time limit. As root, git would read another user's configuration and leave files that the owner cannot write. Everything
that could start a program is turned off: hooks, fsmonitor, filters, maintenance, submodules, and every protocol except
local files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from time import monotonic

from cloche import hostfs
from cloche.core.errors import BackendUnavailable, InvalidRequest, WorkspaceFailed
from cloche.core.escape import escape_line, escape_name
from cloche.core.record import dataclass

from .git_folder import GitFolder, git_folder
from .snapshot import Snapshot, SnapshotEntry

PATIENCE_S, LOOKS_EVERY_S = 120.0, 0.2
MOST_BRANCHES = 100
MOST_REASONS, MOST_AT_ONCE = 20, 500
_MOST_REF_BYTES = 512
_MOST_PACKED_BYTES = 4 << 20
_MOST_OBJECTS = 200_000
HEADS = "refs/heads/"
_LOOSE = re.compile(rb"\.git/objects/([0-9a-f]{2})/([0-9a-f]{38}|[0-9a-f]{62})\Z")
_PACK = re.compile(rb"\.git/objects/pack/pack-[0-9a-f]{40,64}\.pack\Z")
_BRANCH = re.compile(rb"\.git/(refs/heads/.+)\Z", re.DOTALL)
_PACKED_LINE = re.compile(rb"([0-9a-f]{40}|[0-9a-f]{64}) (refs/heads/[^\x00-\x20\x7f]+)\Z")
_HASH = re.compile(rb"([0-9a-f]{40}|[0-9a-f]{64})\n?\Z")
_SYMBOLIC = re.compile(rb"ref: (refs/[^\x00-\x20\x7f]+)\n?\Z")
_SETTINGS = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.alternateRefsCommand=true", "core.untrackedCache=false",
    "core.attributesFile=/dev/null", "core.bigFileThreshold=16m", "core.pager=cat", "core.sshCommand=false",
    "gc.auto=0", "maintenance.auto=false", "fetch.fsckObjects=true", "transfer.fsckObjects=true", "fetch.unpackLimit=1",
    "fetch.fsck.hasDotgit=error", "transfer.unpackLimit=1", "fetch.writeCommitGraph=false",
    "fetch.recurseSubmodules=false", "submodule.recurse=false", "credential.helper=", "protocol.allow=never",
    "protocol.file.allow=always", "safe.bareRepository=explicit",
    "pack.threads=1", "pack.windowMemory=64m", "commit.gpgSign=false", "advice.detachedHead=false",
)  # fmt: skip
_FETCH = (
    "--quiet", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules", "--no-auto-maintenance", "--force",
)  # fmt: skip
_REMEDY = "Install git (apt install git, dnf install git, apk add git), or commit without it."


Check = Callable[[], None]


def nothing() -> None:
    """Do nothing: the default `check`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Run git in an open folder as a user. `temporary` is a private folder of that user.

    `check` is called while git runs; an exception from it kills the process.
    """

    folder: int
    user: tuple[int, int]
    temporary: str
    environment: Mapping[str, str]
    check: Check = nothing

    def run(self, *arguments: str, data: bytes = b"", more: Mapping[str, str] | None = None) -> bytes:
        """Return the standard output of a command. Raises InvalidRequest with git's error message if it fails."""
        code, out, err = self.call(*arguments, data=data, more=more)
        if code:
            lines = err.decode(errors="replace").strip().splitlines()
            complaint = next(
                (line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else ""
            )
            raise InvalidRequest(f"git {arguments[0]} failed: {escape_line(complaint)[:300] or f'exit code {code}'}")
        return out

    def call(
        self, *arguments: str, data: bytes = b"", more: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, bytes]:
        """Return exit code, standard output and standard error of a command. Raises WorkspaceFailed after
        PATIENCE_S.
        """
        settings = [option for setting in _SETTINGS for option in ("-c", setting)]
        as_root = os.geteuid() == 0 and self.user[0] != 0
        process = subprocess.Popen(
            [_program(), *settings, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=f"/proc/self/fd/{self.folder}",
            env={**self.environment, **(more or {})},
            start_new_session=True,
            user=self.user[0] if as_root else None,
            group=self.user[1] if as_root else None,
            extra_groups=[] if as_root else None,
        )
        try:
            out, err = self._ended(process, data)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise WorkspaceFailed(f"git {arguments[0]} took more than {PATIENCE_S:.0f} s and was ended") from error
            raise
        return process.returncode, out, err

    def _ended(self, process: subprocess.Popen[bytes], data: bytes) -> tuple[bytes, bytes]:
        """Wait for the process. Raises TimeoutExpired, and any exception from `check`."""
        ends_at, unsent = monotonic() + PATIENCE_S, data or None
        while True:
            self.check()
            remaining_s = ends_at - monotonic()
            try:
                return process.communicate(unsent, timeout=max(0.0, min(remaining_s, LOOKS_EVERY_S)))
            except subprocess.TimeoutExpired:
                if remaining_s <= LOOKS_EVERY_S:
                    raise
            unsent = None  # communicate() keeps the input between calls, and it is sent only once

    def give(self, path: str) -> None:
        if os.geteuid() == 0:
            os.chown(path, *self.user)


def touched_files(
    folder: int, snapshot: Snapshot, paths: Sequence[str], check: Check = nothing
) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """Return the guest's branches whose commits delete or change one of these paths: by branch, the commit and the
    reasons.

    `check` is called meanwhile, and may raise. Raises the errors of `fetch_commits`, and WorkspaceFailed after
    PATIENCE_S.
    """
    ends_at = monotonic() + PATIENCE_S

    def look() -> None:
        check()
        if monotonic() > ends_at:
            raise WorkspaceFailed(f"git took more than {PATIENCE_S:.0f} s to look at the guest's commits")

    with quarantined(folder, snapshot, look) as quarantine:
        if quarantine is None:
            return {}
        return {branch: (quarantine.moved[branch], reasons) for branch, reasons in _touching(quarantine, paths).items()}


def fetch_commits(
    folder: int, snapshot: Snapshot, name: str, *, hidden: Sequence[str] = (), agreed: Collection[str] = ()
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Fetch the guest's commits into the host's repository. Return references with their commits, and refused branches
    with reasons.

    Each branch that the guest made or moved becomes `refs/cloche/NAME/BRANCH`; a detached commit becomes
    `refs/cloche/NAME/HEAD`. Both results are empty if the folder has no repository of its own or no branch has moved. A
    branch that deletes or changes one of the `hidden` paths is refused, unless it is in `agreed`.

    Raises InvalidRequest for data that git would not write or that fails its checks, BackendUnavailable without git,
    and WorkspaceFailed.
    """
    with quarantined(folder, snapshot) as quarantine:
        if quarantine is None:
            return {}, {}
        check_name(quarantine.git, f"refs/cloche/{name}/x", name)
        if "/" in name:
            raise InvalidRequest(f"not a name for references: {escape_name(name)}")
        touching = _touching(quarantine, hidden) if hidden else {}
        refused = {branch: "; ".join(reasons) for branch, reasons in touching.items() if branch not in agreed}
        fetched = {branch: value for branch, value in sorted(quarantine.moved.items()) if branch not in refused}
        if fetched:
            refspecs = [f"+{HEADS}{branch}:refs/cloche/{name}/{branch}" for branch in fetched]
            quarantine.git.run("fetch", *_FETCH, "--", quarantine.path, *refspecs)
    return {f"refs/cloche/{name}/{branch}": value for branch, value in fetched.items()}, refused


def objects_of(git: Git) -> tuple[str, str]:
    """Return the folder of the objects, and the object format. Raises InvalidRequest for a path no file can name."""
    kind = git.run("rev-parse", "--show-object-format").decode().strip()
    objects = os.fsdecode(git.run("rev-parse", "--path-format=absolute", "--git-path", "objects").removesuffix(b"\n"))
    if "\n" in objects or objects.startswith(('"', "#")):
        raise InvalidRequest("the repository's path has a line feed, so no commits can be made or fetched")
    return objects, kind


def base_of(folder: int, path: str) -> bytes | None:
    """Return a file's content in the checked-out commit; None if the commit does not have it."""
    facts = os.fstat(folder)
    with opened(folder, (facts.st_uid, facts.st_gid), discovered(folder)) as git:
        code, out, _ = git.call("cat-file", "blob", f"HEAD:./{path}")
    return None if code else out


def merge_text(base: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    """Return a three-way merge; None if both sides touch the same lines, or one is binary."""
    if any(b"\0" in text for text in (base, ours, theirs)):
        return None
    root_fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with opened(root_fd, (os.geteuid(), os.getegid()), {"GIT_DIR": os.devnull}) as git:
            paths = [os.path.join(git.temporary, name) for name in ("ours", "base", "theirs")]
            for path, text in zip(paths, (ours, base, theirs), strict=True):
                with open(path, "wb") as file:
                    file.write(text)
            code, out, _ = git.call("merge-file", "-p", "--quiet", *paths)
    finally:
        os.close(root_fd)
    return out if code == 0 else None


def discovered(folder: int) -> dict[str, str]:
    """Return the GIT_* variables for the repository around an open folder, if git cannot find it by itself.

    Raises InvalidRequest if the nearest `.git` is a file that names a repository of another folder.
    """
    with ExitStack() as stack:
        fd = hostfs.open_folder(".", folder)
        stack.callback(os.close, fd)
        while hostfs.look(".git", fd) is None:
            above = hostfs.open_folder("..", fd)
            stack.callback(os.close, above)
            if os.path.samestat(os.fstat(above), os.fstat(fd)):
                return {}
            fd = above
        git_directory = stack.enter_context(git_folder(fd))
        if git_directory is None:
            return {}
        own = os.path.normpath(os.path.join(git_directory.path, git_directory.name))
        tree = os.readlink(f"/proc/self/fd/{fd}")
        return {"GIT_DIR": own, "GIT_COMMON_DIR": git_directory.path, "GIT_WORK_TREE": tree}


@contextmanager
def opened(folder: int, user: tuple[int, int], more: Mapping[str, str], check: Check = nothing) -> Iterator[Git]:
    """Yield git in an open folder as a user, with a temporary folder and an environment of its own."""
    _program()
    temporary = tempfile.mkdtemp(prefix="cloche-git-", dir=hostfs.temporary_folder())
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "file",
        # git(1): a partial clone would fetch missing objects from its promisor remote.
        "GIT_NO_LAZY_FETCH": "1",
        # git-replace(1): refs/replace would substitute other objects.
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        **more,
    }
    git = Git(folder=folder, user=user, temporary=temporary, environment=environment, check=check)
    try:
        git.give(temporary)
        yield git
    except OSError as error:
        raise WorkspaceFailed(f"git could not be used: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _program() -> str:
    program = shutil.which("git")
    if program is None:
        raise BackendUnavailable("git is not installed here.", remedy=_REMEDY)
    return program


def check_name(git: Git, reference: str, name: str) -> None:
    """Raise InvalidRequest for a reference that git would not make."""
    if "\0" in name or git.call("check-ref-format", reference)[0]:
        raise InvalidRequest(f"not a name that git takes: {escape_name(name)[:200]}")


# The guest's branches.


def _read_branches(snapshot: Snapshot, entries: Mapping[bytes, SnapshotEntry], git: int) -> dict[str, str]:
    """Return the value of each branch that the guest may have moved, and of HEAD if it is detached."""
    branches = _read_packed(snapshot, entries, git)
    for path, entry in entries.items():
        match = _BRANCH.match(path)
        if match is None or entry.kind in {"directory", "removed", "unchanged"} or path.endswith(b".lock"):
            continue
        value = _HASH.match(_small(snapshot, entry, _MOST_REF_BYTES))
        if value is None:
            raise InvalidRequest(f"the guest's {shown(path)} is not a reference to a commit")
        branches[_text(match[1])] = value[1].decode()
    head = entries.get(b".git/HEAD")
    if head is not None and head.kind not in {"removed", "unchanged"}:
        data = _small(snapshot, head, _MOST_REF_BYTES)
        value = _HASH.match(data)
        if value is not None:
            branches[f"{HEADS}HEAD"] = value[1].decode()
        elif _SYMBOLIC.match(data) is None:
            raise InvalidRequest("the guest's .git/HEAD is not as git writes it")
    return {reference.removeprefix(HEADS): value for reference, value in branches.items()}


def _read_packed(snapshot: Snapshot, entries: Mapping[bytes, SnapshotEntry], git: int) -> dict[str, str]:
    """Return the branches in the guest's `packed-refs`, without those that a loose file overrides."""
    packed = entries.get(b".git/packed-refs")
    if packed is None or packed.kind in {"removed", "unchanged"}:
        return {}
    branches = {}
    for line in _small(snapshot, packed, _MOST_PACKED_BYTES).split(b"\n"):
        if line[:1] in {b"", b"#", b"^"} or not line.partition(b" ")[2].startswith(b"refs/heads/"):
            continue
        match = _PACKED_LINE.match(line)
        if match is None:
            raise InvalidRequest("the guest's .git/packed-refs is not as git writes it")
        loose = entries.get(b".git/" + match[2])
        is_as_on_host = loose is None and not snapshot.is_whole and _is_loose(git, match[2])
        if not is_as_on_host and (loose is None or loose.kind != "unchanged"):
            branches[_text(match[2])] = match[1].decode()
    return branches


def _is_loose(git: int, reference: bytes) -> bool:
    """Tell whether the host has a loose file for a reference, which overrides `packed-refs`."""
    *above, name = _text(reference).split("/")
    if any(component in {"", ".", ".."} for component in (*above, name)):
        return False
    try:
        with hostfs.descended(git, above) as parent_fd:
            return hostfs.look(name, parent_fd) is not None
    except OSError:
        return False


def _small(snapshot: Snapshot, entry: SnapshotEntry, max_bytes: int) -> bytes:
    """Return the content of a file below the guest's `.git`. Raises InvalidRequest for other types and large files."""
    if entry.kind != "file" or entry.problem:
        raise InvalidRequest(f"the guest's {shown(entry.path)} is not a file that can be read")
    if entry.size > max_bytes:
        raise InvalidRequest(f"the guest's {shown(entry.path)} has more than {max_bytes} bytes")
    return b"".join(snapshot.read(entry))


def _moved(git: Git, branches: Mapping[str, str]) -> dict[str, str]:
    """Return the branches that differ from the host's branch of the same name, after checking their names."""
    listed = git.run("for-each-ref", "--format=%(objectname) %(refname)", HEADS).decode(errors="surrogateescape")
    on_host = set(listed.splitlines())
    moved = {name: value for name, value in branches.items() if f"{value} {HEADS}{name}" not in on_host}
    head = git.call("rev-parse", "--verify", "--quiet", "HEAD^{commit}")[1].decode().strip()
    if moved.get("HEAD") == head:
        del moved["HEAD"]
    if len(moved) > MOST_BRANCHES:
        raise InvalidRequest(f"the guest has more than {MOST_BRANCHES} branches of its own")
    for name in moved:
        check_name(git, f"{HEADS}{name}", name)
    return moved


# The quarantine.


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The quarantine repository with the guest's objects, git in the host's repository, and the branches that moved."""

    git: Git
    path: str
    moved: Mapping[str, str]


@contextmanager
def quarantined(folder: int, snapshot: Snapshot, check: Check = nothing) -> Iterator[Quarantine | None]:
    """Yield the quarantine of the guest's commits; None if it has made no commits."""
    entries = {path: snapshot.entries[path] for path in snapshot.entries if path.startswith(b".git/")}
    with _repository(folder) if entries else nullcontext() as repository:
        branches = _read_branches(snapshot, entries, repository.fd) if repository is not None else {}
        if repository is None or not branches:
            yield None
            return
        with opened(repository.fd, repository.owner(), repository.variables(), check) as git:
            moved = _moved(git, branches)
            quarantine_path = _make_quarantine(git, snapshot, entries, moved) if moved else ""
            yield Quarantine(git=git, path=quarantine_path, moved=moved) if moved else None


@contextmanager
def _repository(folder: int) -> Iterator[GitFolder | None]:
    """Yield the git directory of an open folder; None if it has none. Raises the errors of `find_git_folder`."""
    facts = hostfs.look(".git", folder)
    if facts is None or not stat.S_ISDIR(facts.st_mode):
        with git_folder(folder) as named:
            yield named
        return
    if os.geteuid() not in {0, facts.st_uid}:
        raise InvalidRequest("the repository is another user's, so no commits are fetched into it")
    fd = hostfs.open_folder(".git", folder)
    own = GitFolder(path=".git", fd=fd, own=os.dup(fd), name=".")
    try:
        yield own
    finally:
        own.close()


def _touching(quarantine: Quarantine, paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the branches whose new commits delete or change one of these paths, with a reason for each path.

    Each branch is compared with the boundary commits on which its new commits are based.
    """
    git, inside = quarantine.git, quarantine_variables(quarantine.path)
    revisions = git.run("for-each-ref", "--format=^%(objectname)", "refs/heads", "refs/remotes", "refs/cloche")
    head = git.call("rev-parse", "--verify", "--quiet", "HEAD^{commit}")[1].strip()
    revisions += b"^" + head + b"\n" if head else b""
    reasons_by_branch: dict[str, tuple[str, ...]] = {}
    for branch, value in quarantine.moved.items():
        rev_list_input = revisions + value.encode() + b"\n"
        listed = git.run(
            "rev-list", "--boundary", "--ignore-missing", "--stdin", data=rev_list_input, more=inside
        ).split()
        bases = [line[1:] for line in listed if line.startswith(b"-")]
        if len(bases) == len(listed):
            continue  # only boundary commits are listed, so the branch has no new commit
        before: dict[bytes, set[bytes]] = {}
        for base in bases[:MOST_BRANCHES] or filter(None, [head]):
            for path, blob in _blobs(git, base.decode(), paths, inside).items():
                before.setdefault(path, set()).add(blob)
        now = _blobs(git, value, paths, inside)
        reasons = [
            f"it {'changes' if path in now else 'deletes'} {shown(path)}, which is hidden from the sandbox"
            for path, blobs in before.items()
            if now.get(path) not in blobs
        ]
        if reasons:
            more = (f"and {len(reasons) - MOST_REASONS} more",) if len(reasons) > MOST_REASONS else ()
            reasons_by_branch[branch] = (*reasons[:MOST_REASONS], *more)
    return reasons_by_branch


def _blobs(git: Git, commit: str, paths: Sequence[str], inside: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return the blobs of a commit at and below these paths: by path, `ls-tree`'s mode, type and object name."""
    blobs: dict[bytes, bytes] = {}
    for start in range(0, len(paths), MOST_AT_ONCE):
        batch = paths[start : start + MOST_AT_ONCE]
        listed = git.run("ls-tree", "-rz", "--full-tree", commit, "--", *batch, more=inside)
        rows = (row.partition(b"\t") for row in listed.split(b"\0"))
        blobs.update((path, facts) for facts, _, path in rows if path)
    return blobs


def _make_quarantine(
    git: Git, snapshot: Snapshot, entries: Mapping[bytes, SnapshotEntry], branches: Mapping[str, str]
) -> str:
    objects, kind = objects_of(git)
    quarantine_path = os.path.join(git.temporary, "quarantine.git")
    extension = "[extensions]\n\tobjectformat = sha256\n" if kind == "sha256" else ""
    version = 1 if extension else 0
    packed = "".join(f"{value} {HEADS}{name}\n" for name, value in sorted(branches.items()))
    files = {
        "HEAD": "ref: refs/heads/none\n",
        "config": f"[core]\n\trepositoryformatversion = {version}\n\tbare = true\n{extension}",
        "packed-refs": f"# pack-refs with: sorted\n{packed}",
        "objects/info/alternates": f"{objects}\n",
    }
    for name in ("", "objects", "objects/info", "objects/pack", "refs", "refs/heads"):
        _make_folder(git, os.path.join(quarantine_path, name))
    for name, text in files.items():
        write_file(git, os.path.join(quarantine_path, name), [os.fsencode(text)])
    inside = quarantine_variables(quarantine_path)
    _copy_objects(git, snapshot, entries, quarantine_path)
    _check_commits(git, branches, inside)
    return quarantine_path


def _copy_objects(git: Git, snapshot: Snapshot, entries: Mapping[bytes, SnapshotEntry], quarantine_path: str) -> None:
    """Copy the guest's loose objects unchanged, and its packs through git, which writes their index itself."""
    count = 0
    for path, entry in entries.items():
        loose = _LOOSE.match(path)
        if entry.kind != "file" or not (loose or _PACK.match(path)):
            continue
        count += 1
        git.check()
        if entry.problem or count > _MOST_OBJECTS:
            raise InvalidRequest(f"the guest's {shown(path)} cannot be taken: {entry.problem or 'too many objects'}")
        if loose is not None:
            above = os.path.join(quarantine_path, "objects", loose[1].decode())
            _make_folder(git, above)
            write_file(git, os.path.join(above, loose[2].decode()), snapshot.read(entry))
        else:
            pack = os.path.join(git.temporary, f"{count}.pack")
            write_file(git, pack, snapshot.read(entry))
            _index(git, pack, quarantine_path)


def _index(git: Git, pack: str, quarantine_path: str) -> None:
    """Let git check a pack and write its index. The fetch checks that the objects it links to exist."""
    pack_path = os.path.join(quarantine_path, "objects", "pack", f"pack-{os.urandom(20).hex()}")
    os.rename(pack, f"{pack_path}.pack")
    git.run(
        "index-pack",
        "--fsck-objects",
        "-o",
        f"{pack_path}.idx",
        f"{pack_path}.pack",
        more=quarantine_variables(quarantine_path),
    )


def quarantine_variables(quarantine_path: str) -> dict[str, str]:
    """Return the variables with which git reads the quarantine."""
    return {"GIT_DIR": quarantine_path, "GIT_COMMON_DIR": quarantine_path}


def _check_commits(git: Git, branches: Mapping[str, str], inside: Mapping[str, str]) -> None:
    object_names = "".join(f"{value}\n" for value in branches.values()).encode()
    answers = git.run("cat-file", "--batch-check=%(objecttype)", data=object_names, more=inside).splitlines()
    for name, answer in zip(branches, answers, strict=True):
        if answer != b"commit":
            raise InvalidRequest(f"the guest's branch {escape_name(name)} names no commit that is there")


def _make_folder(git: Git, path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        git.give(path)


def write_file(git: Git, path: str, pieces: Iterator[bytes] | list[bytes]) -> str:
    """Write a new file that git's user owns; return its SHA-256."""
    digest = hashlib.sha256()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
    git.give(path)
    return digest.hexdigest()


def _text(path: bytes) -> str:
    return os.fsdecode(path)


def shown(path: bytes) -> str:
    """Return a path as an error message shows it."""
    return escape_name(os.fsdecode(path))[:200]
