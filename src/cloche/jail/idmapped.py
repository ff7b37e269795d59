"""Id-mapped binds: show what only root may read as if the sandbox's outside id owned it.

The kernel takes the mapping from a user namespace; a child that does nothing but exist lends us one.
"""

from __future__ import annotations

import os

from .identity import write_maps
from .syscalls import (
    CLONE_NEWUSER,
    MOUNT_ATTR_IDMAP,
    clone,
    mount_setattr,
    open_tree,
)  # fmt: skip


def open_idmapped(sources: list[str], outside_id: int) -> dict[str, int]:
    """Return a detached mount of each source in which root's files belong to `outside_id`; needs real root."""
    namespace = _mapping_namespace(outside_id)
    found = {}
    try:
        for source in sources:
            fd = open_tree(source, recursive=True)
            mount_setattr(fd, attr_set=MOUNT_ATTR_IDMAP, userns_fd=namespace, recursive=True)
            found[source] = fd
    finally:
        os.close(namespace)
    return found


def _mapping_namespace(outside_id: int) -> int:
    """Return a user namespace that maps id 0 to `outside_id`."""
    hold, release = os.pipe()
    pid = clone(CLONE_NEWUSER)
    if pid == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    try:
        write_maps(pid, inside_id=0, outside_uid=outside_id, outside_gid=outside_id, privileged=True)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(release)
        os.waitpid(pid, 0)
