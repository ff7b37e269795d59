"""This machine as a fleet: a server that does not start. What a fleet does is in `test_fleet_claims.py`."""

import asyncio
from pathlib import Path

import pytest

from cloche.backends.cloche.links import WireLink
from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import LeaseSpec
from cloche.fleets.local import LocalFleet

LOST_S = 30.0


def test_a_server_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for a lease says why there is no node, with the last line that its server wrote."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))

    async def work() -> None:
        fleet = LocalFleet(WireLink, words=["--tier", "nine"])
        try:
            await fleet.start()
            async with asyncio.timeout(LOST_S):
                while not (await fleet.nodes())[0].reason:  # noqa: ASYNC110 - looked at each second anyway
                    await asyncio.sleep(0.1)
            with pytest.raises(BackendUnavailable, match=r'local .*"cloche node" ended with code 2: .*nine'):
                await fleet.lease(LeaseSpec())
        finally:
            await fleet.close()

    asyncio.run(work())
