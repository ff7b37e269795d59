"""What every fleet does, whatever its engine: each claim is a function of a `World`, and `checked` tries all of them.

For Ray they are tried in a process on a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

import cloche
from cloche.backends.cloche.leased import _NodeBackend
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, NodeLost, NotFound
from cloche.core.fleet import LEAST_TTL_S, Lease, LeaseSpec
from cloche.core.record import replace
from cloche.core.remote import LeasedPlace, RemoteAccount
from cloche.fleets.leases import OVER_S

QUOTA, MIB, PATIENCE_S = 4, 1 << 20, 60.0
PART = LeaseSpec(cpus=0.2, memory_bytes=64 * MIB, wait_s=PATIENCE_S)
OPTIONS: dict[str, Any] = {"cpus": PART.cpus, "memory": "64m"}


@dataclass(frozen=True)
class World:
    """A fleet whose keys have a quota of `QUOTA`, with `count` nodes.

    `lose` ends the server of a node by SIGKILL; the engine brings another one.
    """

    fleet: Any  # a Fleet
    operator: Any  # a FleetOperator
    count: int
    lose: Callable[[str], Awaitable[None]]

    async def whole(self) -> LeaseSpec:
        """Return what takes all processors of a node."""
        cpus = max(node.cpus for node in await self.fleet.nodes())
        return replace(PART, cpus=cpus)

    async def until(self, condition: Callable[[Any], object], what: str) -> None:
        """Wait until a condition holds of the fleet's state."""
        ends = time.monotonic() + PATIENCE_S
        while not condition(status := await self.fleet.status()):
            assert time.monotonic() < ends, f"{what}: {status}"
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def held(self, *specs: LeaseSpec, key: str = "") -> AsyncIterator[list[Lease]]:
        """Hold leases during the body."""
        leases = [await self.fleet.lease(spec, key=key) for spec in specs]
        try:
            yield leases
        finally:
            for lease in leases:
                await self.fleet.release(lease)
        await self.until(lambda status: not status.leases, "all leases are released")

    def backend(self, lease: Lease) -> _NodeBackend:
        """Return the backend of a lease."""
        place = LeasedPlace(
            engine=lease.engine, node=lease.node, lease=lease.id, credential=lease.credential,
            is_over=lambda: self.is_over(lease),
        )  # fmt: skip
        account = RemoteAccount(provider="cloche", url=lease.address, certificate=lease.certificate, place=place)
        return _NodeBackend(account, "")

    async def is_over(self, lease: Lease) -> bool:
        """Tell whether a lease is over, or will be within seconds."""
        ends = time.monotonic() + OVER_S
        with contextlib.suppress(NodeLost):
            while time.monotonic() < ends:
                await self.fleet.renew(lease)
                await asyncio.sleep(0.05)
            return False
        return True

    async def run(self, lease: Lease, code: str, **more: Any) -> Any:
        """Run code in the place of a lease."""
        return await cloche.arun(code, backend=self.backend(lease), **OPTIONS, **more)


async def check_over(world: World, lease: Lease) -> None:
    """Check that a lease can be neither renewed nor used, and that its second end has no effect."""
    for use in (world.fleet.renew(lease), world.run(lease, "print(1)")):
        with pytest.raises(NodeLost) as raised:
            await use
        assert (raised.value.node, raised.value.lease) == (lease.node, lease.id)
    await world.fleet.release(lease)


async def a_lease_is_a_place_until_its_end(world: World) -> None:
    """Code runs there; a renewed lease ends later; a released one is over at its node, and events tell of both."""
    events = world.fleet.watch()
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.5)  # a reader on Ray asks for what is new
    async with world.held(PART, key="k") as (lease,):
        assert (lease.engine, lease.until > time.time()) == (world.fleet.engine, True)
        assert lease.node in {node.id for node in await world.fleet.nodes() if node.state == "ready"}
        result = await world.run(lease, "print(6 * 7)")
        assert (result.stdout, result.meta["remote"]["node"]) == ("42\n", lease.node), result
        renewed = await world.fleet.renew(lease, ttl_s=90)
        assert (renewed.id, renewed.node, renewed.until > lease.until) == (lease.id, lease.node, True)
        assert (await world.fleet.status()).leases == 1
    await check_over(world, renewed)
    seen = [await reading]
    while (seen[-1].kind, seen[-1].lease) != ("release", lease.id):
        seen.append(await asyncio.wait_for(anext(events), PATIENCE_S))
    assert ("lease", lease.id, lease.node) in {(event.kind, event.lease, event.node) for event in seen}


