"""Seccomp's notifications: calls that the filter hands to the reaper, which lets them continue, or refuses them.

File locks live on inodes, and files of the host that the jail shows read-only have the host's inodes: a lock on such a
file would be seen by the host and by other sandboxes, and show theirs. So locking calls notify first, and continue only
for files in the guest's own mounts. The check comes before the call: a guest with two threads can swap the descriptor
in between, so this stops programs and leaves a narrow channel to a determined pair (see the limitations).

Where the namespaces of network and IPC may be used again (see `prefork`), calls that make a network socket, or make or
open a lasting IPC object, notify as well: they are always allowed, and remembered. A live session notifies before it
clones itself into new namespaces, and may only while the helper waits for that. Decisions compare registers, which
cannot change between the check and the call.

All other notifications are refused, and exist for the count alone: calls that no program makes by chance.
"""

from __future__ import annotations

import posix

from .syscalls import (
    ASK_IF_HEARD,
    CLONE_NEW_ANY,
    EXIT_NOTICE,
    FORK_FLAGS,
    LASTING,
    MACHINE,
    NUMBERS,
    address_of,
    call,
    fresh,
    read_uint,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SET_MODE_FILTER, NEW_LISTENER, WAIT_KILLABLE_RECV = 1, 1 << 3, 1 << 5
NOTIF_RECV, NOTIF_SEND = 0xC0502100, 0xC0182101
NOTIF_BYTES = 80
FLAG_CONTINUE = 1
ALLOW = 0x7FFF0000
EPERM, EBUSY, EINVAL, ENOLCK = 1, 16, 22, 37
AF_NETLINK = 16
_LOCKING = frozenset(NUMBERS[MACHINE][name] for name in ("flock", "fcntl") if MACHINE in NUMBERS)
_NO_ANSWERERS: Mapping[int, Callable[[int, bytes], None]] = {}
_LASTING = frozenset(NUMBERS[MACHINE][name] for name in LASTING if MACHINE in NUMBERS)


def install(program: bytes, *, holds: bool = False) -> tuple[int, bool]:
    """Install the filter for this process; return its notification descriptor, and whether it holds notifying threads.

    -1 if a filter outside has a listener already (some containers): the kernel knows one listener only. Then notifying
    calls fail with ENOSYS, except those that notify only if heard (new processes and threads, for the count), which are
    allowed. With `holds`, a thread whose question was received waits for the answer through all signals but a deadly
    one (WAIT_KILLABLE_RECV); kernels before Linux 5.19 have no such flag.
    """
    header = (len(program) // 8).to_bytes(8, "little") + address_of(program)
    for flags in ([NEW_LISTENER | WAIT_KILLABLE_RECV] if holds else []) + [NEW_LISTENER]:
        try:
            return call("seccomp", SET_MODE_FILTER, flags, header), flags != NEW_LISTENER
        except OSError as error:
            if error.errno != EBUSY and (error.errno != EINVAL or flags == NEW_LISTENER):
                raise
    unheard = without_questions(program)
    call("seccomp", SET_MODE_FILTER, 0, header[:8] + address_of(unheard))
    return -1, False


def without_questions(program: bytes) -> bytes:
    """Return the program that allows the calls that would notify if heard."""
    asking, allowed = (bytes((6, 0, 0, 0)) + answer.to_bytes(4, "little") for answer in (ASK_IF_HEARD, ALLOW))
    lines = (program[offset : offset + 8] for offset in range(0, len(program), 8))
    return b"".join(allowed if line == asking else line for line in lines)


def receive(listener: int) -> bytes:
    """Return the next question. Raises OSError if the notifying thread has ended meanwhile."""
    question = fresh(NOTIF_BYTES)
    ioctl(listener, NOTIF_RECV, question)
    return question


def reply(listener: int, question: bytes, refusal: int = 0) -> None:
    """Let a call continue, or refuse it with an errno. Raises OSError if the notifying thread has ended meanwhile."""
    flags = 0 if refusal else FLAG_CONTINUE
    answer = question[:8] + bytes(8) + (-refusal).to_bytes(4, "little", signed=True) + flags.to_bytes(4, "little")
    ioctl(listener, NOTIF_SEND, answer)


def send_value(listener: int, question: bytes, value: int, refusal: int = 0) -> None:
    """Answer a call, which is not made, with a value or an errno. Raises OSError if the notifying thread has ended."""
    answer = question[:8] + value.to_bytes(8, "little", signed=True)
    answer += (-refusal).to_bytes(4, "little", signed=True) + bytes(4)
    ioctl(listener, NOTIF_SEND, answer)


def is_exit_notice(question: bytes, pid: int) -> bool:
    """Tell whether process `pid` is about to end, and gives notice of it."""
    number, upper = NUMBERS[MACHINE]["exit_group"], read_uint(question, 36)
    return (read_uint(question, 16), read_uint(question, 8), upper) == (number, pid, EXIT_NOTICE)


def exit_code(question: bytes) -> int:
    """Return the exit code of an exit notice, as the kernel keeps it."""
    return read_uint(question, 32) & 0xFF


def answer(
    listener: int,
    own_mounts: Sequence[str],
    may_fork: Callable[[int], bool],
    answerers: Mapping[int, Callable[[int, bytes], None]] = _NO_ANSWERERS,
) -> bool:
    """Take one question and answer it; a process that ended meanwhile needs none.

    Tell whether the policy blocked the call. `may_fork` tells whether the process of that number may clone itself, this
    once. `answerers` has, by a call's number, the function that makes it in the guest's place (`answered_calls.load`).
    """
    try:
        question = receive(listener)
        answerer = answerers.get(read_uint(question, 16))
        if answerer is not None and not _enters_namespaces(question):
            answerer(listener, question)
            return False
        refused = refusal(question, own_mounts, may_fork)
        reply(listener, question, refused)
    except OSError:
        return False  # the question is unknown
    return is_denied(question, refused)


def _enters_namespaces(question: bytes) -> bool:
    """Tell whether a question is for a clone into new namespaces, which is no matter of counting."""
    return read_uint(question, 16) == NUMBERS[MACHINE]["clone"] and bool(read_uint(question, 32) & CLONE_NEW_ANY)


def is_denied(question: bytes, refused: int) -> bool:
    """Tell whether a call that was refused with this errno is one that the policy blocks for every process."""
    return refused == EPERM and read_uint(question, 16) != NUMBERS[MACHINE]["socket"]


def leaves_traces(question: bytes) -> bool:
    """Tell whether a question is for an object that may leave a trace in a namespace: a socket, or an IPC object."""
    number = read_uint(question, 16)
    return number == NUMBERS[MACHINE]["socket"] or number in _LASTING


def refusal(question: bytes, own_mounts: Sequence[str], may_fork: Callable[[int], bool]) -> int:
    """Return the errno to refuse a call with, 0 to let it go on."""
    number, pid = read_uint(question, 16), read_uint(question, 8)
    argument = read_uint(question, 32)  # the first one
    if number == NUMBERS[MACHINE]["exit_group"]:
        return 0
    if number == NUMBERS[MACHINE]["socket"]:
        return 0 if argument != AF_NETLINK or _has_no_capabilities(pid) else EPERM
    if number in _LASTING:
        return 0
    if number == NUMBERS[MACHINE]["clone"]:
        return 0 if argument == FORK_FLAGS and may_fork(pid) else EPERM
    if number in _LOCKING:
        return 0 if _is_own(pid, argument, own_mounts) else ENOLCK
    return EPERM


def _has_no_capabilities(pid: int) -> bool:
    """Tell whether a thread has no capabilities: with those that it begins with a clone could arrange its network."""
    try:
        fd = posix.open(f"/proc/{pid}/status", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return False
    try:
        rows = posix.read(fd, 1 << 14).split(b"\n")  # of its name the kernel hides no other end of a line
    finally:
        posix.close(fd)
    sets = [int(row.split()[1], 16) for row in rows if row.startswith((b"CapPrm:", b"CapEff:"))]
    return len(sets) == 2 and not any(sets)


def ioctl(listener: int, request: int, data: bytes) -> int:
    """Make the call again when a signal (a child that ended, say) came in between."""
    while True:
        try:
            return call("ioctl", listener, request, data)
        except InterruptedError:
            continue


def _is_own(pid: int, fd: int, own_mounts: Sequence[str]) -> bool:
    """Tell whether descriptor `fd` of process `pid` is a file in one of the guest's own mounts.

    One may be within another (a project below /home): the innermost around the file counts. Files of the host that are
    shown below them are on another mount, which no renaming of the folders above can hide. Nearly always they are on
    another device, too, which is faster to compare; but an overlay of several file systems has several. The root of an
    own mount is own as well, if it is a mount: below level `jail` it is a folder of the host, which the caller locks.
    """
    try:
        path = posix.readlink(f"/proc/{pid}/fd/{fd}")
        around = [
            mount_point for mount_point in own_mounts if path == mount_point or path.startswith(f"{mount_point}/")
        ]
        if not around:
            return False
        own = max(around, key=len)
        root = f"/proc/{pid}/root{own}"
        if path != own and posix.stat(f"/proc/{pid}/fd/{fd}").st_dev == posix.stat(root).st_dev:
            return True
        mount = _mount_at(root)
        return _mount_id(f"/proc/{pid}/fdinfo/{fd}") == mount and (path != own or mount != _mount_at(f"{root}/.."))
    except OSError:
        return False


def _mount_at(folder: str) -> int:
    """Return the number of the mount that a folder is on."""
    held = posix.open(folder, posix.O_PATH | posix.O_DIRECTORY | posix.O_CLOEXEC)
    try:
        return _mount_id(f"/proc/self/fdinfo/{held}")
    finally:
        posix.close(held)


def _mount_id(path: str) -> int:
    """Return the number of the mount that a descriptor is on, by its file in /proc."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        rows = posix.read(fd, 1 << 10).split(b"\n")
    finally:
        posix.close(fd)
    return next(int(row.split()[1]) for row in rows if row.startswith(b"mnt_id:"))
