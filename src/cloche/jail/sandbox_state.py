"""The helper's objects of its sandbox on the host, across runs; messages to the caller."""

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

    `prepared` is the building that the caller had built last, `early` are its messages that came before their time,
    `before` the control group's counters when the run began. Of a prefork jail, `handoff` is the handoff socket,
    `status` and `timer` are the shared status, and `generation` is its number. By `network_link` pid 1 sends its
    sockets to the egress process.
    """

    def __init__(self, caller: int, cgroup: Cgroup | None):
        self.caller, self.cgroup = caller, cgroup
        self.spec = Spec()
        self.prepared: dict[str, Any] = {}
        self.claim: user_namespaces.Claim | None = None
        self.is_claim_own = False  # and not one of several helpers of a sandbox
        self.init_claim: user_namespaces.Claim | None = None
        self.folder: WorkFolder | None = None
        self.workspace_fd = self.network_link = -1
        self.handoff = self.status = self.timer = -1
        self.generation = 0
        self.early: list[tuple[str, dict[str, Any], list[int]]] = []
        self.has_run = False
        self.before: dict[str, int] = {}
        self._pids_before = 0

    def claim_init_id(self) -> int:
        """Return a second outside id, for pid 1 of a prefork jail."""
        if self.init_claim is None:
            self.init_claim = user_namespaces.claim_outside_id(*self.spec.ids)
        return self.init_claim.outside_id

    def keep_workspace(self, fd: int) -> None:
        """Hold a workspace that the next reaper shall attach, in place of the one before; -1 for none."""
        if self.workspace_fd >= 0:
            posix.close(self.workspace_fd)
        self.workspace_fd = fd

    def keep_network_link(self, fd: int) -> None:
        """Hold the link over which the next pid 1 sends its sockets, in place of the one before; -1 for none."""
        if self.network_link >= 0:
            posix.close(self.network_link)
        self.network_link = fd

    def begin_counting(self) -> None:
        """Note the control group's counters before a run."""
        self.before = self.cgroup.counters() if self.cgroup is not None else {}
        self._pids_before = self.cgroup.most_pids() if self.cgroup is not None and self.has_run else 0

    def counters(self) -> dict[str, int]:
        """Return how often the run has hit a limit of the control group."""
        now = self.cgroup.counters() if self.cgroup is not None else {}
        return {name: count - self.before.get(name, 0) for name, count in now.items()}

    def most_pids(self) -> int:
        """Return the run's largest number of processes at once; a maximum from before this run is not its own."""
        most_pids = self.cgroup.most_pids() if self.cgroup is not None else 0
        return most_pids if most_pids > self._pids_before else 0

    def is_folder_over(self, *, at_end: bool = False) -> bool:
        """Tell whether the folders of the host that replace the workspace's mount exceed their limit."""
        return self.folder is not None and self.folder.is_over(self.spec.disk_bytes, self.spec.inodes, is_fresh=at_end)

    def send_failure(self, failed: dict[str, Any], number: int) -> None:
        """Send how a run failed, and give the workspace back: attaching may have taken it out of the caller's hands."""
        self.send("failed", {**failed, "number": number}, (self.workspace_fd,) if self.workspace_fd >= 0 else ())
        self.keep_workspace(-1)

    def send(self, tag: str, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send the caller a message; when it is gone, the loop will notice by itself."""
        try:
            messages.send_retrying(self.caller, tag, body, fds)
        except OSError:
            pass


def failure(message: str, step: str, errno: int = 0) -> dict[str, Any]:
    """Return the body of a message about our own failure."""
    return {"message": message, "step": step, "index": 0, "errno": errno}
