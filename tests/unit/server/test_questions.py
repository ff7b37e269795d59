"""Questions about hosts to a client of the service: what bounds them, and what refuses a host."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloche.core.remote import MOST_QUESTIONS
from cloche.server.service import ServiceOptions, opened
from cloche.wire.asking import Questions
from cloche.wire.callers import Caller

ADMIN = Caller(project="default", scopes=("run", "admin"), key_id="admin")
RUNNER = Caller(project="default", scopes=("run",))


def test_silence_and_too_many_questions_refuse(tmp_path: Path) -> None:
    """A yes opens one host; silence, one question too many, the client's end, a key's bounds and other keys do not."""

    async def work() -> None:
        async with opened(str(tmp_path / "records" / "r.db"), ServiceOptions(drain_s=1)) as service:
            sent: list[Mapping[str, Any]] = []

            async def send(question: Mapping[str, Any]) -> None:
                sent.append(question)

            brief = Questions(service, ADMIN, send, answer_s=0.05)
            assert (await brief.decide("a.example", 443), len(sent)) == (None, 1)
            refused = Questions(service, RUNNER, send)
            assert (await refused.decide("a.example", 443), len(sent)) == (False, 1)
            questions = Questions(service, ADMIN, send)
            sent.clear()
            waiting = [asyncio.ensure_future(questions.decide("a.example", 443)) for _ in range(MOST_QUESTIONS)]
            async with asyncio.timeout(60):
                while len(sent) < MOST_QUESTIONS:  # noqa: ASYNC110 - sent by tasks
                    await asyncio.sleep(0.01)
            assert await questions.decide("b.example", 443) is None
            assert questions.take(1, key_id="runner") is None  # it could not open the host itself
            question = questions.take(1, key_id="admin")
            assert question is not None
            assert questions.take(1, key_id="admin") is None
            question.answer.set_result(True)
            assert await waiting[0] is True
            assert questions.take(1, key_id="admin") is None
            questions.close()
            assert await asyncio.gather(*waiting[1:]) == [None] * (MOST_QUESTIONS - 1)
            assert await questions.decide("c.example", 443) is None

    asyncio.run(work())
