"""Every backend that sends code elsewhere is counted against its account, and recorded with it, whatever runs there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.backends.cloche import ClocheBackend, leased
from cloche.backends.cloche.kubernetes import KubernetesBackend
from cloche.backends.cloche.leased import LeasedBackend
from cloche.backends.cloche.links import link_to
from cloche.backends.cloche.ray import RayBackend
from cloche.backends.daytona import DaytonaBackend, client
from cloche.backends.e2b import E2BBackend
from cloche.backends.remote.quota import Counter
from cloche.core.errors import BackendUnavailable
from cloche.core.fleet import Fleet, FleetSettings
from cloche.core.policy import BACKEND_ROWS
from cloche.core.protocols import SupportsAccount
from cloche.core.remote import HiddenText, Quota, RemoteAccount
from cloche.fleets.local import LocalFleet
from tests.harness import daytona_server, e2b_server
from tests.harness.remote import serving_tls
from tests.harness.tls import Authority

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
REMOTE = [name for name, row in BACKEND_ROWS.items() if row.is_remote]


@contextmanager
def at_e2b(folder: Path) -> Iterator[E2BBackend]:
    """Give the backend at a server that speaks E2B's wire."""
    with e2b_server.serving(folder / "tls") as server:
        account = RemoteAccount(
            provider="e2b", api_key=HiddenText(e2b_server.KEY), url=server.url, sandbox_url=server.url,
            ca_file=str(folder / "tls" / "ca.pem"),
        )  # fmt: skip
        yield E2BBackend().with_account(account)


@contextmanager
def at_daytona(folder: Path) -> Iterator[DaytonaBackend]:
    """Give the backend at a server that speaks Daytona's wire."""
    pytest.importorskip(client.API, reason="the clients of the SDK daytona are not installed")
    authority = Authority(folder)
    with daytona_server.DaytonaServer(authority.server_context()) as server:
        account = RemoteAccount(
            provider="daytona", api_key=HiddenText(daytona_server.KEY), url=server.url, ca_file=str(authority.file)
        )
        found = DaytonaBackend().with_account(account)
        yield found
        found.drain()


@contextmanager
def at_cloche(folder: Path) -> Iterator[ClocheBackend]:
    """Give the backend at a service of another process."""
    with serving_tls(folder) as (_, account):
        yield ClocheBackend().with_account(account)


async def connect_here(self: LeasedBackend, account: RemoteAccount) -> Fleet:
    """Return a fleet of this machine whose node is ready."""
    fleet = LocalFleet(link_to, settings=FleetSettings(share=1.0))
    await fleet.up()
    return fleet


@contextmanager
def over_this_machine(kind: type[LeasedBackend], _: Path) -> Iterator[LeasedBackend]:
    """Give a backend of leases at a node of this machine, without its engine and its engine's package."""
    here = type("OverThisMachine", (kind,), {"package": "websockets", "connect": connect_here})
    yield here(RemoteAccount(provider=kind.name))
    for leases in leased._of_processes.values():
        leases.close()


SERVERS = {
    "e2b": at_e2b, "daytona": at_daytona, "cloche": at_cloche, "ray": partial(over_this_machine, RayBackend),
    "kubernetes": partial(over_this_machine, KubernetesBackend),
}  # fmt: skip


@pytest.fixture(scope="module", params=REMOTE)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give each backend that sends code elsewhere, with an account at a server of the tests' own."""
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as found:
        yield found


def limited(backend: SupportsAccount, folder: Path, **quota: float) -> tuple[Any, RemoteAccount]:
    """Return the same backend for the same account, of which only so much may be used."""
    account = backend.account()
    assert account is not None
    account = replace(account, quota=Quota(**quota), quota_file=str(folder / "quota.db"))  # type: ignore[arg-type]
    return backend.with_account(account), account


async def _run_each_kind(sandbox: Any) -> list[Any]:
    """Run once in each of the ways in which a live sandbox runs something."""
    results = [await sandbox.run("print(1)"), await sandbox.exec(["true"])]
    process = await sandbox.start(["true"])
    results.append(await process.wait())
    async with await sandbox.session("python") as session:
        results.append(await session.run("1"))
    return results


def test_whatever_runs_is_counted_and_recorded_with_its_account(backend: Any, tmp_path: Path) -> None:
    """A throwaway run, and in a sandbox a run, a command, a process and a cell: each counts, and both events say it."""
    chosen, account = limited(backend, tmp_path, runs_per_day=5)
    log = tmp_path / "log"

    async def main() -> None:
        results = [await cloche.arun("print(1)", backend=chosen, audit=str(log))]
        async with cloche.AsyncSandbox(backend=chosen, audit=str(log), live=True) as sandbox:
            results += await _run_each_kind(sandbox)
            assert [one.status for one in results] == ["ok"] * 5, results
            for one in results:
                assert account.as_dict().items() <= one.meta["remote"].items()
            for again in (sandbox.run("1"), sandbox.exec(["true"]), sandbox.start(["true"])):
                with pytest.raises(BackendUnavailable, match="5 of 5 runs for today are used"):
                    await again

    asyncio.run(main())
    assert Counter(account).used_today()["runs"] == 5
    lines = [line for path in log.rglob("*.jsonl") for line in path.read_text().splitlines()]
    events = [found for found in map(json.loads, lines) if found["kind"] in ("start", "execution")]
    assert {one["what"] for one in events} == {"run", "exec", "start", "cell"}
    assert [one.get("remote") for one in events] == [account.as_dict()] * len(events)
    assert account.as_dict()["host"]


@pytest.mark.parametrize(
    "quota",
    [
        {"runs_per_day": 1}, {"seconds_per_day": 61}, {"sandboxes_per_day": 1}, {"sandboxes_at_once": 1},
        {"money_per_day": 1},
    ],
    ids=lambda quota: next(iter(quota)),
)  # fmt: skip
def test_each_quota_binds(backend: Any, tmp_path: Path, quota: dict[str, float]) -> None:
    """The first run goes through; the second is refused, whichever amount is used up, while the sandbox is open."""
    chosen, account = limited(backend, tmp_path, **quota)
    with cloche.Sandbox(backend=chosen, timeout=60, live=True) as sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"
        if "money_per_day" in quota:  # what a provider says that it cost
            Counter(account).add(datetime.now(UTC).strftime("%Y-%m-%d"), money=1.0)
        if "seconds_per_day" in quota:
            Counter(account).add(datetime.now(UTC).strftime("%Y-%m-%d"), seconds=2.0)
        with pytest.raises(BackendUnavailable, match=r"at once are open|for today are used"):
            cloche.run("print(2)", backend=chosen, timeout=60)


def test_who_sends_code_elsewhere_can_say_with_which_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every remote row is of the protocol that is counted by, and one that is not is refused before it is used."""
    from cloche.execution import registry
    from cloche.testing.fake import FakeBackend

    assert set(REMOTE) == set(SERVERS)
    for name in REMOTE:
        assert issubclass(type(registry._backend_of(name)), SupportsAccount), name
    monkeypatch.setitem(
        BACKEND_ROWS, "e2b", replace(BACKEND_ROWS["e2b"], provider=f"{FakeBackend.__module__}:FakeBackend")
    )
    with pytest.raises(cloche.InternalError, match="does not name the account"):
        cloche.run("1", backend="e2b")
