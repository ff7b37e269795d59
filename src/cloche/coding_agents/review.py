"""The review of a sandbox: its changes by file, the dangerous ones first, and a choice of them.

A front end shows a `Review`, makes a `Choice`, and passes its keywords to `commit` or `try_commit`. Names and contents
are the guest's: escape them where they are printed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from cloche.core.changes import Change, Committed, Diff, InsideBranch, Question
from cloche.core.errors import BackendUnavailable, InvalidRequest, WorkspaceFailed
from cloche.core.record import asdict, dataclass, field, replace
from cloche.workspace.hunks import FileDiff, Hunk, file_diffs, may_be_split

if TYPE_CHECKING:
    from cloche.execution.sandbox import AsyncSandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedFile:
    """Hold one change with its part of the patch; None if the patch does not show it (binary, too long)."""

    change: Change
    diff: FileDiff | None = None

    @property
    def hunks(self) -> tuple[Hunk, ...]:
        """Return the hunks that can be chosen one by one; fewer than two are the file as a whole."""
        return self.diff.hunks if self.diff is not None and may_be_split(self.change) else ()

    @property
    def note(self) -> str:
        """Return `+2 -1`, or the sizes of a file that is not shown by lines; empty for a folder."""
        change = self.change
        if self.diff is not None and self.diff.hunks:
            return f"+{self.diff.added} -{self.diff.removed}"
        if change.kind != "file" or change.what in ("mode", "renamed"):
            return ""
        sizes = [f"{size:,}" for size in (change.old_size, change.size) if size]
        return f"{' to '.join(sizes) or '0'} bytes"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, with its hunks."""
        counts = (self.diff.added, self.diff.removed) if self.diff is not None else (None, None)
        return {
            "path": self.change.path, "what": self.change.what, "kind": self.change.kind, "added": counts[0],
            "removed": counts[1], "dangers": list(self.change.dangers), "conflict": self.change.conflict,
            "hunks": [{"id": hunk.id, "text": hunk.text} for hunk in self.hunks],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """Hold the files in the order shown: dangerous ones by the gravest reason, then conflicts, then the others.

    `branches` have the commits that were made inside; `git_error` says why they cannot be read.
    """

    diff: Diff
    files: tuple[ReviewedFile, ...]
    branches: tuple[InsideBranch, ...] = ()
    git_error: str = ""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the number of changes other than folders, of added lines, and of removed lines."""
        parts = [file.diff for file in self.files if file.diff is not None]
        number = sum(file.change.kind != "directory" for file in self.files)
        return number, sum(part.added for part in parts), sum(part.removed for part in parts)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        number, added, removed = self.counts
        left_out = [{"path": skipped.path, "reason": skipped.reason} for skipped in self.diff.left_out]
        return {
            "id": self.diff.id, "count": number, "added": added, "removed": removed, "isCut": self.diff.is_cut,
            "files": [file.as_dict() for file in self.files], "leftOut": left_out,
            "branches": [asdict(branch) for branch in self.branches], "gitError": self.git_error,
        }  # fmt: skip


async def review_changes(sandbox: AsyncSandbox) -> Review:
    """Compare a sandbox with its folder, and list the commits made inside, for a review."""
    diff = await sandbox.diff()
    review = await asyncio.to_thread(review_of, diff)  # there may be a million changes
    if not any(skipped.path.partition("/")[0] == ".git" for skipped in diff.left_out):
        return review
    try:
        return replace(review, branches=await sandbox.commits_inside())
    except (InvalidRequest, BackendUnavailable, WorkspaceFailed) as error:  # the guest's `.git` may be anything
        return replace(review, git_error=str(error))


def review_of(diff: Diff) -> Review:
    """Return a review of a diff: its changes in the order of a review."""
    parts = file_diffs(diff)
    rank = {path: number for number, question in enumerate(diff.questions) for path in question.paths}
    ordered = sorted(diff.changes, key=lambda change: (rank.get(change.path, len(rank)), not change.conflict))
    files = tuple(ReviewedFile(change=change, diff=parts.get(change.path)) for change in ordered)
    return Review(diff=diff, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Hold the paths that are written, and by path the hunks where it is not the whole file.

    `dangerous` are the chosen paths that were agreed to by themselves.
    """

    paths: frozenset[str] = frozenset()
    hunks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dangerous: frozenset[str] = frozenset()

    def without(self, paths: Iterable[str]) -> Choice:
        """Return the choice without some paths."""
        kept = self.paths.difference(paths)
        hunks = {path: ids for path, ids in self.hunks.items() if path in kept}
        return Choice(paths=kept, hunks=hunks, dangerous=self.dangerous & kept)

    def agreed(self, paths: Iterable[str]) -> Choice:
        """Return the choice with some dangerous paths agreed to."""
        return Choice(paths=self.paths, hunks=self.hunks, dangerous=self.dangerous | self.paths.intersection(paths))

    def keywords(self, review: Review) -> dict[str, Any]:
        """Return the keywords `paths`, `theirs` and `hunks` of `commit` and `try_commit`.

        A path includes everything below it, so the changes that are not chosen are named.
        """
        above = {folder for path in self.paths for folder in _folders_above(path)}
        declined = [
            file.change.path
            for file in review.files
            if file.change.path not in self.paths and not (file.change.path in above and is_new_folder(file.change))
        ]
        return {"paths": sorted(self.paths), "theirs": declined, "hunks": dict(self.hunks)}


def everything(review: Review) -> Choice:
    """Return the choice of all changes without a conflict."""
    return Choice(paths=frozenset(file.change.path for file in review.files if not file.change.conflict))


def asked_files(review: Review) -> tuple[ReviewedFile, ...]:
    """Return the files for questions one by one: no conflicts, and no folders that come with their files."""
    with_files = {folder for file in review.files for folder in _folders_above(file.change.path)}
    return tuple(
        file
        for file in review.files
        if not file.change.conflict
        and (file.change.dangers or not (is_new_folder(file.change) and file.change.path in with_files))
    )


def choice_of(chosen: Mapping[str, Collection[str] | None], review: Review) -> Choice:
    """Return the choice for paths with the ids of their hunks; None, and all hunks of a file, mean the whole file."""
    number = {file.change.path: len(file.hunks) for file in review.files}
    parts = {path: tuple(ids) for path, ids in chosen.items() if ids is not None and len(set(ids)) < number[path]}
    paths = frozenset(path for path in chosen if parts.get(path) != ())
    return Choice(paths=paths, hunks={path: ids for path, ids in parts.items() if ids})


def questions_for(review: Review, choice: Choice) -> list[Question]:
    """Return the questions about dangerous changes that are chosen and not agreed to yet, by reason."""
    open_paths = choice.paths - choice.dangerous
    asked = (
        Question(reason=question.reason, paths=tuple(path for path in question.paths if path in open_paths))
        for question in review.diff.questions
    )
    return [question for question in asked if question.paths]


def left_after(review: Review, choice: Choice, committed: Committed) -> int:
    """Return how many changes of a review stay in the sandbox after a commit to the folder."""
    whole = set(committed.written).difference(choice.hunks)
    return sum(file.change.path not in whole for file in review.files)


def is_new_folder(change: Change) -> bool:
    """Tell whether a change only makes a folder."""
    return change.kind == "directory" and change.what == "added"


def _folders_above(path: str) -> Iterable[str]:
    while path := path.rpartition("/")[0]:
        yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewEnd:
    """Say how a review ended: the written paths, the number of changes that stay, the archive of discarded ones."""

    how: Literal["nothing", "committed", "kept", "discarded"]
    committed: Committed | None = None
    left: int = 0
    saved: str = ""
