"""Room for leases: the nodes of a fleet, their blocks, and a search for the least loaded node.

Theory of operation: `FreeTree` is a segment tree over the nodes. A leaf has the free processors and memory of a node
and its load; an inner place has the maximum of the free amounts and the minimum of the loads below it. A search
descends to the least loaded side first, and leaves out a side without room, or without a lower load than the best so
far. With nodes of one kind it visits one path; its answer is exact for all others, too.

Amounts are integers (thousandths of a processor, bytes), so that sums come back to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import ceil, inf
from typing import Literal, NamedTuple

from cloche.core.record import dataclass, field

MOST_DIGESTS = 1_000  # remembered for each node
EXPECTED_S = 60.0  # in which a node gets what a lease on it prefers, or never
MOST_CANDIDATES = 64  # nodes with a digest that are looked at for one lease
NodePhase = Literal["coming", "starting", "ready", "draining"]


class ResourceSize(NamedTuple):
    """An amount of thousandths of a processor, and of bytes of memory."""

    cpus_m: int
    memory: int

    @classmethod
    def of(cls, cpus: float, memory_bytes: int) -> ResourceSize:
        """Return the amount, rounded up to the next thousandth."""
        return cls(max(ceil(cpus * 1000 - 1e-6), 0), max(memory_bytes, 0))

    @property
    def cpus(self) -> float:
        """Return the processors."""
        return self.cpus_m / 1000

    def fits(self, free: ResourceSize) -> bool:
        """Tell whether there is that much."""
        return self.cpus_m <= free.cpus_m and self.memory <= free.memory

    def plus(self, added: ResourceSize) -> ResourceSize:
        """Return the sum."""
        return ResourceSize(self.cpus_m + added.cpus_m, self.memory + added.memory)

    def minus(self, taken: ResourceSize) -> ResourceSize:
        """Return the difference; its amounts may be negative."""
        return ResourceSize(self.cpus_m - taken.cpus_m, self.memory - taken.memory)

    def times(self, count: int) -> ResourceSize:
        """Return so many times the amount."""
        return ResourceSize(self.cpus_m * count, self.memory * count)

    def least(self, limit: ResourceSize) -> ResourceSize:
        """Return the smaller amount of each kind."""
        return ResourceSize(min(self.cpus_m, limit.cpus_m), min(self.memory, limit.memory))

    def most(self, floor: ResourceSize) -> ResourceSize:
        """Return the larger amount of each kind."""
        return ResourceSize(max(self.cpus_m, floor.cpus_m), max(self.memory, floor.memory))

    def __str__(self) -> str:
        return f"{self.cpus:g} processors and {self.memory / (1 << 20):,.0f} MiB of memory"


NOTHING = ResourceSize(0, 0)


@dataclass(slots=True, kw_only=True)
class HeldBlock:
    """A block of a node; `needed_at` is when leases last filled the node up to it."""

    id: str
    size: ResourceSize
    needed_at: float


@dataclass(slots=True, kw_only=True)
class PlacedNode:
    """Count the capacity of a node. Leases of a node may use all its blocks alike.

    `share` is the most that the fleet may use, `reserved` the sum of the blocks, `used` that of the leases. `asked` is
    the sum of the blocks that the engine was asked for, and `promised` that of the requests `promises`, which wait for
    those blocks, or for a node that starts. `digests` has, for each, until when it counts. A node that `is_whole` has
    one lease at most.
    """

    id: str
    index: int
    share: ResourceSize
    phase: NodePhase = "starting"
    is_whole: bool = False
    reserved: ResourceSize = NOTHING
    used: ResourceSize = NOTHING
    asked: ResourceSize = NOTHING
    promised: ResourceSize = NOTHING
    blocks: dict[str, HeldBlock] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    promises: dict[str, ResourceSize] = field(default_factory=dict)
    digests: dict[str, float] = field(default_factory=dict)
    asks_again_at: float = 0.0

    @property
    def free(self) -> ResourceSize:
        """Return the amount that can be sublet now."""
        return NOTHING if self.is_whole and self.leases else self.reserved.minus(self.used)

    @property
    def room(self) -> ResourceSize:
        """Return the amount for further requests, with the blocks that the node still has space for."""
        if self.is_whole and (self.leases or self.promises):
            return NOTHING
        return self.share.minus(self.used).minus(self.promised)

    @property
    def spare(self) -> ResourceSize:
        """Return the amount that is free and not promised, once the requested blocks are there."""
        if self.is_whole and (self.leases or self.promises):
            return NOTHING
        return self.reserved.plus(self.asked).minus(self.used).minus(self.promised)

    @property
    def load(self) -> float:
        """Return the used part of the share, of the scarcer kind."""
        cpus, memory = self.share
        return max(self.used.cpus_m / cpus if cpus else 1.0, self.used.memory / memory if memory else 1.0)

    def block_for(self, size: ResourceSize, unit: ResourceSize) -> ResourceSize:
        """Return how large a block has to be for a request of this size; `unit` is the usual size of a block."""
        space = self.share.minus(self.reserved).minus(self.asked)
        return size.minus(self.spare.most(NOTHING)).most(unit).least(space).most(NOTHING)

    def unneeded(self, now: float, idle_s: float) -> list[str]:
        """Return the blocks without which all leases have had room for `idle_s`, and note those that are needed."""
        idle, sum_before = [], NOTHING
        for block in self.blocks.values():
            is_needed = not self.used.fits(sum_before)
            if is_needed:
                block.needed_at = now
            if not is_needed and now - block.needed_at >= idle_s:
                idle.append(block.id)
            else:
                sum_before = sum_before.plus(block.size)
        return idle


class FreeTree:
    """Find the least loaded node that has room, by the index of the node."""

    def __init__(self) -> None:
        self._leaves = 1
        self._clear()

    def _clear(self) -> None:
        self._cpus, self._memory = [-1] * (2 * self._leaves), [-1] * (2 * self._leaves)
        self._load = [inf] * (2 * self._leaves)

    def set(self, index: int, free: ResourceSize | None, load: float) -> None:
        """Note the free amount of a node; None takes it out of all searches."""
        if index >= self._leaves:
            self._grow(index + 1)
        place = index + self._leaves
        self._cpus[place], self._memory[place] = (-1, -1) if free is None else free
        self._load[place] = inf if free is None else load
        self._raise_from(place >> 1)

    def _raise_from(self, place: int) -> None:
        cpus, memory, loads = self._cpus, self._memory, self._load
        while place:
            left, right = 2 * place, 2 * place + 1
            most_cpus, most_memory = max(cpus[left], cpus[right]), max(memory[left], memory[right])
            load = min(loads[left], loads[right])
            if cpus[place] == most_cpus and memory[place] == most_memory and loads[place] == load:
                return
            cpus[place], memory[place], loads[place] = most_cpus, most_memory, load
            place >>= 1

    def _grow(self, wanted: int) -> None:
        before = [column[self._leaves :] for column in (self._cpus, self._memory, self._load)]
        while self._leaves < wanted:
            self._leaves *= 2
        self._clear()
        for column, values in zip((self._cpus, self._memory, self._load), before, strict=True):
            column[self._leaves : self._leaves + len(values)] = values  # type: ignore[index]
        for place in range(self._leaves - 1, 0, -1):
            self._raise_only(place)

    def _raise_only(self, place: int) -> None:
        left, right = 2 * place, 2 * place + 1
        self._cpus[place] = max(self._cpus[left], self._cpus[right])
        self._memory[place] = max(self._memory[left], self._memory[right])
        self._load[place] = min(self._load[left], self._load[right])

    @property
    def has_any(self) -> bool:
        """Tell whether any node has anything free."""
        return self._cpus[1] > 0 and self._memory[1] > 0

    def find(self, size: ResourceSize) -> int | None:
        """Return the index of the least loaded node with that much free."""
        (wanted_cpus, wanted_memory), (cpus, memory, loads) = size, (self._cpus, self._memory, self._load)
        best, best_load, places = None, inf, [1]
        while places:
            place = places.pop()
            if cpus[place] < wanted_cpus or memory[place] < wanted_memory or loads[place] >= best_load:
                continue
            if place >= self._leaves:
                best, best_load = place - self._leaves, loads[place]
                continue
            left, right = 2 * place, 2 * place + 1
            places += (right, left) if loads[left] <= loads[right] else (left, right)
        return best


class Digests:
    """The nodes that have a digest. A node has what it reported last, and soon what a lease on it prefers."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, PlacedNode]] = {}

    def report(self, node: PlacedNode, digests: Sequence[str], now: float) -> None:
        """Note all that a node has, those used last first, and forget what it does not have and is not to get."""
        reported = dict.fromkeys(digests[:MOST_DIGESTS])
        for digest, until in list(node.digests.items()):
            if digest not in reported and (until == inf or until <= now):
                self._forget(node, digest)
        for digest in reversed(reported):
            self._note(node, digest, inf)

    def expect(self, node: PlacedNode, digests: Sequence[str], now: float) -> None:
        """Note that a node will soon have these."""
        for digest in digests[:MOST_DIGESTS]:
            self._note(node, digest, max(node.digests.get(digest, 0.0), now + EXPECTED_S))

    def _note(self, node: PlacedNode, digest: str, until: float) -> None:
        node.digests.pop(digest, None)
        node.digests[digest] = until  # the last one again
        self._nodes.setdefault(digest, {})[node.id] = node
        if len(node.digests) > MOST_DIGESTS:
            self._forget(node, next(iter(node.digests)))

    def forget(self, node: PlacedNode) -> None:
        """Forget the digests of a node."""
        for digest in list(node.digests):
            self._forget(node, digest)

    def _forget(self, node: PlacedNode, digest: str) -> None:
        del node.digests[digest]
        nodes = self._nodes[digest]
        del nodes[node.id]
        if not nodes:
            del self._nodes[digest]

    def candidates(self, digests: Sequence[str], now: float) -> list[PlacedNode]:
        """Return nodes that have a digest, those with more of them first, and turn to others at the next call."""
        counts: dict[str, int] = {}
        nodes: dict[str, PlacedNode] = {}
        for digest in digests[:MOST_DIGESTS]:
            have = self._nodes.get(digest, {})
            for node in list(islice(have.values(), MOST_CANDIDATES)):
                have[node.id] = have.pop(node.id)
                if node.digests[digest] > now:
                    counts[node.id] = counts.get(node.id, 0) + 1
                    nodes[node.id] = node
        return sorted(nodes.values(), key=lambda node: (-counts[node.id], node.load))
