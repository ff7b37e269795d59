"""Take a diff's patch apart into the hunks of each file, and apply some of them to the host's text.

A patch is Cloche's own: names in it are quoted, and each line of a file begins with a mark, so no content looks like a
header. A hunk's id is a hash of its text: it names the same change of the same lines, or nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from cloche.core.changes import Change, Diff
from cloche.core.record import dataclass

from .patch import section_head, text_lines

_RANGES = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@\n\Z")
_NO_LINE_FEED = "\\"
ID_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """Hold one hunk: its `text` with the header, the first old line (from 0), and the old and the new lines."""

    id: str
    text: str
    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    added: int
    removed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDiff:
    """Hold the part of the patch for one change: its `text` and its hunks. A binary file has no hunks."""

    text: str
    hunks: tuple[Hunk, ...] = ()

    @property
    def added(self) -> int:
        """Return the number of added lines."""
        return sum(hunk.added for hunk in self.hunks)

    @property
    def removed(self) -> int:
        """Return the number of removed lines."""
        return sum(hunk.removed for hunk in self.hunks)


def file_diffs(diff: Diff) -> dict[str, FileDiff]:
    """Return the part of the patch for each changed file; without those that the patch does not show."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text_lines(diff.patch):
        if line.startswith("diff --git "):
            lines = sections.setdefault(line, [])
        elif line.startswith((" ", "+", "-", "@", _NO_LINE_FEED, "old ", "new ", "deleted ", "similarity ", "rename ")):
            lines.append(line)
        # Other lines are about one file that has no diff.
    parts: dict[str, FileDiff] = {}
    for change in diff.changes:
        if not sections:
            break
        head = section_head(change)
        lines_of_file = sections.pop(head, None)
        if lines_of_file is not None:
            text = "".join((head, *lines_of_file))
            parts[change.path] = FileDiff(text=text, hunks=tuple(_hunks(lines_of_file)))
    return parts


def may_be_split(change: Change) -> bool:
    """Tell whether single hunks of a change can be written: it is the new text of a file that stays."""
    return change.what == "modified" and change.kind == "file" and not (change.old_kind or change.conflict)


def apply(text: str, hunks: Collection[Hunk]) -> str:
    """Return a text with some hunks applied. Raises ValueError if it does not have their old lines."""
    lines, result, position = text_lines(text), [], 0
    for hunk in sorted(hunks, key=lambda hunk: hunk.start):
        end = hunk.start + len(hunk.old)
        if hunk.start < position or tuple(lines[hunk.start : end]) != hunk.old:
            raise ValueError("the text is not the one that was compared")
        result += [*lines[position : hunk.start], *hunk.new]
        position = end
    return "".join((*result, *lines[position:]))


def chosen_hunks(parts: Mapping[str, FileDiff], path: str, ids: Collection[str]) -> list[Hunk]:
    """Return the hunks of a file by their ids. Raises LookupError for an id that the diff does not have."""
    by_id = {hunk.id: hunk for hunk in (parts[path].hunks if path in parts else ())}
    return [by_id[hunk_id] for hunk_id in dict.fromkeys(ids)]


def _hunks(lines: Sequence[str]) -> Iterator[Hunk]:
    group: list[str] = []
    for line in lines:
        if line.startswith("@"):
            yield from _hunk(group)
            group = [line]
        elif group:
            group.append(line)
    yield from _hunk(group)


def _hunk(group: Sequence[str]) -> Iterator[Hunk]:
    ranges = _RANGES.match(group[0]) if group else None
    if ranges is None:
        return
    old: list[str] = []
    new: list[str] = []
    counts = {"+": 0, "-": 0}
    sides: tuple[list[str], ...] = ()
    for line in group[1:]:
        mark, content = line[0], line[1:]
        if mark == _NO_LINE_FEED:  # the line before it has none
            for side in sides:
                side[-1] = side[-1].removesuffix("\n")
            continue
        sides = (old,) if mark == "-" else (new,) if mark == "+" else (old, new)
        counts[mark] = counts.get(mark, 0) + 1
        for side in sides:
            side.append(content)
    start = int(ranges[1])
    text = "".join(group)
    yield Hunk(
        id=hashlib.sha256(text.encode()).hexdigest()[:ID_CHARS], text=text, start=start - 1 if old else start,
        old=tuple(old), new=tuple(new), added=counts["+"], removed=counts["-"],
    )  # fmt: skip
