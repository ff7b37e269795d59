"""The amounts of a lease: what one sandbox may have, and what waits or is refused beside others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cloche.core.errors import PolicyDenied
from cloche.core.limits import GIB, MIB, Limits
from cloche.fleets.lease_ids import new_lease_id
from cloche.fleets.placing import NOTHING, ResourceSize
from cloche.node.amounts import LeaseAmounts, size_of_lease, within_lease
from cloche.wire.problems import Refused

SIZE = ResourceSize(500, 256 * MIB)
LEASE = new_lease_id(SIZE, "0" * 16)


def test_defaults_are_no_more_than_a_lease_has_and_what_is_asked_for_and_is_more_is_refused() -> None:
    """For processors, memory and the disk, which may be what the operator's is; an id without amounts has none."""

    def within(size: ResourceSize = SIZE, **own: Any) -> dict[str, Any]:
        fields = {"cpus": "cpus", "memory": "memory_bytes", "disk": "disk_bytes"}
        asked = {fields[name]: value for name, value in own.items()}
        return within_lease(own, Limits().with_changes(**asked), Limits(), size)

    assert within() == {"cpus": 0.5, "memory": 256 * MIB}
    assert within(ResourceSize(100, 64 * MIB)) == {"cpus": 0.1, "memory": 64 * MIB}
    assert within(cpus=0.5, memory=128 * MIB, disk=256 * MIB) == {"cpus": 0.5, "memory": 128 * MIB}
    assert within(ResourceSize(500, GIB), disk=GIB)
    for own, shown in (
        ({"cpus": 64}, r"cpuLimit: 64 is above the lease's amount \(0.5\)"),
        ({"memory": 200 * GIB}, r"memoryLimit: 200GiB is above the lease's amount \(256MiB\)"),
        ({"disk": GIB}, r"diskLimit: 1GiB is above"),
    ):
        with pytest.raises(PolicyDenied, match=f"{shown}.*take a larger lease"):
            within(**own)
    assert (size_of_lease(LEASE), size_of_lease("lease-1")) == (SIZE, None)


def test_what_has_no_room_in_a_lease_waits_in_order_and_is_then_refused() -> None:
    """Beside live sandboxes, too; one that gives up or is cancelled holds nothing; other leases go on."""
    half, living = ResourceSize(250, 128 * MIB), {LEASE: NOTHING}

    async def main() -> None:
        amounts, order = LeaseAmounts(lambda lease: living.get(lease, NOTHING)), list[str]()

        async def run(name: str, size: ResourceSize) -> None:
            await amounts.take(LEASE, size, 60.0)
            order.append(name)

        await amounts.take(LEASE, half, 0.0)
        waiting = [asyncio.create_task(run(*row)) for row in (("whole", SIZE), ("half", half), ("none", half))]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="no room"):
            await amounts.take(LEASE, half, 0.0)
        await amounts.take(new_lease_id(SIZE, "1" * 16), SIZE, 0.0)
        assert order == []
        waiting.pop().cancel()
        amounts.give_back(LEASE, half)
        await waiting[0]
        living[LEASE] = half
        amounts.give_back(LEASE, SIZE)
        await waiting[1]
        assert order == ["whole", "half"]
        with pytest.raises(Refused, match=r"0\.5 processors and 256 MiB of memory are in use"):
            amounts.check(LEASE, ResourceSize(1, 0))
        amounts.give_back(LEASE, half)
        living[LEASE] = NOTHING
        assert amounts.has_room(LEASE, SIZE)

    asyncio.run(main())
