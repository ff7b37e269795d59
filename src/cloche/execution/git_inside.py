"""Git inside a sandbox that has a host folder: the author of commits, and hidden files that must not look deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from cloche.core.errors import ClocheError
from cloche.core.escape import escape_line
from cloche.core.languages import PROGRAM_FILES
from cloche.core.loops import finish
from cloche.core.processes import ProcessRequest

if TYPE_CHECKING:
    from cloche.core.changes import HostFolder
    from cloche.core.protocols import OpenLiveSandbox
    from cloche.workspace.archive import Packed

    from .open_folder import OpenFolder

WORKSPACE = "/workspace"
PATIENCE_S, MOST_AT_ONCE = 60.0, 500
IGNORED = "/home/sandbox/.config/git/ignore"
CONFIG = "/tmp/.cloche-gitconfig"  # for a copy, in whose /etc we cannot write
# There is no key inside, so with commit.gpgSign or tag.gpgSign set git would fail. `git commit -S` still signs.
UNSIGNED: Mapping[str, str] = {
    "GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "commit.gpgSign", "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "tag.gpgSign", "GIT_CONFIG_VALUE_1": "false",
}  # fmt: skip
MARKS = (
    'cd "$1" && shift && git -c core.fsmonitor=false --literal-pathspecs ls-files -z -- "$@" |'
    " git -c core.fsmonitor=false update-index -z --skip-worktree --stdin"
)


def place_inside(live: object, path: str) -> str:
    """Return the path that programs of a sandbox see. At level confined it lies below a folder of the host."""
    absolute: Callable[[str], str] | None = getattr(live, "absolute", None)
    return path if absolute is None else absolute(path)


def variables_for(folder: HostFolder, live: object = None) -> dict[str, str]:
    """Return the variables for git that every command in the sandbox gets."""
    own = {"GIT_CONFIG_SYSTEM": place_inside(live, CONFIG)} if folder.copied_ns and folder.git_config else {}
    return {**UNSIGNED, **own}


async def prepare_git(live: OpenLiveSandbox, folder: HostFolder) -> list[str]:
    """Write the author of commits into a copy, and mark hidden files in the index; return sentences about failures.

    The program files of runs lie in the workspace meanwhile, so git is configured to ignore them. A file marked with
    skip-worktree is not shown as deleted by `git status` and not removed by `git add`.
    """
    with suppress(ClocheError):  # without such a home, git also lists program files
        await live.write_path(IGNORED, _programs().encode())
    if folder.copied_ns and folder.git_config:
        await live.write_path(CONFIG, folder.git_config.encode("utf-8", "surrogateescape"), mode=0o644)
    by_place: dict[str, list[str]] = {}
    for repository, path in folder.tracked:
        by_place.setdefault(repository, []).append(path[len(repository) + 1 :] if repository else path)
    for repository, paths in by_place.items():
        repository_path = f"{folder.at}/{repository}" if repository else folder.at
        for start in range(0, len(paths), MOST_AT_ONCE):
            if why := await _mark(live, repository_path, paths[start : start + MOST_AT_ONCE]):
                return [f"Git inside shows tracked hidden files as deleted, because they could not be marked: {why}"]
    return []


def _programs() -> str:
    """Return ignore patterns for the file names of running programs."""
    name_parts = (name.rpartition(".") for name in sorted(PROGRAM_FILES))
    return "".join(f"/{stem}.{suffix}\n/{stem}-[0-9]*.{suffix}\n" for stem, _, suffix in name_parts)


async def give_git(live: OpenLiveSandbox, open_folder: OpenFolder, *, is_copy: bool) -> None:
    """Turn the `.git` file of a worktree or submodule into an ordinary git directory.

    A view shows the files that all worktrees share; a copy has nothing yet. Raises InvalidRequest if there is too much.
    """
    shown, git = open_folder.folder.git, open_folder.git
    if shown is None or git is None:
        return
    from cloche.workspace.archive import pack, paths_below
    from cloche.workspace.git_folder import PLACES, own_config

    git_path = f"{WORKSPACE}/.git" if is_copy else shown.at
    max_bytes = shown.disk_bytes
    if is_copy:
        await _unpack(
            live, git_path, lambda: pack(git.fd, paths_below(git.fd, hidden=shown.hidden), max_bytes=max_bytes)
        )
    if git.is_shared:
        await _unpack(live, git_path, lambda: pack(git.own, paths_below(git.own, hidden=PLACES), max_bytes=max_bytes))
    config = await finish(asyncio.to_thread(own_config, git))
    if config is not None:
        await live.write_path(f"{git_path}/config", config, mode=0o644)


async def _unpack(live: OpenLiveSandbox, target: str, packing: Callable[[], Packed]) -> None:
    packed = await finish(asyncio.to_thread(packing))
    with packed.file:
        await live.unpack_path(target, in_threads(packed.pieces()))


async def in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces that are read in threads."""
    while piece := await finish(asyncio.to_thread(next, pieces, b"")):
        yield piece


async def _mark(live: OpenLiveSandbox, repository_path: str, paths: list[str]) -> str:
    """Mark files of one repository; return why that failed, or an empty string."""
    command = ("/bin/sh", "-c", MARKS, "sh", place_inside(live, repository_path), *paths)
    request = ProcessRequest(argv=command, cwd=place_inside(live, "/tmp"), timeout_s=PATIENCE_S, has_input=False)
    try:
        process = await live.start_process(request)
        try:
            result = await process.result()
        finally:
            await process.close()
    except ClocheError as error:
        return escape_line(str(error))
    if result.ok:
        return ""
    lines = result.stderr.strip().splitlines() or [str(result.status)]
    return escape_line(lines[0])[:200]
