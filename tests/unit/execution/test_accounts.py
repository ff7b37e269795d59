"""Runs are counted against the account that they are sent with, where they can be asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import cloche
from cloche.backends.remote.quota import Counter
from cloche.core.errors import BackendUnavailable, OutcomeUnknown, StartFailed
from cloche.core.remote import HiddenText, Quota, RemoteAccount
from cloche.core.result import Result
from cloche.execution.accounts import counted
from cloche.testing.fake import FakeBackend


class RemoteFake(FakeBackend):
    """A backend of a provider's, with an account of a hundred runs and a thousand seconds."""

    def __init__(self, tmp_path: Path, *script: Result | Exception) -> None:
        super().__init__(script)
        quota = Quota(runs_per_day=100, seconds_per_day=1000)
        self.told = RemoteAccount(
            provider="e2b", api_key=HiddenText("key"), quota=quota, quota_file=str(tmp_path / "quota.db")
        )

    def account(self) -> RemoteAccount:
        """Return the account that code is sent with."""
        return self.told

    def with_account(self, account: RemoteAccount) -> RemoteFake:
        """Have no other."""
        raise NotImplementedError


def used(backend: RemoteFake) -> tuple[float, float]:
    """Return the runs and the whole hundreds of seconds that are used."""
    found = Counter(backend.told).used_today()
    return found["runs"], found["seconds"] // 100


def test_what_ran_is_settled_and_what_did_not_is_not_counted(tmp_path: Path) -> None:
    """By the clock of this host, whatever the result says; what may still run keeps all that was reserved."""
    claims = Result("", "", 0, 0.0, meta={"remote": {"cost": 0.5}})
    backend = RemoteFake(tmp_path, claims, StartFailed("no"), OutcomeUnknown("lost"))
    cloche.run("1", backend=backend, timeout=300)
    assert used(backend) == (1, 0)
    with pytest.raises(StartFailed):
        cloche.run("1", backend=backend, timeout=300)
    assert used(backend) == (1, 0)
    with pytest.raises(OutcomeUnknown):
        cloche.run("1", backend=backend, timeout=300)
    assert used(backend) == (2, 3)
    with pytest.raises(BackendUnavailable, match="seconds for today"):
        cloche.run("1", backend=backend, timeout=900)
    assert len(backend.requests) == 3
    assert Counter(backend.told).used_today()["money"] == 0.5


def test_who_is_cancelled_has_used_what_was_reserved(tmp_path: Path) -> None:
    """The provider may go on with it."""
    backend = RemoteFake(tmp_path)

    async def main() -> None:
        began = asyncio.Event()

        async def run() -> Result:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

        running = asyncio.ensure_future(counted(run, backend, 200.0))
        await began.wait()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert used(backend) == (1, 2)
