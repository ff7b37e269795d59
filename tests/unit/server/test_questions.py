"""Questions about hosts over the wire: what bounds them, and what refuses a host."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cloche.core.remote import MOST_QUESTIONS
from cloche.init import wire
from cloche.server.identities import Caller
from cloche.server.service import ServiceOptions, opened
from cloche.server.wire.calls import Call, CallRequest, Nothing
from cloche.server.wire.questions import Questions

ADMIN = Caller(project="default", scopes=("run", "admin"), key_id="admin")
RUNNER = Caller(project="default", scopes=("run",))


class Client:
    """Take frames, and hold the events."""

    def __init__(self) -> None:
        self.events = 0

    async def send_frame(self, frame: bytes) -> None:
        """Count a frame."""
        self.events += frame[8] == wire.EVENT


def test_silence_and_too_many_questions_refuse(tmp_path: Path) -> None:
    """A yes opens one host; silence, one question too many, the call's end, a key's bounds and other keys do not."""

    async def work() -> None:
        async with opened(str(tmp_path / "records" / "r.db"), ServiceOptions(drain_s=1)) as service:

            def asking(caller: Caller, answer_s: float) -> tuple[Questions, Client]:
                client = Client()
                request = CallRequest(caller=caller, service=service, ids={}, fields=Nothing())
                return Questions(Call(client, 1), request, answer_s=answer_s), client

            brief, client = asking(ADMIN, 0.05)
            assert (await brief.decide("a.example", 443), client.events) == (False, 1)
            refused, client = asking(RUNNER, 60)
            assert (await refused.decide("a.example", 443), client.events) == (False, 0)
            questions, client = asking(ADMIN, 60)
            waiting = [asyncio.ensure_future(questions.decide("a.example", 443)) for _ in range(MOST_QUESTIONS)]
            async with asyncio.timeout(60):
                while client.events < MOST_QUESTIONS:  # noqa: ASYNC110 - sent by tasks
                    await asyncio.sleep(0.01)
            assert await questions.decide("b.example", 443) is False
            assert not questions.answer(1, allow=True, key_id="runner")  # it could not open the host itself
            assert questions.answer(1, allow=True, key_id="admin")
            assert await waiting[0] is True
            assert not questions.answer(1, allow=True, key_id="admin")
            questions.close()
            assert await asyncio.gather(*waiting[1:]) == [False] * (MOST_QUESTIONS - 1)
            assert await questions.decide("c.example", 443) is False

    asyncio.run(work())
