"""Compiled modules where the installation has none: it cannot be written to, or PYTHONDONTWRITEBYTECODE is set.

Each command would compile a hundred modules anew. So they are kept in this user's cache, where nobody else may write:
what is there runs as this user does.
"""

from __future__ import annotations

import os
import stat
import sys

MOST_INSTALLATIONS = 8  # whose modules are kept


def keep_bytecode() -> None:
    """Have this process read and write compiled modules in the user's cache, if there is one that is safe."""
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    installation = os.path.dirname(os.path.dirname(__file__)).replace("/", "%")[-200:]
    if not os.path.isabs(above):
        return
    folder = above
    try:
        home = os.stat(above if os.path.exists(above) else os.path.dirname(above))
        if home.st_uid != os.geteuid():  # root may have a user's
            return
        for name in ("", "cloche", "bytecode", installation):
            folder = os.path.join(folder, name) if name else folder
            is_new = _make(folder)
            if not _is_ours(os.stat(folder) if folder == above else os.lstat(folder)):
                return
        if is_new:
            _remove_oldest(os.path.dirname(folder))
    except OSError:  # it cannot be written to either
        return
    sys.pycache_prefix, sys.dont_write_bytecode = folder, False


def _make(folder: str) -> bool:
    """Make a folder where there is none; tell whether it was made."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return False
    return True


def _is_ours(state: os.stat_result) -> bool:
    """Tell whether a folder is this user's, and nobody else may write to it."""
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _remove_oldest(folder: str) -> None:
    """Keep the modules of the installations that were met last."""
    import shutil

    caches = sorted((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in os.scandir(folder))
    for _, path in caches[:-MOST_INSTALLATIONS]:
        shutil.rmtree(path, ignore_errors=True)
