"""This machine as a fleet of one node, and a backend over it, for tests and benchmarks."""

import os
import subprocess

from cloche.backends.cloche.leased import LeasedBackend
from cloche.backends.cloche.links import link_to
from cloche.core.fleet import Fleet, FleetSettings
from cloche.core.remote import RemoteAccount
from cloche.fleets.leases import Leases
from cloche.fleets.local import LocalFleet

SILENCE_S = 2.0


class LocalFleetBackend(LeasedBackend):
    """A backend over this machine as a fleet, whose node may use all of it."""

    name, package = "local-fleet", "websockets"
    leases: Leases
    share = 1.0  # of its processors; more than 1 as the library does, which has 4 runs of half a processor on each

    def __init__(self) -> None:
        super().__init__(RemoteAccount(provider=self.name, silence_s=SILENCE_S))
        self.leases = Leases(lambda: self.connect(self._checked()))

    async def connect(self, account: RemoteAccount) -> Fleet:
        """Return a fleet whose node is ready."""
        fleet = LocalFleet(link_to, settings=FleetSettings(share=self.share))
        await fleet.up()
        return fleet

    def _leases(self) -> Leases:
        return self.leases


def node_pid() -> int:
    """Return the node server of this process."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], check=True, capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return next(int(pid) for pid, parent, args in rows if int(parent) == os.getpid() and "cloche node" in args)
