"""The amounts of leases: what one sandbox may ask for, and what runs in a lease at once.

The id of a lease has its amounts, and its credential signs the id. A sandbox that is larger than its lease is refused;
one that has no room beside the others of its lease waits for its turn, and is then refused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cloche.core.errors import PolicyDenied
from cloche.core.limits import Limits, format_size
from cloche.fleets.lease_ids import sublet_of
from cloche.fleets.placing import NOTHING, ResourceSize
from cloche.wire.places import Places
from cloche.wire.problems import Refused
from cloche.wire.queue import NoRows, RunOrder, RunQueue

# Amounts bound what runs; these are for leases of tiny runs.
MOST_RUNS, MOST_RUNS_OF_LEASE = 512, 32
MOST_WAITING, MOST_WAITING_OF_LEASE = 2_048, 64


@lru_cache(maxsize=4_096)
def size_of_lease(lease: str) -> ResourceSize | None:
    """Return the amounts that a lease's id has, None for one without."""
    sublet = sublet_of(lease, "")
    return None if sublet is None else sublet.size


def within_lease(own: Mapping[str, Any], limits: Limits, base: Limits, size: ResourceSize) -> dict[str, Any]:
    """Return the processors and memory of a sandbox: those of `own`, the options that were asked for, else a default.

    A default is no more than the lease has. `limits` are those with `own`, `base` the operator's: the files of a
    sandbox may take as much as its lease has memory, or as the operator permits. Raises PolicyDenied for what was
    asked for and is more.
    """
    if "cpus" in own and ResourceSize.of(limits.cpus, 0).cpus_m > size.cpus_m:
        raise _above("cpuLimit", f"{limits.cpus:g}", f"{size.cpus:g}")
    if "memory" in own and limits.memory_bytes > size.memory:
        raise _above("memoryLimit", format_size(limits.memory_bytes), format_size(size.memory))
    most_disk = max(size.memory, base.disk_bytes)
    if limits.disk_bytes > most_disk:
        raise _above("diskLimit", format_size(limits.disk_bytes), format_size(most_disk))
    return {"cpus": min(limits.cpus, size.cpus), "memory": min(limits.memory_bytes, size.memory)}


def _above(name: str, requested: str, most: str) -> PolicyDenied:
    return PolicyDenied(
        f"{name}: {requested} is above the lease's amount ({most}); ask for less, or take a larger lease"
    )


class LeaseAmounts:
    """Count what runs in each lease. `living` returns what its live sandboxes take."""

    def __init__(self, living: Callable[[str], ResourceSize]):
        self._living = living
        self._taken: dict[str, ResourceSize] = {}
        self._waiting: dict[str, deque[tuple[ResourceSize, asyncio.Future[None]]]] = {}

    def has_room(self, lease: str, size: ResourceSize) -> bool:
        """Tell whether so much more may run in a lease."""
        return size.plus(self._used(lease)).fits(size_of_lease(lease) or NOTHING)

    def _used(self, lease: str) -> ResourceSize:
        return self._living(lease).plus(self._taken.get(lease, NOTHING))

    def check(self, lease: str, size: ResourceSize) -> None:
        """Raise Refused (429) where a lease has no room."""
        if not self.has_room(lease, size):
            raise self._full(lease, size)

    def _full(self, lease: str, size: ResourceSize) -> Refused:
        return Refused(
            429, "lease-full", f"this lease has {size_of_lease(lease)}, of which {self._used(lease)} are in use; "
            f"there is no room for {size}", remedy="end what runs in it, or take a larger lease",
        )  # fmt: skip

    async def take(self, lease: str, size: ResourceSize, wait_s: float) -> None:
        """Wait for room in order of arrival, and take it. Raises Refused (429) where none comes in time."""
        if lease not in self._waiting and self.has_room(lease, size):
            self._note_taken(lease, size)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lease, deque()).append((size, turn))
        try:
            await asyncio.wait([turn], timeout=wait_s)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(lease, size)
            turn.cancel()
            self.note_end(lease)
            raise
        if not turn.done():
            turn.cancel()
            self.note_end(lease)
            raise self._full(lease, size)

    def give_back(self, lease: str, size: ResourceSize) -> None:
        """Give room back."""
        left = self._taken[lease].minus(size)
        self._taken[lease] = left
        if left == NOTHING:
            del self._taken[lease]
        self.note_end(lease)

    def _note_taken(self, lease: str, size: ResourceSize) -> None:
        self._taken[lease] = self._taken.get(lease, NOTHING).plus(size)

    def note_end(self, lease: str) -> None:
        """Give room to the first that wait for it: something of the lease may have ended."""
        queue = self._waiting.get(lease)
        while queue and (queue[0][1].done() or self.has_room(lease, queue[0][0])):
            size, turn = queue.popleft()
            if not turn.done():
                self._note_taken(lease, size)
                turn.set_result(None)
        if queue is not None and not queue:
            del self._waiting[lease]


class LeaseRuns(RunQueue):
    """Run orders of leases: each waits for room in its lease, and then for a place among all."""

    def __init__(self, amounts: LeaseAmounts, *, deadline_s: float):
        super().__init__(
            NoRows(), queue_limit=MOST_WAITING, most_of_one=MOST_WAITING_OF_LEASE, deadline_s=deadline_s,
            places=Places(MOST_RUNS, most_of_one=MOST_RUNS_OF_LEASE),
        )  # fmt: skip
        self._amounts = amounts

    async def _take_place(self, order: RunOrder) -> None:
        try:
            await self._amounts.take(order.project, _size_of(order), self._deadline_s)
        except BaseException:
            self._leave_queue(order)
            raise
        try:
            await super()._take_place(order)
        except BaseException:
            self._amounts.give_back(order.project, _size_of(order))
            raise

    def _give_place_back(self, order: RunOrder) -> None:
        super()._give_place_back(order)
        self._amounts.give_back(order.project, _size_of(order))


def _size_of(order: RunOrder) -> ResourceSize:
    return ResourceSize.of(order.amounts["cpus"], order.amounts["memory"])
