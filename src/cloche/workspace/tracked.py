"""Find which paths git tracks, in a folder whose own git configuration is not trusted.

Only the index is read. Settings that could start a program or fetch something are overridden, the repository is given
by GIT_DIR instead of being searched for, and the time is bounded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from cloche import hostfs

MOST_TIME_S, MOST_AT_ONCE, MOST_REPOSITORIES = 5.0, 500, 50
_SWITCHES = (
    "--no-pager", "--literal-pathspecs", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
    "-c", "protocol.allow=never", "-c", "core.alternateRefsCommand=",
)  # fmt: skip
_VARIABLES: Mapping[str, str] = {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_OPTIONAL_LOCKS": "0", "GIT_DIR": ".git",
    "GIT_WORK_TREE": ".", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "", "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1", "HOME": "/nonexistent", "LC_ALL": "C",
}  # fmt: skip


def find_tracked(folder: int, paths: Sequence[str], repositories: Sequence[str]) -> tuple[str, ...] | None:
    """Return the paths that git tracks, or below which it tracks files; None if git fails.

    `repositories` are the folders with a `.git`, "" for the open one; each path belongs to the nearest.
    """
    by_place: dict[str, list[str]] = {}
    for path in paths:
        repository = nearest(path, repositories)
        if repository is not None:
            by_place.setdefault(repository, []).append(path)
    git = shutil.which("git") if by_place else None
    if by_place and (git is None or len(by_place) > MOST_REPOSITORIES):
        return None
    deadline, tracked = time.monotonic() + MOST_TIME_S, list[str]()
    for repository, inside in by_place.items():
        listed = _tracked_in(git or "", folder, repository, inside, deadline)
        if listed is None:
            return None
        tracked += listed
    return tuple(sorted(tracked))


def nearest(path: str, repositories: Sequence[str]) -> str | None:
    """Return the innermost repository around a path."""
    around = [repository for repository in repositories if not repository or path.startswith(f"{repository}/")]
    return max(around, key=len, default=None)


def _tracked_in(git: str, folder: int, repository: str, paths: Sequence[str], deadline: float) -> list[str] | None:
    relative = {path[len(repository) + 1 :] if repository else path: path for path in paths}
    names = list(relative)
    hits: set[str] = set()
    try:
        with hostfs.descended(folder, repository.split("/") if repository else ()) as repository_fd:
            for start in range(0, len(names), MOST_AT_ONCE):
                batch = names[start : start + MOST_AT_ONCE]
                hits.update(_hit(batch, _list_files(git, repository_fd, batch, deadline)))
    except (OSError, subprocess.SubprocessError):
        return None
    return [relative[name] for name in hits]


def _list_files(git: str, repository_fd: int, names: Sequence[str], deadline: float) -> list[str]:
    """Return the tracked files at or below these names. Raises OSError and SubprocessError."""
    completed = subprocess.run(
        [git, *_SWITCHES, "ls-files", "-z", "--", *names],
        cwd=f"/proc/{os.getpid()}/fd/{repository_fd}",
        env={**_VARIABLES, "PATH": os.environ.get("PATH", os.defpath)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=max(0.0, deadline - time.monotonic()),
        check=True,
    )
    return os.fsdecode(completed.stdout).split("\0")[:-1]


def _hit(names: Sequence[str], listed: Sequence[str]) -> Iterator[str]:
    """Yield the names that are listed themselves, or have a listed path below them."""
    requested = set(names)
    for path in listed:
        above = path
        while above:
            if above in requested:
                yield above
                break
            above = above.rpartition("/")[0]
