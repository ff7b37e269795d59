"""Folders of the host that stand in for a workspace, and that nobody could remove: caller and helper were killed.

A helper holds a lock on its folder for as long as it lives, which the kernel releases however that ends. So a folder
of ours without a lock is nobody's any more, unless the guest has left a process behind that still is in it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cloche import hostfs
from cloche.jail.workfolder import WorkFolder

from ..noting import noted

log = logging.getLogger("cloche.local")
_NAME = re.compile(r"cloche-[0-9]+-work-[0-9a-f]{12}")


def new_folder() -> str:
    """Return the path of a folder that a helper is to make."""
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"cloche-{os.getpid()}-work-{os.urandom(6).hex()}")


def remove_folders() -> list[str]:
    """Remove what the dead left of this user's in the temporary folder; return the paths."""
    import tempfile

    place = os.path.realpath(tempfile.gettempdir())
    names: list[str] = []
    with noted(log, f"nobody may look into {place}, or it is gone", OSError):
        names = os.listdir(place)
    found = sorted(name for name in names if _NAME.fullmatch(name))
    return [path for name in found if _remove_unused(path := os.path.join(place, name))]


def _remove_unused(path: str) -> bool:
    """Remove a folder that is ours and not in use, following no link; tell whether it was."""
    is_removed = False
    with noted(log, f"{path} stays", OSError):
        held = hostfs.open_folder(path)
        try:
            if os.fstat(held).st_uid == os.geteuid():
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not any(place == path or place.startswith(f"{path}/") for place in _places_in_use()):
                    WorkFolder(path, "", "", None).remove()
                    is_removed = True
        finally:
            os.close(held)
    return is_removed


def _places_in_use() -> Iterator[str]:
    """Yield where others' processes are and what they have open, as far as we may look, and what is mounted."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        yield line.split()[4]
    ours = str(os.getpid())
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and name != ours):
        with noted(log, f"process {pid} is gone, or another user's", OSError):
            yield os.readlink(f"/proc/{pid}/cwd")
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with noted(log, f"descriptor {fd} of {pid} is closed", OSError):
                    yield os.readlink(f"/proc/{pid}/fd/{fd}")
