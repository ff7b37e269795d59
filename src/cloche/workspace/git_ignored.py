"""Which paths the host's git ignores, by the host's own files: `.gitignore` and `.git/info/exclude`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from cloche.core.errors import BackendUnavailable, InvalidRequest, WorkspaceFailed

from .git import Check, discovered, nothing, opened


def ignored_roots(folder: int, paths: Mapping[bytes, bool], check: Check = nothing) -> frozenset[bytes]:
    """Return the topmost ignored paths at or above some paths below an open folder; the values tell which are folders.

    A path that git tracks is not ignored. Without a repository, or without git, none is.
    """
    if not paths:
        return frozenset()
    above = {name for path in paths for name in list(_above(path))[1:]}
    names = [*(path + b"/" * is_folder for path, is_folder in paths.items()), *(name + b"/" for name in above)]
    facts = os.fstat(folder)
    try:
        with opened(folder, (facts.st_uid, facts.st_gid), discovered(folder), check) as git:
            _, out, _ = git.call("check-ignore", "-z", "--stdin", data=b"\0".join(names) + b"\0")
    except (InvalidRequest, BackendUnavailable, WorkspaceFailed):
        return frozenset()
    found = {name.rstrip(b"/") for name in out.split(b"\0") if name}
    return frozenset(path for path in found if found.isdisjoint(list(_above(path))[1:]))


def _above(path: bytes) -> Iterator[bytes]:
    while path:
        yield path
        path = path.rpartition(b"/")[0]
