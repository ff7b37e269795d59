"""Messages between the caller and its helper: a tag and a dict of plain values, with descriptors beside them.

Both ends are Cloche's own code in the same version of the same interpreter, and no guest's program ever
holds an end, so `marshal` serves. Whatever may be large (code, files, environment) travels in a sealed memory file.
"""

from __future__ import annotations

import _socket
import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MAX_MESSAGE_BYTES = 128 * 1024
MAX_DESCRIPTORS = 8
_INT_BYTES = 4
ANCILLARY_BYTES = _socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES)


def send(link: _socket.socket, tag: str, body: dict[str, Any] | None = None, fds: Sequence[int] = ()) -> None:
    """Send one message; raises OSError when the other end is gone."""
    data = marshal.dumps((tag, body or {}))
    packed = b"".join(fd.to_bytes(_INT_BYTES, "little") for fd in fds)
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if fds else []
    link.sendmsg([data], ancillary, _socket.MSG_NOSIGNAL)


def receive(link: _socket.socket) -> tuple[str, dict[str, Any], list[int]]:
    """Return one message with its descriptors; the tag is empty when the other end is gone."""
    try:
        data, ancillary, _flags, _address = link.recvmsg(MAX_MESSAGE_BYTES, ANCILLARY_BYTES, _socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        data, ancillary = b"", []
    fds = [
        int.from_bytes(packed[at : at + _INT_BYTES], "little")
        for level, kind, packed in ancillary
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS
        for at in range(0, len(packed) - len(packed) % _INT_BYTES, _INT_BYTES)
    ]
    if not data:
        return "", {}, fds
    tag, body = marshal.loads(data)
    return tag, body, fds


def pack(value: dict[str, Any]) -> int:
    """Return a memory file that holds `value`, positioned at its start."""
    fd = os.memfd_create("cloche", os.MFD_CLOEXEC)
    view = memoryview(marshal.dumps(value))
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def unpack(fd: int) -> dict[str, Any]:
    """Read what `pack` wrote."""
    size = os.fstat(fd).st_size
    data = bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    value: dict[str, Any] = marshal.loads(data)
    return value
