"""The audit log says where code went, with which account, and what it cost."""

from __future__ import annotations

import json
from pathlib import Path

import cloche
from cloche.core.remote import HiddenText, RemoteAccount
from cloche.core.result import Result
from cloche.testing.fake import FakeBackend

KEY = "e2b_0123456789abcdef0123"


class RemoteFake(FakeBackend):
    """A backend of a provider's, as far as the log is concerned."""

    def __init__(self, result: Result) -> None:
        super().__init__([result])
        self.told = RemoteAccount(provider="e2b", api_key=HiddenText(KEY), url="https://api.example.test")

    def account(self) -> RemoteAccount:
        """Return the account that code is sent with."""
        return self.told

    def with_account(self, account: RemoteAccount) -> RemoteFake:
        """Have no other."""
        raise NotImplementedError


def events(folder: Path) -> list[dict[str, object]]:
    """Return all events, oldest first."""
    lines = [line for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines()]
    return [found for found in map(json.loads, lines) if found["kind"] in ("start", "execution")]


def test_where_code_went_is_recorded_before_and_after(tmp_path: Path) -> None:
    """Both events name provider, account and host; the end has the cost; the key is nowhere."""
    backend = RemoteFake(Result("", "", 0, 0.0, meta={"remote": {"cost": 0.25}}))
    cloche.run("1", backend=backend, audit=str(tmp_path))
    start, end = events(tmp_path)
    assert start["remote"] == end["remote"] == backend.told.as_dict()
    assert backend.told.as_dict()["account"].startswith("e2b:")
    assert end["cost"] == 0.25
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
