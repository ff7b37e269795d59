"""The coordinator, with an engine and nodes in memory, and a clock that jumps."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from cloche.core.errors import BackendUnavailable, InvalidRequest, NodeLost, NotFound
from cloche.core.fleet import FleetEvent, Lease, LeaseSpec
from cloche.core.record import replace
from cloche.core.remote import HiddenText
from cloche.fleets.coordinator import Coordinator
from cloche.fleets.decisions import PlacingRules
from cloche.fleets.engine import EngineNode, KeepAnswer, NodeReport, ReservedBlock, denied_tag
from cloche.fleets.events import MOST_EVENTS
from cloche.fleets.lease_ids import key_tag, new_lease_id, size_of
from cloche.fleets.signing import LeaseClaim, Signer, Verifier
from cloche.fleets.tending import Reach

from ...harness.virtual_loop import run_virtually

GIB = 1 << 30
SIGNER = Signer()
START = 1_700_000_000.0


def now() -> float:
    """Return the virtual time as seconds since 1970."""
    return START + asyncio.get_running_loop().time()


class Machine:
    """A node's server: what it holds, and how it can fail."""

    def __init__(self, name: str, number: int, cpus: float):
        self.node = EngineNode(
            id=name, cpus=cpus, memory_bytes=8 * GIB, address=f"https://10.0.0.{number}:700", boot="1",
            certificate=f"{number:064x}", hosts=(f"10.1.0.{number}",),
        )  # fmt: skip
        self.verifier = Verifier(SIGNER.public_key, self.node.certificate)
        self.leases: dict[str, float] = {}
        self.ended: list[str] = []
        self.last_ends: list[float] = []  # in how many seconds the last credentials are over; 0: unknown
        self.stuck: set[str] = set()  # leases whose end takes too long
        self.denied: Sequence[str] = ()
        self.told = 0  # how often it was told these
        self.is_cut = self.is_busy = self.is_dead = self.is_draining = self.is_late = False
        self.version = "1.0"
        self.ahead_s = 0.0  # of its clock
        self.digests: tuple[str, ...] = ()

    def use(self, lease: Lease) -> None:
        """Make a first call with a lease."""
        claim = self.verifier.check(lease.credential.reveal(), now=now() + self.ahead_s)
        assert (claim.lease, claim.role) == (lease.id, "lease")
        assert claim.lease not in self.ended
        self.leases[claim.lease] = claim.until


class Link:
    """A link to a machine: calls hang while it is cut."""

    def __init__(self, machine: Machine, credential: Callable[[], HiddenText]):
        self._machine, self._credential = machine, credential

    async def _machine_there(self) -> Machine:
        if self._machine.is_dead:
            raise ConnectionResetError
        if self._machine.is_late:
            raise TimeoutError
        if self._machine.is_cut or self._machine.is_busy:
            await asyncio.Event().wait()
        claim = self._machine.verifier.check(self._credential().reveal(), now=now() + self._machine.ahead_s)
        assert claim.role == "coordinator"
        return self._machine

    async def status(self) -> NodeReport:
        machine = await self._machine_there()
        return NodeReport(
            version=machine.version, is_draining=machine.is_draining, clock=now() + machine.ahead_s,
            digests=machine.digests, digests_tag=str(machine.digests),
        )  # fmt: skip

    async def keep(self, denied: Sequence[str] | None, ttl_s: float, leases: Mapping[str, float]) -> KeepAnswer:
        machine = await self._machine_there()
        if denied is not None:
            machine.denied, machine.told = denied, machine.told + 1
        machine.leases.update({lease: until for lease, until in leases.items() if lease in machine.leases})
        return KeepAnswer(digests_tag=str(machine.digests), denied_tag=denied_tag(machine.denied))

    async def leases(self) -> Mapping[str, float]:
        return dict((await self._machine_there()).leases)

    async def release(self, lease: str, until: float) -> None:
        machine = await self._machine_there()
        if lease in machine.stuck:
            await asyncio.sleep(3)
            raise TimeoutError
        machine.leases.pop(lease, None)
        machine.ended.append(lease)
        machine.last_ends.append(until and until - now())

    async def drain(self, *, undo: bool = False) -> None:
        (await self._machine_there()).is_draining = not undo

    async def close(self) -> None:
        pass


