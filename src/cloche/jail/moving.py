"""How a clone of a live session gets into a control group of its own."""

from __future__ import annotations

import posix

from . import wire
from .cgroups import Cgroup
from .rehouse import Errand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Move:
    """Make a control group for a clone that is yet to be born, and move the clone in when it is told which that is.

    To move another process the kernel takes a lock, and when nobody took it for a while it waits for an RCU grace
    period first: ten milliseconds. So whoever does this takes the lock once, by moving itself, while others build. As
    long no other group can be made, so its own is made first. A clone could move itself without that lock; but until it
    was looked at it may share memory with its parent, and what it touched inside would count nowhere when it is gone.
    """

    def __init__(self, cgroup: dict[str, Any]):
        self.group, self._amounts = Cgroup(cgroup["version"], cgroup["folders"]), cgroup["amounts"]
        self._errand: Errand | None = Errand(self._work)

    def _work(self, link: int) -> None:
        self.group.create(**self._amounts)
        self.group.attach(posix.getpid())
        tag, body, _ = wire.receive(link)
        if tag == "move":
            self.group.attach(body["pid"])

    def begin(self, pid: int) -> None:
        """Say which process is to be moved: one that cannot end, or whose parent has no chance to bury it."""
        if self._errand is not None:
            self._errand.tell("move", {"pid": pid})

    def finish(self, ended: list[Errand]) -> Cgroup:
        """Wait until it is inside, and return the group; who did it is to be buried. Raises OSError."""
        errand, self._errand = self._errand, None
        if errand is not None:
            ended.append(errand)
            errand.hear()
        return self.group

    def give_up(self) -> None:
        """Remove the group; nobody needs it."""
        if self._errand is not None:
            self._errand.tell("nobody")
        ended: list[Errand] = []
        try:
            self.finish(ended)
        except OSError:
            pass  # there was no room
        for errand in ended:
            errand.bury()
        self.group.remove()