async def a_lease_that_nobody_renews_is_over(world: World) -> None:
    """It ends by its own time, neither before nor without it."""
    lease = await world.fleet.lease(PART, ttl_s=LEAST_TTL_S)
    kept = await world.fleet.lease(PART, ttl_s=LEAST_TTL_S)
    await asyncio.sleep(LEAST_TTL_S / 2)
    kept = await world.fleet.renew(kept)
    await world.until(lambda status: status.leases == 1, "one is over")
    assert time.time() > lease.until - 1
    await check_over(world, lease)
    await world.fleet.release(await world.fleet.renew(kept))


async def what_no_node_can_have_is_refused_at_once(world: World) -> None:
    """The error says what was asked for, and what there is; wrong amounts are the caller's error."""
    began, whole = time.monotonic(), await world.whole()
    text = f"no node can ever meet 4096 processors .*: the largest share of a node is {whole.cpus:g} processors"
    with pytest.raises(BackendUnavailable, match=text):
        await world.fleet.lease(LeaseSpec(cpus=4096), key="e")  # its own key alone waits for it
    assert time.monotonic() - began < 10
    with pytest.raises(InvalidRequest):
        await world.fleet.lease(LeaseSpec(cpus=0))


async def requests_wait_in_order_fairly_and_bounded(world: World) -> None:
    """Leases spread over the nodes; then keys take turns, each in order; one that waits too long is refused."""
    whole, order = await world.whole(), list[str]()
    tasks = list[asyncio.Task[None]]()

    async def wait_for(name: str) -> None:
        lease = await world.fleet.lease(whole, key=name[0])
        order.append(name)
        await world.fleet.release(lease)

    async with world.held(*[whole] * world.count, key="x") as leases:
        assert len({lease.node for lease in leases}) == world.count
        for name in ("a1", "a2", "c1", "a3", "b1"):
            tasks.append(asyncio.create_task(wait_for(name)))
            await world.until(lambda status: status.waiting == len(tasks), name)
        tasks.pop(2).cancel()
        await world.until(lambda status: status.waiting == 4, "a cancelled request waits no longer")
        text = f"no node had {whole.cpus:g} processors and 64 MiB of memory free within 1 s"
        with pytest.raises(BackendUnavailable, match=text):
            await world.fleet.lease(replace(whole, wait_s=1.0), key="d")
        await world.fleet.release(leases[0])
        await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "a2", "a3"], order


async def a_key_has_no_more_than_its_quota(world: World) -> None:
    """Requests that wait count as leases do; other keys are free."""
    async with world.held(*[await world.whole()] * world.count, key="q"):
        waiting = [asyncio.create_task(world.fleet.lease(PART, key="q")) for _ in range(QUOTA - world.count)]
        await world.until(lambda status: status.waiting == len(waiting), "they wait")
        with pytest.raises(BackendUnavailable, match=f"the quota of {QUOTA} leases at once is used up"):
            await world.fleet.lease(PART, key="q")
        other = asyncio.create_task(world.fleet.lease(PART, key="r"))
        await world.until(lambda status: status.waiting == len(waiting) + 1, "another key waits")
        for task in (*waiting, other):
            task.cancel()
        await world.until(lambda status: not status.waiting, "none waits")


