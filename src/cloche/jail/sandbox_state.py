"""What the helper holds of its sandbox on the host, whichever run goes on in it, and how the caller is told."""

from __future__ import annotations

import posix

from . import messages, user_namespaces
from .messages import Spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .cgroups import Cgroup
    from .work_folder import WorkFolder


class SandboxState:
    """Hold the descriptors, the outside ids, the control group and the folder that one run leaves to the next.

    `prepared` is what the caller had built last, `early` are its words that came before their time, `before` the
    control group's counters when the run began. Of a prefork jail, `door` is the handoff socket, `slate` and `timer`
    are the shared status, and `generation` says which one it is.
    """

    def __init__(self, caller: int, cgroup: Cgroup | None):
        self.caller, self.cgroup = caller, cgroup
        self.spec = Spec()
        self.prepared: dict[str, Any] = {}
        self.claim: user_namespaces.Claim | None = None
        self.keeper: user_namespaces.Claim | None = None
        self.folder: WorkFolder | None = None
        self.workspace_fd = -1
        self.door = self.slate = self.timer = -1
        self.generation = 0
        self.early: list[tuple[str, dict[str, Any], list[int]]] = []
        self.has_run = False
        self.before: dict[str, int] = {}

    def claim_keeper(self) -> int:
        """Return a second outside id, for the process that keeps a jail between its guests."""
        if self.keeper is None:
            self.keeper = user_namespaces.claim_outside_id(*self.spec.ids)
        return self.keeper.outside_id

    def keep_workspace(self, fd: int) -> None:
        """Hold a workspace that the next reaper shall attach, in place of the one before; -1 for none."""
        if self.workspace_fd >= 0:
            posix.close(self.workspace_fd)
        self.workspace_fd = fd

    def tell_failure(self, said: dict[str, Any], number: int) -> None:
        """Tell how a run failed, and give the workspace back: attaching may have taken it out of the caller's hands."""
        self.tell("failed", {**said, "number": number}, (self.workspace_fd,) if self.workspace_fd >= 0 else ())
        self.keep_workspace(-1)

    def tell(self, tag: str, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Tell the caller; when it is gone, the loop will notice by itself."""
        try:
            messages.send_patiently(self.caller, tag, body, fds)
        except OSError:
            pass


def failure(message: str, step: str, errno: int = 0) -> dict[str, Any]:
    """Return the body of a word about our own failure."""
    return {"message": message, "step": step, "index": 0, "errno": errno}
