"""The lives of sandboxes by what their keepers say: rows, and who hears of a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts
from cloche.server import sandboxes
from cloche.server.sandbox_lives import Lives, is_same, values_of
from tests.harness.loops import in_loop

NOW = 1_800_000_000.0
RUNNING = {"is_paused": False, "left_s": 60.0, "at_end": "pause", "has_memory": True}
PAUSED = {**RUNNING, "is_paused": True, "left_s": 30.0}


def row(status: str = "running", **document: Any) -> SandboxFacts:
    """Return the row of a sandbox."""
    return SandboxFacts(
        id="sb_1", project="default", name="sb-1", status=status, created_at=moment(NOW), ended_at=None, api_key="k",
        worker="w", document=document,
    )  # fmt: skip


def test_a_row_is_written_again_when_it_differs_by_more_than_a_moment() -> None:
    """The end of a life is told at another moment than it was written."""
    same = row(endsAt=moment(NOW + 60.4), atEnd="pause")
    assert is_same(same, *values_of(RUNNING, NOW))
    for other in (
        row(endsAt=moment(NOW + 90), atEnd="pause"),
        row(endsAt=moment(NOW + 60), atEnd="end"),
        row("paused", endsAt=None, atEnd="pause"),
    ):
        assert not is_same(other, *values_of(RUNNING, NOW))
    assert not is_same(same, *values_of(PAUSED, NOW))
    assert is_same(row("paused", endsAt=None, atEnd="pause"), *values_of(PAUSED, NOW))


def test_a_pause_is_told_when_its_row_says_so() -> None:
    """A client whose stream is cut looks at once, and must not find the sandbox running."""

    class Rows:
        told: list[str] = []  # noqa: RUF012 - of one object

        async def write(self, _: Callable[..., object]) -> None:
            await asyncio.sleep(0)
            self.told.append("written")

    class Kept:
        async def ask(self, op: str, **_: object) -> dict[str, object]:
            assert op == "info"
            return PAUSED

        async def life_events(self) -> AsyncIterator[dict[str, object]]:
            for info in (RUNNING, PAUSED, PAUSED):
                yield info

    async def claim() -> None:
        rows, kept = Rows(), Kept()
        lives = Lives(cast("Any", rows))
        lives.listeners.append(lambda _, what: rows.told.append(what))
        attachment = SimpleNamespace(
            kept=kept, live=kept, is_held=False, is_lost=False, is_paused=False, is_closed=True
        )
        await lives.follow(cast("Any", attachment), row())
        assert rows.told == ["written", "paused"]
        attachment.is_lost = True
        await lives.follow(cast("Any", attachment), row("paused"))  # detached, as it is unused
        assert "ended" not in rows.told
        attachment.is_closed = False
        await lives.follow(cast("Any", attachment), row("paused"))
        assert rows.told[-1] == "ended"

    in_loop(claim)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_sandbox_whose_connection_broke_lives_as_long_as_its_name(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request attaches to it again; before, all of them said that there is none."""
    monkeypatch.setattr(sandboxes, "SETTLE_S", 0.0)
    monkeypatch.setattr("cloche.server.keepers.is_there", lambda _: is_there)
    calls: list[str] = []

    class Broken(sandboxes.Sandboxes):
        def __init__(self) -> None:
            self._ending = set()

        def _attachment_of(self, _: str) -> Any:
            return SimpleNamespace(is_lost=True)

        async def _let_go(self, sandbox_id: str, *, timeout_s: float = 0) -> None:
            del sandbox_id, timeout_s
            calls.append("let go")

        async def _note_ended(self, facts: SandboxFacts) -> SandboxFacts:
            calls.append("noted")
            return facts

    async def claim() -> None:
        assert await Broken().is_alive(row()) is is_there
        assert calls == (["let go"] if is_there else ["let go", "noted"])

    in_loop(claim)
