"""Messages between the caller, its helper and the helper's children: a tag, plain values, and descriptors.

All ends are Cloche's own code in the same version of the same interpreter, and no guest's program ever holds an
end, so `marshal` serves. What is large (files, mostly) travels in a memory file.
"""

from __future__ import annotations

import marshal
import posix

from .syscalls import ppoll, recvmsg, sendmsg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

INLINE_BYTES = 8 * 1024  # a message with more comes as a memory file
MAX_DESCRIPTORS = 136  # two mounts of a workspace for each of many forks
SEEK_SET, ETOOMANYREFS = 0, 109
GARBAGE_PAUSES, GARBAGE_PAUSE_S = 100, 0.002  # the kernel collects what was on its way when it finds the time
_IN_FILE = marshal.dumps(None)


def send(link: int, tag: str, body: dict[str, Any] | None = None, fds: Sequence[int] = ()) -> None:
    """Send one message; raises OSError when the other end is gone."""
    send_by(lambda data, all_fds: sendmsg(link, data, all_fds), tag, body or {}, fds)


def send_patiently(link: int, tag: str, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Do the same in a process of ours that may wait: again after a pause where too many descriptors are on their way.

    The kernel counts them for each user, and guests leave some that are garbage.
    """
    for _ in range(GARBAGE_PAUSES):
        try:
            send(link, tag, body, fds)
        except OSError as error:
            if error.errno != ETOOMANYREFS:
                raise
            ppoll((), GARBAGE_PAUSE_S)
        else:
            return
    send(link, tag, body, fds)


def send_by(
    pass_on: Callable[[bytes, Sequence[int]], None], tag: str, body: dict[str, Any], fds: Sequence[int] = ()
) -> None:
    """Send one message by what passes on one of bytes and descriptors."""
    data = marshal.dumps((tag, body))
    if len(data) <= INLINE_BYTES:
        pass_on(data, fds)
        return
    file = _write_file(data)
    try:
        pass_on(_IN_FILE, (file, *fds))
    finally:
        posix.close(file)


def receive(link: int) -> tuple[str, dict[str, Any], list[int]]:
    """Return one message with its descriptors; the tag is empty when the other end is gone."""
    try:
        data, fds = recvmsg(link, INLINE_BYTES, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return "", {}, []
    return read(data, fds)


def read(data: bytes, fds: list[int]) -> tuple[str, dict[str, Any], list[int]]:
    """Read a message that came with these descriptors; the tag is empty for none."""
    if not data:
        return "", {}, fds
    if data == _IN_FILE:
        file = fds.pop(0)
        data = _read_file(file)
        posix.close(file)
    tag, body = marshal.loads(data)
    return tag, body, fds


def pack(value: dict[str, Any]) -> int:
    """Return a memory file that holds `value`, positioned at its start."""
    return _write_file(marshal.dumps(value))


def unpack(fd: int) -> dict[str, Any]:
    """Read what `pack` wrote."""
    value: dict[str, Any] = marshal.loads(_read_file(fd))
    return value


def pack_part(value: dict[str, Any]) -> bytes:
    """Return `value` as bytes, to travel in a message or a file of which not everybody reads all."""
    return marshal.dumps(value)


def unpack_part(data: bytes) -> dict[str, Any]:
    """Read what `pack_part` made."""
    value: dict[str, Any] = marshal.loads(data)
    return value


def _write_file(data: bytes) -> int:
    fd = posix.memfd_create("cloche", posix.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]
    posix.lseek(fd, 0, SEEK_SET)
    return fd


def _read_file(fd: int) -> bytes:
    size = posix.fstat(fd).st_size
    data = bytearray()
    while len(data) < size:
        data += posix.pread(fd, size - len(data), len(data))
    return bytes(data)
