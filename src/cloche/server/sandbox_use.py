"""The use of one sandbox by one request: the caller, and the sandbox, held until the response has been sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from starlette.requests import HTTPConnection

from cloche.core.events import Sink
from cloche.core.result import Result
from cloche.wire.uses import Use, using

from .auth import find_caller, service_of
from .events import wait_or_cancel
from .streams import event_stream


def _use_for(scope: str) -> Any:  # noqa: ANN401 - what FastAPI takes as a default
    async def use(sandbox_id: str, connection: HTTPConnection) -> AsyncIterator[Use]:
        caller = await find_caller(connection)
        caller.require(scope)
        async with using(service_of(connection), caller, sandbox_id) as sandbox_use:
            yield sandbox_use

    return Depends(use)


Running = Annotated[Use, _use_for("run")]
Reading = Annotated[Use, _use_for("read")]


# Responses other than JSON, for the OpenAPI document.
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": {"text/event-stream": {}}}
}
RESULT_OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The complete result.", "content": {"application/json": {}, "text/event-stream": {}}}
}


async def answer_call(
    request: Request, use: Use, work: Callable[[Sink], Awaitable[Result]], *, stream: bool
) -> Response:
    """Run `work`, and answer with its whole result or its events. A disconnect cancels it."""
    live = use.held.begin(use.caller.project, work)
    if stream:
        return event_stream(live)
    return Response(await wait_or_cancel(request, live), media_type="application/json")
