"""Seccomp's questions: calls that the filter hands to the reaper, which looks and lets them go on, or refuses.

File locks live on inodes, and what the jail shows read-only of the host has the host's inodes: a lock on such a file
would tell about, and speak to, the host and other sandboxes. So locking calls ask first, and go on only for files in
the guest's own places. The look comes before the call: a guest with two threads can swap the descriptor in between,
so this stops programs and leaves a narrow channel to a determined pair (said in the limitations).

Where the namespaces of network and IPC may be used again (see `nursery`), making a socket of the network asks as well,
and so does what makes or opens an IPC object that lasts: they are always allowed, and remembered. A live session asks
before it clones itself into new namespaces, and may only while that is being waited for. What is compared are
registers, which cannot change between the look and the call.
"""

from __future__ import annotations

import posix

from .syscalls import FORK_FLAGS, LASTING, MACHINE, NUMBERS, address_of, call, fresh, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SET_MODE_FILTER, NEW_LISTENER = 1, 1 << 3
NOTIF_RECV, NOTIF_SEND = 0xC0502100, 0xC0182101
NOTIF_BYTES = 80
FLAG_CONTINUE = 1
EPERM, EBUSY, ENOLCK = 1, 16, 37
AF_NETLINK = 16
_LASTING = frozenset(NUMBERS[MACHINE][name] for name in LASTING if MACHINE in NUMBERS)


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


def answer(listener: int, own_places: Sequence[str], may_fork: Callable[[int], bool]) -> bool:
    """Take one question and answer it; a process that ended meanwhile needs none.

    Tell whether it was for what may leave a trace in a namespace: a socket, or an IPC object.
    `may_fork` tells whether the process of that number may clone itself, this once.
    """
    question = fresh(NOTIF_BYTES)
    try:
        _ioctl(listener, NOTIF_RECV, question)
        number = word(question, 16)
        refusal = _refusal(number, word(question, 8), word(question, 32), own_places, may_fork)
        flags = 0 if refusal else FLAG_CONTINUE
        reply = question[:8] + bytes(8) + (-refusal).to_bytes(4, "little", signed=True) + flags.to_bytes(4, "little")
        _ioctl(listener, NOTIF_SEND, reply)
    except OSError:
        return True  # we do not know what it was for
    return number == NUMBERS[MACHINE]["socket"] or number in _LASTING


def _refusal(number: int, pid: int, argument: int, own_places: Sequence[str], may_fork: Callable[[int], bool]) -> int:
    """Return the errno to refuse a call with, 0 to let it go on; `argument` is its first."""
    if number == NUMBERS[MACHINE]["socket"]:
        return 0 if argument != AF_NETLINK or _is_powerless(pid) else EPERM
    if number in _LASTING:
        return 0
    if number == NUMBERS[MACHINE]["clone"]:
        return 0 if argument == FORK_FLAGS and may_fork(pid) else EPERM
    return 0 if _is_own(pid, argument, own_places) else ENOLCK


def _is_powerless(pid: int) -> bool:
    """Tell whether a thread has no capabilities: with those that it is born with a clone could arrange its network."""
    try:
        fd = posix.open(f"/proc/{pid}/status", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return False
    try:
        rows = posix.read(fd, 1 << 14).decode("utf-8", "replace").splitlines()
    finally:
        posix.close(fd)
    powers = [int(row.split()[1], 16) for row in rows if row.startswith(("CapPrm:", "CapEff:"))]
    return len(powers) == 2 and not any(powers)


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
