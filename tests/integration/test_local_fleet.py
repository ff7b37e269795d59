"""This machine as a fleet: the seam between an engine and the wire needs nothing but a child process."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import cloche
from cloche.backends.cloche.leased import _NodeBackend
from cloche.backends.cloche.links import WireLink
from cloche.core.errors import BackendUnavailable, NodeLost
from cloche.core.fleet import FleetSettings, Lease, LeaseSpec
from cloche.core.remote import LeasedPlace, RemoteAccount
from cloche.fleets.local import LocalFleet

HALF = LeaseSpec(cpus=0.5, memory_bytes=64 << 20)
LOST_S = 30.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the node folders of its own."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def backend_of(lease: Lease) -> _NodeBackend:
    """Return the backend of a lease."""
    place = LeasedPlace(engine=lease.engine, node=lease.node, lease=lease.id, credential=lease.credential)
    return _NodeBackend(
        RemoteAccount(provider="cloche", url=lease.address, certificate=lease.certificate, place=place), ""
    )


def is_running(pid: int) -> bool:
    """Tell whether there is a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_this_machine_is_a_fleet(home: Path) -> None:
    """Runs have a lease on the child's server; one that is killed starts again, and its end leaves no process."""

    async def work() -> None:
        fleet = LocalFleet(WireLink, settings=FleetSettings(share=1.0), version=cloche.__version__)
        try:
            (node,) = (await fleet.up()).nodes
            assert (node.state, node.version) == ("ready", cloche.__version__)
            lease = await fleet.lease(HALF)
            result = await cloche.arun("print(6 * 7)", backend=backend_of(lease), memory="64m")
            assert (result.stdout, result.meta["remote"]["node"]) == ("42\n", "local")
            assert (await fleet.renew(lease)).until > lease.until
            await fleet.release(lease)
            await fleet._tended["local"].ended()
            with pytest.raises(NodeLost):
                await cloche.arun("print(1)", backend=backend_of(lease), memory="64m")
            with pytest.raises(BackendUnavailable, match="no node can ever meet 4096 processors"):
                await fleet.lease(LeaseSpec(cpus=4096))
            lease = await fleet.lease(HALF)
            child = fleet._engine._child  # type: ignore[attr-defined]
            os.kill(int(child.facts["pid"]), signal.SIGKILL)
            began = time.monotonic()
            another = await fleet.lease(LeaseSpec(cpus=len(os.sched_getaffinity(0)), memory_bytes=1 << 20))
            assert time.monotonic() - began < LOST_S
            with pytest.raises(NodeLost, match="node local is over"):
                await fleet.renew(lease)
            assert another.certificate != lease.certificate
            await fleet.release(another)
            await fleet.drain("local")
            with pytest.raises(BackendUnavailable, match=r"local \(draining\)"):
                await fleet.lease(HALF)
            await fleet.undrain("local")
            lease = await fleet.lease(HALF)
            assert (await cloche.arun("print(7)", backend=backend_of(lease), memory="64m")).stdout == "7\n"
            pid = int(fleet._engine._child.facts["pid"])  # type: ignore[attr-defined]
            assert is_running(pid)
        finally:
            await fleet.close()
        assert not is_running(pid)

    asyncio.run(work())


def test_a_server_that_does_not_start_is_named(home: Path) -> None:
    """A request for a lease says why there is no node, with the last line that its server wrote."""

    async def work() -> None:
        fleet = LocalFleet(WireLink, words=["--tier", "nine"])
        try:
            await fleet.start()
            async with asyncio.timeout(LOST_S):
                while not (await fleet.nodes())[0].reason:  # noqa: ASYNC110 - looked at each second anyway
                    await asyncio.sleep(0.1)
            with pytest.raises(BackendUnavailable, match=r'local .*"cloche node" ended with code 2: .*nine'):
                await fleet.lease(HALF)
        finally:
            await fleet.close()

    asyncio.run(work())
