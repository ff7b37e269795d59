"""A fleet's coordinator: carries out what `decisions.py` decides, with an engine and a link to each node.

Theory of operation: all state of leases is in `Decisions`, which is asked without waiting; so no two tasks see it half
changed. Its actions begin tasks here: blocks are asked for and given back, leases end at their nodes, callers get
answers. One task follows the engine's nodes, one calls `tick`, and each node has those of `TendedNode`.

A coordinator may die at any time. The next one reads the engine's nodes and blocks, asks each node for its leases, and
grants nothing before all nodes have answered or failed to. A lease that no node has heard of yet is known again when
its holder renews it, by its credential, which has this fleet's signature.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cloche.core.errors import BackendUnavailable, ClocheError, NodeLost, NotFound
from cloche.core.fleet import (
    TTL_S,
    EventKind,
    FleetEvent,
    FleetStatus,
    Lease,
    LeaseSpec,
    NodeInfo,
    NodeState,
)

from .decisions import Action, AskBlock, Decisions, EndLease, GiveBack, Grant, PlacingRules, Refuse, Sublet
from .engine import BlockTaken, DeniedAddresses, EngineNode, FleetEngine, LinkTo, NodeReport, TellingEngine
from .events import EventReader, EventReaders
from .hosts import NodeHosts
from .lease_ids import MOST_TTL_S, check_request, key_tag, new_lease_id, size_of, sublet_of
from .placing import ResourceSize
from .signing import BadCredential, LeaseClaim, Signer, Verifier, own_credentials
from .tending import STALL_S, Reach, TendedNode, Timing, reach, sentence_of, why_unfit
from .waiting import LeaseRequest

MOST_PREFERRED = 64
GIVE_BACK_TRIES = 3
MOST_LOST = 1_024
PULSE_S = 0.25
SOONEST_S = 0.05  # between two looks at an engine that tells of changes
log = logging.getLogger("cloche.fleet")
_EVENT_OF_END: Mapping[str, EventKind] = {"released": "release", "expired": "expired", "node-lost": "node-lost"}


class Coordinator:
    """Grant leases on the nodes of an engine. It implements Fleet and FleetOperator.

    `version` is that of this Cloche; a node with another one takes no lease. Without it no versions are compared.
    """

    def __init__(
        self,
        engine: FleetEngine,
        link_to: LinkTo,
        *,
        signer: Signer,
        quota: int | None = None,
        version: str = "",
        timing: Timing | None = None,
        rules: PlacingRules | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        reach: Callable[[str], Awaitable[Reach]] = reach,
    ):
        self.engine, self.timing = engine.name, timing or Timing()
        rules = rules or PlacingRules(quota=quota, has_blocks=engine.has_blocks, scaling_s=engine.scaling_s)
        self.decisions = Decisions(rules)
        self._engine, self._link_to, self._signer, self._version = engine, link_to, signer, version
        self.clock, self._wall, self._reach = clock, wall, reach
        self._listed: dict[str, EngineNode] = {}
        self._tended: dict[str, TendedNode] = {}
        self._draining: set[str] = set()
        self._hosts = NodeHosts()
        self._lost: dict[str, tuple[str, str]] = {}  # by lease: node and reason
        self._waiters: dict[str, asyncio.Future[Lease]] = {}
        self._readers = EventReaders()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._recovered, self._changed = asyncio.Event(), asyncio.Event()
        self._looking = asyncio.Lock()
        self._pulse_at = self._stalled_at = self._began_at = 0.0
        self._is_closed = False
        self._unready_text: str | None = None

    # Start and end

    async def start(self) -> None:
        """Connect to the engine, and take over what an earlier coordinator left. Raises BackendUnavailable."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _started(self) -> None:
        if self._starting is None:
            await self.start()

    async def _start(self) -> None:
        self._pulse_at = self.decisions.busy_at = self._began_at = self.clock()
        await self._engine.start(self._signer.public_key)
        await self._look(is_first=True)
        for block in await self._engine.blocks() if self._engine.has_blocks else ():
            size = ResourceSize.of(block.cpus, block.memory_bytes)
            self._carry_out(self.decisions.block_found(block.id, block.node, size, self.clock()))
        self._begin(self._follow_engine())
        self._begin(self._tick())
        self._begin(self._pulse())
        await asyncio.gather(*(node.tried() for node in list(self._tended.values())))
        self._carry_out(self.decisions.resume(self.clock()))
        self._recovered.set()

    async def up(self) -> FleetStatus:
        """Start, and return the state once a node is ready. Raises BackendUnavailable."""
        await self.start()
        try:
            async with asyncio.timeout(max(self.timing.ready_s, self._engine.scaling_s)):
                while not any(node.phase == "ready" for node in self.decisions.nodes.values()):
                    await self._next_change()
        except TimeoutError:
            raise BackendUnavailable(
                f"no node of engine {self.engine} is ready after {self.timing.ready_s:g} s.{self._unready()}",
                remedy="Mend a node, or add one.",
            ) from None
        return await self.status()

    async def down(self) -> None:
        """End all leases, blocks and node servers."""
        now = self.clock()
        self._is_closed = True
        for request in list(self.decisions.waiting):
            self._carry_out(self.decisions.cancel(request.id, now))
        for lease in list(self.decisions.leases):
            self._carry_out(self.decisions.release(lease, now))
        await asyncio.gather(*(node.ended() for node in self._tended.values()))
        await self._end_tasks()
        await self._engine.stop()
        await self._engine.close()

    async def close(self) -> None:
        """Disconnect. Leases, blocks and node servers live on, for the next coordinator."""
        await self._end_tasks()
        await self._engine.close()

    async def _end_tasks(self) -> None:
        self._is_closed = True
        tasks = [*self._tasks, *([] if self._starting is None else [self._starting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(node.close() for node in self._tended.values()))
        self._tended.clear()
        error = BackendUnavailable("the fleet has ended.", remedy='"cloche fleet up" starts one again.')
        for waiter in self._waiters.values():
            _refuse_waiter(waiter, error)
        self._readers.close()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the coordinator: %r", task.exception(), exc_info=task.exception())

    # Leases

    async def lease(
        self, spec: LeaseSpec, *, ttl_s: float = TTL_S, key: str = "", labels: Mapping[str, str] | None = None
    ) -> Lease:
        """Wait for a place. Raises BackendUnavailable, InvalidRequest."""
        del labels  # nothing is chosen by them yet
        request = self._request(spec, ttl_s, key)
        if self._is_closed:
            raise BackendUnavailable("the fleet has ended.", remedy='"cloche fleet up" starts one again.')
        await self._started()
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiters[request.id] = waiter
        try:
            self._carry_out(self.decisions.ask(request, request.arrived))
            return await waiter
        except asyncio.CancelledError:
            now = self.clock()
            self._carry_out(self.decisions.cancel(request.id, now) + self.decisions.release(request.id, now))
            raise
        finally:
            self._waiters.pop(request.id, None)

    def _request(self, spec: LeaseSpec, ttl_s: float, key: str) -> LeaseRequest:
        check_request(spec, ttl_s)
        size, tag = size_of(spec.cpus, spec.memory_bytes), key_tag(key)
        return LeaseRequest(
            id=new_lease_id(size, tag),
            key=tag,
            size=size,
            prefers=tuple(spec.prefers[:MOST_PREFERRED]),
            ttl_s=ttl_s,
            arrived=self.clock(),
            wait_s=spec.wait_s,
        )

    async def renew(self, lease: Lease, *, ttl_s: float = TTL_S) -> Lease:
        """Return the same lease with a later end. Raises NodeLost for one that is over."""
        check_request(LeaseSpec(), ttl_s)
        await self._started()
        await self._recovered.wait()
        now = self.clock()
        end = self.decisions.renew(lease.id, ttl_s, now)
        if end is None and self._adopt_by_credential(lease):
            end = self.decisions.renew(lease.id, ttl_s, now)
        sublet = self.decisions.leases.get(lease.id)
        if end is None or sublet is None:
            _, reason = self._lost.get(lease.id, ("", ""))
            raise NodeLost(
                f"lease {lease.id} on node {lease.node} is over, with everything that ran there"
                f"{f' ({reason})' if reason else ''}; take another lease.",
                node=lease.node,
                lease=lease.id,
            )
        renewed = self._signed(lease.id, sublet.node, end)
        self._tended[sublet.node].renew(lease.id, renewed.until)
        return renewed

    async def why_lost(self, lease: str, wait_s: float) -> str:
        """Return why the node of a lease was lost, as far as that is known within `wait_s`."""
        known = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while lease not in self._lost:
                    await self._next_change()
                if isinstance(self._engine, TellingEngine):
                    known = await self._engine.why_lost(self._lost[lease][0])
        return known or self._lost.get(lease, ("", ""))[1]

    def _note_lost(self, node: str, leases: Iterable[str], reason: str) -> None:
        self._lost |= dict.fromkeys(leases, (node, reason))
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]

    def _adopt_by_credential(self, lease: Lease) -> bool:
        """Take a lease over that no node has reported, if its credential is of this fleet and its node answers."""
        tended, sublet = self._tended.get(lease.node), sublet_of(lease.id, lease.node)
        if tended is None or not tended.is_ready or sublet is None or lease.id in tended.ending:
            return False
        verifier = Verifier(self._signer.public_key, tended.node.certificate)
        try:
            claim = verifier.check(lease.credential.reveal(), now=self._wall())
        except BadCredential:
            return False
        if claim.lease != lease.id or claim.role != "lease":
            return False
        now = self.clock()
        self._carry_out(self.decisions.adopt(lease.node, [(sublet, now + claim.until - self._wall())], now))
        return True

    async def release(self, lease: Lease) -> None:
        """Give a place back. Without effect for one that is over."""
        await self._started()
        await self._recovered.wait()
        now = self.clock()
        until = now + min(max(lease.until - self._wall(), 0.0), MOST_TTL_S)
        is_known = lease.id in self.decisions.leases
        self._carry_out(self.decisions.release(lease.id, now, until=until))
        tended = self._tended.get(lease.node)
        if not is_known and until > now and tended is not None and sublet_of(lease.id, lease.node) is not None:
            tended.end(lease.id)

    def _signed(self, lease: str, node: str, end: float) -> Lease:
        server = self._tended[node].node
        until = self._wall() + end - self.clock()
        claim = LeaseClaim(lease=lease, until=until, certificate=server.certificate)
        return Lease(
            id=lease,
            engine=self.engine,
            node=node,
            address=server.address,
            certificate=server.certificate,
            credential=self._signer.credential(claim),
            until=until,
        )

    # What is seen

    async def nodes(self) -> Sequence[NodeInfo]:
        """Return the nodes."""
        return tuple(self._described(node) for node in self._listed.values())

    def _described(self, node: EngineNode) -> NodeInfo:
        tended, placed = self._tended.get(node.id), self.decisions.nodes.get(node.id)
        report = None if tended is None else tended.report
        state: NodeState = "starting"
        if placed is not None:
            state = "starting" if placed.phase == "coming" else placed.phase
        elif tended is not None and tended.was_ready:
            state = "lost"
        return NodeInfo(
            id=node.id,
            address=node.address,
            state=state,
            cpus=node.cpus,
            memory_bytes=node.memory_bytes,
            leases=0 if placed is None else len(placed.leases),
            version="" if report is None else report.version,
            level="" if report is None else report.level,
            reason=node.reason or ("" if tended is None else tended.reason),
        )

    async def status(self) -> FleetStatus:
        """Return nodes and counts."""
        return FleetStatus(
            engine=self.engine,
            nodes=tuple(await self.nodes()),
            leases=len(self.decisions.leases),
            waiting=len(self.decisions.waiting),
            granted=self.decisions.granted,
            refused=self.decisions.refused,
            version=self._version,
        )

    def watch(self) -> EventReader:
        """Iterate over events from now on. A reader that falls behind misses the oldest."""
        return self._readers.open()

    @property
    def idle_s(self) -> float:
        """Return how long there has been no lease and no request."""
        is_busy = bool(self.decisions.leases or self.decisions.waiting)
        return 0.0 if is_busy else self.clock() - self.decisions.busy_at

    def _tell(self, kind: EventKind, *, node: str = "", lease: str = "", detail: str = "") -> None:
        self._readers.put(FleetEvent(kind=kind, at=self._wall(), node=node, lease=lease, detail=detail))

    # Nodes

    async def drain(self, node: str, *, timeout_s: float | None = None) -> None:
        """Give a node no further lease, and wait until it has none. Raises NotFound, TimeoutError."""
        self._check_listed(node)
        self._draining.add(node)
        if node in self.decisions.nodes:
            self._carry_out(self.decisions.node_drained(node, self.clock()))
        async with asyncio.timeout(timeout_s):
            while (placed := self.decisions.nodes.get(node)) is not None and placed.leases:
                await self._next_change()
                self._check_draining(node)
        tended = self._tended.get(node)
        if tended is not None and tended.is_ready:
            await tended.ended()
            self._check_draining(node)
            await self._drain_server(tended)
        self._tell("node-drained", node=node)

    def _check_listed(self, node: str) -> None:
        if node not in self._listed:
            raise NotFound(f"the fleet has no node {node}; its nodes are {', '.join(sorted(self._listed)) or 'none'}")

    def _check_draining(self, node: str) -> None:
        if node not in self._draining:
            raise BackendUnavailable(f"node {node} takes leases again: its drain was undone.", remedy="Drain it again.")

    async def undrain(self, node: str) -> None:
        """Let a drained node take leases again. Raises NotFound, and BackendUnavailable if it does not answer."""
        self._check_listed(node)
        self._draining.discard(node)
        tended = self._tended.get(node)
        if tended is None or not tended.was_ready:
            return
        try:
            await tended.drain(undo=True)
        except (ClocheError, OSError) as error:
            self._draining.add(node)
            reason = f"node {node} stays drained: its server does not answer ({str(error) or type(error).__name__})."
            raise BackendUnavailable(reason, remedy="Try again once it does.") from error
        if node in self.decisions.nodes:
            self._carry_out(self.decisions.node_undrained(node, self.clock()))
            self._tell("node-up", node=node)

    async def _drain_server(self, tended: TendedNode) -> None:
        """Let an empty node's server refuse leases, too; before that it would refuse those that are not used yet."""
        try:
            await tended.drain()
        except (ClocheError, OSError) as error:
            log.warning("node %s is drained, but does not know it: %s", tended.node.id, error)

    async def _follow_engine(self) -> None:
        while True:
            await self._next_look()
            try:
                await self._look()
            except Exception as error:  # the nodes that are known go on
                log.error("the nodes of engine %s: %r", self.engine, error, exc_info=error)

    async def _next_look(self) -> None:
        """Wait for a beat, or for less where the engine tells of a change."""
        if not isinstance(self._engine, TellingEngine):
            await asyncio.sleep(self.timing.beat_s)
            return
        await asyncio.sleep(SOONEST_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(self.timing.beat_s - SOONEST_S, 0.0)):
                await self._engine.changed.wait()
        self._engine.changed.clear()

    async def _look(self, *, is_first: bool = False) -> None:
        """Bring the nodes up to date with the engine's; they stay as they are while the engine does not answer."""
        async with self._looking:
            try:
                async with asyncio.timeout(max(self.timing.silence_s, 10 * self.timing.beat_s)):
                    listed = {node.id: node for node in await self._engine.nodes()}
            except Exception as error:
                log.warning("engine %s does not list its nodes: %r", self.engine, error)
                if is_first:
                    raise _unlisted(self.engine, error) from error
                return
            self._hosts.note(listed.values(), self.clock())
            before, self._listed = self._listed, listed
            for name in before.keys() - listed.keys():
                self._forget(name, "the engine has it no longer")
            for name, node in listed.items():
                self._take_up(name, node)
            self.decisions.expected = {_share(node) for name, node in listed.items() if self._may_come_back(name, node)}
            self._changed.set()

    def _may_come_back(self, name: str, node: EngineNode) -> bool:
        """Tell whether a node that served and is silent may soon serve again, as one whose server is started again."""
        tended = self._tended.get(name)
        if tended is None or not tended.was_ready or node.reason or name in self.decisions.nodes:
            return False
        return name not in self._draining and self.clock() - tended.silent_since < self.timing.back_s

    def _take_up(self, name: str, node: EngineNode) -> None:
        tended = self._tended.get(name)
        if tended is not None and (node.reason or (node.address and _server_of(tended.node) != _server_of(node))):
            self._forget(name, node.reason or "its server has started again")
            tended = None
        if node.reason:
            self._lose(name, node.reason)
            return
        if tended is not None and node.address:
            tended.node = node
        if name in self.decisions.nodes or tended is None:
            self._carry_out(self.decisions.node_known(name, _share(node), self.clock(), is_coming=node.is_coming))
        if node.is_leaving and (placed := self.decisions.nodes.get(name)) is not None and placed.phase != "draining":
            self._draining.add(name)
            self._carry_out(self.decisions.node_drained(name, self.clock()))
        if tended is None and node.address and node.certificate:
            credentials = own_credentials(self._signer, node.certificate, self._wall)
            self._tended[name] = TendedNode(self, node, self._link_to, credentials)

    def _forget(self, name: str, reason: str) -> None:
        """End all that there is of a node, or of its server before it started again."""
        tended = self._tended.pop(name, None)
        self._lose(name, reason)
        if tended is not None:
            now = self.clock()
            for lease in tended.ending:
                self.decisions.release(lease, now, until=now + self.timing.alone_s)
            self._begin(tended.close())

    def _lose(self, name: str, reason: str) -> None:
        placed = self.decisions.nodes.get(name)
        if placed is not None:
            is_used_up = placed.is_whole and placed.phase == "draining" and not placed.leases
            is_told = placed.phase in ("ready", "draining") and not is_used_up
            self._note_lost(name, placed.leases, reason)
            self._carry_out(self.decisions.node_lost(name, self.clock()))
            if is_told:
                self._tell("node-lost", node=name, detail=reason)

    # What a node's task calls

    async def reach(self, address: str) -> Reach:
        """Try to connect to a node's address."""
        return await self._reach(address)

    def denied(self) -> DeniedAddresses:
        """Return the addresses of all nodes."""
        return self._hosts.denied

    def node_answers(self, node: TendedNode, report: NodeReport, leases: Mapping[str, float]) -> None:
        """Let a node take leases. Raises BackendUnavailable for one of another version, or whose clock is wrong."""
        name, now = node.node.id, self.clock()
        if self._tended.get(name) is not node:
            return
        if (unfit := why_unfit(report, version=self._version, wall=self._wall())) is not None:
            self._lose(name, unfit.reason)
            raise unfit
        self._carry_out(self.decisions.node_known(name, _share(node.node), now))
        self._carry_out(self.decisions.adopt(name, self._listed_leases(name, leases), now))
        node.is_ready = True
        if report.is_draining:
            self._draining.add(name)
        if name in self._draining:
            self._carry_out(self.decisions.node_drained(name, now))
            return
        self._tell("node-up", node=name, detail=report.version)
        self._carry_out(self.decisions.node_ready(name, now, digests=report.digests))

    def node_has(self, node: TendedNode, digests: Sequence[str]) -> None:
        """Prefer a node for leases that need what it has now."""
        name = node.node.id
        if self._tended.get(name) is node and name in self.decisions.nodes:
            self.decisions.node_has(name, digests, self.clock())

    def _listed_leases(self, node: str, leases: Mapping[str, float]) -> Iterator[tuple[Sublet, float]]:
        """Yield the leases of a node's list that a coordinator may have granted; all are over after `alone_s`."""
        is_late = self.clock() - self._began_at > self.timing.alone_s
        for lease, until in leases.items():
            sublet, left_s = sublet_of(lease, node), until - self._wall()
            if sublet is not None and left_s <= MOST_TTL_S:
                yield sublet, 0.0 if is_late else self.clock() + left_s

    def node_is_silent(self, node: TendedNode) -> None:
        """End the leases of a node that does not answer; one that never did is not waited for."""
        if self._tended.get(node.node.id) is node:
            if node.node.id in self.decisions.nodes:
                node.silent_since = self.clock()
            self._lose(node.node.id, node.reason)

    def has_stalled(self) -> bool:
        """Tell whether this event loop stood still within the last moments, so that it could hear no node."""
        now = self.clock()
        return now - self._pulse_at > STALL_S or now - self._stalled_at < STALL_S

    async def _pulse(self) -> None:
        while True:
            self._pulse_at = self.clock()
            await asyncio.sleep(PULSE_S)
            now = self.clock()
            if now - self._pulse_at > STALL_S:
                self._stalled_at = now

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.timing.tick_s)
            try:
                self._carry_out(self.decisions.tick(self.clock()))
            except Exception as error:  # the next tick does what is due
                log.error("the coordinator: %r", error, exc_info=error)

    # Actions

    def _carry_out(self, actions: Sequence[Action]) -> None:
        self._unready_text = None
        for action in actions:
            self._HANDLERS[type(action)](self, action)
        self._changed.set()

    def _grant(self, grant: Grant) -> None:
        waiter = self._waiters.get(grant.request.id)
        if waiter is None or waiter.done():  # its caller was cancelled, and gives it back
            return
        waiter.set_result(self._signed(grant.request.id, grant.node, grant.until))
        self._tell("lease", node=grant.node, lease=grant.request.id)

    def _refuse(self, refusal: Refuse) -> None:
        unready = self._unready() if refusal.kind in ("unmet", "late") else ""
        known = self._engine.remedy(unready) if isinstance(self._engine, TellingEngine) else ""
        reason, remedy = refusal.reason + unready, known or refusal.remedy
        waiter = self._waiters.get(refusal.request.id)
        if waiter is not None:
            _refuse_waiter(waiter, BackendUnavailable(reason, remedy=remedy))
        self._tell("refused", lease=refusal.request.id, detail=reason)

    def _unready(self) -> str:
        """Return a sentence about the nodes that take no lease, made once for all refusals of a decision."""
        if self._unready_text is None:
            infos = map(self._described, self._listed.values())
            self._unready_text = sentence_of([info for info in infos if info.state != "ready"])
        return self._unready_text

    def _end_lease(self, end: EndLease) -> None:
        tended = self._tended.get(end.node)
        if tended is not None and end.kind != "node-lost":
            tended.end(end.lease, self._last_end(end.until))
        if end.kind in _EVENT_OF_END:
            self._tell(_EVENT_OF_END[end.kind], node=end.node, lease=end.lease)

    def _last_end(self, until: float) -> float:
        """Return when the last credential of a lease is over, 0 where an earlier coordinator may have signed later."""
        now = self.clock()
        return self._wall() + max(until - now, 0.0) if until and now - self._began_at > MOST_TTL_S else 0.0

    def _ask_block(self, ask: AskBlock) -> None:
        self._begin(self._take_block(ask))

    async def _take_block(self, ask: AskBlock) -> None:
        limit_s = self.timing.block_s if ask.node else self._engine.scaling_s + self.timing.block_s
        try:
            async with asyncio.timeout(limit_s):
                block = await self._engine.take_block(node=ask.node, cpus=ask.size.cpus, memory_bytes=ask.size.memory)
        except Exception as error:
            where = f"on node {ask.node}" if ask.node else "on any machine"
            level = logging.DEBUG if isinstance(error, BlockTaken) else logging.WARNING
            log.log(level, "engine %s gave no block %s: %s", self.engine, where, str(error) or type(error).__name__)
            self._carry_out(self.decisions.block_refused(ask.ask, self.clock()))
            return
        if block.node not in self.decisions.nodes:
            await self._look()
        size = ResourceSize.of(block.cpus, block.memory_bytes)
        self._carry_out(self.decisions.block_taken(ask.ask, block.id, block.node, size, self.clock()))
        if block.node not in self._tended:  # a machine whose server is known only now
            await self._look()

    def _give_back(self, back: GiveBack) -> None:
        self._begin(self._return_block(back))

    async def _return_block(self, back: GiveBack) -> None:
        for tries_left in reversed(range(GIVE_BACK_TRIES)):
            try:
                async with asyncio.timeout(self.timing.block_s):
                    await self._engine.give_back(back.block)
                return
            except Exception as error:
                log.warning("engine %s keeps block %s: %r", self.engine, back.block, error)
            await asyncio.sleep(self.timing.beat_s if tries_left else 0)

    _HANDLERS: Mapping[type[Action], Callable[[Coordinator, Any], None]] = {  # pyright: ignore[reportAssignmentType]
        Grant: _grant, Refuse: _refuse, EndLease: _end_lease, AskBlock: _ask_block, GiveBack: _give_back,
    }  # fmt: skip


def _refuse_waiter(waiter: asyncio.Future[Lease], error: ClocheError) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def _unlisted(engine: str, error: Exception) -> ClocheError:
    if isinstance(error, ClocheError):
        return error
    reason = f"engine {engine} does not list its nodes: {str(error) or type(error).__name__}."
    return BackendUnavailable(reason, remedy="Look at the engine, and start again.")


def _share(node: EngineNode) -> ResourceSize:
    return ResourceSize.of(node.cpus, node.memory_bytes)


def _server_of(node: EngineNode) -> tuple[str, str, str]:
    return node.address, node.certificate, node.boot
