"""Who is asked about hosts, by socket pairs in place of callers: nothing is told, or kept, that nobody would answer."""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import cloche.egress.callers as callers_module
from cloche.egress.callers import MOST_PER_S, NOBODY, NOT_YET, WANTED_AGAIN_S, Callers, EgressCaller, Questions
from cloche.jail import messages


@contextmanager
def callers(*, is_kept: bool, others: int = 0) -> Iterator[tuple[Callers, list[int]]]:
    """Hold the callers of a sandbox; give the far ends of their links, that of the control end first."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(others + 1)]
    found = Callers(pairs[0][0].fileno(), is_kept=is_kept)
    for ours, _ in pairs[1:]:
        found.by_end[ours.fileno()] = EgressCaller(ours.fileno())
    try:
        yield found, [theirs.fileno() for _, theirs in pairs]
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def told(end: int) -> list[str]:
    """Return the tags of what was told to a caller."""
    found = []
    while select.select([end], [], [], 0)[0]:
        found.append(messages.receive(end)[0])
    return found


def test_nobody_is_told_what_nobody_would_answer() -> None:
    """However often a guest tries; once somebody decides, the host is asked about."""

    async def main() -> None:
        with callers(is_kept=False) as (found, (end,)):
            questions = Questions(found)
            for _ in range(3000):
                assert await questions.ask("a.example", 443) == NOBODY
            assert told(end) == []
            questions.put_to(found.control)
            asking = asyncio.create_task(questions.ask("a.example", 443))
            await asyncio.sleep(0)
            assert told(end) == ["ask"]
            questions.take_answer(found.control.end, 3001, is_allowed=True, is_final=True)
            assert await asking is None
            assert await questions.ask("a.example", 443) is None
            assert told(end) == []

    asyncio.run(main())


def test_a_guest_that_gets_no_answer_asks_at_a_pace() -> None:
    """Each connection to a host without a final answer is asked about, and only so many in a second."""

    async def main() -> None:
        with callers(is_kept=False) as (found, (end,)):
            questions = Questions(found)
            questions.put_to(found.control)
            later = asyncio.get_running_loop().time() + 1000  # so that none of them is over
            questions._lately = deque([later] * (MOST_PER_S - 1))
            for number in range(1, 4):
                asking = asyncio.create_task(questions.ask("a.example", 443))
                await asyncio.sleep(0)
                questions.take_answer(found.control.end, number, is_allowed=False, is_final=False)
                assert await asking is not None
            assert told(end) == ["ask"]
            questions._lately.clear()
            asking = asyncio.create_task(questions.ask("a.example", 443))
            await asyncio.sleep(0)
            assert told(end) == ["ask"]
            asking.cancel()

    asyncio.run(main())


def test_who_stands_in_is_wanted_at_a_pace() -> None:
    """One that ends at once, whatever the guest tries, is not started for each try."""

    async def main() -> None:
        with callers(is_kept=True, others=1) as (found, (end, other)):
            (attached,) = found.attached()
            attached.stands_in = True  # who comes when it is wanted
            questions = Questions(found)
            for number in range(100):
                asking = asyncio.create_task(questions.ask(f"{number}.example", 443))
                await asyncio.sleep(0)
                questions.lose(attached)
                assert await asking == NOBODY
            assert (told(end), told(other)) == (["wanted"], [])
            questions._wanted_at -= WANTED_AGAIN_S
            asking = asyncio.create_task(questions.ask("a.example", 443))
            await asyncio.sleep(0)
            questions.put_to(attached)
            assert (told(end), told(other)) == (["wanted"], ["ask"])
            asking.cancel()

    asyncio.run(main())


def test_a_question_outlives_the_connection_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put once; connections wait a shorter time while one has no answer; a yes for once is asked about again."""
    monkeypatch.setattr(callers_module, "QUEUE_S", 0.0)
    monkeypatch.setattr(callers_module, "LATE_S", 0.0)

    async def main() -> None:
        with callers(is_kept=True, others=2) as (found, (_, of_client, of_stand_in)):
            client, stand_in = found.attached()  # the client does not decide
            stand_in.stands_in = True
            questions = Questions(found)
            questions.put_to(stand_in)
            for host in ("a.example", "a.example", "b.example"):
                assert await questions.ask(host, 443) == NOT_YET
            assert (told(of_client), told(of_stand_in)) == ([], ["ask", "ask"])
            questions.take_answer(stand_in.end, 1, is_allowed=True, is_final=True, is_once=True)
            questions.take_answer(stand_in.end, 2, is_allowed=False, is_final=True, why="no")
            assert await questions.ask("b.example", 443) == "no"
            assert await questions.ask("a.example", 443) == NOT_YET
            assert told(of_stand_in) == ["ask"]
            assert client.end != stand_in.end

    asyncio.run(main())
