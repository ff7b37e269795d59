"""Hosts that no rule of a live sandbox names: asked of its client by events, answered by another call.

A host is asked about only if the settings or their ceilings let this key open it. It is refused if the answer does not
come in time, if too many questions wait, and once the call that asks has ended.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field

from cloche.core.errors import ClocheError, NotFound
from cloche.core.remote import ANSWER_S, MOST_QUESTIONS

from ..exec_options import WireModel
from ..problems import Refused
from ..routes.code import allowed_options
from .calls import Call, CallRequest
from .work import use_of


class Answer(WireModel):
    """An answer to a question, by its number."""

    question: Annotated[int, Field(ge=1)]
    allow: bool


class Questions:
    """Ask the client of one call. `answer_s` is how long a question waits."""

    def __init__(self, call: Call, request: CallRequest, *, answer_s: float = ANSWER_S):
        self._call, self._request, self._answer_s = call, request, answer_s
        self._waiting: dict[int, asyncio.Future[bool]] = {}
        self._number, self._is_over = 0, False

    async def decide(self, host: str, port: int) -> bool:
        """Return whether the client allows a host and port."""
        if self._is_over or len(self._waiting) >= MOST_QUESTIONS:
            return False
        self._number += 1
        number = self._number
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            if not await self._may_be_asked(host, port) or self._is_over:
                return False
            async with asyncio.timeout(self._answer_s):
                await self._call.event("question", {"question": number, "host": host, "port": port})
                return await answer
        except (TimeoutError, Refused):  # Refused: the client reads no events
            return False
        finally:
            del self._waiting[number]

    async def _may_be_asked(self, host: str, port: int) -> bool:
        """Tell whether the client's key may open a host, by a rule of its own."""
        rule = {"network": "allowlist", "network_allow": [f"{host}:{port}"]}
        try:
            await allowed_options(self._request.service, self._request.caller, rule)
        except ClocheError:
            return False
        return True

    def answer(self, number: int, *, allow: bool, key_id: str | None) -> bool:
        """Take an answer; return False if the question does not wait for one, or not of this key.

        A host is asked about if the key that asks may open it. Another key may have fewer permissions.
        """
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done() or key_id != self._request.caller.key_id:
            return False
        waiting.set_result(allow)
        return True

    def close(self) -> None:
        """Refuse the waiting questions, and all further ones."""
        self._is_over = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(False)


async def ask(call: Call, request: CallRequest) -> object:
    """Send the questions of a sandbox until it ends, or the call is cancelled."""
    use = use_of(request)
    if use.held.questions is not None:
        raise Refused(409, "followed", f"another call takes the questions of sandbox {use.held.id}")
    questions = Questions(call, request)
    use.sandbox.network.ask(questions.decide)
    use.held.questions = questions
    try:
        await call.event("asking", {})
        await asyncio.wait([use.held.lost])
    finally:
        questions.close()
        use.held.questions = None
    return {}


async def answer(_: Call, request: CallRequest) -> object:
    """Answer a question."""
    given: Answer = request.fields
    questions, key_id = use_of(request).held.questions, request.caller.key_id
    if questions is None or not questions.answer(given.question, allow=given.allow, key_id=key_id):
        raise NotFound(f"question {given.question} does not wait for an answer of this key, or not any more")
    return {}
