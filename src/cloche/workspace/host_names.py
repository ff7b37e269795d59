"""Find the other names by which the host reaches a path in the folder, and the danger rows that apply through them.

Theory of operation: a link whose own name matches a row applies that row to its target: to the file alone if the row is
for a file name, otherwise to everything below too. A row of several names, of which the link's path matches only the
first, applies when the remaining names follow. The rows of a folder are passed on through the links in it. So each link
and row is visited once, and a path is judged by the folders above it. A path that git's settings or agents' files name
counts as the target of a link from that file.
"""

from __future__ import annotations

import os
import pwd
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from ..core.changes import Change
from ..core.record import dataclass
from .danger_table import AGENT, GIT, INTO_GIT, LEAVES, TABLE, TO_HIDDEN, DangerRow
from .dangers import matches, rows_near, sequence
from .host_links import ANYWHERE, Resolver, ancestors, find_links, fold
from .host_settings import NamedPaths, find_named

MOST_LINKS_OF_HOME, MOST_FOLDERS_OF_HOME = 2_000, 300
MOST_NEW = 100_000  # new links of a sandbox
MOST_STEPS = 5_000_000  # links visited while passing rows on
_GIT = next(row for row in TABLE if row.form == "folder" and row.pattern == ".git" and row.reason == GIT)
_AGENT = next(row for row in TABLE if row.form == "name" and row.pattern == "claude.md" and row.reason == AGENT)


@dataclass(frozen=True, slots=True)
class _Tag:
    """A row that applies to a path: to the path `alone`, to everything below too, or once its remaining names
    follow.
    """

    row: DangerRow
    alone: bool = False
    begun: int = 0  # number of the row's names that a link's path matches


class HostNames:
    """The rows that apply to a path through its other names, each with the name that it comes from."""

    def __init__(self, resolver: Resolver, *, is_complete: bool = True):
        self.resolver = resolver
        self.is_complete = is_complete
        self._tags: dict[str, dict[_Tag, str]] = {}
        self._tagged: list[str] = []
        self._sources: list[
            tuple[str, tuple[str, ...]]
        ] = []  # folded paths of links in the folder, and their destinations
        self._to_pass_on: list[tuple[str, _Tag, str]] = []

    def add_link(self, path: str, targets: Iterable[str], *, is_inside: bool = True) -> None:
        """Add a link and its destinations; `is_inside` says that the link lies in the folder."""
        ends = tuple({fold(target) for target in targets} - {fold(path)})
        if is_inside and ends:
            self._sources.append((fold(path), ends))
        for tag in _tags_of_link(path):
            for end in ends:
                self._give(end, tag, path)

    def add_named(self, path: str, row: DangerRow, by: str, *, alone: bool) -> None:
        """Apply a row to a path, or a folder, that the file `by` names."""
        self._give(fold(path), _Tag(row, alone=alone), by)

    def settle(self, check: Callable[[], None]) -> None:
        """Pass the rows of folders on through the links in them."""
        self._sources.sort()
        keys = [path for path, _ in self._sources]
        steps = MOST_STEPS
        while self._to_pass_on:
            tagged_path, tag, by = self._to_pass_on.pop()
            check()
            for index in _range_below(keys, tagged_path):
                path, ends = self._sources[index]
                steps -= 1
                passed = _passed_on(tag, path[len(tagged_path) + 1 if tagged_path else 0 :].split("/"))
                if passed is not None:
                    for end in ends:
                        self._give(end, passed, by)
            if steps < 0:
                self.is_complete = False
                break
        self._tagged = sorted(self._tags)

    def _give(self, path: str, tag: _Tag, by: str) -> None:
        if any(
            tag in self._tags.get(tagged_path, ()) for tagged_path in (ancestors(path) if _is_open(tag) else (path,))
        ):
            return
        self._tags.setdefault(path, {})[tag] = by
        if not tag.alone:
            self._to_pass_on.append((path, tag, by))

    def rows_for(self, path: str) -> dict[DangerRow, str]:
        """Return the rows that apply to a path through another name, with that name or the file that names it."""
        names_by_row: dict[DangerRow, str] = {}
        if not self._tags:
            return names_by_row
        key = fold(path)
        for above in ancestors(key):
            for tag, by in self._tags.get(above, {}).items():
                names = key[len(above) + 1 if above else 0 :].split("/") if above != key else []
                if _holds(tag, names):
                    names_by_row.setdefault(tag.row, by)
        return names_by_row

    def rows_for_link(self, path: str) -> dict[DangerRow, str]:
        """Return the rows that may apply to the target of a new link at this path."""
        names_by_row: dict[DangerRow, str] = {}
        if not self._tags:
            return names_by_row
        key = fold(path)
        for index in _range_below(self._tagged, key):
            names_by_row |= {tag.row: by for tag, by in self._tags[self._tagged[index]].items()}
        for above in ancestors(key):
            names = key[len(above) + 1 if above else 0 :].split("/") if above != key else []
            for tag, by in self._tags.get(above, {}).items():
                if tag.begun and sequence(tag.row)[0][tag.begun :][: len(names)] == names:
                    names_by_row.setdefault(tag.row, by)
        return names_by_row


def _range_below(keys: Sequence[str], path: str) -> range:
    """Return the index range of the sorted keys that lie below a path."""
    after = chr(ord("/") + 1)
    return range(bisect_left(keys, f"{path}/"), bisect_left(keys, path + after)) if path else range(len(keys))


