"""Caches compiled modules if the installation has none: it is not writable, or PYTHONDONTWRITEBYTECODE is set.

Without them each command would compile a hundred modules. The cache is in this user's cache folder, and only this user
may write to it, because its contents run with this user's rights.
"""

from __future__ import annotations

import os
import stat
import sys

MOST_INSTALLATIONS = 8  # the cache keeps their modules


def keep_bytecode() -> None:
    """Make this process read and write compiled modules in the user's cache folder, if that folder is safe."""
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    installation = os.path.dirname(os.path.dirname(__file__)).replace("/", "%")[-200:]
    if not os.path.isabs(above):
        return
    folder = above
    try:
        home = os.stat(above if os.path.exists(above) else os.path.dirname(above))
        if home.st_uid != os.geteuid():  # with sudo, HOME may be another user's
            return
        for name in ("", "cloche", "bytecode", installation):
            folder = os.path.join(folder, name) if name else folder
            is_new = _make(folder)
            if not _is_ours(os.stat(folder) if folder == above else os.lstat(folder)):
                return
        if is_new:
            _remove_oldest(os.path.dirname(folder))
    except OSError:  # the cache is not writable either
        return
    sys.pycache_prefix, sys.dont_write_bytecode = folder, False


def _make(folder: str) -> bool:
    """Make a folder, and return whether it is new."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return False
    return True


def _is_ours(state: os.stat_result) -> bool:
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _remove_oldest(folder: str) -> None:
    """Keep the modules of the most recently used installations."""
    import shutil

    caches = sorted((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in os.scandir(folder))
    for _, path in caches[:-MOST_INSTALLATIONS]:
        shutil.rmtree(path, ignore_errors=True)
