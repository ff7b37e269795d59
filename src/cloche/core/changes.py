"""Changes of a sandbox in a folder of the host, as values. Paths are relative to the folder, with `/` between.

A path may be any name that the kernel takes. Bytes that are not UTF-8 are surrogates (`os.fsdecode`): print paths by
`core.escape` only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from .record import asdict, dataclass, field, replace

if TYPE_CHECKING:
    from .enforcement import Level

# Where a jail shows, read-only, what the sandbox has changed in its view of a folder, as overlayfs keeps it.
CHANGES = "/.cloche-changes"
ChangeType = Literal["added", "removed", "modified", "renamed", "mode"]
FileKind = Literal["file", "directory", "link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFolder:
    """Say which folder of the host a sandbox is shown, and how. Only Cloche makes these.

    `path` is the folder's real path; `opened_as` the path that opens it, empty for the same; `at` the path inside.
    `hidden` are paths below it that do not exist inside, `masked_folders` their parent folders: path, permission bits,
    time of change in ns. `owner` are uid and gid of the folder, `mode` its permission bits, `identity` its device and
    inode. `disk_bytes` bounds the bytes written. `opened_ns` is the time of opening by the host's clock. `copied_ns` is
    the time of copying by the sandbox's clock, 0 where the sandbox has a view; `left_out` are the paths that the copy
    lacks. `read_only` are further folders. `tracked` are the hidden paths that git tracks, or that have tracked files
    below, each behind the folder of its repository, "" for the folder itself. `git_config` is the text of the sandbox's
    /etc/gitconfig. `git` is the folder shown as `.git`, in place of a file that names it.
    """

    path: str
    at: str
    opened_as: str = ""
    hidden: tuple[str, ...] = ()
    masked_folders: tuple[tuple[str, int, int], ...] = ()
    owner: tuple[int, int] = (0, 0)
    mode: int = 0o755
    identity: tuple[int, int] = (0, 0)
    disk_bytes: int = 2 << 30
    opened_ns: int = 0
    copied_ns: int = 0
    left_out: tuple[str, ...] = ()
    read_only: tuple[HostFolder, ...] = ()
    tracked: tuple[tuple[str, str], ...] = ()
    git_config: str = ""
    git: HostFolder | None = None

    @property
    def tracked_here(self) -> tuple[str, ...]:
        """Return the hidden paths that the folder's own repository tracks."""
        return tuple(path for repository, path in self.tracked if not repository)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> HostFolder:
        """Read what `as_dict` made, perhaps through JSON. Raises TypeError."""
        rows: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
        }
        for name in ("masked_folders", "tracked"):
            rows[name] = tuple(map(tuple, rows.get(name, ())))
        rows["read_only"] = tuple(map(cls.from_dict, rows.get("read_only", ())))
        rows["git"] = None if rows.get("git") is None else cls.from_dict(rows["git"])
        return cls(**rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFolder:
    """Say which folder of the host is the home folder of a live sandbox, for writing. Only Cloche makes these.

    `path` is the folder's real path, `at` the path inside; `owner` are uid and gid of its files on the host. What the
    guest writes there stays, and is not bounded by the sandbox.
    """

    path: str
    at: str
    owner: tuple[int, int]

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> HomeFolder:
        """Read what `asdict` made, perhaps through JSON. Raises TypeError."""
        return cls(**{**document, "owner": tuple(document["owner"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Describe how one path would differ on the host.

    `kind` is the type after the change, of a removed path the type before; `old_kind` the type before, where it
    differs. Such a change is `modified`; the former content of a folder has changes with `what` removed. Modes are
    permission bits (0o777), sizes are bytes, `sha256` is the hash of a file's new content, in hexadecimal. `dangers`
    are the reasons why the change must be agreed to by itself, the gravest first. `reached_as` are other names of the
    file on the host, or files of the host that name it, where a reason comes from those. `conflict` says how the host's
    file differs from the one the sandbox began with; empty where it does not.
    """

    path: str
    what: ChangeType
    kind: FileKind
    old_path: str = ""
    old_kind: FileKind | Literal[""] = ""
    mode: int = 0
    old_mode: int = 0
    size: int = 0
    old_size: int = 0
    sha256: str = ""
    target: str = ""
    old_target: str = ""
    is_text: bool = False
    dangers: tuple[str, ...] = ()
    conflict: str = ""
    reached_as: tuple[str, ...] = ()

    @property
    def mode_note(self) -> str:
        """Say how permissions change with a path that stays, or those of a new one that are not the usual ones."""
        if self.kind == "link" or self.what == "removed":
            return ""
        if self.what == "added" or self.old_kind:
            usual = (0o755,) if self.kind == "directory" else (0o644, 0o755)
            return "" if self.mode in usual else f"mode {self.mode:04o}"
        return "" if self.mode == self.old_mode else f"mode {self.old_mode:04o} -> {self.mode:04o}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Hold the paths of the changes that need a yes for the same reason, which is the gravest of each."""

    reason: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Say why a path that the sandbox has changed is not part of its changes: it is never written to the host."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Hold the changes of a sandbox at one moment.

    `id` is a hash over paths, kinds, modes and contents: `commit` with it writes exactly these changes, or refuses.
    `patch` has unified diffs of text files, as `git apply` takes them, up to a bound (`is_cut`). `questions` group the
    changes that must be agreed to by reason; first come files that run without a build or test. `changes` are in the
    order of the tree: a tuple, or above 20,000 a sequence that reads them from a temporary file.
    """

    id: str
    changes: Sequence[Change] = ()
    left_out: tuple[LeftOut, ...] = ()
    patch: str = ""
    is_cut: bool = False
    questions: tuple[Question, ...] = ()

    @property
    def dangerous(self) -> tuple[Change, ...]:
        """Return the changes that need their own confirmation."""
        return tuple(change for change in self.changes if change.dangers)

    @property
    def conflicts(self) -> tuple[Change, ...]:
        """Return the changes whose file has also changed on the host."""
        return tuple(change for change in self.changes if change.conflict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(replace(self, changes=())), "changes": [asdict(change) for change in self.changes]}


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideCommit:
    """Describe a commit that was made inside. All but `id` is the guest's text; `time_s` are seconds since 1970."""

    id: str
    author: str
    time_s: int
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideBranch:
    """Hold the new commits of a branch that the guest has made or moved, the newest first; `count` is their number.

    `dangerous` are the dangerous changes of its tip against the host's checked-out commit.
    """

    name: str
    tip: str
    count: int
    commits: tuple[InsideCommit, ...] = ()
    dangerous: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Name the paths that were written to the host, and by path the reason why others were not.

    `refs` are the git references that were made, with the commits that they name.
    """

    written: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    refs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Say what became of a sandbox's changes when its view and the host's folder were made one.

    `written` are paths of the host now. `held` are dangerous changes, and `conflicts` those of files that the host has
    changed, too: they exist in the sandbox alone. `left` has the reason why other paths were not written, and `refs`
    are git references for commits that were made inside. With `is_git_renewed` the host's branch has moved, so git
    inside shows the host's repository again. `ignored` are paths that git ignores: what is there stays in the sandbox.
    """

    written: tuple[str, ...] = ()
    held: tuple[Change, ...] = ()
    conflicts: tuple[Change, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    refs: Mapping[str, str] = field(default_factory=dict)
    is_git_renewed: bool = False
    ignored: tuple[str, ...] = ()


@runtime_checkable
class SupportsHostFolder(Protocol):
    """Be a backend whose live sandboxes can be shown a folder of the host copy-on-write (`policy.host_folder`)."""

    def why_no_view(self, level: Level | None) -> str:
        """Say why this host gives none at a level, None for its strongest; empty where it may.

        Opening raises StartFailed where the kernel refuses it.
        """
        ...


@runtime_checkable
class SupportsGrantedDisk(Protocol):
    """Be a backend whose disk limit others grant: a copy of a folder counts towards it, and does not raise it."""

    is_disk_granted: bool


@runtime_checkable
class SupportsStreamedFiles(Protocol):
    """Be a backend that sends the files of a run piece by piece: their data may be a view of a file on disk."""

    streams_files: bool


@runtime_checkable
class SupportsChanges(Protocol):
    """Report changes in a folder of a live sandbox."""

    def changes_stream(
        self,
        root: str,
        *,
        since: int | None,
        max_bytes: int,
        max_entries: int,
        skip: Sequence[str] = (),
        note_answer: Callable[[Mapping[str, Any]], None],
    ) -> AsyncIterator[bytes]:
        """Yield the bytes that `cloche.workspace.snapshot` reads; at the end `note_answer` gets the sandbox's answer.

        `since`, in ns of the sandbox's clock, reads a copy; without it a view is read. All processes are stopped
        meanwhile.
        """
        ...