def _is_open(tag: _Tag) -> bool:
    return not tag.alone and not tag.begun


def _tags_of_link(path: str) -> Iterator[_Tag]:
    """Yield the tags that a link's own path applies to its target."""
    names = path.casefold().split("/")
    for row in rows_near(path):
        if row.form == "path":
            row_names, is_open = sequence(row)
            for count in range(1, len(row_names)):
                if names[-count:] == row_names[:count]:
                    yield _Tag(row, begun=count)
            if matches(row, path):
                yield _Tag(row, alone=not is_open)
        elif matches(row, path):
            yield _Tag(row, alone=row.form in ("name", "glob"))


def _passed_on(tag: _Tag, names: list[str]) -> _Tag | None:
    """Return the tag that a link passes on to its target; `names` are the link's path in the tagged folder."""
    if not tag.begun:
        return tag
    row_names, is_open = sequence(tag.row)
    remaining = row_names[tag.begun :]
    if names[: len(remaining)] == remaining:
        return _Tag(tag.row) if is_open else _Tag(tag.row, alone=True) if names == remaining else None
    return _Tag(tag.row, begun=tag.begun + len(names)) if remaining[: len(names)] == names else None


def _holds(tag: _Tag, names: list[str]) -> bool:
    """Tell whether a folder's tag applies to the path `names` below it."""
    if tag.alone:
        return not names
    if not tag.begun:
        return True
    row_names, is_open = sequence(tag.row)
    remaining = row_names[tag.begun :]
    return names[: len(remaining)] == remaining if is_open else names == remaining


def find_names(folder: int, changes: Iterable[Change], check: Callable[[], None]) -> HostNames:
    """Collect the host's links: those in an open folder, and those at the top of its owner's and this user's homes."""
    root = os.readlink(f"/proc/self/fd/{folder}")
    host_links = find_links(folder, check)
    found_new = (
        (change.path, change.target) for change in changes if change.kind == "link" and change.what != "removed"
    )
    new = list(islice(found_new, MOST_NEW + 1))
    resolver = Resolver(root, host_links.links, new)
    names = HostNames(resolver, is_complete=host_links.is_complete and len(new) <= MOST_NEW)
    for links, is_trusted in ((host_links.links, True), (new, False)):
        for path, target in links:
            check()
            destinations = resolver.follow(_above(path), target, is_trusted=is_trusted)
            names.is_complete = names.is_complete and destinations is not ANYWHERE
            names.add_link(path, destinations.paths)
    homes = _homes(folder)
    for home in homes:
        for path, target in _links_of_home(home):
            check()
            destinations = resolver.follow("", os.path.join(home, _above(path), target), is_trusted=True)
            names.add_link(path, destinations.paths, is_inside=False)
    _add_named(names, find_named(root, host_links, homes, resolver, check))
    names.settle(check)
    return names


def _add_named(names: HostNames, named: NamedPaths) -> None:
    names.is_complete = names.is_complete and named.is_complete
    for path, by in named.by_git.items():
        names.add_named(path, _GIT, by, alone=True)
    for path, by in named.folders_of_git.items():
        names.add_named(path, _GIT, by, alone=False)
    for path, by in named.by_agents.items():
        names.add_named(path, _AGENT, by, alone=True)


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _homes(folder: int) -> tuple[str, ...]:
    candidates = {os.path.expanduser("~")}
    for uid in {os.fstat(folder).st_uid, os.geteuid()}:
        try:
            candidates.add(pwd.getpwuid(uid).pw_dir)
        except KeyError:
            continue
    return tuple(sorted(home for home in candidates if os.path.isabs(home) and home != "/"))


def _links_of_home(home: str) -> list[tuple[str, str]]:
    """Return the links at the top of a home and in its hidden folders, where dotfiles may link to settings
    elsewhere.
    """
    home_links: list[tuple[str, str]] = []
    folders = [""]
    for above in folders:
        if len(folders) > MOST_FOLDERS_OF_HOME or len(home_links) > MOST_LINKS_OF_HOME:
            break
        try:
            with os.scandir(os.path.join(home, above)) as entries:
                for entry in entries:
                    path = f"{above}/{entry.name}" if above else entry.name
                    if entry.is_symlink():
                        home_links.append((path, os.readlink(entry.path)))
                    elif _may_hold_settings(above, entry.name) and entry.is_dir(follow_symlinks=False):
                        folders.append(path)
        except OSError:
            continue
    return home_links


def _may_hold_settings(above: str, name: str) -> bool:
    return above == ".config" or (not above and name.startswith(".") and name != ".cache")


def reasons_of_link(change: Change, names: HostNames, hidden: Sequence[str]) -> set[str]:
    """Return the dangers of a new link's destinations. `hidden` are sorted, folded paths."""
    destinations = names.resolver.follow(_above(change.path), change.target, is_trusted=False)
    reasons = {LEAVES} if destinations.leaves else set()
    for path in map(fold, destinations.paths):
        if ".git" in path.split("/"):
            reasons.add(INTO_GIT)
        if any(_has(hidden, above) for above in ancestors(path)[:-1]) or _has_below(hidden, path):
            reasons.add(TO_HIDDEN)
    return reasons


def _has(paths: Sequence[str], path: str) -> bool:
    index = bisect_left(paths, path)
    return index < len(paths) and paths[index] == path


def _has_below(hidden: Sequence[str], path: str) -> bool:
    return bool(_range_below(hidden, path))
