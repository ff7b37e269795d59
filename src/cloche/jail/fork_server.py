"""The fork server: an interpreter with all modules loaded that forks helpers, and nothing else.

It is a fresh `python -I -S` process of the caller's, never a fork of the caller. The caller sends it the sockets that
new helpers shall serve, and nothing else: a run's orders go to its reaper and guest directly, so the memory of the next
run contains nothing of it. It checks that it has one thread: a fork with others would leave their locks held for ever.
The client at the caller's end is `forkserver/slot.py`.
"""

from __future__ import annotations

import gc
import posix

from . import messages, shared_status
from .cgroups import Cgroup
from .helper import Helper
from .pid1 import never_freed
from .syscalls import PR_SET_DUMPABLE, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_signal: Any = __import__("_signal")
SIGINT, SIGCHLD = 2, 17
LOADING_S = 60


def main(fd: int, load_interpreter: Callable[[str], Any]) -> Callable[[], None] | None:
    """Serve the caller at socket `fd`; returns only in a guest, with a function to call, or None at the end.

    `load_interpreter` returns modules of the interpreter's by name. The first message is in the socket before this
    process starts, and has the settings of its `warm_up`.
    """
    _signal.signal(SIGINT, _signal.SIG_DFL)
    _signal.signal(SIGCHLD, _signal.SIG_IGN)  # helpers that end leave nothing to wait for
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    posix.umask(0o077)
    shared_status.copying.register_at_fork()
    _signal.alarm(LOADING_S)  # a module that never finishes loading must not outlive the caller
    settings = messages.receive(fd)[1]
    loaded = load_interpreter("preload").warm_up(settings)
    loaded["threads"] = len(posix.listdir("/proc/self/task"))
    _signal.alarm(0)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all present objects
    messages.send(fd, "ready", loaded)
    while True:
        tag, body, fds = messages.receive(fd)
        if tag != "fork":
            posix._exit(0)
        if posix.fork() == 0:
            posix.close(fd)
            _signal.signal(SIGCHLD, _signal.SIG_DFL)
            cgroup = Cgroup(body["version"], body["folders"]) if body["folders"] else None
            _send_here(fds[0])
            never_freed.extend((loaded, settings, body, fds, cgroup))
            return Helper(fds[0], cgroup, load_interpreter).serve()
        for passed_fd in fds:
            posix.close(passed_fd)


def _send_here(link: int) -> None:
    """Report this process's pid to the caller; a lost caller has left a control group to be removed all the same."""
    try:
        messages.send(link, "here", {"pid": posix.getpid()})
    except OSError:
        pass  # the helper will find that nothing more comes
