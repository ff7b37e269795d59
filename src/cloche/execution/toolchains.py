"""The configured toolchain folders that a sandbox is shown: what is hidden in them, and the PATH inside.

They are checked by the same rules as a host folder that becomes a workspace, each time again, and files with
credentials are covered. Homes, folders above a home, and folders of the system are not shown.

`advise` tells a caller whose program exists on this host but not inside which folders to show.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator, Sequence

from cloche.config.origins import DEFAULT
from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.loops import finish
from cloche.core.record import replace
from cloche.core.result import Result
from cloche.packages.folders import agents_store, is_own

from .open_folder import FolderOptions
from .prepare import Prepared
from .registry import is_shown_anyway, prefixes_for

log = logging.getLogger("cloche.runtime")
LOCAL = "local"
MOST_HIDDEN = 1000  # each hidden path needs a mount
MOST_SHOWN = 100  # characters of a command shown in advice


async def with_toolchains(prepared: Prepared, folder: FolderOptions | None = None) -> Prepared:
    """Return the call with the configured folders shown. Folders inside the workspace are shown already.

    Raises InvalidRequest for a folder that must not be shown, BackendUnavailable if the backend can show none. Folders
    that only the variable CLOCHE_TOOLCHAINS names are searched for toolchains in any case, and shown if allowed.
    """
    folders = prepared.settings.toolchains
    if not folders:
        return prepared
    is_demanded = prepared.settings.origins.get("toolchains", DEFAULT).kind != "environment"
    if prepared.backend.name != LOCAL or prepared.backend.capabilities().level < Level.JAIL or _is_below_jail(prepared):
        if not is_demanded:
            return prepared
        raise BackendUnavailable(
            "toolchains: only backend local at level jail can show folders of this host without their private parts; "
            f"here it is backend {prepared.backend.name!r}.",
            remedy="Leave them out, or use an image that has the programs.",
        )
    workspace = None if folder is None else folder.path
    return await finish(asyncio.to_thread(_with_folders, prepared, folders, workspace, is_demanded=is_demanded))


def _is_below_jail(prepared: Prepared) -> bool:
    return prepared.policy.level is not None and prepared.policy.level < Level.JAIL


def _with_folders(prepared: Prepared, folders: Sequence[str], workspace: str | None, *, is_demanded: bool) -> Prepared:
    inside = os.path.realpath(os.path.expanduser(workspace)) if workspace is not None else ""
    shown: list[str] = []
    hidden: list[str] = []
    for named in folders:
        try:
            path, covered = _look_through(named)
            if inside and _is_below(inside, path):
                raise InvalidRequest(f"toolchains: {escape_name(named)} contains the workspace; name folders below it")
        except InvalidRequest as error:
            if is_demanded:
                raise
            log.info("a folder of CLOCHE_TOOLCHAINS is searched but not shown: %s", error)
            continue
        if not any(_is_below(path, folder) for folder in (*shown, inside) if folder):
            shown = [*(folder for folder in shown if not _is_below(folder, path)), path]
            hidden = [*(hidden_path for hidden_path in hidden if not _is_below(hidden_path, path)), *covered]
    if len(hidden) > MOST_HIDDEN:
        raise InvalidRequest(
            f"toolchains: more than {MOST_HIDDEN} paths of them would be hidden; name folders further down"
        )
    binds = tuple(path for path in shown if not is_shown_anyway(path))
    policy = prepared.policy.with_changes(
        toolchains=binds, toolchains_hidden=tuple(hidden), toolchains_path=tuple(dict.fromkeys(_program_folders(shown)))
    )
    return replace(prepared, policy=policy)


def _look_through(named: str) -> tuple[str, list[str]]:
    """Return a folder's real path, and its hidden paths. Raises InvalidRequest for one that must not be shown."""
    real = os.path.realpath(os.path.expanduser(named))
    if (is_shown_anyway(real) or is_installed_agent(real)) and os.path.isdir(real):
        return real, []
    if not os.path.isabs(os.path.expanduser(named)):
        raise InvalidRequest(f"toolchains: {escape_name(named)} is not an absolute path; write one, or ~/ before it")
    from cloche.workspace.allowed import check_folder
    from cloche.workspace.hidden import find_hidden

    try:
        allowed = check_folder(named)
        try:
            return allowed.path, [
                f"{allowed.path}/{path}" for path in find_hidden(allowed.fd, hides_special=True).paths
            ]
        finally:
            os.close(allowed.fd)
    except InvalidRequest as error:
        raise InvalidRequest(f"toolchains: {str(error).removeprefix('workspace: ')}") from error


def is_installed_agent(path: str) -> bool:
    """Tell whether a real path is the folder of an agent that Cloche installed: it has packages alone."""
    try:
        store = os.path.realpath(agents_store())
    except BackendUnavailable:
        return False
    return os.path.dirname(path) == f"{store}/layers" and is_own(store)


def _program_folders(shown: Sequence[str]) -> Iterator[str]:
    """Yield the PATH inside: folders of this process's PATH that are shown, and the `bin` of each shown folder."""
    for folder in dict.fromkeys(map(os.path.realpath, os.environ.get("PATH", "").split(os.pathsep))):
        if any(_is_below(folder, top) for top in shown):
            yield folder
    for path in shown:
        yield from (folder for folder in (f"{path}/bin", path) if os.path.isdir(folder) and _has_program(folder))


def _has_program(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.is_file() and os.access(entry.path, os.X_OK) for entry in entries)
    except OSError:
        return False


def _is_below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above.rstrip('/')}/")


async def advise(result: Result, prepared: Prepared, argv: Sequence[str]) -> None:
    """Note in a result which folders to show for a program that was not found inside, but is on this host's PATH.

    If the name looks like a shell command line, note that instead.
    """
    if len(argv) == 1 and " " in argv[0]:
        result.meta["advice"] = (
            f"{escape_name(argv[0][:MOST_SHOWN])!r} was taken as the name of one program; pass its words separately, "
            "or as a shell command (sh -c LINE, shell=)"
        )
    if not argv or prepared.backend.name != LOCAL or "host_advice" in result.meta:
        return
    missing = await asyncio.to_thread(_missing, argv[0], prepared.policy.toolchains)
    if missing:
        path, prefixes = missing
        options = " ".join(f"--toolchain {escape_name(prefix)}" for prefix in prefixes)
        listed = ", ".join(f'"{escape_name(prefix)}"' for prefix in prefixes)
        result.meta["host_advice"] = (
            f"{escape_name(argv[0])} is on this host, as {escape_name(path)}, but not shown inside; show it with "
            f"{options} (toolchains=[{listed}])"
        )


def _missing(program: str, shown: Sequence[str]) -> tuple[str, list[str]] | None:
    path = shutil.which(program)
    if path is None or not os.path.isabs(path):
        return None
    prefixes = [prefix for prefix in prefixes_for(path) if not any(_is_below(prefix, top) for top in shown)]
    return (path, prefixes) if prefixes else None
