"""Find the symbolic links in a host folder by one walk, and compute their destinations from their targets.

Theory of operation: the walk uses descriptors, follows no link, takes types from the directory listings, and reads no
file. A path is resolved from the links' targets as the kernel would. Paths below the folder are not looked up: a
missing one counts as existing, since a commit may create it. Where a sandbox's new link has the name of a host file,
both are considered, since not every change need be committed. Names are compared without case and Unicode form, as some
file systems do. All work is bounded; an incomplete result says so.
"""

from __future__ import annotations

import errno
import os
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from cloche import hostfs

from ..core.record import dataclass, field
from .mounts import mount_of

MOST_TIME_S, MOST_LINKS, MOST_DEPTH = 60.0, 200_000, 200
MOST_HOPS, MOST_WAYS = 40, 64  # of one link: MAXSYMLINKS as in the kernel (path_resolution(7)), and walks
MOST_STEPS = 20_000_000  # names on all walks
_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # replaced since it was listed
_NOT_FOR_US = (errno.EACCES, errno.EPERM)
GIT_FOLDER = ".git"
_NOT_WALKED = frozenset({"objects", "refs", "logs", "lfs", "annex"})  # in `.git`: many names, no settings
# Files that import others; agents look for these names case-sensitively.
IMPORTERS = frozenset({
    "CLAUDE.md", "CLAUDE.local.md", "AGENTS.md", "AGENTS.override.md", "AGENT.md", "GEMINI.md", "QWEN.md",
})  # fmt: skip
_SETTINGS = frozenset({"config", "config.worktree"})
_NOTED = IMPORTERS | _SETTINGS | {"HEAD", GIT_FOLDER}


@dataclass(slots=True)
class HostLinks:
    """The result of a walk: links with their targets, and the paths of files that name other files."""

    links: list[tuple[str, str]] = field(default_factory=list)
    git_files: list[str] = field(default_factory=list)  # `.git` files
    settings: list[str] = field(default_factory=list)  # git configuration files
    importers: list[str] = field(default_factory=list)
    is_complete: bool = True


def find_links(folder: int, check: Callable[[], None], most_s: float = MOST_TIME_S) -> HostLinks:
    """Walk an open folder. Mounts and unreadable folders are skipped."""
    links = HostLinks()
    mount, until = mount_of(folder), time.monotonic() + most_s
    open_: list[tuple[int, str, list[str]]] = []
    try:
        _enter(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder), "", open_, links)
        while open_:
            fd, prefix, names = open_[-1]
            if not names:
                os.close(open_.pop()[0])
                continue
            name = names.pop()
            check()
            if len(open_) > MOST_DEPTH or time.monotonic() > until:
                links.is_complete = False
            if not links.is_complete:
                break
            try:
                below = hostfs.open_folder(name, fd)
            except OSError as error:
                links.is_complete = error.errno in (*_REPLACED, *_NOT_FOR_US)
                continue
            if mount_of(below) != mount:
                os.close(below)
                continue
            _enter(below, f"{prefix}{name}/", open_, links)
    finally:
        for fd, _, _ in open_:
            os.close(fd)
    return links


def _enter(fd: int, prefix: str, open_: list[tuple[int, str, list[str]]], links: HostLinks) -> None:
    """Note the entries of a folder, and push it with its subfolders onto `open_`, which owns the descriptor from then
    on.
    """
    folders: list[str] = []
    open_.append((fd, prefix, folders))
    noted: list[str] = []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_symlink():
                    if len(links.links) >= MOST_LINKS:
                        links.is_complete = False
                        break
                    links.links.append((prefix + entry.name, os.readlink(entry.name, dir_fd=fd)))
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                    continue
                if entry.name in _NOTED:
                    noted.append(entry.name)
    except OSError as error:
        links.is_complete = links.is_complete and error.errno in (*_REPLACED, *_NOT_FOR_US, errno.EINVAL)
    is_git = f"/{GIT_FOLDER}/" in f"/{prefix}"
    if is_git:
        folders[:] = [name for name in folders if name not in _NOT_WALKED]
    for name in noted:
        if name == GIT_FOLDER:
            links.git_files.append(prefix + name)
        elif name in IMPORTERS:
            links.importers.append(prefix + name)
        elif name in _SETTINGS and (is_git or "HEAD" in noted):
            links.settings.append(prefix + name)


def fold(path: str) -> str:
    """Return a key that is equal for paths that some file systems treat as the same."""
    return path.casefold() if path.isascii() else _composed(_composed(path).casefold())


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """The paths below the folder that a path may resolve to ("" is the folder, and stands for all of it if unknown).

    `leaves` says that it resolves, or may resolve, to a path outside of the folder.
    """

    paths: frozenset[str] = frozenset()
    leaves: bool = False


