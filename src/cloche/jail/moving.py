"""How a clone of a live session gets into a control group of its own."""

from __future__ import annotations

import posix

from . import wire
from .cgroups import Cgroup
from .rehouse import Errand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIGKILL = 9
EBUSY = 16


class Move:
    """Make a control group for a clone that is yet to be born, and see to it that the clone gets in.

    To move another process the kernel takes a lock, and when nobody took it for a while it waits for an RCU grace
    period first: ten milliseconds. In version 1 a process that moves itself needs no lock: there the clone is handed
    the `doors` by which it goes in at its birth, and we look whether it did. In version 2 an errand takes the lock
    once, by moving itself, while others build, and moves the clone when it is told which that is.
    """

    def __init__(self, cgroup: dict[str, Any]):
        self.group, self._amounts = Cgroup(cgroup["version"], cgroup["folders"]), cgroup["amounts"]
        self._errand: Errand | None = None
        self.doors: list[int] = []
        if self.group.version == 1:
            try:
                self.group.create(**self._amounts)
                self.doors = self.group.open_doors()
            except OSError:
                self.group.remove()
                raise
        else:
            self._errand = Errand(self._work)

    def _work(self, link: int) -> None:
        self.group.create(**self._amounts)
        self.group.attach(posix.getpid())
        tag, body, _ = wire.receive(link)
        if tag == "move":
            self.group.attach(body["pid"])

    def begin(self, pid: int) -> None:
        """Say which process is to be inside: one that stands still, and cannot end without its number being kept."""
        if self._errand is not None:
            self._errand.tell("move", {"pid": pid})
            return
        found = self.group.threads()
        intruders = set().union(*found) - {pid}
        for intruder in intruders:  # who would else be rid of what its own group has counted
            posix.kill(intruder, SIGKILL)
        if intruders:
            raise OSError(EBUSY, "somebody else has entered the control group of the clone, and was ended")
        if not all(found):  # it was not able to, or not willing
            self.group.attach(pid)

    def finish(self) -> Cgroup:
        """Wait until it is inside, and return the group. Raises OSError."""
        errand, self._errand = self._errand, None
        if errand is not None:
            errand.finish()
        return self.group

    def give_up(self) -> None:
        """Remove the group; nobody needs it."""
        if self._errand is not None:
            self._errand.tell("nobody")
        try:
            self.finish()
        except OSError:
            pass  # there was no room
        self.group.remove()
