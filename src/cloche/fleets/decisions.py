"""The rules of a coordinator: which request gets a lease, where and when. No I/O, and no clock: each call has the time.

Theory of operation: a request waits in `WaitingRequests` until a node has room in its blocks. After each event that
can help a request, `_serve` grants leases in the order of the keys' turns until nothing more has room. For those that
are left it asks the engine for blocks: on a node whose share has space, or on any machine if an autoscaler may bring
one. What will be free on a node is *promised* to requests, so that each request asks once.

A request that smaller ones overtake for `patience_s` gets a node of its own to wait for: that node takes no other lease
until the request has room there. There is one such node at a time.

All calls return actions, which the caller carries out in this order; `coordinator.py` does it with I/O, and
`bench/fleet_simulation.py` with a virtual clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import count, islice
from typing import Literal

from cloche.core.record import dataclass

from .placing import NOTHING, Digests, FreeTree, HeldBlock, PlacedNode, ResourceSize
from .waiting import Deadlines, LeaseRequest, WaitingRequests

STARTING_LOAD = 2.0  # beyond that of a full node: blocks are taken on nodes that serve first
MOST_LOOKED_AT = 64  # nodes with blocks to come, for one request
MOST_LEASES_OF_NODE = 10_000  # that are adopted from a node's own list
RefusalKind = Literal["unmet", "late", "quota", "full"]
EndKind = Literal["released", "expired", "node-lost", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingRules:
    """Settings of the decisions.

    `quota` bounds the leases of a key, with those that it waits for; None is without a limit. `unmet_s` is the time
    after which a request that no node can ever meet is refused; with an autoscaler it is `scaling_s`, if that is more.
    `block_part` is the usual size of a block, as a part of its node's share. With `one_lease` a node has one lease in
    all its life.
    """

    quota: int | None = None
    most_waiting: int = 100_000
    unmet_s: float = 2.0
    scaling_s: float = 0.0
    has_blocks: bool = True
    block_part: float = 0.25
    block_idle_s: float = 300.0
    asks_again_s: float = 5.0
    patience_s: float = 10.0
    one_lease: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublet:
    """Describe a lease that is held."""

    id: str
    key: str
    node: str
    size: ResourceSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Give a request its lease, on a node until a time."""

    request: LeaseRequest
    node: str
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuse a request, with the reason and the remedy in sentences."""

    request: LeaseRequest
    kind: RefusalKind
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskBlock:
    """Ask the engine for a block, on any machine if `node` is empty; `block_taken` or `block_refused` answers `ask`."""

    ask: int
    node: str
    size: ResourceSize


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """Give a block back to the engine."""

    block: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLease:
    """End a lease at its node, where the node can be reached; its holder must not use it any longer.

    `until` is its last end, 0 where that is not known.
    """

    lease: str
    node: str
    kind: EndKind
    until: float = 0.0


Action = Grant | Refuse | AskBlock | GiveBack | EndLease


class Decisions:
    """Decide for one fleet. It begins paused, for `recover` of what an earlier coordinator left; then `resume`."""

    def __init__(self, rules: PlacingRules | None = None):
        self.rules = rules or PlacingRules()
        self.nodes: dict[str, PlacedNode] = {}
        self.leases: dict[str, Sublet] = {}
        self.waiting = WaitingRequests()
        self.granted = self.refused = 0
        self.expected: Collection[ResourceSize] = ()  # shares of nodes that were lost, and may come back
        self.busy_at = 0.0  # when there was a lease or a request
        self._ends: dict[str, float] = {}  # of the leases
        self._end_times, self._wait_times = Deadlines(), Deadlines()
        self._waits: dict[str, float] = {}
        self._held: dict[str, int] = {}  # leases of each key
        self._over: dict[str, float] = {}  # ended leases whose credentials may be valid, with their ends
        self._free, self._room = FreeTree(), FreeTree()
        self._to_come: dict[str, PlacedNode] = {}  # nodes with a block that is asked for, or that serve soon
        self._by_index: list[PlacedNode | None] = []
        self._spare_indexes: list[int] = []
        self._digests = Digests()
        self._asks: dict[int, tuple[PlacedNode, ResourceSize]] = {}
        self._ask_anywhere: int | None = None
        self._asks_anywhere_from = self._looks_for_idle_at = 0.0
        self._ask_ids = count(1)
        self._unpromised: dict[ResourceSize, OrderedDict[str, LeaseRequest]] = {}
        self._promised: dict[str, PlacedNode] = {}
        self._unmet_since: dict[ResourceSize, float] = {}
        self._overtaken: dict[str, float] = {}  # requests without room in their turn, and since when
        self._kept: tuple[LeaseRequest, PlacedNode] | None = None  # a request, and the node that is kept for it
        self._is_paused = True

    # Nodes

    def node_known(self, name: str, share: ResourceSize, now: float, *, is_coming: bool = False) -> list[Action]:
        """Note a node that will serve leases, or its new share. It takes none until `node_ready`.

        No block is asked for on one that `is_coming`.
        """
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = PlacedNode(
                id=name, index=self._new_index(), share=share, is_whole=self.rules.one_lease
            )
            self._by_index[node.index] = node
        elif node.share == share and (node.phase in ("ready", "draining") or is_coming == (node.phase == "coming")):
            return []
        node.share = share
        if node.phase in ("coming", "starting"):
            node.phase = "coming" if is_coming else "starting"
        if not self.rules.has_blocks:
            node.reserved = share
        self._refresh(node)
        return self._serve(now)

    def _new_index(self) -> int:
        if self._spare_indexes:
            return self._spare_indexes.pop()
        self._by_index.append(None)
        return len(self._by_index) - 1

    def node_has(self, name: str, digests: Sequence[str], now: float) -> None:
        """Note the digests that a node has now, those used last first."""
        self._digests.report(self.nodes[name], digests, now)

    def node_ready(self, name: str, now: float, *, digests: Sequence[str] = ()) -> list[Action]:
        """Let a node take leases, unless it is drained; it has these digests."""
        node = self.nodes[name]
        if node.phase in ("coming", "starting"):
            node.phase = "ready"
        self._digests.report(node, digests, now)
        if node.asked == NOTHING:  # else the requests wait for the block that comes
            self._drop_promises(node)
        self._refresh(node)
        return self._serve(now)

    def node_drained(self, name: str, now: float) -> list[Action]:
        """Give a node no further lease. It is empty when it has no `leases`."""
        node = self.nodes[name]
        node.phase = "draining"
        self._drop_kept(node)
        self._drop_promises(node)
        self._refresh(node)
        return self._give_back(node, now, idle_s=0.0) + self._serve(now)

    def node_undrained(self, name: str, now: float) -> list[Action]:
        """Let a drained node take leases again."""
        node = self.nodes[name]
        node.phase = "ready" if node.phase == "draining" else node.phase
        self._refresh(node)
        return self._serve(now)

    def node_lost(self, name: str, now: float) -> list[Action]:
        """Forget a node; its leases and blocks are over."""
        node = self.nodes.get(name)
        if node is None:
            return []
        actions: list[Action] = []
        for lease in sorted(node.leases):
            self._over[lease] = self._ends[lease]
            actions.append(self._end(self.leases[lease], "node-lost"))
        actions += [GiveBack(block=block, node=name) for block in node.blocks]
        self._drop_kept(node)
        self._drop_promises(node)
        self._digests.forget(node)
        self._asks = {ask: asked for ask, asked in self._asks.items() if asked[0] is not node}
        self._to_come.pop(name, None)
        self._free.set(node.index, None, 0.0)
        self._room.set(node.index, None, 0.0)
        del self.nodes[name]
        self._by_index[node.index] = None
        self._spare_indexes.append(node.index)
        return actions + self._serve(now)

    def _refresh(self, node: PlacedNode) -> None:
        """Bring the searches up to date with a node."""
        is_open = node.phase == "ready" and not self._is_kept(node)
        if node.asked != NOTHING or (node.phase == "starting" and node.reserved != NOTHING):
            self._to_come[node.id] = node
        else:
            self._to_come.pop(node.id, None)
        load = node.load
        self._free.set(node.index, node.free if is_open else None, load)
        if self.rules.has_blocks:
            is_asked = (is_open or node.phase == "starting") and not node.asks_again_at
            self._room.set(node.index, node.room if is_asked else None, load if is_open else load + STARTING_LOAD)

    # Blocks

    def block_taken(self, ask: int, block: str, node: str, size: ResourceSize, now: float) -> list[Action]:
        """Note a block that was asked for; one that its node has no space for goes back."""
        is_anywhere = ask == self._ask_anywhere
        asked = self._answered(ask)
        if asked is not None and asked.phase == "ready":  # the requests for one that starts wait for it further
            self._drop_promises(asked)
        actions = self.block_found(block, node, size, now)
        if is_anywhere and any(isinstance(action, GiveBack) for action in actions):
            self._asks_anywhere_from = now + self.rules.asks_again_s
        return actions + self._serve(now)

    def block_found(self, block: str, node: str, size: ResourceSize, now: float) -> list[Action]:
        """Note a block that the engine has for this fleet."""
        placed = self.nodes.get(node)
        if placed is None or placed.phase == "draining" or not placed.reserved.plus(size).fits(placed.share):
            return [GiveBack(block=block, node=node)]
        placed.blocks[block] = HeldBlock(id=block, size=size, needed_at=now)
        placed.reserved = placed.reserved.plus(size)
        self._refresh(placed)
        return self._serve(now)

    def block_refused(self, ask: int, now: float) -> list[Action]:
        """Note that the engine gave no block; that node is asked again later."""
        if ask == self._ask_anywhere:
            self._asks_anywhere_from = now + self.rules.asks_again_s
        node = self._answered(ask)
        if node is not None:
            node.asks_again_at = now + self.rules.asks_again_s
            self._drop_promises(node)
        return self._serve(now)

    def _answered(self, ask: int) -> PlacedNode | None:
        if ask == self._ask_anywhere:
            self._ask_anywhere = None
        node, size = self._asks.pop(ask, (None, NOTHING))
        if node is not None:
            node.asked = node.asked.minus(size)
        return node

    def _give_back(self, node: PlacedNode, now: float, *, idle_s: float) -> list[Action]:
        actions: list[Action] = []
        for block in node.unneeded(now, idle_s):
            node.reserved = node.reserved.minus(node.blocks.pop(block).size)
            actions.append(GiveBack(block=block, node=node.id))
        if actions:
            self._refresh(node)
        return actions

    def _add_unpromised(self, request: LeaseRequest) -> None:
        if self.rules.has_blocks and request.id in self.waiting:
            self._unpromised.setdefault(request.size, OrderedDict())[request.id] = request

    def _drop_promises(self, node: PlacedNode) -> None:
        for name in list(node.promises):
            self._drop_promise(name)
            request = self.waiting.get(name)
            if request is not None:
                self._add_unpromised(request)
        self._refresh(node)

    def _drop_promise(self, request: str) -> None:
        node = self._promised.pop(request, None)
        if node is not None:
            node.promised = node.promised.minus(node.promises.pop(request))
            self._refresh(node)

    def _ask_blocks(self, now: float) -> list[Action]:
        """Ask for blocks for the requests that nothing is promised to, as far as nodes have space."""
        actions: list[Action] = []
        if self._kept is not None and self._kept[0].id in self._unpromised.get(self._kept[0].size, ()):
            request, node = self._kept
            actions += self._promise(request, node) if request.size.fits(node.room) and not node.asks_again_at else []
        for requests in list(self._unpromised.values()):
            while requests and (placed := self._node_to_ask(request := next(iter(requests.values())), now)) is not None:
                actions += self._promise(request, placed)
        if self._unpromised and self.rules.scaling_s and self._ask_anywhere is None and now >= self._asks_anywhere_from:
            self._ask_anywhere = next(self._ask_ids)
            actions.append(AskBlock(ask=self._ask_anywhere, node="", size=next(iter(self._unpromised))))
        return actions

    def _node_to_ask(self, request: LeaseRequest, now: float) -> PlacedNode | None:
        """Return a node with a block on its way that nobody waits for, else one with space for another block."""
        for node in islice(self._to_come.values(), MOST_LOOKED_AT):
            if request.size.fits(node.spare) and not self._is_kept(node) and node.phase != "draining":
                return node
        index = self._room.find(request.size)
        return None if index is None else self._preferred(request, now, is_block=True) or self._node_at(index)

    def _promise(self, request: LeaseRequest, node: PlacedNode) -> list[Action]:
        self._drop_unpromised(request)
        actions: list[Action] = []
        if not request.size.fits(node.spare):
            part = self.rules.block_part
            unit = ResourceSize(int(node.share.cpus_m * part), int(node.share.memory * part))
            size, ask = node.block_for(request.size, unit), next(self._ask_ids)
            self._asks[ask] = (node, size)
            node.asked = node.asked.plus(size)
            actions.append(AskBlock(ask=ask, node=node.id, size=size))
        self._promised[request.id], node.promises[request.id] = node, request.size
        node.promised = node.promised.plus(request.size)
        self._refresh(node)
        return actions

    def _drop_unpromised(self, request: LeaseRequest) -> None:
        requests = self._unpromised.get(request.size)
        if requests is not None:
            requests.pop(request.id, None)
            if not requests:
                del self._unpromised[request.size]

    # Requests and leases

    def ask(self, request: LeaseRequest, now: float) -> list[Action]:
        """Grant a lease, refuse it, or let the request wait; the id of a request is used once."""
        if request.id in self.leases or request.id in self.waiting:
            raise ValueError(f"the id {request.id} is used by another lease")
        self.busy_at = now
        refusal = self._refusal_at_once(request)
        if refusal is not None:
            self.refused += 1
            return [refusal]
        self.waiting.add(request)
        self._waits[request.id] = request.arrived + request.wait_s
        self._wait_times.add(self._waits[request.id], request.id)
        self._add_unpromised(request)
        return self._serve(now)

    def _refusal_at_once(self, request: LeaseRequest) -> Refuse | None:
        quota, held, waiting = self.rules.quota, self._held.get(request.key, 0), self.waiting.count(request.key)
        if quota is not None and held + waiting >= quota:
            reason = (
                f"the quota of {quota} leases at once is used up: this key holds {held} leases, and {waiting} of its "
                "requests wait."
            )
            return Refuse(request=request, kind="quota", reason=reason, remedy="Release leases, or raise fleet.quota.")
        if len(self.waiting) >= self.rules.most_waiting:
            reason = f"{len(self.waiting)} requests wait for a lease, which is the maximum."
            return Refuse(request=request, kind="full", reason=reason, remedy="Try again later, or add nodes.")
        return None

    def cancel(self, request: str, now: float) -> list[Action]:
        """Take a request out of the queue. Without effect for one that does not wait."""
        waiting = self.waiting.get(request)
        if waiting is None:
            return []
        self._no_longer_waits(waiting)
        return self._serve(now)

    def renew(self, lease: str, ttl_s: float, now: float) -> float | None:
        """Return the later end of a lease; None for one that is over."""
        end = self._ends.get(lease)
        if end is None or end <= now:
            return None
        self._ends[lease] = max(end, now + ttl_s)
        return self._ends[lease]

    def release(self, lease: str, now: float, *, until: float = 0.0) -> list[Action]:
        """End a lease, which nothing brings back until `until`, the end of its credential, and its own one."""
        sublet, until = self.leases.get(lease), max(until, self._ends.get(lease, 0.0))
        if until > now:
            self._over[lease] = until
        if sublet is None:
            return []
        self.busy_at = now
        return [self._end(sublet, "released"), *self._shrunk(sublet.node, now), *self._serve(now)]

    def adopt(self, node: str, listed: Iterable[tuple[Sublet, float]], now: float) -> list[Action]:
        """Take over leases with their ends from a node's own list; those that are over are ended there."""
        placed, actions = self.nodes[node], list[Action]()
        for sublet, until in islice(listed, MOST_LEASES_OF_NODE):
            if sublet.id in self._over or until <= now:
                actions.append(EndLease(lease=sublet.id, node=node, kind="unknown"))
            elif sublet.id not in self.leases and sublet.id not in self.waiting:
                self._hold(placed, sublet, until)
        self._refresh(placed)
        return actions + self._serve(now)

    def resume(self, now: float) -> list[Action]:
        """Begin to grant leases."""
        self._is_paused = False
        return self._serve(now)

    def tick(self, now: float) -> list[Action]:
        """Do what is due: ends, refusals, blocks that go back. To be called about twice a second."""
        if self.leases or self.waiting:
            self.busy_at = now
        actions = self._expired(now)
        actions += self._serve(now)
        actions += self._late(now)
        actions += self._unmet(now)
        actions += self._tend_blocks(now) if self.rules.has_blocks else []
        self._over = {lease: until for lease, until in self._over.items() if until > now}
        self._keep_node(now)
        return actions + self._serve(now)

    def _tend_blocks(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for node in self.nodes.values():
            if node.asks_again_at and node.asks_again_at <= now:
                node.asks_again_at = 0.0
                self._refresh(node)
        if now >= self._looks_for_idle_at:
            self._looks_for_idle_at = now + self.rules.block_idle_s / 60
            for node in self.nodes.values():
                actions += self._give_back(node, now, idle_s=self.rules.block_idle_s) if node.blocks else []
        return actions

    def _expired(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for lease in self._end_times.due(now):
            end = self._ends.get(lease)
            if end is not None and end > now:
                self._end_times.add(end, lease)
            elif end is not None:
                sublet = self.leases[lease]
                actions += [self._end(sublet, "expired"), *self._shrunk(sublet.node, now)]
        self._end_times.keep(self._ends)
        return actions

    def _late(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name in self._wait_times.due(now):
            request = self.waiting.get(name)
            if request is not None:
                reason = (
                    f"no node had {request.size} free within {request.wait_s:g} s: {len(self.leases)} leases are held "
                    f"on {len(self.nodes)} nodes, and {len(self.waiting)} requests wait."
                )
                actions.append(self._refuse(request, "late", reason, "Add nodes, or raise fleet.wait."))
        self._wait_times.keep(self._waits)
        return actions

    def _unmet(self, now: float) -> list[Action]:
        """Refuse the requests that no node has been able to meet for a while."""
        shares = {node.share for node in self.nodes.values() if node.phase != "draining"} if self.waiting else set()
        to_come = shares.union(self.expected)
        unmet = [size for size in self.waiting.sizes if not any(size.fits(share) for share in to_come)]
        self._unmet_since = {size: self._unmet_since.get(size, now) for size in unmet}
        limit = now - max(self.rules.unmet_s, self.rules.scaling_s)
        due = {size for size, since in self._unmet_since.items() if since <= limit}
        late = [request for request in self.waiting if request.size in due and request.arrived <= limit] if due else []
        return [self._refuse_unmet(request, shares) for request in late]

    def _refuse_unmet(self, request: LeaseRequest, shares: set[ResourceSize]) -> Refuse:
        if not shares:
            reason = f"no node takes leases, so none can meet {request.size}."
            remedy = 'Mend a node, or add one; "cloche fleet drain NODE --undo" lets a drained one take leases again.'
            return self._refuse(request, "unmet", reason, remedy)
        largest = {max(shares), max(shares, key=lambda share: (share.memory, share.cpus_m))}
        reason = (
            f"no node can ever meet {request.size}: the largest share of a node is "
            f"{' or '.join(map(str, sorted(largest)))}."
        )
        return self._refuse(request, "unmet", reason, "Ask for less, or add a larger node.")

    def _refuse(self, request: LeaseRequest, kind: RefusalKind, reason: str, remedy: str) -> Refuse:
        self._no_longer_waits(request)
        self.refused += 1
        return Refuse(request=request, kind=kind, reason=reason, remedy=remedy)

    def _no_longer_waits(self, request: LeaseRequest, *, is_served: bool = False) -> None:
        self.waiting.remove(request, is_served=is_served)
        del self._waits[request.id]
        self._overtaken.pop(request.id, None)
        self._drop_unpromised(request)
        self._drop_promise(request.id)
        if self._kept is not None and self._kept[0] is request:
            self._drop_kept(self._kept[1])

    # Grants

    def _serve(self, now: float) -> list[Action]:
        """Grant what has room, in the order of turns, and ask for blocks for the others."""
        if self._is_paused or not self.waiting:
            return []
        actions: list[Action] = []
        without_room: set[ResourceSize] = set()
        while (served := self._next_with_room(without_room, now)) is not None:
            actions.append(self._grant(*served, now))
        if self._unpromised:
            actions += self._ask_blocks(now)
        return actions

    def _next_with_room(self, without_room: set[ResourceSize], now: float) -> tuple[LeaseRequest, PlacedNode] | None:
        if self._kept is not None and self._kept[0].size.fits(self._kept[1].free):
            return self._kept
        if not self._free.has_any:
            return None
        for turn, request in self.waiting.in_turn(without_room):
            node = self._node_for(request, now)
            if node is not None:
                self._note_overtaken(without_room, turn, now)
                return request, node
            without_room.add(request.size)
        return None

    def _note_overtaken(self, without_room: set[ResourceSize], turn: int, now: float) -> None:
        """Note the requests whose turn was before this one."""
        for size in without_room:
            entry = self.waiting.next_of(size)
            if entry is not None and entry[0] < turn:
                self._overtaken.setdefault(entry[1].id, now)

    def _node_for(self, request: LeaseRequest, now: float) -> PlacedNode | None:
        index = self._free.find(request.size)
        if index is None:
            return None
        return self._preferred(request, now) or self._node_at(index)

    def _preferred(self, request: LeaseRequest, now: float, *, is_block: bool = False) -> PlacedNode | None:
        """Return a node that has what a request prefers and room for it; with `is_block`, in a further block."""
        for node in self._digests.candidates(request.prefers, now) if request.prefers else ():
            room = node.free if not is_block else NOTHING if node.asks_again_at else node.room
            if node.phase == "ready" and not self._is_kept(node) and request.size.fits(room):
                return node
        return None

    def _grant(self, request: LeaseRequest, node: PlacedNode, now: float) -> Grant:
        self._no_longer_waits(request, is_served=True)
        sublet = Sublet(id=request.id, key=request.key, node=node.id, size=request.size)
        until = now + request.ttl_s
        self._hold(node, sublet, until)
        self.granted += 1
        if request.prefers:
            self._digests.expect(node, request.prefers, now)
        if node.blocks:
            node.unneeded(now, self.rules.block_idle_s)  # notes which blocks are needed now
        self._refresh(node)
        return Grant(request=request, node=node.id, until=until)

    def _hold(self, node: PlacedNode, sublet: Sublet, until: float) -> None:
        self.leases[sublet.id], self._ends[sublet.id] = sublet, until
        self._end_times.add(until, sublet.id)
        self._held[sublet.key] = self._held.get(sublet.key, 0) + 1
        node.leases.add(sublet.id)
        node.used = node.used.plus(sublet.size)

    def _end(self, sublet: Sublet, kind: EndKind) -> EndLease:
        del self.leases[sublet.id]
        until = self._ends.pop(sublet.id)
        self._held[sublet.key] -= 1
        if not self._held[sublet.key]:
            del self._held[sublet.key]
        node = self.nodes[sublet.node]
        node.leases.discard(sublet.id)
        node.used = node.used.minus(sublet.size)
        self._refresh(node)
        return EndLease(lease=sublet.id, node=sublet.node, kind=kind, until=until)

    def _shrunk(self, name: str, now: float) -> list[Action]:
        """Give back the blocks that a node which is drained, or has had its one lease, does not need any longer."""
        node = self.nodes[name]
        if node.is_whole and not node.leases:
            node.phase = "draining"
            self._refresh(node)
        return self._give_back(node, now, idle_s=0.0) if node.phase == "draining" else []

    def _node_at(self, index: int) -> PlacedNode:
        node = self._by_index[index]
        if node is None:
            raise LookupError(f"no node has the index {index}")
        return node

    # The node that is kept for a request

    def _is_kept(self, node: PlacedNode) -> bool:
        return self._kept is not None and self._kept[1] is node

    def _drop_kept(self, node: PlacedNode) -> None:
        if self._is_kept(node):
            self._kept = None
            self._refresh(node)

    def _keep_node(self, now: float) -> None:
        """Keep the least loaded node that is large enough for the request that has been overtaken longest."""
        if self._kept is not None and not self._kept[0].size.fits(self._kept[1].share):
            self._drop_kept(self._kept[1])
        if self._kept is not None or not self._overtaken:
            return
        name, since = min(self._overtaken.items(), key=lambda overtaken: overtaken[1])
        request = self.waiting.get(name)
        if request is None or now - since < self.rules.patience_s:
            return
        nodes = [node for node in self.nodes.values() if node.phase == "ready" and request.size.fits(node.share)]
        if nodes:
            self._kept = (request, min(nodes, key=lambda node: node.load))
            self._refresh(self._kept[1])
