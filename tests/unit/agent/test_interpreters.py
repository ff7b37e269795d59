"""How many interpreters go on between calls, and which one is put away for another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from cloche import InvalidRequest
from cloche.agent.interpreters import Room, choose_eviction


@dataclass(eq=False)
class Lodger:
    """Be alive from the first stay until it is put away."""

    owner: str | None = None
    used_at: float = 0.0
    is_busy: bool = False
    is_alive: bool = True
    heard: list[str] = field(default_factory=list)

    async def evict(self, why: str) -> None:
        self.heard.append(why)
        self.is_alive = False


def _lodgers(told: str) -> list[Lodger]:
    """Return lodgers by the names of their owners, the least recently used first; those with a star are at work."""
    return [Lodger(word.rstrip("*"), float(at), is_busy=word.endswith("*")) for at, word in enumerate(told.split())]


@pytest.mark.parametrize(
    ("there", "owner", "expected"),
    [
        ("a a a", "a", 0),
        ("a* a a", "a", 1),
        ("a* a* a*", "a", None),
        ("b a a a", "b", 1),  # who has most makes room, whenever it was used
        ("b a a", "a", 1),  # which may be who asks
        ("b a a", "b", 0),  # or would be then
        ("b b a a", "a", 2),  # equal shares: each keeps what it has
        ("b b a* a*", "a", None),
        ("b a c", "d", 0),  # more owners than places: the least recently used of all
        ("b* a* c", "d", 2),
        ("b a a* a*", "b", 1),
        ("c b a a", "b", 1),  # an even share would not become one by taking from it
        ("a* a* a* b", "b", 3),
    ],
)
def test_who_makes_room(there: str, owner: str, expected: int | None) -> None:
    """Of what is not at work: the least recently used of whoever has most; nobody falls below an equal share."""
    lodgers = _lodgers(there)
    assert choose_eviction(lodgers, owner) is (None if expected is None else lodgers[expected])


def _run(work: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(main())


def test_there_are_never_more_than_there_is_room_for() -> None:
    """The least recently used one is told why; what comes back takes a place as another one would."""

    async def work() -> None:
        room, lodgers = Room(most=2), [Lodger() for _ in range(3)]
        for one in lodgers:
            async with room.hold_entry(one):
                assert one.is_busy
        assert [one.is_alive for one in lodgers] == [False, True, True]
        assert "least recently" in lodgers[0].heard[0]
        assert "at most 2" in lodgers[0].heard[0]
        async with room.hold_entry(lodgers[1]):
            pass
        lodgers[0].is_alive = True
        async with room.hold_entry(lodgers[0]):
            pass
        assert [one.is_alive for one in lodgers] == [True, True, False]

    _run(work())


def test_who_cannot_be_put_away_is_waited_for() -> None:
    """What is at work keeps its place, and the next one has it afterwards, whoever gave up waiting before."""

    async def work() -> None:
        room, first, second, third = Room(most=1), Lodger(), Lodger(), Lodger()

        async def stay(one: Lodger) -> None:
            async with room.hold_entry(one):
                pass

        async with AsyncExitStack() as stack:
            await stack.enter_async_context(room.hold_entry(first))
            given_up, waiting = asyncio.ensure_future(stay(third)), asyncio.ensure_future(stay(second))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not waiting.done()
            given_up.cancel()
        await waiting
        assert (first.is_alive, second.is_alive, third.heard) == (False, True, [])

    _run(work())


def test_what_has_ended_or_left_needs_no_room() -> None:
    """Its place is there for others, and nobody is put away for it."""

    async def work() -> None:
        room, first, second, third = Room(most=1), Lodger(), Lodger(), Lodger()
        async with room.hold_entry(first):
            first.is_alive = False
        async with room.hold_entry(second):
            pass
        room.remove_entry(second)
        async with room.hold_entry(third):
            pass
        assert first.heard == second.heard == []

    _run(work())


@pytest.mark.parametrize("told", [{"most": 0}, {"most": -1}, {"idle_s": 0}, {"idle_s": float("inf")}])
def test_numbers_that_are_none_are_errors(told: dict[str, Any]) -> None:
    """They say which."""
    with pytest.raises(InvalidRequest, match=next(iter(told))):
        Room(**told)
