"""Compare the changes of two sandboxes to one folder: which of them changed each file, and how the versions differ.

A file that both have changed to the same is no difference. One that both have changed to different versions becomes a
conflict of the other sandbox as soon as one version is written to the folder: `conflicts_with` asks for these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from cloche.core.changes import Change, Diff
from cloche.core.errors import ClocheError, InvalidRequest, SandboxFileError
from cloche.core.escape import escape_name
from cloche.core.record import asdict, dataclass
from cloche.execution.sandbox import AsyncSandbox
from cloche.workspace.lines import CONTEXT, Region, Work, changed_regions
from cloche.workspace.patch import as_text, text_lines

from .running import open_agents

Whose = Literal["first", "second", "both", "same"]
MOST_TEXT_BYTES, MOST_TEXTS, MOST_LINES, MOST_PAIRS, MOST_STEPS = 1 << 20, 200, 50_000, 50_000, 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePair:
    """Hold a line of each version beside the other, with its number; None where a version has none there."""

    first: str | None
    second: str | None
    first_number: int = 0
    second_number: int = 0

    @property
    def is_equal(self) -> bool:
        """Tell whether both versions have the line."""
        return self.first == self.second


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFile:
    """Describe a path that at least one sandbox has changed.

    `whose` is `both` if the versions differ, `same` if both have made the same. `pairs` has the regions that differ
    between them, with lines around, one tuple for each; it is empty where `note` says why.
    """

    path: str
    whose: Whose
    first: Change | None = None
    second: Change | None = None
    pairs: tuple[tuple[LinePair, ...], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hold the folder, the names of the sandboxes, and the paths that they have changed, in order."""

    folder: str
    names: tuple[str, str]
    files: tuple[ComparedFile, ...] = ()

    def of(self, whose: Whose) -> tuple[ComparedFile, ...]:
        """Return the files of one kind."""
        return tuple(file for file in self.files if file.whose == whose)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


async def compare(first: str, second: str) -> Comparison:
    """Compare two sandboxes by name. Raises InvalidRequest unless both live, and have the same folder."""
    async with AsyncSandbox.attach(first) as one, AsyncSandbox.attach(second) as other:
        folder, other_folder = _folder(one, first), _folder(other, second)
        if folder != other_folder:
            raise InvalidRequest(
                f"agent compare: {first} has {escape_name(folder)}, and {second} has {escape_name(other_folder)}; "
                "name two sandboxes on one folder"
            )
        diffs = await asyncio.gather(one.diff(), other.diff())
        rows = list(_rows(*diffs))
        work, texts, pairs = Work(MOST_STEPS), 0, 0
        for number, row in enumerate(rows):
            if row.whose == "both" and texts < MOST_TEXTS and pairs < MOST_PAIRS:
                rows[number], texts = await _beside(row, one, other, work), texts + 1
                pairs += sum(map(len, rows[number].pairs))
    return Comparison(folder=folder, names=(first, second), files=tuple(rows))


def _folder(sandbox: AsyncSandbox, name: str) -> str:
    folder = sandbox.policy.host_folder
    if folder is None:
        raise InvalidRequest(f"agent compare: {name} has no folder of this host")
    return folder.path


def _rows(first: Diff, second: Diff) -> Iterator[ComparedFile]:
    """Yield the paths by whose they are. Pure."""
    ours, theirs = ({change.path: change for change in diff.changes} for diff in (first, second))
    for path in sorted({*ours, *theirs}):
        one, other = ours.get(path), theirs.get(path)
        whose: Whose = "first" if other is None else "second"
        if one is not None and other is not None:
            whose = "same" if _result(one) == _result(other) else "both"
        yield ComparedFile(path=path, whose=whose, first=one, second=other)


def _result(change: Change) -> tuple[object, ...]:
    """Return what a change leaves at its path."""
    if change.what == "removed":
        return ("removed",)
    return change.kind, change.mode, change.sha256 if change.kind == "file" else change.target


