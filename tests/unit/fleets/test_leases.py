"""Leases that a process holds: used again, renewed, lost, and given back whatever happens to the caller."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import pytest

from cloche.core.errors import BackendUnavailable, NodeLost
from cloche.core.fleet import Fleet, FleetEvent, FleetStatus, Lease, LeaseSpec, NodeInfo
from cloche.core.remote import HiddenText
from cloche.fleets import leases as leases_module
from cloche.fleets.leases import HeldLease, Leases

SPEC, LARGE = LeaseSpec(), LeaseSpec(cpus=4.0)
PATIENCE_S = 20.0


class CountingFleet:
    """A fleet that grants each lease at once, or when it is let, and remembers what it granted."""

    engine = "counting"

    def __init__(self) -> None:
        self.granted, self.renewed, self.released = list[str](), list[str](), list[str]()
        self.may_grant = threading.Event()
        self.may_grant.set()
        self.asked = threading.Event()
        self.failure: Exception | None = None

    async def lease(
        self, spec: LeaseSpec, *, ttl_s: float = 60.0, key: str = "", labels: Mapping[str, str] | None = None
    ) -> Lease:
        if self.failure is not None:
            raise self.failure
        self.asked.set()
        while not self.may_grant.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)
        self.granted.append(f"ls_{len(self.granted)}")
        return self._lease(self.granted[-1], ttl_s, 0)

    def _lease(self, name: str, ttl_s: float, count: int) -> Lease:
        return Lease(
            id=name, engine=self.engine, node="n1", address="https://127.0.0.1:1", certificate="c" * 64,
            credential=HiddenText(f"{name}:{count}"), until=time.time() + ttl_s,
        )  # fmt: skip

    async def renew(self, lease: Lease, *, ttl_s: float = 60.0) -> Lease:
        if lease.id in self.released:
            raise NodeLost(f"lease {lease.id} is over")
        self.renewed.append(lease.id)
        return self._lease(lease.id, ttl_s, len(self.renewed))

    async def release(self, lease: Lease) -> None:
        self.released.append(lease.id)

    async def nodes(self) -> Sequence[NodeInfo]:
        return ()

    async def _no_events(self) -> AsyncIterator[FleetEvent]:
        return
        yield

    def watch(self) -> AsyncIterator[FleetEvent]:
        return self._no_events()

    async def status(self) -> FleetStatus:
        return FleetStatus(engine=self.engine)

    async def close(self) -> None:
        self.released.append("closed")


@pytest.fixture
def fleet() -> CountingFleet:
    """Return a fleet."""
    return CountingFleet()


@pytest.fixture
def make_leases(fleet: CountingFleet) -> Iterator[Callable[..., Leases]]:
    """Return what makes the leases of this process; they are closed at the end."""
    made: list[Leases] = []

    def make(ttl_s: float = 60.0) -> Leases:
        async def connect() -> Fleet:
            return fleet

        made.append(Leases(connect, ttl_s=ttl_s))
        return made[-1]

    yield make
    for leases in made:
        leases.close()


def _until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _take(leases: Leases, spec: LeaseSpec = SPEC) -> HeldLease:
    return asyncio.run(leases.take(spec))


def test_programs_one_after_the_other_hold_one_lease(
    fleet: CountingFleet, make_leases: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that was given back serves the next sandbox of the same size; an idle one is released after a while."""
    monkeypatch.setattr(leases_module, "IDLE_S", 0.2)
    leases = make_leases()
    for _ in range(20):
        leases.give_back(_take(leases))
    other = _take(leases, LARGE)
    assert fleet.granted == ["ls_0", "ls_1"]
    _until(lambda: fleet.released == ["ls_0"])
    leases.give_back(other, is_used_up=True)
    _until(lambda: fleet.released == ["ls_0", "ls_1"])


def test_a_lease_is_renewed_between_blocking_calls_until_it_is_lost(
    fleet: CountingFleet, make_leases: Callable[..., Leases], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop of the caller runs, and the credential is new; a lost lease is not used again."""
    monkeypatch.setattr(leases_module, "MARGIN_S", 0.0)
    leases = make_leases(ttl_s=0.6)
    held = _take(leases)
    _until(lambda: held.place.credential.reveal() == "ls_0:1")
    fleet.released.append("ls_0")
    _until(lambda: held.is_lost)
    leases.give_back(held)
    assert _take(leases).lease.id == "ls_1"


def test_a_caller_that_is_cancelled_holds_nothing(fleet: CountingFleet, make_leases: Callable[..., Leases]) -> None:
    """Neither while it waits nor at the moment when the lease is granted."""
    leases = make_leases()

    async def cancelled(when: Callable[[], None]) -> None:
        taking = asyncio.ensure_future(leases.take(SPEC))
        await asyncio.to_thread(fleet.asked.wait, PATIENCE_S)
        when()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking

    fleet.may_grant.clear()
    asyncio.run(cancelled(lambda: None))

    def grant() -> None:
        fleet.may_grant.set()
        _until(lambda: len(fleet.granted) == 1)  # blocks the caller's loop, which does not see the grant yet

    fleet.asked.clear()
    asyncio.run(cancelled(grant))
    _until(lambda: fleet.released == fleet.granted == ["ls_0"])


def test_a_fleet_that_could_not_be_reached_is_tried_again(
    fleet: CountingFleet, make_leases: Callable[..., Leases]
) -> None:
    """The caller gets the fleet's own error, and the next one a lease."""
    leases = make_leases()
    fleet.failure = BackendUnavailable("no node has 4 processors")
    with pytest.raises(BackendUnavailable, match="no node has 4 processors"):
        _take(leases)
    fleet.failure = None
    assert _take(leases).lease.id == "ls_0"


def test_all_are_released_at_the_end(fleet: CountingFleet, make_leases: Callable[..., Leases]) -> None:
    """Closing releases what is held and what waits, then disconnects; a lease after that is a new one."""
    leases = make_leases()
    leases.give_back(_take(leases))
    _take(leases, LARGE)
    leases.close()
    assert sorted(fleet.released) == ["closed", "ls_0", "ls_1"]
    assert fleet.released[-1] == "closed"
    assert _take(leases).lease.id == "ls_2"
