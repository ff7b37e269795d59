"""What a sandbox has changed in a folder of the host, as values. Paths are relative to the folder, with `/` between.

A path may be any name that the kernel takes: bytes that are no UTF-8 are surrogates (`os.fsdecode`), so print one only
by `core.escape`.
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

    `path` is the folder's real path, `opened_as` one by which it is opened, empty for the same; `at` the path inside.
    `hidden` are paths below it that are not there inside, `masked_folders` the folders above those: path, permission
    bits, time of change in ns. `owner` are uid and gid of the folder, `mode` its permission bits, `identity` its device
    and inode. `disk_bytes` bounds what is written. `opened_ns` is when it was opened, by the host's clock. A sandbox
    that has a copy of it sees what was changed in that by `copied_ns`, by its own clock; 0 where it has a view.
    `left_out` are paths that the copy lacks. Further folders are `read_only`. `tracked` are the hidden paths that git
    tracks, or has tracked files below, each behind the folder of its repository, "" for the folder itself. `git_config`
    is the text of the sandbox's /etc/gitconfig. `git` is the folder that is shown as `.git`, in place of a file that
    names it.
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
        """Return what is hidden though the folder's own repository tracks it."""
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
class Change:
    """Say how one path would differ on the host.

    `kind` is what is there afterwards, of a removed one what was there; `old_kind` is what was there where that was of
    another kind: such a change is `modified`, and what was in a folder is removed by changes of its own. Modes are
    permission bits (0o777), sizes are bytes. `sha256` is that of a file's content afterwards, in hexadecimal. `dangers`
    are the reasons why it needs a yes of its own, the gravest first; `reached_as` are other names by which the host
    reaches it, or files of the host that name it, where such a reason comes from those. `conflict` says how the host's
    file is not what the sandbox began with; empty where it is.
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
    """Hold what a sandbox has changed at one moment.

    `id` is a hash over paths, kinds, modes and contents: `commit` with it writes exactly this, or refuses. `patch` has
    unified diffs of text files, as `git apply` takes them, up to a bound (`is_cut`). `questions` have the changes that
    need a yes of their own by reason: first what runs without anybody building or testing. `changes` are in the order
    of the tree; a tuple, but of more than 20,000 a sequence that reads them from a temporary file.
    """

    id: str
    changes: Sequence[Change] = ()
    left_out: tuple[LeftOut, ...] = ()
    patch: str = ""
    is_cut: bool = False
    questions: tuple[Question, ...] = ()

    @property
    def dangerous(self) -> tuple[Change, ...]:
        """Return the changes that need a yes of their own."""
        return tuple(change for change in self.changes if change.dangers)

    @property
    def conflicts(self) -> tuple[Change, ...]:
        """Return the changes to what has changed on the host meanwhile."""
        return tuple(change for change in self.changes if change.conflict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(replace(self, changes=())), "changes": [asdict(change) for change in self.changes]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Say what was written to the host: paths, and by path what was not and why.

    `refs` are the git references that were made, with the commits that they name.
    """

    written: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    refs: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class SupportsHostFolder(Protocol):
    """Be a backend whose sandboxes that live can be shown a folder of the host copy-on-write (`policy.host_folder`)."""

    def why_no_view(self, level: Level | None) -> str:
        """Say why this host gives none at a level, None for its strongest; empty where it may.

        Opening raises StartFailed where the kernel refuses it.
        """
        ...


@runtime_checkable
class SupportsChanges(Protocol):
    """Tell what was changed in a folder of a sandbox that lives."""

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
        """Yield what `cloche.workspace.snapshot` reads; at last `note_answer` gets what the sandbox says of it.

        With `since`, in ns of its own clock, it is of a copy, else of a view. All processes stand still meanwhile.
        """
        ...
