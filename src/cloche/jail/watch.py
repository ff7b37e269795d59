"""The helper's watch over one run: start it, keep the clock and the sums, kill, report."""

from __future__ import annotations

import _socket
import os
import select
import time

from . import identity, tree, wire
from .enter import Descriptors
from .reaper import Reaper
from .spec import Run
from .syscalls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_DUMPABLE,
    clone,
    prctl,
)  # fmt: skip

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .helper import Helper

ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
# The control group's namespace is entered by the reaper, once it is in the group: its root is where its maker is.
NAMESPACES_AT_BIRTH = ALL_NAMESPACES & ~CLONE_NEWCGROUP
TICK_S = 0.02
SETUP_PATIENCE_S, ETIMEDOUT = 60.0, 110
GO = b"g"
SIGKILL = 9


class Watch:
    """Watch over one run from the fork of its reaper to the last process's end."""

    def __init__(self, helper: Helper, timeout_s: float):
        self.helper, self.spec, self.timeout_s = helper, helper.spec, timeout_s
        self.owner = os.getpid()
        self.reaper = 0
        self.cause = ""
        self.started_at = 0.0
        self.deadline = 0.0
        self.setup_deadline = time.monotonic() + SETUP_PATIENCE_S
        self.ended: dict[str, Any] | None = None
        self.failed: dict[str, Any] | None = None
        self.peak_bytes = 0
        self.peak_tasks = 0
        self.link, self._reaper_link = _socket.socketpair(
            _socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC
        )
        self.before: dict[str, int] = helper.cgroup.counters() if helper.cgroup else {}

    def start(self, fds: list[int], private_paths: list[str]) -> Callable[[], None] | None:
        """Fork the reaper, give it its identity and limits, and let it go; returns a callable in the guest."""
        is_jail = self.spec.level == "jail"
        private = self._open_private(private_paths)
        ready, go = os.pipe()
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # inherited: an undumpable child's id maps belong to root alone
        self.reaper = clone(NAMESPACES_AT_BIRTH) if is_jail else os.fork()
        if self.reaper != 0 or not is_jail:
            prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if self.reaper == 0:
            return self._be_reaper(fds, private, ready, go)
        self._reaper_link.close()
        os.close(ready)
        try:
            if self.helper.cgroup is not None and self.helper.cgroup.version == 2:
                self.helper.cgroup.attach(self.reaper)
            if is_jail:
                self._map_ids()
            os.write(go, GO)
        finally:
            os.close(go)
            for fd in private.values():
                os.close(fd)
        return None

    def _be_reaper(self, fds: list[int], private: dict[str, int], ready: int, go: int) -> Callable[[], None]:
        """Wait until the helper has set identity and limits, then live as the reaper."""
        os.close(go)
        self.link.close()
        os.close(self.helper.caller.detach())
        if self.helper.claim is not None:
            self.helper.claim.forget()
        try:
            if self.helper.cgroup is not None and self.helper.cgroup.version == 1:
                self.helper.cgroup.enter()
            if os.read(ready, 1) != GO:  # the helper is gone, and so must we be
                os._exit(1)
            prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
            run = Run(**wire.unpack(fds[0]))
            streams = Descriptors(fds[1], fds[2], fds[3], fds[4], self.helper.workspace_fd)
            return Reaper(self.spec, run, self._reaper_link, streams, private).live()
        except BaseException as error:  # a fault of ours: it must be told, and nothing of the helper may run on here
            wire.send(self._reaper_link, "failed", failure(f"{type(error).__name__}: {error}", "reaper"))
            os._exit(1)

    def _map_ids(self) -> None:
        outside = self.spec.outside
        uid, gid = (outside[0], outside[0]) if outside else (os.geteuid(), os.getegid())
        identity.write_maps(
            self.reaper, inside_id=self.spec.inside_id, outside_uid=uid, outside_gid=gid, privileged=outside is not None
        )

    def _open_private(self, paths: list[str]) -> dict[str, int]:
        """Open what only root may read through mounts that show it as the outside id's own."""
        if not paths:
            return {}
        from .idmapped import open_idmapped

        assert self.spec.outside is not None
        return open_idmapped(paths, self.spec.outside[0])

    def attend(self) -> None:
        """Wait for the end, whatever brings it; then report what the kernel says about it."""
        poll = select.poll()
        poll.register(self.link.fileno(), select.POLLIN)
        poll.register(self.helper.caller.fileno(), select.POLLIN)
        is_caller_here = True
        while self.ended is None and self.failed is None:
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            if self.helper.caller.fileno() in ready and not self._hear_caller():
                is_caller_here = False
            if not is_caller_here or self.cause:
                break
            if self.link.fileno() in ready and not self._hear_reaper():
                break
            self._check_limits()
        if self.ended is not None and self.ended["is_alone"] and not self.cause:
            self._report(None)  # nothing but the reaper is left: its own end need not be waited for
            self.kill()
        else:
            usage = self.kill()
            while self.ended is None and self.failed is None and self._hear_reaper():
                pass
            self._report(usage)
        self.link.close()

    def last_words(self) -> dict[str, Any] | None:
        """Kill the tree, and return what the reaper said it failed at: our own error may only follow from that."""
        if self.reaper:
            self.kill()
            while self.failed is None and self._hear_reaper():
                pass
        return self.failed

    def kill(self) -> Any:
        """Kill the tree, wait until nothing of it is left, and return what it used."""
        if not self.reaper:
            return None
        if self.ended is None:
            os.kill(self.reaper, SIGKILL)
        _, _, usage = os.wait4(self.reaper, 0)
        self.reaper = 0
        if self.spec.level != "jail":
            tree.kill_descendants(os.getpid())
        return usage

    def _patience_ms(self) -> int:
        left = max(0.0, (self.deadline or self.setup_deadline) - time.monotonic())
        is_summing = self.spec.accounting and self.deadline
        return int(min(left, TICK_S if is_summing else left) * 1000) + 1

    def _hear_caller(self) -> bool:
        """Take one word of the caller's; False when it is gone."""
        tag, body, _ = wire.receive(self.helper.caller)
        if tag == "kill" and not self.cause:
            self.cause = body["cause"]
        return tag != ""

    def _hear_reaper(self) -> bool:
        """Take one word of the reaper's; False when it is gone."""
        tag, body, fds = wire.receive(self.link)
        if tag == "ready":
            if fds:
                self._keep_workspace(fds[0])
            self.helper._tell("ready", {**body, "outside": self.spec.outside}, tuple(fds))
        elif tag == "started":
            self.started_at = body["at"]
            self.deadline = self.started_at + self.timeout_s
            self.helper._tell("started", body)
        elif tag == "ended":
            self.ended = body
        elif tag == "failed":
            if fds:
                self._keep_workspace(fds[0])
            self.failed = body
        return tag != ""

    def _keep_workspace(self, fd: int) -> None:
        if self.helper.workspace_fd >= 0:
            os.close(self.helper.workspace_fd)
        self.helper.workspace_fd = fd

    def _check_limits(self) -> None:
        if self.ended is not None or self.failed is not None:
            return
        if not self.deadline:
            if time.monotonic() >= self.setup_deadline:
                said = f"the sandbox was not set up within {SETUP_PATIENCE_S:.0f} s; is a file system stuck?"
                self.failed = failure(said, "helper", ETIMEDOUT)
            return
        if time.monotonic() >= self.deadline:
            self.cause = "timeout"
        elif self.spec.accounting and self._is_memory_exceeded():
            self.cause = "out_of_memory"
        elif self._is_folder_over():
            self.cause = "disk_limit"

    def _is_memory_exceeded(self) -> bool:
        """Sum the tree's memory: a cheap figure first, the fair one only when the cheap one is over."""
        limit, cgroup = self.spec.memory_bytes, self.helper.cgroup
        if self.spec.accounting == "cgroup" and cgroup is not None:
            if cgroup.memory_bytes() <= limit:
                return False
            used = cgroup.anonymous_bytes()
        else:
            pids = tree.descendants(self.reaper)
            self.peak_tasks = max(self.peak_tasks, tree.count_tasks(pids))
            used = tree.resident_bytes(pids)
            if used > limit:
                used = tree.private_bytes(pids)
        self.peak_bytes = max(self.peak_bytes, used)
        return used > limit

    def _is_task_limit_seen(self) -> bool:
        """Tell, without a counter of the kernel's, whether the tree was seen at its limit."""
        left = self.ended["tasks"] if self.ended is not None else 0  # the reaper in place of the guest that ended
        return self.helper.cgroup is None and self.spec.pids > 0 and max(self.peak_tasks, left) >= self.spec.pids

    def _is_folder_over(self, *, at_end: bool = False) -> bool:
        """Tell whether the folders of the host that stand in for the workspace hold more than they may."""
        folder = self.helper.folder
        return folder is not None and folder.is_over(self.spec.disk_bytes, self.spec.inodes, is_fresh=at_end)

    def _report(self, usage: Any) -> None:
        if self.ended is None and not self.started_at and not self.cause:
            self.failed = self.failed or failure("the sandbox ended before the code was started", "reaper")
        if self.failed is not None and not self.cause:
            self.helper._tell("failed", self.failed)
            return
        cgroup = self.helper.cgroup
        now = cgroup.counters() if cgroup else {}
        user_s, system_s, most_kib = self._spent(usage)
        body = {
            "cause": self.cause,
            "ended": self.ended,
            "wall_s": time.monotonic() - self.started_at if self.started_at else 0.0,
            "cpu_user_s": user_s,
            "cpu_system_s": system_s,
            "peak_bytes": max(self.peak_bytes, most_kib * 1024),
            "tasks": max(self.peak_tasks, cgroup.most_pids() if cgroup else 0),
            "counters": {name: count - self.before.get(name, 0) for name, count in now.items()},
            "is_task_limit_seen": self._is_task_limit_seen(),
            "is_folder_over": self._is_folder_over(at_end=True),
        }
        self.helper._tell("ended", body)

    def _spent(self, usage: Any) -> tuple[float, float, int]:
        """Return user and system seconds and the largest process in KiB: by the reaper's count, or by the kernel's."""
        if usage is not None:
            return usage.ru_utime, usage.ru_stime, usage.ru_maxrss
        ended = self.ended or {}
        return ended.get("user_s", 0.0), ended.get("system_s", 0.0), ended.get("most_kib", 0)


def failure(message: str, step: str, errno: int = 0) -> dict[str, Any]:
    """Return the body of a word about our own failure."""
    return {"message": message, "step": step, "index": 0, "errno": errno}
