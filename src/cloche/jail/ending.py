"""The end of everything that runs in a sandbox without a process namespace.

Theory of operation: whoever loses a parent comes to the reaper, which is a subreaper, or once that is gone to the
helper, which is one too. Nobody leaves, so it is over when the kernel says that there is no child left (ECHILD). Until
then everybody must be killed, and faster than they can make others. There are three ways; `end` takes the first that
this host has, and goes on with the next one where it fails.

1. By scope (Landlock 6 and later): before it forks anybody, the reaper enters a domain that has scopes and nothing
   else, and each guest another one inside of it. The kernel then lets the reaper's `kill(-1)` reach this domain and
   those inside of it: exactly this sandbox, whatever other processes have the same uid. No guest can signal the reaper.
2. By id, as root: `kill(-1)` of a child with the uid that this sandbox alone has. Its other ids are those of nobody, so
   that no guest can signal it first.
3. By a walk from the helper down, which stops all that it finds, kills it, and looks again.

One `kill(-1)` leaves nobody out: the kernel sends the signal to all at once, and whoever is making another process just
then fails at it. The walk is slower the more there are, and the faster they make others.
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
    """Enter a Landlock domain that has scopes alone; whoever is forked from now on is in it too.

    A domain that does not handle moves between folders refuses them all (EXDEV), so this one handles and allows them.
    Raises OSError, also where the kernel does not keep our signals inside: they would reach all that our user has.
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
    """End everybody in the scope that this process has entered, but itself; `take` what each of them had used.

    This process is their subreaper, and single-threaded. As root a guest that has yet to take its id cannot be killed
    by us, who have it already: it is as soon as it has.
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
    """End a reaper and all that is below it, as its parent and subreaper; return what they used, as far as is known.

    Only the reaper is left where it `is_alone`. One that `is_scoped` ends everybody when it receives `end` by `link`.
    `kill_by_id` is the second way, and tells whether it could be gone. A reaper that makes a call in a guest's place
    may wait there for what other guests hold (they write to a file without end), killed or not: these are killed first.
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
    """Kill whoever has the uid `guest_id`, as root; `own_id` is nobody's.

    Raises OSError where nobody can be forked to do it: the container's limit on processes may be reached.
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
        pass  # there is nobody but ourselves


def _is_asked(link: int) -> bool:
    """Ask a reaper to end everybody and itself; False where it is gone, or takes nothing more."""
    try:
        messages.send(link, "end")
    except OSError:
        return False
    return True


def _is_nobody_left() -> bool:
    """Take all children that are dead; tell whether there are no others."""
    try:
        while wait4(-1, WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _end_children() -> None:
    """Wait until no child is left, where all that could make others were killed."""
    while not _is_nobody_left():
        for pid in procfs.children(posix.getpid()):
            _signal(pid, SIGKILL)
        wait4(-1, 0)


def end_by_walk() -> None:
    """Kill everything below us and wait until nothing is left. Stopped first, so that a fork bomb stands still."""
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
