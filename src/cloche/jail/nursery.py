"""A reaper that stays: pid 1 of a jail in which one guest after the other lives, each in places of its own.

Making namespaces and a root costs more than running a small program, so where the kernel lets us keep them apart from
the guest they are kept. What stays: the namespaces of users, processes, network, host name and control group, and the
read-only tree. What is new for every guest: its process and all its descendants, its mount namespace with empty
/workspace, /tmp and /dev/shm, its System V IPC namespace, its limits, its Landlock domain and its filter. This process
has an identity that no guest has, so no guest can signal, slow down or limit it; that takes a second outside id, which
only root can give. After each guest everything else in the process namespace is killed and waited for. What a network
namespace remembers is too much to list (counters, flow labels, memberships, closed connections), so it is not looked
at: a guest's filter tells this process of every socket of the network that it makes, and after the first one the
nursery ends with its guest.
"""

from __future__ import annotations

import posix

from . import wire
from .guest import Guest
from .reaper import Attendance, Parent
from .spec import Building
from .syscalls import CLONE_NEWCGROUP, WNOHANG, unshare, wait4

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Nursery(Parent):
    """Be pid 1 for one guest after the other. The helper hands over orders on `link` and hears of each end."""

    def live(self) -> Callable[[], None]:
        """Do everything; returns only in a guest, with what it must call."""
        posix.close(self.go)  # our guests are forked when we have our identity
        private = self.await_go()
        unshare(CLONE_NEWCGROUP)
        building = Building(**wire.unpack(self.plan_fd))
        seconds = self.build(building, private)
        while True:
            attendance = Attendance(self.spec)
            pid = posix.fork()
            if pid == 0:
                return Guest(self, 0, -1, attendance.leave(), building).become
            attendance.leave_to_guest()
            ended, namespace = self._raise(pid, attendance, seconds)
            ended["is_worn"] = attendance.has_used_network
            wire.send(self.link, "ended", ended)
            if ended["is_worn"]:
                posix._exit(0)
            attendance.close()
            posix.close(namespace)

    def _raise(self, pid: int, attendance: Attendance, seconds: list[float]) -> tuple[dict[str, Any], int]:
        """See one guest from its orders to its end; return what there is to tell of it, and its mount namespace."""
        tag, body, fds = wire.receive(self.link)
        if tag != "order":  # the helper is gone, or needs us no more
            posix._exit(1)
        made, _, kept = wire.receive(attendance.ours)
        if made != "made" or wait4(pid, WNOHANG)[0]:  # it failed, and has told the helper at what
            posix._exit(1)
        *places, namespace = kept
        wire.send(self.link, "ready", {"seconds": seconds}, places[:1])
        wire.send(attendance.ours, "order", body, fds)
        for fd in fds:  # so that the streams end with the guest
            posix.close(fd)
        status = attendance.wait_for(pid)
        ended = {"wait_status": status, "tasks": _count_tasks() if status else 0, "full": _count_full(places)}
        for fd in places:
            posix.close(fd)
        attendance.end_everybody()
        return ended | attendance.conclude(), namespace


def _count_full(places: list[int]) -> int:
    states = [posix.fstatvfs(fd) for fd in places]
    return sum(state.f_bfree == 0 or state.f_ffree == 0 for state in states)


def _count_tasks() -> int:
    from . import tree

    return tree.count_tasks([int(name) for name in posix.listdir("/proc") if name.isdigit()])
