"""The subordinate ids of an ordinary user, taken once into a user namespace that all helpers of a caller enter.

The *mapper* is a separate process. It makes that namespace, where 0 is the caller and the ids of the range map to
themselves; `newuidmap` and `newgidmap`, which may write its maps, are called for it and never again. A helper that
enters the namespace by its descriptor can do there what root can do with ids: each jail maps two single ids of the
range, its guest's and its first process's, and the caller's own is not among them.

The caller stays outside, where a file of another id is closed to it. So each workspace comes with a second mount, not
attached anywhere, that the mapper makes show the guest's files as the caller's own: the kernel allows that only to a
process with power over both the namespace of the file system and that of the ids to show.
"""

from __future__ import annotations

import posix

from . import messages, user_namespaces
from .syscalls import (
    AT_FDCWD,
    AT_RECURSIVE,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MNT_DETACH,
    MOVE_MOUNT_F_EMPTY_PATH,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    OPEN_TREE_CLOEXEC,
    OPEN_TREE_CLONE,
    PR_SET_DUMPABLE,
    call,
    prctl,
    unshare,
    wait4,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_signal: Any = __import__("_signal")

SIGINT = 2
GO = b"g"
MOST_ERROR_BYTES = 400
FSCONFIG_CMD_CREATE = 6
CALLER = 0  # in the namespace
TRIED_ID = 1000


def enter(namespace: int) -> None:
    """Enter the namespace, as a process that was just started; -1 for none."""
    if namespace >= 0:
        call("setns", namespace, CLONE_NEWUSER)
        posix.close(namespace)


def main(fd: int, order: dict[str, Any]) -> NoReturn:
    """Be the mapper for the caller at socket `fd`; it ends when the caller ends.

    `order` holds `namespace`, the descriptor of one that was made before, or -1 and the `programs`: arguments that get
    the number of this process added, as the second.
    """
    _signal.signal(SIGINT, _signal.SIG_DFL)
    namespaces: dict[int, int] = {}
    try:
        if order["namespace"] >= 0:
            enter(order["namespace"])
            unshare(CLONE_NEWNS)
        else:
            _take_range(order["programs"])
        _leave_mounts()
        _show(_new_tmpfs(), TRIED_ID, namespaces)
        own = posix.open("/proc/self/ns/user", posix.O_RDONLY | posix.O_CLOEXEC)
        messages.send(fd, "ready", {}, (own,))
        posix.close(own)
        while True:
            tag, body, mounts = messages.receive(fd)
            if tag != "show":
                posix._exit(0)
            try:
                _show(mounts[0], body["inside_id"], namespaces)
                messages.send(fd, "shown")
            except OSError as error:
                messages.send(fd, "failed", {"message": str(error)})
    except OSError as error:
        messages.send(fd, "failed", {"message": str(error)})
    finally:
        posix._exit(1)


def _take_range(programs: list[list[str]]) -> None:
    """Make the namespace, and have its maps written by the programs, which must run outside of it."""
    waiting, go = posix.pipe()
    errors, error_pipe = posix.pipe()
    number = str(posix.getpid())
    pids = []
    for program, *rows in programs:
        pid = posix.fork()
        if pid == 0:
            _write_map([program, number, *rows], waiting, go, error_pipe)
        pids.append(pid)
    posix.close(waiting)
    posix.close(error_pipe)
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else our maps belong to root alone
    posix.write(go, GO * len(pids))
    posix.close(go)
    statuses = [wait4(pid, 0)[1] for pid in pids]
    if any(statuses):
        text = posix.read(errors, MOST_ERROR_BYTES).decode("utf-8", "replace").strip()
        raise OSError(0, text or "newuidmap has failed")
    posix.close(errors)


def _leave_mounts() -> None:
    """Keep none of the host's mounts but /proc: mounts that the host unmounts would live on in our namespace."""
    call("mount", b"none", b"/", b"", MS_REC | MS_PRIVATE, None)
    proc = call("open_tree", AT_FDCWD, b"/proc", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE)
    call("mount", b"none", b"/proc", b"tmpfs", MS_NOSUID | MS_NODEV, b"size=4k,mode=755")
    posix.chdir("/proc")
    posix.mkdir("proc", 0o755)
    call("move_mount", proc, b"", AT_FDCWD, b"proc", MOVE_MOUNT_F_EMPTY_PATH)
    posix.close(proc)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    posix.chdir("/")


def _write_map(argv: list[str], waiting: int, go: int, error_pipe: int) -> NoReturn:
    """Execute one of the programs, when the namespace exists."""
    try:
        posix.close(go)
        if posix.read(waiting, 1) == GO:
            posix.dup2(error_pipe, 2)
            posix.execve(argv[0], argv, {"LANG": "C"})
    except OSError as error:
        posix.write(error_pipe, f"{argv[0]}: {error}\n".encode())
    finally:
        posix._exit(1)


def _show(mount: int, inside_id: int, namespaces: dict[int, int]) -> None:
    """Have a detached mount show the files of `inside_id` as the caller's; then close it. Raises OSError."""
    try:
        if inside_id not in namespaces:
            namespaces[inside_id] = user_namespaces.mapping_namespace(inside_id, inside_id, CALLER)
        user_namespaces.map_ids(mount, namespaces[inside_id], is_recursive=False)
    finally:
        posix.close(mount)


def _new_tmpfs() -> int:
    context = call("fsopen", b"tmpfs", 1)
    try:
        call("fsconfig", context, FSCONFIG_CMD_CREATE, None, None, 0)
        return call("fsmount", context, 1, 0)
    finally:
        posix.close(context)
