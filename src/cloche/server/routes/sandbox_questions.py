"""`/api/sandboxes/{id}/network/questions`: hosts that no rule names, followed by one client, and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import ConfigDict

from cloche.wire import asking
from cloche.wire.events import EventLog
from cloche.wire.exec_options import WireModel
from cloche.wire.uses import Use

from ..auth import TheService
from ..bodies import JsonRoute
from ..events import server_sent
from ..problems import RESPONSES
from ..sandbox_use import EVENTS, Running
from ..streams import HeldStream

router = APIRouter(prefix="/api/sandboxes/{sandbox_id}/network/questions", tags=["sandboxes"], route_class=JsonRoute)


class HostAnswer(WireModel):
    """Whether the sandbox may connect to the host and port of a question."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"allow": True}]})

    allow: bool


@router.get("", responses={**RESPONSES, **EVENTS}, response_class=Response)
async def follow_questions(use: Running, service: TheService) -> Response:
    """Stream the hosts that a sandbox with `onNetwork` `ask` wants to reach, as server-sent events.

    The first event is `asking`. Each `question` has a number (`question`), `host` and `port`, and waits 60 seconds for
    its answer. The last event is `ended`, when the sandbox has ended. One client at a time follows the questions.
    While no client does, connections are refused.
    """
    events = EventLog()

    async def send(question: Mapping[str, Any]) -> None:
        events.add("question", question)

    async with AsyncExitStack() as stack:
        stack.enter_context(asking.asking(use, send))
        events.add("asking", {})
        task = asyncio.ensure_future(_until_ended(use, events))
        service.sandboxes.note_stream(task)
        stack.callback(task.cancel)
        return HeldStream(server_sent(events, 0), stack.pop_all(), media_type="text/event-stream")


async def _until_ended(use: Use, events: EventLog) -> None:
    try:
        await asyncio.wait([use.held.lost])
        events.add("ended", {})
    finally:
        events.end()


@router.post("/{number}", responses=RESPONSES)
async def answer_question(
    number: Annotated[int, Path(ge=1, lt=1 << 63)], use: Running, body: HostAnswer
) -> dict[str, Any]:
    """Allow or refuse the host of a question. Only the key that follows the questions may answer."""
    await asking.answer(use, number, allow=body.allow)
    return {"question": number, "allow": body.allow}
