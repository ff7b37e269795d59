"""A reaper that stays: pid 1 of a jail in which one guest after the other lives, each in places of its own.

Making namespaces and a root costs more than running a small program, so they are kept apart from the guest, and stay:
the namespaces of users, processes, network, host name and control group, and the read-only tree. What is new for every
guest: its process and all its descendants, its mount namespace with empty /workspace, /tmp and /dev/shm, its limits,
its Landlock domain and its filter.

This process is out of a guest's reach. As root it has an outside id that no guest has. An ordinary user has one id to
give, and there it has the guest's: the kernel then lets no signal from inside end pid 1; as it keeps all capabilities
of its user namespace, nobody with fewer may trace, read or slow it down; it is not dumpable, and outside the guest's
Landlock domain; and the filter refuses what limits another process, and all of that once more.

After each guest everything else in the process namespace is killed and waited for. What a network namespace remembers
is too much to list (counters, flow labels, memberships, closed connections), so it is not looked at: a guest's filter
tells this process of every socket of the network that it makes, and after the first one the nursery ends with its
guest. Pairs of sockets it makes without asking; where the kernel still counts any when nobody is left, the nursery
ends as well. It is the same with the namespace of System V IPC and message queues: the filter tells of every segment,
set of semaphores and queue that is made or opened.

A guest takes its orders from the caller itself, at the *door*: a socket whose inner end this process keeps, for each
guest to inherit, and to close before the program runs. So between the caller and the guest nobody has to wake up. By
the door this process also says to the caller that a guest is ready, and how it ended. The helper sleeps meanwhile,
unless a run takes long: see `slate`.

A nursery may serve one sandbox alone, for all its runs: then what is new for every guest is all the above but
/workspace, of which each guest hands a mount on to the next.
"""

from __future__ import annotations

import gc
import posix
from time import monotonic

from . import slate, touched, tree, wire
from .guest import PLACES, Guest, Nursed, forget_helper, kept, load_notify
from .minding import Parent
from .spec import Building
from .syscalls import CLONE_NEWCGROUP, unshare
from .ward import Ward

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FEW_BLOCKS = 64  # what a guest may have stored that is still there for a moment when the next one is made
COUNTER = "counter"  # the register with what says which process was made last
TICKET = "ticket"  # the register of the mount that a guest attaches as its workspace, where it is kept


