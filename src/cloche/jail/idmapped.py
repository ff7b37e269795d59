"""Id-mapped binds: show what only root may read as if the sandbox's outside id owned it.

The kernel takes the mapping from a user namespace; a child that does nothing but exist lends us one.
"""

from __future__ import annotations

import posix

from .identity import write_maps
from .syscalls import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    AT_RECURSIVE,
    CLONE_NEWUSER,
    MOUNT_ATTR_IDMAP,
    OPEN_TREE_CLOEXEC,
    OPEN_TREE_CLONE,
    call,
    clone,
)  # fmt: skip

MOUNT_ATTR_BYTES = 32


def open_idmapped(sources: list[str], outside_id: int) -> dict[str, int]:
    """Return a detached mount of each source in which root's files belong to `outside_id`; needs real root."""
    namespace = mapping_namespace(0, outside_id)
    found = {}
    try:
        for source in sources:
            flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
            fd = call("open_tree", AT_FDCWD, source.encode("utf-8", "surrogateescape"), flags)
            map_ids(fd, namespace, is_recursive=True)
            found[source] = fd
    finally:
        posix.close(namespace)
    return found


def map_ids(mount: int, namespace: int, *, is_recursive: bool) -> None:
    """Have a detached mount show ids as a user namespace maps them."""
    attr = b"".join(n.to_bytes(8, "little") for n in (MOUNT_ATTR_IDMAP, 0, 0, namespace))
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if is_recursive else 0)
    call("mount_setattr", mount, b"", flags, attr, MOUNT_ATTR_BYTES)


def mapping_namespace(inside_id: int, outside_id: int) -> int:
    """Return a user namespace that maps `inside_id` to `outside_id`."""
    hold, release = posix.pipe()
    pid = clone(CLONE_NEWUSER)
    if pid == 0:
        posix.close(release)
        posix.read(hold, 1)
        posix._exit(0)
    posix.close(hold)
    try:
        write_maps(pid, inside_id=inside_id, outside_uid=outside_id, outside_gid=outside_id, privileged=True)
        return posix.open(f"/proc/{pid}/ns/user", posix.O_RDONLY | posix.O_CLOEXEC)
    finally:
        posix.close(release)
        posix.waitpid(pid, 0)
