"""Changes that run, or steer, something on the host once they are there, so that each needs a yes of its own.

`danger_table` says which names; beside it are executables, links and permissions, which no name tells. It is compared
without regard to letters' case, at any depth: what a tool reads at the top of a project it reads at the top of the next
one, too. A change is judged by its own path and by every other name through which the host reaches it (`host_names`).
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
    Row,
)

# What else makes a folder a repository to git, or leads it to one, where a `HEAD` is in it.
_FILES_BESIDE_HEAD = frozenset({"config", "config.worktree", "commondir"})
_FOLDERS_BESIDE_HEAD = frozenset({"objects", "refs"})
_RANK = {reason: rank for rank, reason in enumerate(RANKED)}
_BY_NAME: dict[str, list[Row]] = defaultdict(list)
for _row in TABLE:
    if _row.form in ("name", "folder", "path"):
        _BY_NAME[_row.pattern.partition("/")[0]].append(_row)
_AFFIXED = tuple(row for row in TABLE if row.form in ("prefix", "suffix", "glob"))
_PREFIXES = tuple(row.pattern.partition("*")[0] for row in _AFFIXED if row.form != "suffix")
_SUFFIXES = tuple(row.pattern for row in _AFFIXED if row.form == "suffix")


def may_steer_git(change: Change) -> bool:
    """Tell whether what comes is git's own where the folder that it is in is a repository, as any with a `HEAD` is."""
    if change.what == "removed":
        return False
    name = change.path.rpartition("/")[2].casefold()
    may_be_file, may_be_folder = change.kind != "directory", change.kind != "file"
    return (may_be_file and name in _FILES_BESIDE_HEAD) or (may_be_folder and name in _FOLDERS_BESIDE_HEAD)


def _no_rows(_: str) -> Collection[Row]:
    return ()


def dangers_of(
    change: Change,
    *,
    rows_by_other_names: Callable[[str], Collection[Row]] = _no_rows,
    host_reasons: Iterable[str] = (),
) -> tuple[str, ...]:
    """Return the reasons why a change needs a yes of its own, the gravest first; none where it does not.

    `others` returns the rows that hold for a path by its other names on the host. `found` are reasons that it takes a
    look at the host to tell.
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
    """Return the paths that something comes to, or goes from. A folder is nothing without what is in it."""
    touched = []
    if change.kind != "directory":
        touched.append((change.path, change.what == "removed"))
    if change.old_path:
        touched.append((change.old_path, True))
    if change.old_kind and change.kind == "directory":
        touched.append((change.path, True))
    return touched


def rows_near(path: str) -> Iterator[Row]:
    """Yield the rows that may match a path: there may be very many paths, and most rows are for one name."""
    for name in path.casefold().split("/"):
        yield from _BY_NAME.get(name, ())
        if name.startswith(_PREFIXES) or name.endswith(_SUFFIXES):
            yield from _AFFIXED


def matches(row: Row, path: str) -> bool:
    """Tell whether a path is one of a row's."""
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


def sequence(row: Row) -> tuple[list[str], bool]:
    """Return the names of a row of paths, and whether all that is below them is meant."""
    row_names = row.pattern.split("/")
    return (row_names[:-1], True) if row_names[-1] == "*" else (row_names, False)


def leads_to(row: Row, path: str) -> bool:
    """Tell whether a path may be that of a folder in which a row has its own: a link there brings what is elsewhere."""
    if row.form != "path":
        return False
    row_names, names = sequence(row)[0], path.casefold().split("/")
    return any(names[-count:] == row_names[:count] for count in range(1, len(row_names)))


def _is_executable(change: Change) -> bool:
    """Tell whether a program comes to be, or is another one by then."""
    if change.kind != "file" or change.what == "removed":
        return False
    if change.what == "modified":
        return bool(change.mode & 0o111)
    old_mode = change.old_mode if change.what != "added" and not change.old_kind else 0
    return bool(change.mode & 0o111 & ~old_mode)


def _gives(change: Change, bits: int) -> bool:
    """Tell whether others get one of these rights, which they had not before."""
    if change.kind == "link" or change.what == "removed":
        return False
    old_mode = change.old_mode if change.what != "added" and not change.old_kind else 0
    return bool(change.mode & bits & ~old_mode)


def _dangers_of_link(path: str, target: str) -> list[str]:
    """Return what is wrong with where a link leads, by its own words alone."""
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