@dataclass(slots=True)
class _PartialWalk:
    """A partly resolved path: the names `reached`, the names `remaining`, and the number of links followed (`hops`)."""

    reached: list[str]
    remaining: list[str]
    hops: int


ANYWHERE = Destinations(paths=frozenset({""}), leaves=True)


class Resolver:
    """Resolve links by their targets. `root` is the folder's own path: absolute targets below it lead back into the
    folder.

    `links` are the host's, `new` the sandbox's.
    """

    def __init__(self, root: str, links: Iterable[tuple[str, str]], new: Iterable[tuple[str, str]] = ()):
        self.root = root
        self._targets: dict[str, list[str]] = {}
        self._new: set[str] = set()
        for path, target in links:
            self._targets.setdefault(fold(path), []).append(target)
        for path, target in new:
            self._targets.setdefault(fold(path), []).append(target)
            self._new.add(fold(path))
        self._real_paths: dict[str, str] = {}
        self._steps = MOST_STEPS

    def follow(self, above: str, target: str, *, is_trusted: bool) -> Destinations:
        """Return the destinations of a link target, relative to the folder `above`.

        A target outside of the folder is resolved on the host if `is_trusted` (not the guest's), as it may lead back.
        """
        paths: set[str] = set()
        pending: list[_PartialWalk] = []
        self._add_target(
            pending, _PartialWalk([name for name in above.split("/") if name], [], 0), target, [], is_trusted
        )
        leaves, walked = not pending, 0
        while pending:
            walk = pending.pop()
            if walk.hops > MOST_HOPS:
                continue
            before = len(pending)
            if self._walk(walk, pending, is_trusted=is_trusted):
                paths.add("/".join(walk.reached))
            else:
                leaves = leaves or len(pending) == before
            walked += 1
            self._steps -= 1 + len(walk.remaining)
            if walked > MOST_WAYS or self._steps < 0:
                return ANYWHERE
        return Destinations(paths=frozenset(paths), leaves=leaves)

    def _walk(self, walk: _PartialWalk, pending: list[_PartialWalk], *, is_trusted: bool) -> bool:
        """Resolve names until the end and return True; at a link, or above the root, push the continuations and return
        False.
        """
        names, remaining = walk.reached, walk.remaining
        key = fold("/".join(names))
        for index, name in enumerate(remaining, 1):
            if name in ("", "."):
                continue
            if name == "..":
                if not names:
                    outside = "/".join((os.path.dirname(self.root), *remaining[index:]))
                    pending += self._from_outside(outside, walk.hops, is_trusted=is_trusted)
                    return False
                names.pop()
                key = key.rpartition("/")[0]
                continue
            names.append(name)
            key = f"{key}/{fold(name)}" if key else fold(name)
            targets = self._targets.get(key)
            if targets is None:
                continue
            if key in self._new:  # the link may not be committed, so the name may also be a plain one
                pending.append(_PartialWalk(list(names), remaining[index:], walk.hops))
            for target in targets[: MOST_WAYS + 1]:  # more targets end as ANYWHERE
                self._add_target(
                    pending, _PartialWalk(names[:-1], [], walk.hops), target, remaining[index:], is_trusted
                )
            return False
        return True

    def _add_target(
        self, pending: list[_PartialWalk], walk: _PartialWalk, target: str, after: list[str], is_trusted: bool
    ) -> None:
        if target.startswith("/"):
            pending += self._from_outside("/".join((target, *after)), walk.hops, is_trusted=is_trusted)
        else:
            pending.append(_PartialWalk(walk.reached, [*target.split("/"), *after], walk.hops + 1))

    def _from_outside(self, path: str, hops: int, *, is_trusted: bool) -> list[_PartialWalk]:
        """Return the continuations of a path outside of the folder that leads back into it."""
        normalized = os.path.normpath(path)
        candidates = {normalized}
        if is_trusted and not _is_below(normalized, self.root):
            candidates.add(self._real(path))
        return [
            _PartialWalk([], candidate[len(self.root) :].split("/"), hops + 1)
            for candidate in candidates
            if _is_below(candidate, self.root)
        ]

    def _real(self, path: str) -> str:
        """Return a host path with its links resolved; each parent folder is resolved once."""
        above, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            return os.path.realpath(path)
        if above not in self._real_paths:
            self._real_paths[above] = os.path.realpath(above or "/")
        joined = os.path.join(self._real_paths[above], name)
        return os.path.realpath(joined) if os.path.islink(joined) else joined


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def ancestors(path: str) -> Sequence[str]:
    """Return a path and all folders above it, ending with ""."""
    chain = [path]
    while path:
        path = path.rpartition("/")[0]
        chain.append(path)
    return chain
