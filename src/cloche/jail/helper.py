"""The helper: a fresh `python -I -S` process outside the sandbox that builds it, guards it and clears up after it.

It holds one end of a socket whose other end is the caller's. End of file there, however it comes about, means that
the caller is gone: everything is killed and removed. It enforces the time-out and sums the memory, and it is the
only one that says why it killed. It knows nothing of the caller but what the spec says.
"""

from __future__ import annotations

import _socket
import gc
import os

from . import identity, wire
from .cgroups import Cgroup
from .spec import Spec
from .syscalls import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, prctl
from .watch import Watch, failure
from .workfolder import WorkFolder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_signal: Any = __import__("_signal")  # `signal` would cost every run milliseconds

SIGINT = 2


def main(fd: int, version: int, folders: dict[str, str]) -> Callable[[], None] | None:
    """Serve the caller at socket `fd`; returns only in a guest, with what it must call, or None at the end.

    `folders` are those of the control group that the caller is making meanwhile; removing them is ours, and so must
    be known before the first message can come.
    """
    _signal.signal(SIGINT, _signal.SIG_DFL)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.umask(0o077)
    gc.freeze()  # what is here now is shared with every fork; collecting it would only copy its pages
    helper = Helper(_socket.socket(fileno=fd), Cgroup(version, folders) if folders else None)
    return helper.serve()


class Helper:
    """Serve one sandbox: open it, run in it, close it."""

    def __init__(self, caller: _socket.socket, cgroup: Cgroup | None):
        self.caller = caller
        self.spec = Spec()
        self.claim: identity.Claim | None = None
        self.cgroup = cgroup
        self.folder: WorkFolder | None = None
        self.workspace_fd = -1
        self.is_open = False

    def serve(self) -> Callable[[], None] | None:
        while True:
            tag, body, fds = wire.receive(self.caller)
            if tag == "open":
                self.spec = Spec(**wire.unpack(fds[0]))
                os.close(fds[0])
            elif tag == "run":
                guest = self._run(body, fds)
                if guest is not None:
                    return guest
            if tag == "" or body.get("is_last"):
                self._clear_up()
                os._exit(0)

    def _run(self, body: dict[str, Any], fds: list[int]) -> Callable[[], None] | None:
        """Run once and report; an error of ours before the guest's code began is reported as `failed`."""
        watch = None
        try:
            self._open()
            watch = Watch(self, body["timeout_s"])
            guest = watch.start(fds, body["private"])
            if guest is not None:
                return guest
        except OSError as error:
            said = watch.last_words() if watch is not None else None
            ours = failure(f"cannot set up the sandbox: {error}", "helper", error.errno or 0)
            self._tell("failed", said or ours)
        finally:
            if watch is None or os.getpid() == watch.owner:
                for fd in fds:
                    os.close(fd)
        if watch is not None and watch.reaper:
            self._attend(watch)
        return None

    def _attend(self, watch: Watch) -> None:
        """See the run to its end. A fault of ours must neither free the guest nor keep the caller waiting."""
        try:
            watch.attend()
        except Exception as error:
            watch.kill()
            self._tell("lost", failure(f"{type(error).__name__}: {error}", "helper"))

    def _open(self) -> None:
        """Make what lives as long as the sandbox, once."""
        spec = self.spec
        if self.is_open:
            if self.folder is not None:
                self.folder.renew_tmp()
            return
        if spec.outside is not None and spec.level in ("jail", "confined"):
            self.claim = identity.claim_outside_id(*spec.outside)
            spec.outside = (self.claim.outside_id, 1)
        if spec.level != "jail":
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            owner = spec.outside[0] if spec.outside is not None and self.claim else None
            self.folder = WorkFolder(spec.folder, spec.workspace, spec.tmp, owner)
            self.folder.create()
        self.is_open = True

    def _clear_up(self) -> None:
        if self.cgroup is not None:
            self.cgroup.remove()
        if self.folder is not None:
            self.folder.remove()

    def _tell(self, tag: str, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Tell the caller; when it is gone, the loop will notice by itself."""
        try:
            wire.send(self.caller, tag, body, fds)
        except OSError:
            pass
