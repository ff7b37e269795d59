"""The rules of a coordinator: what holds after any sequence of events, and one claim for each rule."""

from collections import defaultdict
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloche.fleets.decisions import (
    Action,
    AskBlock,
    Decisions,
    EndLease,
    GiveBack,
    Grant,
    PlacingRules,
    Refuse,
    Sublet,
)
from cloche.fleets.placing import MOST_DIGESTS, NOTHING, ResourceSize
from cloche.fleets.waiting import LeaseRequest

MIB = 1 << 20
SHARES = [ResourceSize(1000, 512 * MIB), ResourceSize(4000, 2048 * MIB), ResourceSize(8000, 1024 * MIB)]
SIZES = [
    ResourceSize(500, 128 * MIB),
    ResourceSize(1000, 512 * MIB),
    ResourceSize(3000, 256 * MIB),
    ResourceSize(16_000, 128 * MIB),
]
KEYS = ["a", "b", "c"]
QUOTA = 6


def total(sizes: Any) -> ResourceSize:
    """Return the sum of sizes."""
    amount = NOTHING
    for size in sizes:
        amount = amount.plus(size)
    return amount


class FleetEvents(RuleBasedStateMachine):
    """Any order of requests, ends, nodes that come and go, answers of the engine, and restarts of the coordinator."""

    has_blocks = True
    scaling_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.now, self.ids = 1000.0, count(1)
        self.rules = PlacingRules(
            quota=QUOTA, has_blocks=self.has_blocks, scaling_s=self.scaling_s, block_idle_s=20.0, patience_s=4.0
        )
        self.waiting: dict[str, list[str]] = defaultdict(list)
        self.requests: dict[str, LeaseRequest] = {}
        self.held: dict[str, tuple[str, float]] = {}
        self.blocks: dict[str, tuple[str, ResourceSize]] = {}
        self.asks: dict[int, AskBlock] = {}
        self.ended: set[str] = set()
        self.decisions = Decisions(self.rules)
        self.decisions.resume(self.now)

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            self.handlers()[type(action)](action)

    def handlers(self) -> dict[type, Any]:
        return {
            Grant: self.granted, Refuse: self.refused, EndLease: self.lease_ended, AskBlock: self.block_asked,
            GiveBack: self.block_given_back,
        }  # fmt: skip

    def granted(self, grant: Grant) -> None:
        request = grant.request
        assert request.id not in self.held | dict.fromkeys(self.ended), "a lease is granted once"
        assert self.waiting[request.key][0] == request.id, "the requests of a key are granted in order of arrival"
        self.waiting[request.key].pop(0)
        assert grant.until == self.now + request.ttl_s
        assert self.decisions.nodes[grant.node].phase == "ready"
        self.held[request.id] = (grant.node, grant.until)

    def refused(self, refusal: Refuse) -> None:
        assert refusal.reason.endswith(".")
        assert refusal.remedy
        if refusal.kind in ("quota", "full"):
            assert len(self.of_key(refusal.request.key)) >= QUOTA
        if refusal.kind == "unmet":
            assert self.now - refusal.request.arrived >= self.rules.unmet_s
        if refusal.request.id in self.waiting[refusal.request.key]:
            self.waiting[refusal.request.key].remove(refusal.request.id)
        self.ended.add(refusal.request.id)

    def lease_ended(self, end: EndLease) -> None:
        assert self.held.pop(end.lease)[0] == end.node
        self.ended.add(end.lease)

    def block_asked(self, ask: AskBlock) -> None:
        assert ask.size != NOTHING
        assert ask.ask not in self.asks
        self.asks[ask.ask] = ask

    def block_given_back(self, back: GiveBack) -> None:
        assert self.blocks.pop(back.block)[0] == back.node

    def of_key(self, key: str) -> list[str]:
        return self.waiting[key] + [lease for lease in self.held if self.requests[lease].key == key]

    def lease(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.held)))

    @rule(share=st.sampled_from(SHARES))
    def join(self, share: ResourceSize) -> None:
        name = f"n{next(self.ids)}"
        if len(self.decisions.nodes) < 4:
            self.carry_out(self.decisions.node_known(name, share, self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.decisions.nodes)
    def become_ready(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.decisions.nodes)))
        self.carry_out(self.decisions.node_ready(name, self.now, digests=("d1",)))

    @rule(data=st.data(), is_lost=st.booleans())
    @precondition(lambda self: len(self.decisions.nodes) > 1)
    def leave(self, data: st.DataObject, is_lost: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.decisions.nodes)))
        step = self.decisions.node_lost if is_lost else self.decisions.node_drained
        self.carry_out(step(name, self.now))
        assert not is_lost or not any(node == name for node, _ in [*self.held.values(), *self.blocks.values()])

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        drained = [name for name, node in self.decisions.nodes.items() if node.phase == "draining"]
        if drained:
            self.carry_out(self.decisions.node_undrained(data.draw(st.sampled_from(sorted(drained))), self.now))

    @rule(
        key=st.sampled_from(KEYS), size=st.sampled_from(SIZES), prefers=st.sampled_from([(), ("d1",), ("d2",)]),
        ttl_s=st.sampled_from([5.0, 60.0]), wait_s=st.sampled_from([3.0, 60.0]),
    )  # fmt: skip
    def ask(self, key: str, size: ResourceSize, prefers: tuple[str, ...], ttl_s: float, wait_s: float) -> None:
        name = f"l{next(self.ids)}"
        request = LeaseRequest(
            id=name, key=key, size=size, prefers=prefers, ttl_s=ttl_s, arrived=self.now, wait_s=wait_s
        )
        self.requests[name] = request
        is_full = len(self.of_key(key)) >= QUOTA
        if not is_full:
            self.waiting[key].append(name)
        self.carry_out(self.decisions.ask(request, self.now))
        assert is_full == (name in self.ended)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        names = [name for names in self.waiting.values() for name in names]
        if names:
            name = data.draw(st.sampled_from(names))
            self.waiting[self.requests[name].key].remove(name)
            self.ended.add(name)
            self.carry_out(self.decisions.cancel(name, self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def release(self, data: st.DataObject) -> None:
        name = self.lease(data)
        self.carry_out(self.decisions.release(name, self.now))
        assert name in self.ended
        assert self.decisions.release(name, self.now) == [], "a second release is without effect"

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def renew(self, data: st.DataObject) -> None:
        name = self.lease(data)
        node, until = self.held[name]
        renewed = self.decisions.renew(name, 30.0, self.now)
        assert renewed == (max(until, self.now + 30.0) if until > self.now else None)
        self.held[name] = (node, renewed or until)

    @rule(data=st.data(), is_given=st.booleans())
    @precondition(lambda self: self.asks)
    def answer(self, data: st.DataObject, is_given: bool) -> None:
        ask = self.asks.pop(data.draw(st.sampled_from(sorted(self.asks))))
        node = ask.node or data.draw(st.sampled_from(["elsewhere", *sorted(self.decisions.nodes)]))
        if not is_given:
            self.carry_out(self.decisions.block_refused(ask.ask, self.now))
            return
        block = f"b{next(self.ids)}"
        self.blocks[block] = (node, ask.size)
        self.carry_out(self.decisions.block_taken(ask.ask, block, node, ask.size, self.now))

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.decisions.tick(self.now))
        assert all(until > self.now for _, until in self.held.values()), "no lease outlives its end"
        for names in self.waiting.values():
            assert all(self.now < self.requests[name].arrived + self.requests[name].wait_s for name in names)

    @rule()
    def restart(self) -> None:
        """Rebuild from the engine's table and the nodes' own lists; requests that waited are lost with their link."""
        nodes = {name: node.share for name, node in self.decisions.nodes.items()}
        self.decisions = Decisions(self.rules)
        self.asks.clear()
        self.waiting.clear()
        for name, share in nodes.items():
            self.carry_out(self.decisions.node_known(name, share, self.now))
        for block, (node, size) in list(self.blocks.items()):
            self.carry_out(self.decisions.block_found(block, node, size, self.now))
        for name in nodes:
            listed = [
                (Sublet(id=lease, key=self.requests[lease].key, node=name, size=self.requests[lease].size), until)
                for lease, (node, until) in self.held.items()
                if node == name
            ]
            self.carry_out(self.decisions.adopt(name, listed, self.now))
            self.carry_out(self.decisions.node_ready(name, self.now))
        self.carry_out(self.decisions.resume(self.now))

    @invariant()
    def the_same_leases_are_held(self) -> None:
        assert {name: lease.node for name, lease in self.decisions.leases.items()} == {
            name: node for name, (node, _) in self.held.items()
        }
        assert sorted(request.id for request in self.decisions.waiting) == sorted(
            name for names in self.waiting.values() for name in names
        )

    @invariant()
    def no_node_is_over_its_capacity(self) -> None:
        for name, node in self.decisions.nodes.items():
            used = total(self.requests[lease].size for lease, (where, _) in self.held.items() if where == name)
            blocks = total(size for where, size in self.blocks.values() if where == name)
            assert used == node.used
            assert used.fits(node.reserved)
            assert node.reserved.plus(node.asked).fits(node.share)
            assert not self.has_blocks or blocks == node.reserved

    @invariant()
    def quotas_hold(self) -> None:
        assert all(len(self.of_key(key)) <= QUOTA for key in KEYS)

    @invariant()
    def no_request_waits_beside_a_free_node(self) -> None:
        kept = self.decisions._kept
        ready = [node for node in self.decisions.nodes.values() if node.phase == "ready"]
        for names in filter(None, self.waiting.values()):
            request = self.requests[names[0]]
            for node in ready:
                if kept is None or kept[1] is not node or kept[0] is request:
                    assert not request.size.fits(node.free)

    @invariant()
    def no_request_waits_beside_space_for_a_block(self) -> None:
        """Whoever has no room is promised some: all that could be asked for is asked for, or the engine refused."""
        asked = [node for node in self.decisions.nodes.values() if node.phase == "ready" and not node.asks_again_at]
        for size in self.decisions._unpromised if self.has_blocks else ():
            for node in asked:
                assert self.decisions._is_kept(node) or not size.fits(node.room)


class EventsWithoutBlocks(FleetEvents):
    """The same with an engine that reserves nothing."""

    has_blocks = False


class EventsWithAutoscaler(FleetEvents):
    """The same with an engine that brings machines."""

    scaling_s = 30.0


MACHINE_SETTINGS = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
for machine in (FleetEvents, EventsWithoutBlocks, EventsWithAutoscaler):
    machine.TestCase.settings = MACHINE_SETTINGS
TestFleetEvents = FleetEvents.TestCase
TestEventsWithoutBlocks = EventsWithoutBlocks.TestCase
TestEventsWithAutoscaler = EventsWithAutoscaler.TestCase


def fleet_of(*shares: ResourceSize, **rules: Any) -> Decisions:
    """Return the decisions of a fleet of ready nodes, without blocks."""
    decisions = Decisions(PlacingRules(has_blocks=False, **rules))
    for number, share in enumerate(shares):
        decisions.node_known(f"n{number}", share, 0.0)
        decisions.node_ready(f"n{number}", 0.0)
    decisions.resume(0.0)
    return decisions


def request(name: str, size: ResourceSize = SIZES[1], key: str = "", prefers: tuple[str, ...] = ()) -> LeaseRequest:
    """Return a request that arrived at 0."""
    return LeaseRequest(id=name, key=key, size=size, prefers=prefers, ttl_s=1000.0, arrived=0.0, wait_s=1000.0)


def granted(actions: list[Action]) -> list[Grant]:
    """Return the grants among actions."""
    return [action for action in actions if isinstance(action, Grant)]


def test_keys_are_served_in_turns() -> None:
    """A key with thousands of requests gets no more than another one with a few; each key's own are in order."""
    decisions = fleet_of(SIZES[1])
    decisions.ask(request("first", key="x"), 0.0)
    for number in range(3000):
        decisions.ask(request(f"a{number}", key="a"), 0.0)
    for number in range(3):
        decisions.ask(request(f"b{number}", key="b"), 0.0)
    order, last = [], "first"
    for _ in range(8):
        last = granted(decisions.release(last, 1.0))[0].request.id
        order.append(last)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """While small ones come and go on all nodes, one node is kept for a large one after `patience_s`."""
    share = ResourceSize(4000, 4096 * MIB)
    decisions, now = fleet_of(share, share, patience_s=10.0), 0.0
    held = [grant.request.id for n in range(8) for grant in granted(decisions.ask(request(f"s{n}"), now))]
    decisions.ask(request("large", share, key="other"), now)
    for number in range(8, 200):
        now += 1.0
        actions = decisions.ask(request(f"s{number}"), now) + decisions.release(held.pop(0), now) + decisions.tick(now)
        held += [grant.request.id for grant in granted(actions)]
        if "large" in held:
            break
    assert now <= 25.0
    assert len(decisions.nodes[decisions.leases["large"].node].leases) == 1


def test_a_lease_goes_where_its_digest_is() -> None:
    """A node that has the digest is preferred while it has room, and the least loaded one otherwise."""
    share = ResourceSize(2000, 4096 * MIB)
    decisions = fleet_of(share, share)
    first = granted(decisions.ask(request("l1", prefers=("d",)), 0.0))[0].node
    assert granted(decisions.ask(request("l2", prefers=("d",)), 0.0))[0].node == first
    other = granted(decisions.ask(request("l3", prefers=("d",)), 0.0))[0].node
    assert other != first
    decisions.release("l1", 0.0)
    decisions.release("l2", 0.0)
    assert granted(decisions.ask(request("l4"), 0.0))[0].node == first
    decisions.node_lost(first, 0.0)
    assert granted(decisions.ask(request("l5", prefers=("d",)), 0.0))[0].node == other


def test_a_digest_that_a_node_does_not_report_counts_for_a_minute() -> None:
    """A lease that prefers it was to bring it; what is reported counts until a later report lacks it."""
    share = ResourceSize(8000, 4096 * MIB)
    decisions = fleet_of(share, share)
    first = granted(decisions.ask(request("l1", prefers=("d",)), 0.0))[0].node
    decisions.node_has(first, ("e",), 1.0)
    assert granted(decisions.ask(request("l2", prefers=("d",)), 59.0))[0].node == first
    other = granted(decisions.ask(request("l3", prefers=("d",)), 120.0))[0].node
    assert other != first
    assert granted(decisions.ask(request("l4", prefers=("e",)), 999.0))[0].node == first
    decisions.node_has(first, [f"x{number}" for number in range(2 * MOST_DIGESTS)], 999.0)
    assert list(decisions.nodes[first].digests)[-1] == "x0"
    assert len(decisions.nodes[first].digests) == MOST_DIGESTS


def test_requests_ask_for_no_more_blocks_than_they_need() -> None:
    """A quarter of a share is asked for at once; requests that fit into it ask for nothing."""
    decisions = Decisions(PlacingRules())
    decisions.node_known("n", ResourceSize(16_000, 16 << 30), 0.0)
    decisions.node_ready("n", 0.0)
    decisions.resume(0.0)
    asks = [ask for n in range(5) for ask in decisions.ask(request(f"l{n}", ResourceSize(1000, 1 << 30)), 0.0)]
    assert [ask.size for ask in asks if isinstance(ask, AskBlock)] == [ResourceSize(4000, 4 << 30)] * 2
    actions = decisions.block_taken(1, "b1", "n", ResourceSize(4000, 4 << 30), 0.1)
    assert [grant.request.id for grant in granted(actions)] == ["l0", "l1", "l2", "l3"]