async def a_lost_node_takes_its_sandboxes_along(world: World) -> None:
    """Their holders are told; nobody has their files, and the next lease is served by another server."""
    events, lease = world.fleet.watch(), await world.fleet.lease(PART)
    reading = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.5)
    async with cloche.AsyncSandbox(backend=world.backend(lease), live=True, **OPTIONS) as sandbox:
        await sandbox.write_file("kept.txt", b"of the lost one")
        assert (await sandbox.exec(shell="cat kept.txt; pwd")).stdout.startswith("of the lost one")
        await world.lose(lease.node)
        for _ in range(2):
            with pytest.raises(NodeLost):
                await sandbox.exec(shell="cat kept.txt")
    event = await reading
    while event.kind != "node-lost":
        event = await asyncio.wait_for(anext(events), PATIENCE_S)
    assert event.node == lease.node
    await check_over(world, lease)
    whole = await world.whole()
    async with world.held(*[whole] * world.count) as leases:
        assert lease.certificate not in {each.certificate for each in leases}
        for each in leases:
            assert (await world.run(each, "import os; print(os.path.exists('kept.txt'))")).stdout == "False\n"


async def a_drained_node_takes_no_lease(world: World) -> None:
    """The drain waits for the leases that are there; new ones are elsewhere, until it is undone."""
    async with world.held(PART) as (lease,):
        draining = asyncio.create_task(world.operator.drain(lease.node, timeout_s=PATIENCE_S))
        with pytest.raises(TimeoutError):
            await world.operator.drain(lease.node, timeout_s=1)
        assert (await world.run(lease, "print(1)")).stdout == "1\n"
        assert not draining.done()
    await draining
    specs = [replace(await world.whole(), wait_s=1.0)] * world.count
    asked = [asyncio.create_task(world.fleet.lease(spec)) for spec in specs]
    granted = [each for each in await asyncio.gather(*asked, return_exceptions=True) if isinstance(each, Lease)]
    assert lease.node not in {each.node for each in granted}
    for each in granted:
        await world.fleet.release(each)
    with pytest.raises(NotFound):
        await world.operator.drain("none")
    if lease.node in {node.id for node in await world.fleet.nodes()}:  # a pod is gone, and another one there
        await world.operator.undrain(lease.node)
    async with world.held(*[await world.whole()] * world.count) as leases:
        assert len({each.node for each in leases}) == world.count


async def a_program_on_a_node_calls_functions_of_its_caller(world: World) -> None:
    """They run here, as many at once as the program likes, and the result counts them; a session's cells call, too."""
    calls = list[int]()

    async def double(number: int) -> int:
        calls.append(number)
        await asyncio.sleep(0.01)
        return 2 * number

    code = (
        "import asyncio, cloche_host\n"
        "async def all(): return await asyncio.gather(*map(cloche_host.double, range(9)))\n"
    )
    async with world.held(PART) as (lease,):
        result = await world.run(lease, f"{code}asyncio.run(all())", tools=[double])
        assert result.value == [2 * number for number in range(9)], result
        assert (sorted(calls), result.meta["tools"]["ok"]) == ([*range(9)], 9)
        async with cloche.AsyncSandbox(backend=world.backend(lease), tools=[double], **OPTIONS) as sandbox:
            session = await sandbox.session()
            assert (await session.run(f"{code}await all()")).value == result.value


Claim = Callable[[World], Coroutine[Any, Any, None]]
# Those of a row are tried at the same time.
CLAIMS: tuple[tuple[Claim, ...], ...] = (
    (a_lease_is_a_place_until_its_end,),
    (a_program_on_a_node_calls_functions_of_its_caller,),
    (what_no_node_can_have_is_refused_at_once, a_lease_that_nobody_renews_is_over),
    (requests_wait_in_order_fairly_and_bounded,),
    (a_key_has_no_more_than_its_quota,),
    (a_lost_node_takes_its_sandboxes_along,),
    (a_drained_node_takes_no_lease,),
)
NAMES = [claim.__name__ for claim in itertools.chain(*CLAIMS)]


async def checked(world: World) -> dict[str, str]:
    """Try all claims, and return what is wrong with each: nothing where it holds."""
    wrong = dict[str, str]()

    async def check(claim: Claim) -> None:
        try:
            await claim(world)
            wrong[claim.__name__] = ""
        except (AssertionError, pytest.fail.Exception, ClocheError, TimeoutError) as error:
            wrong[claim.__name__] = "".join(traceback.format_exception(error))

    for row in CLAIMS:
        await asyncio.gather(*map(check, row))
    return wrong