class Nursery(Parent):
    """Be pid 1 for one guest after the other. The helper hears on `link` of what fails."""

    def live(self, door: int, file: int, said: dict[str, Any]) -> Callable[[], None]:
        """Do everything; returns only in a guest, with what it must call. All that goes to the door says `said`.

        `file` is that of the slate.
        """
        posix.close(self.go)  # our guests are forked when we have our identity
        private = self.await_go()
        unshare(CLONE_NEWCGROUP)
        building = Building.of_parts(*wire.unpack(self.plan_fd).values())
        ready = {**said, "seconds": self.build(building, private)}
        self._forget_helper()
        gc.freeze()  # what is here now is nobody's garbage, and nothing for a program to find
        ward, can_copy = Ward(self.spec, self.registers.get(COUNTER, -1)), touched.is_possible()
        left: list[int] = []
        noted = None
        while True:
            ward.begin()
            before, is_crowded = slate.taken(file), slate.is_crowded(file)
            if noted is None:
                noted = touched.read(slate.touched(file))
            touched.copying.wanted = noted
            pid = posix.fork()
            if pid == 0:
                _close(left)
                kept.extend((ward, private))
                nursed = Nursed(building, door, file, ready, is_crowded=is_crowded, can_copy=can_copy)
                return Guest(self, 0, -1, ward.leave(), nursed).become
            given = ward.receive_made(pid, is_looked_at=not is_crowded)
            made = self._take_over(given, keeps_workspace=bool(building.later))
            _close(left)  # taking it down makes the kernel wait, which nobody waits for now
            ended, left = self._raise(pid, ward, made, file, before, said)
            ready = said  # what the building took was told with the first guest
            building.first = building.later or building.first
            wire.send(door, "ended", ended)
            ward.let_go()
            if slate.rebuilds(file):  # else the caller's next run may be for our next guest, which is yet to be made
                posix.sched_yield()  # the kernel tends to put whom we woke behind us, though the other one is idle
            slate.note_end(file, ended["number"])  # after it was told: what is noted, the helper asks nobody about
            if ended["is_worn"] or not slate.start_of(file, ended["number"]):
                posix._exit(0)  # no next guest may attach what one that failed has handed back

    def _forget_helper(self) -> None:
        """Forget, once for all guests, where modules of ours come from; whatever will be needed is here by now."""
        load_notify()
        if self.load_interpreter is not None:
            interpreter = self.load_interpreter("oneshot")
            self.forgotten = forget_helper(interpreter)
            self.load_interpreter = {"oneshot": interpreter}.__getitem__  # no other can be loaded any more

    def _take_over(self, given: list[int], *, keeps_workspace: bool) -> list[int]:
        """Return what a guest hands over when it is made: its places, its filter's descriptor, its mount namespace.

        Last may come the mount that shows the caller its workspace. Whoever lets go of that last waits for the kernel.
        """
        if not given:  # it failed, and has told the helper at what; or it was killed
            posix._exit(1)
        *places, namespace, listener = given[: len(PLACES) + 2]
        further = given[len(PLACES) + 2 :]
        if further and keeps_workspace:
            self._keep(further.pop())
        return [*places, listener, namespace, *further]

    def _raise(
        self, pid: int, ward: Ward, made: list[int], file: int, before: int, said: dict[str, Any]
    ) -> tuple[dict[str, Any], list[int]]:
        """See one guest to its end; return what there is to tell of it, and what of its mounts is yet to be let go.

        `before` is the number of the run whose orders were taken before it was born; `said` is told in any case.
        """
        places, listener, left = made[: len(PLACES)], made[len(PLACES)], made[len(PLACES) + 1 :]
        last: list[int] = []

        def look_around() -> None:
            """Look while the kernel takes the guest's memory apart: at what no program can change any more."""
            if not last:
                last.extend((slate.taken(file), *_count_full(places)))

        status = ward.see_to_end(pid, listener, look_around, lambda: not slate.has_company(file))
        look_around()
        number, full, stored = last
        if number == before:  # it failed, or was killed while it waited
            posix._exit(1)
        tasks = 0
        if not ward.is_leaving:
            tasks = _count_tasks() if status else 0
            ward.end_everybody()
        ended = {
            **said,
            "number": number,
            "wait_status": status,
            "tasks": tasks,
            "full": full,
            "is_alone": True,
            "is_quiet": ward.is_leaving,
            **ward.spent(),
            "is_worn": ward.is_worn(),
            "denied": ward.count_denied(status),
            "at": monotonic(),
        }
        if stored > FEW_BLOCKS:
            _close(left)
        return ended, left

    def _keep(self, ticket: int) -> None:
        """Hold the mount of the workspace that the next guest shall attach, in place of the one that is attached."""
        if TICKET in self.registers:
            posix.close(self.registers[TICKET])
        self.registers[TICKET] = ticket


def _close(fds: list[int]) -> None:
    while fds:
        posix.close(fds.pop())


def _count_full(places: list[int]) -> tuple[int, int]:
    """Return how many places are full, and how many blocks all of them hold; let go of them."""
    full = stored = 0
    for place in places:
        state = posix.fstatvfs(place)
        full += state.f_bfree == 0 or state.f_ffree == 0
        stored += state.f_blocks - state.f_bfree
        posix.close(place)
    return full, stored


def _count_tasks() -> int:
    return tree.count_tasks([int(name) for name in posix.listdir("/proc") if name.isdigit()])
