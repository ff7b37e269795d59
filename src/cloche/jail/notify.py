"""Seccomp's questions: calls that the filter hands to the reaper, which looks and lets them go on, or refuses.

File locks live on inodes, and what the jail shows read-only of the host has the host's inodes: a lock on such a file
would tell about, and speak to, the host and other sandboxes. So locking calls ask first, and go on only for files in
the guest's own places. The look comes before the call: a guest with two threads can swap the descriptor in between,
so this stops programs and leaves a narrow channel to a determined pair (said in the limitations).

Where the network namespace may be used again (see `nursery`), making a socket of the network asks as well: it is
always allowed, and remembered.
"""

from __future__ import annotations

import posix

from .syscalls import MACHINE, NUMBERS, address_of, call, fresh, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SET_MODE_FILTER, NEW_LISTENER = 1, 1 << 3
NOTIF_RECV, NOTIF_SEND = 0xC0502100, 0xC0182101
NOTIF_BYTES = 80
FLAG_CONTINUE = 1
EBUSY, ENOLCK = 16, 37


def install(program: bytes) -> int:
    """Install the filter for this process and return the descriptor on which it asks.

    -1 where somebody outside listens already (some containers): the kernel knows one listener only. What would be
    asked is then refused with ENOSYS.
    """
    header = (len(program) // 8).to_bytes(8, "little") + address_of(program)
    try:
        return call("seccomp", SET_MODE_FILTER, NEW_LISTENER, header)
    except OSError as error:
        if error.errno != EBUSY:
            raise
    call("seccomp", SET_MODE_FILTER, 0, header)
    return -1


def answer(listener: int, own_places: Sequence[str]) -> bool:
    """Take one question and answer it; a process that ended meanwhile needs none. Tell whether it was for a socket."""
    question = fresh(NOTIF_BYTES)
    try:
        _ioctl(listener, NOTIF_RECV, question)
        pid, fd = word(question, 8), word(question, 32)
        is_socket = word(question, 16) == NUMBERS[MACHINE]["socket"]
        may_go_on = is_socket or _is_own(pid, fd, own_places)
        error, flags = (0, FLAG_CONTINUE) if may_go_on else (-ENOLCK, 0)
        reply = question[:8] + bytes(8) + error.to_bytes(4, "little", signed=True) + flags.to_bytes(4, "little")
        _ioctl(listener, NOTIF_SEND, reply)
    except OSError:
        return True  # we do not know what it was for
    return is_socket


def _ioctl(listener: int, request: int, data: bytes) -> None:
    """Make the call again when a signal (a child that ended, say) came in between."""
    while True:
        try:
            call("ioctl", listener, request, data)
        except InterruptedError:
            continue
        return


def _is_own(pid: int, fd: int, own_places: Sequence[str]) -> bool:
    """Tell whether descriptor `fd` of process `pid` is a file in one of the guest's own places."""
    try:
        path = posix.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return False
    return any(path.startswith(f"{place}/") for place in own_places)
