"""Questions about hosts over the wire: sent as events of one call, answered by another one. See `asking.py`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from pydantic import Field

from . import asking
from .calls import Call, CallRequest
from .exec_options import WireModel
from .work import use_of


class Answer(WireModel):
    """An answer to a question, by its number."""

    question: Annotated[int, Field(ge=1)]
    allow: bool


async def ask(call: Call, request: CallRequest) -> object:
    """Send the questions of a sandbox until it ends, or the call is cancelled."""
    use = use_of(request)
    with asking.asking(use, partial(call.event, "question")):
        await call.event("asking", {})
        await asyncio.wait([use.held.lost])
    return {}


async def answer(_: Call, request: CallRequest) -> object:
    """Answer a question."""
    given: Answer = request.fields
    await asking.answer(use_of(request), given.question, allow=given.allow)
    return {}
