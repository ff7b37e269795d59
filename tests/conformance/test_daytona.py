"""The public conformance suite over Daytona's wire, with sandboxes of the server in `tests/harness`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloche.backends.daytona import DaytonaBackend, client
from cloche.core.enforcement import Level
from cloche.core.remote import HiddenText, RemoteAccount
from cloche.testing.conformance import LIVE_CHECKS, Outcome, run_conformance
from tests.harness.daytona_server import KEY, DaytonaServer
from tests.harness.tls import Authority

pytest.importorskip(client.API, reason="the clients of the SDK daytona are not installed")
pytestmark = pytest.mark.timeout(600)

# What docs/limitations/daytona.md says, by name.
CLAIMED = "a level is only claimed, and required only with accept_claimed"
NO_MOUNTS = "the files of a workspace have no limit together where root there may mount nothing, as on this server"
DEVIATIONS = {"require": CLAIMED, "disk limit": NO_MOUNTS}
LIVE_DEVIATIONS = {"live: disk": NO_MOUNTS}
SKIPPED = {"rollback", "fork", "session apart"}  # of all that is tried, what Daytona has not

# What is part of each test run; the others are the same code as everywhere, and of the soak.
SOME = (
    "exact bytes",
    "value",
    "timeout",
    "out of memory",
    "signal kill",
    "contents",
    "survivor: daemon",
    "batch",
    "require",
)
LIVE = ("live: background", "live: time-out", "live: memory", "live files: content", "session")


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaytonaBackend]:
    """Have a backend whose account is at a server of ours, where nothing is left in the end."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with DaytonaServer(authority.server_context()) as server:
        account = RemoteAccount(
            provider="daytona", api_key=HiddenText(KEY), url=server.url, ca_file=str(authority.file)
        )
        found = DaytonaBackend(account)
        yield found
        found.drain()
        assert not server.boxes


@pytest.mark.parametrize(
    "names",
    [pytest.param(SOME, id="some"), pytest.param((), id="all", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_runs_at_daytona_conform(backend: DaytonaBackend, names: tuple[str, ...]) -> None:
    """Every check is kept, but for deviations that are named and real; where runs take turns, there are no sessions."""
    deviations = {name: why for name, why in DEVIATIONS.items() if not names or name in names}
    rows = run_conformance(backend, level=Level.VM, only=names, deviations=deviations, at_once=3)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    assert {row.reason for row in rows if row.outcome is Outcome.SKIPPED} <= {"its sandboxes have no sessions"}


@pytest.mark.parametrize(
    "names",
    [pytest.param(LIVE, id="some"), pytest.param((), id="all", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_sandboxes_that_live_at_daytona_conform(backend: DaytonaBackend, names: tuple[str, ...]) -> None:
    """Every check is kept, but for deviations that are named and real."""
    deviations = {} if names else LIVE_DEVIATIONS
    rows = run_conformance(backend, level=Level.VM, only=names, deviations=deviations, at_once=3, is_live=True)
    broken = [f"{row.outcome}: {row.check.name}: {row.reason}" for row in rows if not row.ok]
    assert not broken, "\n".join(broken)
    wanted = SKIPPED & {check.name for check in LIVE_CHECKS if not names or check.name in names}
    assert {row.check.name for row in rows if row.outcome is Outcome.SKIPPED} == wanted
