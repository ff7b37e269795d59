"""Messages between the caller, its helper and the helper's children: a tag, plain values, and descriptors.

All ends are Cloche's own code in the same version of the same interpreter, and no guest's program ever holds an
end, so `marshal` serves. Whatever may be large (code, files, environment) travels in a memory file.
"""

from __future__ import annotations

import marshal
import posix

from .syscalls import recvmsg, sendmsg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MAX_MESSAGE_BYTES = 64 * 1024
MAX_DESCRIPTORS = 72  # one workspace for each of many forks
SEEK_SET = 0


def send(link: int, tag: str, body: dict[str, Any] | None = None, fds: Sequence[int] = ()) -> None:
    """Send one message; raises OSError when the other end is gone."""
    sendmsg(link, marshal.dumps((tag, body or {})), fds)


def receive(link: int) -> tuple[str, dict[str, Any], list[int]]:
    """Return one message with its descriptors; the tag is empty when the other end is gone."""
    try:
        data, fds = recvmsg(link, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return "", {}, []
    if not data:
        return "", {}, fds
    tag, body = marshal.loads(data)
    return tag, body, fds


def pack(value: dict[str, Any]) -> int:
    """Return a memory file that holds `value`, positioned at its start."""
    fd = posix.memfd_create("cloche", posix.MFD_CLOEXEC)
    view = memoryview(marshal.dumps(value))
    while view:
        view = view[posix.write(fd, view) :]
    posix.lseek(fd, 0, SEEK_SET)
    return fd


def unpack(fd: int) -> dict[str, Any]:
    """Read what `pack` wrote."""
    size = posix.fstat(fd).st_size
    data = bytearray()
    while len(data) < size:
        data += posix.pread(fd, size - len(data), len(data))
    value: dict[str, Any] = marshal.loads(data)
    return value