class Machines:
    """An engine: machines, and blocks on them."""

    name = "test"

    def __init__(self, *cpus: float, has_blocks: bool = True, scaling_s: float = 0.0):
        self.has_blocks, self.scaling_s = has_blocks, scaling_s
        self._numbers = count(1)
        self.machines: dict[str, Machine] = {}
        self.held: dict[str, ReservedBlock] = {}
        self.block_s, self.is_broken, self.is_stopped, self.tries = 0.01, False, False, 0
        for amount in cpus:
            self.add(amount)

    def add(self, cpus: float) -> Machine:
        """Add a machine."""
        number = next(self._numbers)
        machine = self.machines[f"n{number}"] = Machine(f"n{number}", number, cpus)
        return machine

    def link(self, node: EngineNode, credential: Callable[[], HiddenText]) -> Link:
        """Connect."""
        return Link(self.machines[node.id], credential)

    async def reach(self, address: str) -> Reach:
        """Try to connect: a machine that is cut is silent, one whose server hangs accepts connections."""
        machine = next(machine for machine in self.machines.values() if machine.node.address == address)
        if machine.is_dead:
            return "refused"
        if not machine.is_cut:
            return "open"
        await asyncio.sleep(1)
        return "silent"

    async def start(self, public_key: str) -> None:
        assert public_key == SIGNER.public_key

    async def nodes(self) -> Sequence[EngineNode]:
        if self.is_broken:
            raise RuntimeError("no answer")
        return [machine.node for machine in self.machines.values()]

    async def blocks(self) -> Sequence[ReservedBlock]:
        return list(self.held.values())

    async def take_block(self, *, node: str, cpus: float, memory_bytes: int) -> ReservedBlock:
        self.tries += 1
        await asyncio.sleep(self.block_s)
        if self.is_broken:
            raise BackendUnavailable("no room")
        where = node or self.add(8.0).node.id
        block = ReservedBlock(id=f"b{next(self._numbers)}", node=where, cpus=cpus, memory_bytes=memory_bytes)
        self.held[block.id] = block
        return block

    async def give_back(self, block: str) -> None:
        self.held.pop(block, None)

    async def stop(self) -> None:
        self.held.clear()
        self.is_stopped = True

    async def close(self) -> None:
        pass


def coordinator_of(engine: Machines, **options: Any) -> Coordinator:
    """Return a coordinator with the virtual clock."""
    loop = asyncio.get_running_loop()
    return Coordinator(engine, engine.link, signer=SIGNER, clock=loop.time, wall=now, reach=engine.reach, **options)


