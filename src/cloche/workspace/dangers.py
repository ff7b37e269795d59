"""Find changes that would run code on the host, or control a tool there, so that each needs its own approval.

`danger_table` has the dangerous names. Executables, links and permissions are judged here, since no name shows them.
Names are compared case-insensitively and at any depth, because the top of one project may be a subfolder of another. A
change is judged by its own path and by every other name through which the host reaches it (`host_names`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from ..core.changes import Change
from .danger_table import (
    EXECUTABLE,
    INTO_GIT,
    LEAVES,
    RANKED,
    READABLE,
    TABLE,
    WINDS,
    WRITABLE,
    DangerRow,
)

# The other files and folders by which git recognises a folder with a `HEAD` as a repository (gitrepository-layout(5)).
_FILES_BESIDE_HEAD = frozenset({"config", "config.worktree", "commondir"})
_FOLDERS_BESIDE_HEAD = frozenset({"objects", "refs"})
_RANK = {reason: rank for rank, reason in enumerate(RANKED)}
_BY_NAME: dict[str, list[DangerRow]] = defaultdict(list)
for _row in TABLE:
    if _row.form in ("name", "folder", "path"):
        _BY_NAME[_row.pattern.partition("/")[0]].append(_row)
_AFFIXED = tuple(row for row in TABLE if row.form in ("prefix", "suffix", "glob"))
_PREFIXES = tuple(row.pattern.partition("*")[0] for row in _AFFIXED if row.form != "suffix")
_SUFFIXES = tuple(row.pattern for row in _AFFIXED if row.form == "suffix")


def may_steer_git(change: Change) -> bool:
    """Tell whether a new path is a git file if its parent is a repository, as any folder with a `HEAD` may be."""
    if change.what == "removed":
        return False
    name = change.path.rpartition("/")[2].casefold()
    may_be_file, may_be_folder = change.kind != "directory", change.kind != "file"
    return (may_be_file and name in _FILES_BESIDE_HEAD) or (may_be_folder and name in _FOLDERS_BESIDE_HEAD)


def _no_rows(_: str) -> Collection[DangerRow]:
    return ()


def dangers_of(
    change: Change,
    *,
    rows_by_other_names: Callable[[str], Collection[DangerRow]] = _no_rows,
    host_reasons: Iterable[str] = (),
) -> tuple[str, ...]:
    """Return the reasons why a change needs its own approval, the gravest first; empty if it is harmless.

    `rows_by_other_names` returns the rows that apply to a path through its other names on the host. `host_reasons` are
    reasons that depend on the host's files.
    """
    reasons = set(host_reasons)
    for path, is_removed in _touched(change):
        rows = (*(row for row in rows_near(path) if matches(row, path)), *rows_by_other_names(path))
        reasons.update(row.reason for row in rows if row.guards or not is_removed)
    if _is_executable(change):
        reasons.add(EXECUTABLE)
    if _gives(change, 0o002):
        reasons.add(WRITABLE)
    if (
        change.what != "added"
        and not change.old_kind
        and _gives(change, 0o005 if change.kind == "directory" else 0o004)
    ):
        reasons.add(READABLE)
    if change.kind == "link" and change.what != "removed":
        reasons.update(row.reason for row in rows_near(change.path) if leads_to(row, change.path))
        reasons.update(_dangers_of_link(change.path, change.target))
    return tuple(sorted(reasons, key=lambda reason: _RANK[reason]))


def _touched(change: Change) -> list[tuple[str, bool]]:
    """Return each path that a file is written to or removed from, and whether it is removed. Folders alone are
    harmless.
    """
    touched = []
    if change.kind != "directory":
        touched.append((change.path, change.what == "removed"))
    if change.old_path:
        touched.append((change.old_path, True))
    if change.old_kind and change.kind == "directory":
        touched.append((change.path, True))
    return touched


def rows_near(path: str) -> Iterator[DangerRow]:
    """Yield the rows that may match a path. The index by name keeps this fast for very many paths."""
    for name in path.casefold().split("/"):
        yield from _BY_NAME.get(name, ())
        if name.startswith(_PREFIXES) or name.endswith(_SUFFIXES):
            yield from _AFFIXED


def matches(row: DangerRow, path: str) -> bool:
    """Tell whether a row matches a path."""
    names = path.casefold().split("/")
    match row.form:
        case "name":
            return names[-1] == row.pattern
        case "glob":
            return fnmatchcase(names[-1], row.pattern)
        case "folder":
            return row.pattern in names
        case "prefix":
            return any(name.startswith(row.pattern) for name in names)
        case "suffix":
            return any(name.endswith(row.pattern) for name in names)
        case "path":
            row_names, is_open = sequence(row)
            if is_open:
                return any(names[start : start + len(row_names)] == row_names for start in range(len(names)))
            return names[-len(row_names) :] == row_names


def sequence(row: DangerRow) -> tuple[list[str], bool]:
    """Return the names of a `path` row, and whether it ends with `*`, which means everything below."""
    row_names = row.pattern.split("/")
    return (row_names[:-1], True) if row_names[-1] == "*" else (row_names, False)


def leads_to(row: DangerRow, path: str) -> bool:
    """Tell whether a path may be a parent folder of a `path` row. A link there brings files from elsewhere into that
    folder.
    """
    if row.form != "path":
        return False
    row_names, names = sequence(row)[0], path.casefold().split("/")
    return any(names[-count:] == row_names[:count] for count in range(1, len(row_names)))


def _is_executable(change: Change) -> bool:
    if change.kind != "file" or change.what == "removed":
        return False
    old_mode = change.old_mode if change.what != "added" and not change.old_kind else 0
    if change.what == "modified":  # also with the bits taken away: whoever gives them back runs other content
        return bool((change.mode | old_mode) & 0o111)
    return bool(change.mode & 0o111 & ~old_mode)


def _gives(change: Change, bits: int) -> bool:
    if change.kind == "link" or change.what == "removed":
        return False
    old_mode = change.old_mode if change.what != "added" and not change.old_kind else 0
    return bool(change.mode & bits & ~old_mode)


def _dangers_of_link(path: str, target: str) -> list[str]:
    """Return the dangers of a link's target, judged by its text alone."""
    if target.startswith("/"):
        return [LEAVES]
    names = path.split("/")[:-1]
    is_behind_name = winds = False
    for name in target.split("/"):
        if name == "..":
            if not names:
                return [LEAVES]
            names.pop()
            winds = winds or is_behind_name
        elif name not in ("", "."):
            names.append(name)
            is_behind_name = True
    into_git = any(name.casefold().rstrip(". ") == ".git" for name in names)
    return [reason for reason, holds in ((INTO_GIT, into_git), (WINDS, winds)) if holds]