async def _beside(row: ComparedFile, one: AsyncSandbox, other: AsyncSandbox, work: Work) -> ComparedFile:
    """Return a file with the lines of both versions beside each other."""
    texts = [await _text(sandbox, change) for sandbox, change in ((one, row.first), (other, row.second))]
    if note := next((text for text, is_text in texts if not is_text), ""):
        return ComparedFile(path=row.path, whose=row.whose, first=row.first, second=row.second, note=note)
    lines = [text_lines(text) for text, _ in texts]
    if max(map(len, lines)) > MOST_LINES:
        note = "too long to be shown"
    pairs = () if note else await asyncio.to_thread(lambda: tuple(paired(lines[0], lines[1], work)))
    return ComparedFile(
        path=row.path, whose=row.whose, first=row.first, second=row.second, pairs=pairs,
        note=note or ("" if pairs else "the permissions differ"),
    )  # fmt: skip


async def _text(sandbox: AsyncSandbox, change: Change | None) -> tuple[str, bool]:
    """Return the text of a version, or why it is not shown, and which of both it is."""
    folder = sandbox.policy.host_folder
    if change is None or folder is None or change.what == "removed":
        return "removed in one of them", False
    if change.kind != "file" or change.size > MOST_TEXT_BYTES:
        return "too long to be shown" if change.kind == "file" else f"a {change.kind}", False
    try:
        data = await sandbox.read_file(f"{folder.at}/{change.path}", max_bytes=MOST_TEXT_BYTES)
    except SandboxFileError as error:
        return f"cannot be read: {error.kind}", False
    text = as_text(data)
    return ("binary", False) if text is None else (text, True)


def paired(first: Sequence[str], second: Sequence[str], work: Work) -> Iterator[tuple[LinePair, ...]]:
    """Yield the regions in which two texts differ, with the lines around them, as pairs of lines. Pure."""
    group: list[Region] = []
    for region in changed_regions(first, second, work):
        if group and region[0] - group[-1][1] > 2 * CONTEXT:
            yield tuple(_pairs(first, second, group))
            group = []
        group.append(region)
    if group:
        yield tuple(_pairs(first, second, group))


def _pairs(first: Sequence[str], second: Sequence[str], group: Sequence[Region]) -> Iterator[LinePair]:
    before = min(CONTEXT, group[0][0], group[0][2])
    i, j = group[0][0] - before, group[0][2] - before
    for i1, i2, j1, j2 in group:
        yield from _beside_each_other(first, second, (i, i1, j, j1))
        yield from _beside_each_other(first, second, (i1, i2, j1, j2))
        i, j = i2, j2
    after = min(CONTEXT, len(first) - i, len(second) - j)
    yield from _beside_each_other(first, second, (i, i + after, j, j + after))


def _beside_each_other(first: Sequence[str], second: Sequence[str], region: Region) -> Iterator[LinePair]:
    i1, i2, j1, j2 = region
    for offset in range(max(i2 - i1, j2 - j1)):
        i, j = i1 + offset, j1 + offset
        yield LinePair(
            first=first[i] if i < i2 else None, second=second[j] if j < j2 else None,
            first_number=i + 1 if i < i2 else 0, second_number=j + 1 if j < j2 else 0,
        )  # fmt: skip


async def conflicts_with(folder: str, written: Collection[str], *, by: str) -> dict[str, tuple[str, ...]]:
    """Return, by the names of the other living agents on a folder, their changes that conflict with what was written.

    `by` is the sandbox whose changes were committed. One that ends meanwhile is left out.
    """
    chosen, found = set(written), {}
    for other in await asyncio.to_thread(open_agents, folder):
        if other.sandbox == by:
            continue
        try:
            async with AsyncSandbox.attach(other.sandbox) as sandbox:
                paths = tuple(change.path for change in (await sandbox.diff()).conflicts if change.path in chosen)
        except ClocheError:
            continue
        if paths:
            found[other.sandbox] = paths
    return found