def virtually(*cpus: float, **options: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Run a test in virtual time, with an engine of such machines, and a coordinator that is up."""
    of_engine = {name: options.pop(name) for name in ("has_blocks", "scaling_s") if name in options}

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def work() -> None:
            engine = Machines(*cpus, **of_engine)
            coordinator = coordinator_of(engine, **options)
            await coordinator.start()
            await test(engine, coordinator)
            await coordinator.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left"

        def run() -> None:
            run_virtually(work())

        run.__doc__, run.__name__ = test.__doc__, test.__name__
        return run

    return decorate


async def seconds(amount: float) -> None:
    """Let virtual time pass."""
    await asyncio.sleep(amount)


@virtually(4, 4, has_blocks=False)
async def test_a_lease_goes_to_the_node_that_has_its_packages(engine: Machines, fleet: Coordinator) -> None:
    """Though that one is more loaded: by a report while it serves, and to the next coordinator; until it lacks them."""
    engine.machines["n2"].digests = ("packages:a", "image:b")
    await seconds(2)
    needs = LeaseSpec(prefers=("packages:a",))
    leases = [await fleet.lease(needs) for _ in range(2)]
    assert [lease.node for lease in leases] == ["n2", "n2"]
    for lease in leases:
        engine.machines["n2"].use(lease)
    assert (await fleet.lease(LeaseSpec())).node == "n1"
    await fleet.close()
    later = coordinator_of(engine)
    assert (await later.lease(needs)).node == "n2"
    engine.machines["n2"].digests = ()
    await seconds(61)
    assert (await later.lease(needs)).node == "n1"
    await later.close()


@virtually(4, 4)
async def test_a_block_is_taken_where_the_packages_are(engine: Machines, fleet: Coordinator) -> None:
    """On the node that has them, though it is the more loaded one."""
    engine.machines["n2"].digests = ("packages:a",)
    await seconds(2)
    needs = LeaseSpec(prefers=("packages:a",))
    assert [(await fleet.lease(needs)).node for _ in range(3)] == ["n2"] * 3
    assert (await fleet.lease(LeaseSpec())).node == "n1"


@virtually(2, 2)
async def test_a_lease_opens_its_node_alone_and_ends_there(engine: Machines, fleet: Coordinator) -> None:
    """Leases spread over the nodes; each opens its own node alone; a release, also a second one, ends it for good."""
    first, second = [await fleet.lease(LeaseSpec()) for _ in range(2)]
    assert {first.node, second.node} == {"n1", "n2"}
    engine.machines[first.node].use(first)
    with pytest.raises(ValueError, match="another node"):
        engine.machines[second.node].verifier.check(first.credential.reveal(), now=now())
    await fleet.release(first)
    await fleet.release(first)
    await seconds(1)
    assert first.id in engine.machines[first.node].ended
    assert not engine.machines[first.node].leases
    assert (await fleet.status()).leases == 1
    await fleet.release(second)
    await seconds(1)
    with pytest.raises(NodeLost):
        await fleet.renew(second)


@virtually(2, has_blocks=False)
async def test_those_that_wait_are_served_in_order(engine: Machines, fleet: Coordinator) -> None:
    """Five that wait for the one place get it in the order in which they came."""
    held, order = await fleet.lease(LeaseSpec(cpus=2)), list[int]()

    async def wait_for(number: int) -> None:
        lease = await fleet.lease(LeaseSpec(cpus=2))
        order.append(number)
        await fleet.release(lease)

    tasks = [asyncio.create_task(wait_for(number)) for number in range(5)]
    await seconds(5)
    assert (await fleet.status()).waiting == 5
    await fleet.release(held)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


@virtually(1)
async def test_a_cancelled_caller_holds_nothing(engine: Machines, fleet: Coordinator) -> None:
    """A caller that is cancelled holds nothing, whether it waited or was just granted a lease."""
    held = await fleet.lease(LeaseSpec())
    waiting = asyncio.create_task(fleet.lease(LeaseSpec()))
    await seconds(1)
    await fleet.release(held)  # grants it; the task has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    early = asyncio.create_task(fleet.lease(LeaseSpec(cpus=1)))
    late = asyncio.create_task(fleet.lease(LeaseSpec(cpus=1)))
    await seconds(1)
    late.cancel()
    await fleet.release(await early)
    await seconds(1)
    status = await fleet.status()
    assert (status.leases, status.waiting) == (0, 0)


@virtually(4, 1)
async def test_a_cut_link_ends_the_leases_of_its_node(engine: Machines, fleet: Coordinator) -> None:
    """A node that is silent is lost within 4 s; its leases are over, and end there when the link is back."""
    events = fleet.watch()
    lease = await fleet.lease(LeaseSpec(cpus=2))
    machine = engine.machines[lease.node]
    machine.use(lease)
    machine.is_cut, cut_at = True, now()
    async for event in events:
        if event.kind == "node-lost":
            break
    assert (event.node, now() - cut_at <= 4.2) == (lease.node, True)
    with pytest.raises(NodeLost, match=f"node {lease.node} is over") as raised:
        await fleet.renew(lease)
    assert raised.value.lease == lease.id
    assert [info.state for info in await fleet.nodes() if info.id == lease.node] == ["lost"]
    machine.is_cut = False
    await seconds(8)
    assert machine.leases == {}
    with pytest.raises(NodeLost):
        await fleet.renew(lease)
    assert (await fleet.lease(LeaseSpec(cpus=2))).node == lease.node


@virtually(4)
async def test_a_busy_server_is_not_lost_at_once(engine: Machines, fleet: Coordinator) -> None:
    """A server that is silent on a machine that accepts connections has 15 s; one that is gone is lost within 2 s."""
    lease, machine = await fleet.lease(LeaseSpec(), ttl_s=300), engine.machines["n1"]
    machine.is_busy = True
    await seconds(9)
    machine.is_busy = False
    await seconds(4)
    await fleet.renew(lease)
    machine.is_dead = True
    await seconds(2)
    with pytest.raises(NodeLost):
        await fleet.renew(lease)


@virtually(1)
async def test_a_server_that_has_just_started_may_be_busy(engine: Machines, fleet: Coordinator) -> None:
    """A machine that accepts connections, and is late with its first answers, keeps the block and who waits for it."""
    machine = engine.add(4)
    machine.is_late = True
    asked = asyncio.create_task(fleet.lease(LeaseSpec(cpus=2)))
    await seconds(8)
    machine.is_late = False
    assert ((await asked).node, engine.tries) == (machine.node.id, 1)


@virtually(4, 4)
async def test_a_new_coordinator_knows_what_the_last_one_granted(engine: Machines, fleet: Coordinator) -> None:
    """After a coordinator's death the next one has the same leases, blocks and quotas, also of a lease not yet used."""
    leases = [await fleet.lease(LeaseSpec(cpus=3, memory_bytes=GIB), key="a") for _ in range(2)]
    engine.machines[leases[0].node].use(leases[0])
    unused = leases[1]
    blocks = dict(engine.held)
    await fleet.close()
    heir = coordinator_of(engine, quota=2)
    await heir.start()
    assert engine.held == blocks
    assert set(heir.decisions.leases) == {leases[0].id}
    forged = replace(unused, credential=Signer().credential(LeaseClaim(lease=unused.id, until=9e9, certificate="")))
    with pytest.raises(NodeLost):
        await heir.renew(forged)
    renewed = [await heir.renew(lease, ttl_s=120.0) for lease in leases]
    assert [lease.id for lease in renewed] == [lease.id for lease in leases]
    assert heir.decisions.leases == fleet.decisions.leases
    with pytest.raises(BackendUnavailable, match="quota of 2"):
        await heir.lease(LeaseSpec(), key="a")
    with pytest.raises(BackendUnavailable, match="3 processors"):
        await heir.lease(LeaseSpec(cpus=3, wait_s=2), key="b")
    for lease in renewed:
        await heir.release(lease)
    await heir.close()


@virtually(4, 4, has_blocks=False, quota=2)
async def test_a_node_that_lists_leases_of_others_uses_up_no_quota(engine: Machines, fleet: Coordinator) -> None:
    """A hostile one that comes back with made-up leases: they are ended there, and the key gets its own."""
    await seconds(61)
    machine = engine.machines["n1"]
    machine.is_dead = True
    await seconds(3)
    made_up = [new_lease_id(size_of(0.001, 1 << 20), key_tag("a")) for _ in range(9)]
    machine.leases, machine.is_dead = dict.fromkeys(made_up, now() + 3_000.0), False
    await seconds(5)
    assert [(await fleet.lease(LeaseSpec(), key="a")).node for _ in range(2)]
    assert sorted(machine.ended) == sorted(made_up)


@virtually(1, 4)
async def test_a_request_that_no_node_can_meet_is_refused(engine: Machines, fleet: Coordinator) -> None:
    """It is refused within 3 s, with the amount asked for, the largest nodes, and those that take no lease."""
    engine.machines["n1"].node = replace(engine.machines["n1"].node, reason="it has no Cloche; install it")
    began = now()
    with pytest.raises(BackendUnavailable) as raised:
        await fleet.lease(LeaseSpec(cpus=16))
    assert now() - began <= 3.0
    for part in ("16 processors and 512 MiB", "4 processors and 8,192 MiB", "n1 (starting: it has no Cloche"):
        assert part in str(raised.value)


@virtually(1)
async def test_a_request_that_waits_too_long_is_refused(engine: Machines, fleet: Coordinator) -> None:
    """`wait_s` bounds the time in the queue; wrong amounts are refused at once."""
    lease, began = await fleet.lease(LeaseSpec()), now()
    keeping = asyncio.create_task(seconds(9))
    with pytest.raises(BackendUnavailable, match="within 9 s: 1 leases are held on 1 nodes"):
        await fleet.lease(LeaseSpec(wait_s=9))
    assert 9 <= now() - began <= 10
    await keeping
    for spec, ttl_s in ((LeaseSpec(), 1.0), (LeaseSpec(cpus=0), 60.0), (LeaseSpec(cpus=float("nan")), 60.0)):
        with pytest.raises(InvalidRequest):
            await fleet.lease(spec, ttl_s=ttl_s)
    await fleet.release(lease)


@virtually(1)
async def test_an_autoscaler_brings_what_is_missing(engine: Machines, fleet: Coordinator) -> None:
    """With an autoscaler the engine is asked for a block on any machine, and the lease is on the new one."""
    await fleet.close()
    engine.scaling_s, engine.block_s = 60.0, 20.0
    scaled = coordinator_of(engine)
    await scaled.start()
    lease = await scaled.lease(LeaseSpec(cpus=6))
    assert lease.node == next(reversed(engine.machines))
    await scaled.close()


@virtually(1)
async def test_all_nodes_refuse_guests_the_addresses_of_all(engine: Machines, fleet: Coordinator) -> None:
    """Each node knows the addresses of all, a second after another one joined."""
    engine.add(1.0)
    await seconds(2.5)
    expected = ["10.0.0.1", "10.0.0.2", "10.1.0.1", "10.1.0.2"]
    assert [list(machine.denied) for machine in engine.machines.values()] == [expected, expected]
    told = [machine.told for machine in engine.machines.values()]
    await seconds(10)
    assert [machine.told for machine in engine.machines.values()] == told, "they are sent where they have changed alone"
    engine.machines["n1"].denied = ["10.0.0.9"]
    await seconds(2.5)
    assert list(engine.machines["n1"].denied) == expected


@virtually(2)
async def test_a_node_remembers_an_ended_lease_no_longer_than_its_credentials(
    engine: Machines, fleet: Coordinator
) -> None:
    """It is told when the last one is over, once no earlier coordinator can have signed a later one."""
    await fleet.release(await fleet.lease(LeaseSpec()))
    await seconds(3601)
    lease = await fleet.renew(await fleet.lease(LeaseSpec(), ttl_s=60), ttl_s=90)
    await fleet.release(lease)
    await seconds(1)
    unknown, known = engine.machines["n1"].last_ends
    assert (unknown, round(known)) == (0, 90)


@virtually(64)
async def test_leases_that_do_not_end_hold_up_no_other(engine: Machines, fleet: Coordinator) -> None:
    """The node is asked to end all of them in turns, more at once than it is asked for."""
    leases = [await fleet.lease(LeaseSpec(cpus=0.5)) for _ in range(60)]
    machine = engine.machines["n1"]
    machine.stuck = {lease.id for lease in leases[:40]}
    for lease in leases:
        await fleet.release(lease)
    await seconds(30)
    assert {lease.id for lease in leases[40:]} <= set(machine.ended)
    machine.stuck.clear()
    await seconds(30)
    assert len(machine.ended) == 60


@virtually(1, 1)
async def test_a_drained_node_is_empty_before_it_refuses(engine: Machines, fleet: Coordinator) -> None:
    """A drained node gets no further lease; its server refuses leases once it is empty, also after a restart."""
    held = await fleet.lease(LeaseSpec())
    with pytest.raises(TimeoutError):
        await fleet.drain(held.node, timeout_s=2)
    other = await fleet.lease(LeaseSpec())
    assert other.node != held.node
    machine = engine.machines[held.node]
    machine.use(held)
    assert not machine.is_draining
    draining = asyncio.create_task(fleet.drain(held.node))
    await fleet.release(held)
    await draining
    assert machine.is_draining
    assert [block.node for block in engine.held.values()] == [other.node]
    with pytest.raises(BackendUnavailable):
        await fleet.lease(LeaseSpec(wait_s=3))
    heir = coordinator_of(engine)
    await heir.start()
    assert [info.state for info in await heir.nodes() if info.id == held.node] == ["draining"]
    await heir.close()
    with pytest.raises(NotFound, match="no node n9"):
        await fleet.drain("n9")


@virtually(1)
async def test_a_drain_is_undone(engine: Machines, fleet: Coordinator) -> None:
    """A drained node takes leases again, at its server too; whoever waits for the drain is told."""
    held = await fleet.lease(LeaseSpec())
    draining = asyncio.create_task(fleet.drain("n1"))
    waiting = asyncio.create_task(fleet.lease(LeaseSpec()))
    await seconds(1)
    await fleet.undrain("n1")
    with pytest.raises(BackendUnavailable, match="its drain was undone"):
        await draining
    await fleet.release(held)
    await fleet.release(await waiting)
    await fleet.drain("n1")
    assert engine.machines["n1"].is_draining
    engine.machines["n1"].is_cut = True
    with pytest.raises(BackendUnavailable, match="stays drained: its server does not answer"):
        await fleet.undrain("n1")
    engine.machines["n1"].is_cut = False
    await seconds(8)
    await fleet.undrain("n1")
    assert not engine.machines["n1"].is_draining
    engine.machines["n1"].use(await fleet.lease(LeaseSpec()))
    with pytest.raises(NotFound, match="no node n9"):
        await fleet.undrain("n9")


@virtually(1)
async def test_a_request_waits_for_a_server_that_starts_again(engine: Machines, fleet: Coordinator) -> None:
    """While the only node may come back, for 30 s, it is not refused, unless it needs more than that node."""
    machine = engine.machines["n1"]
    for is_back in (True, False):
        machine.is_dead = True
        await seconds(5)
        began, waiting = now(), asyncio.create_task(fleet.lease(LeaseSpec()))
        with pytest.raises(BackendUnavailable, match="no node takes leases"):
            await fleet.lease(LeaseSpec(cpus=2))
        assert now() - began < 4
        await seconds(15)
        machine.is_dead = not is_back
        if is_back:
            await fleet.release(await waiting)
        else:
            with pytest.raises(BackendUnavailable, match="no node takes leases"):
                await waiting
            assert 20 < now() - began < 40


@virtually(1, 1, 1, 1)
async def test_the_clocks_of_nodes_may_differ(engine: Machines, fleet: Coordinator) -> None:
    """By 20 s, also for leases that are renewed in time; a node that is further off is named, and takes no lease."""
    for machine, ahead_s in zip(engine.machines.values(), (20.0, -20.0, 45.0, 75.0), strict=True):
        machine.ahead_s, machine.node = ahead_s, replace(machine.node, boot="2")
    await seconds(40)
    leases = [await fleet.lease(LeaseSpec()) for _ in range(2)]
    for _ in range(10):
        for lease in leases:
            engine.machines[lease.node].use(lease)
        await seconds(20)
        leases = [await fleet.renew(lease) for lease in leases]
    infos = {info.id: info for info in await fleet.nodes()}
    assert [info.state for info in infos.values()] == ["ready", "ready", "starting", "starting"]
    assert re.search("its clock is 45 s ahead|over by this machine's clock", infos["n3"].reason)
    assert "over by this machine's clock" in infos["n4"].reason


@virtually(4)
async def test_renewed_leases_end_later_at_their_nodes(engine: Machines, fleet: Coordinator) -> None:
    """A renewed lease has a later end, which its node learns with the next heartbeat; others end by their time."""
    renewed, forgotten = [await fleet.lease(LeaseSpec(), ttl_s=10) for _ in range(2)]
    machine = engine.machines["n1"]
    machine.use(renewed)
    machine.use(forgotten)
    later = await fleet.renew(renewed, ttl_s=30)
    await seconds(1.5)
    assert machine.leases == {renewed.id: later.until, forgotten.id: forgotten.until}
    await seconds(10)
    assert machine.ended == [forgotten.id]
    with pytest.raises(NodeLost):
        await fleet.renew(forgotten)


@virtually(4)
async def test_an_engine_that_fails_is_asked_again(engine: Machines, fleet: Coordinator) -> None:
    """While the engine does not answer, leases live on; a request waits until there is a block for it."""
    lease = await fleet.lease(LeaseSpec())
    engine.is_broken = True
    waiting = asyncio.create_task(fleet.lease(LeaseSpec(cpus=2)))
    await seconds(20)
    assert not waiting.done()
    assert 3 <= engine.tries <= 7, "it is asked every few seconds"
    await fleet.renew(lease)
    engine.is_broken = False
    await waiting


@virtually(4, version="2.0")
async def test_a_server_of_another_version_takes_no_lease(engine: Machines, fleet: Coordinator) -> None:
    """It is named with its version; once it has started again with the right one, it is used."""
    with pytest.raises(BackendUnavailable, match=r"no node takes leases.*the node has Cloche 1\.0"):
        await fleet.lease(LeaseSpec(wait_s=9))
    machine = engine.machines["n1"]
    machine.version = "2.0"
    assert (await fleet.up()).nodes[0].state == "ready"
    lease = await fleet.lease(LeaseSpec())
    machine.node = replace(machine.node, boot="2", certificate="f" * 64)
    machine.verifier = Verifier(SIGNER.public_key, "f" * 64)
    await seconds(3)
    with pytest.raises(NodeLost):
        await fleet.renew(lease)


@virtually(4)
async def test_down_ends_everything(engine: Machines, fleet: Coordinator) -> None:
    """All leases end at their nodes, the engine has no block, and requests that wait are refused."""
    lease = await fleet.lease(LeaseSpec(cpus=4))
    engine.machines["n1"].use(lease)
    waiting = asyncio.create_task(fleet.lease(LeaseSpec()))
    await seconds(1)
    await fleet.down()
    assert (engine.machines["n1"].ended, engine.held, engine.is_stopped) == ([lease.id], {}, True)
    for refused in (waiting, fleet.lease(LeaseSpec())):
        with pytest.raises(BackendUnavailable, match="the fleet has ended"):
            await refused


@virtually(4, has_blocks=False)
async def test_a_slow_reader_misses_the_oldest_events(engine: Machines, fleet: Coordinator) -> None:
    """A reader that falls behind has the newest events; one that is closed ends."""
    reader, events = fleet.watch(), list[FleetEvent]()
    for _ in range(MOST_EVENTS):
        lease = await fleet.lease(LeaseSpec())
        await fleet.release(lease)
    await fleet.close()
    async for event in reader:
        events.append(event)
    assert len(events) == MOST_EVENTS
    assert (events[-1].kind, events[-1].lease) == ("release", lease.id)


@virtually(4, rules=PlacingRules(block_idle_s=30.0))
async def test_idle_blocks_go_back(engine: Machines, fleet: Coordinator) -> None:
    """A block without leases goes back after a while, and the fleet says for how long it has been idle."""
    lease = await fleet.lease(LeaseSpec())
    await seconds(60)
    assert len(engine.held) == 1
    with suppress(NodeLost):
        await fleet.release(lease)
    await seconds(20)
    assert len(engine.held) == 1
    await seconds(15)
    assert engine.held == {}
    assert 30 <= fleet.idle_s <= 36
