"""The end of all processes of a sandbox without a process namespace.

Theory of operation: a process that loses its parent is adopted by the reaper, which is a subreaper, or once that has
ended by the helper, which is one too. No process can leave the tree, so it has ended when the kernel reports no child
(ECHILD). Until then all processes must be killed, and faster than they fork. There are three methods; `end` takes the
first that this host supports, and continues with the next one on failure.

1. By scope (Landlock 6 and later): before its first fork, the reaper enters a domain that has scopes and nothing else,
   and each guest another one inside of it. The kernel then limits the reaper's `kill(-1)` to this domain and those
   inside of it: exactly this sandbox, even if other processes have the same uid. No guest can signal the reaper.
2. By id, as root: `kill(-1)` by a child with the uid that this sandbox alone has. Its other ids belong to no process,
   so no guest can signal it first.
3. By a walk from the helper down, which stops all processes that it finds, kills them, and looks again.

One `kill(-1)` misses no process: the kernel sends the signal to all at once, and a fork in progress fails. The walk is
slower the more processes there are, and the faster they fork.
"""

from __future__ import annotations

import posix

from . import messages, procfs
from .syscalls import PR_SET_NO_NEW_PRIVS, WNOHANG, call, ppoll, prctl, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Usage: TypeAlias = tuple[float, float, int]  # seconds as user and as system, the largest process in KiB

REFER, PATH_BENEATH = 1 << 13, 1
SCOPES = 1 | 2  # abstract Unix sockets, and signals
LOGGED_SINCE = 7  # the version of Landlock from which on each signal that is refused goes to the audit log
LOG_SAME_EXEC_OFF = 1
PATIENCE_S = 2.0  # for a reaper to be gone; it may still be building
PAUSE_S = 0.001
SIGSTOP, SIGKILL, ENOTSUP = 19, 9, 95


def enter_scope(abi: int) -> None:
    """Enter a Landlock domain that has scopes alone; all later children are in it too.

    A domain that does not handle moves between folders refuses them all (EXDEV), so this one handles and allows them.
    Raises OSError, also where the kernel does not limit our signals to the domain: they would reach all of our user's
    processes.
    """
    attr = REFER.to_bytes(8, "little") + bytes(8) + SCOPES.to_bytes(8, "little")
    ruleset = call("landlock_create_ruleset", attr, len(attr), 0)
    root = posix.open("/", posix.O_PATH | posix.O_CLOEXEC)
    call("landlock_add_rule", ruleset, PATH_BENEATH, REFER.to_bytes(8, "little") + root.to_bytes(4, "little"), 0)
    posix.close(root)
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("landlock_restrict_self", ruleset, LOG_SAME_EXEC_OFF if abi >= LOGGED_SINCE else 0)
    posix.close(ruleset)
    try:
        posix.kill(posix.getppid(), 0)
    except PermissionError:
        return
    raise OSError(ENOTSUP, "a Landlock scope does not keep signals inside")


def end_scope(take: Callable[[Usage], None]) -> None:
    """Kill all other processes in this process's scope; call `take` with the usage of each.

    This process is their subreaper, and single-threaded. As root, it has the guest's id already and cannot kill a guest
    that has yet to take that id: the guest is killed as soon as it has.
    """
    pause_s = 0.0
    while True:
        try:
            while (reaped := wait4(-1, WNOHANG))[0]:
                take(reaped[2])
        except ChildProcessError:
            return  # and whoever could make others was one
        ppoll((), pause_s)
        _kill_reachable()
        pause_s = PAUSE_S


def end(reaper: int, link: int, *, is_alone: bool, is_scoped: bool, kill_by_id: Callable[[], bool]) -> Usage:
    """End a reaper and all processes below it, as its parent and subreaper; return their usage as far as is known.

    A reaper that `is_alone` has no other process below it. One that `is_scoped` ends all of them when it receives `end`
    by `link`. `kill_by_id` is the second method, and tells whether it could be tried. A reaper that makes a call in a
    guest's place may wait there, killed or not, for a lock of other guests (which write to a file without end): these
    are killed first.
    """
    if is_alone or not is_scoped or not _is_asked(link):
        posix.kill(reaper, SIGKILL)  # it has not been waited for, so this is still its number
    ended = posix.pidfd_open(reaper)
    while not ppoll((ended,), PATIENCE_S):
        _signal(reaper, SIGKILL)
        if not kill_by_id():
            _kill_below()
    posix.close(ended)
    usage = wait4(reaper, 0)[2]
    if not _is_nobody_left():
        if kill_by_id():
            _end_children()
        else:
            end_by_walk()
    return usage


def kill_by_id(guest_id: int, own_id: int) -> None:
    """Kill all processes with the uid `guest_id`, as root; no other process has `own_id`.

    Raises OSError if no child can be forked for it: the container's limit on processes may be reached.
    """
    pid = posix.fork()
    if pid == 0:
        try:
            call("setresuid", own_id, guest_id, own_id)
            _kill_reachable()
        finally:
            posix._exit(0)
    wait4(pid, 0)


def _kill_reachable() -> None:
    try:
        posix.kill(-1, SIGKILL)
    except ProcessLookupError:
        pass  # no other process is left


def _is_asked(link: int) -> bool:
    """Ask a reaper to end its tree and itself; False if it has ended, or accepts no message."""
    try:
        messages.send(link, "end")
    except OSError:
        return False
    return True


def _is_nobody_left() -> bool:
    """Reap all dead children; tell whether no child is left."""
    try:
        while wait4(-1, WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _end_children() -> None:
    """Wait until no child is left, after all that could fork were killed."""
    while not _is_nobody_left():
        for pid in procfs.children(posix.getpid()):
            _signal(pid, SIGKILL)
        wait4(-1, 0)


def end_by_walk() -> None:
    """Kill all processes below this one and wait for them. They are stopped first, so that a fork bomb cannot grow."""
    while not _is_nobody_left():
        _kill_below()
        wait4(-1, 0)


def _kill_below() -> None:
    pids = procfs.descendants(posix.getpid())
    for signal in (SIGSTOP, SIGKILL):
        for pid in pids:
            _signal(pid, signal)


def _signal(pid: int, number: int) -> None:
    try:
        posix.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # gone already, or a zombie of another identity; the next round looks again
