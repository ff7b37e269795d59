"""Use of one sandbox by one request: who asks, and the sandbox itself, held until the answer has been sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import HTTPConnection

from cloche.core.events import Sink
from cloche.core.result import Result
from cloche.execution.sandbox import AsyncSandbox

from .attachments import Attachment
from .auth import find_caller, service_of
from .events import LiveRun, server_sent, wait_or_cancel
from .identities import Caller
from .service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Hold who asks, and the sandbox that it is about."""

    caller: Caller
    service: Service
    held: Attachment

    @property
    def sandbox(self) -> AsyncSandbox:
        """Return the sandbox."""
        return self.held.sandbox


def _use_for(scope: str) -> Any:  # noqa: ANN401 - what FastAPI takes as a default
    async def use(sandbox_id: str, connection: HTTPConnection) -> AsyncIterator[Use]:
        caller = await find_caller(connection)
        caller.require(scope)
        service = service_of(connection)
        async with service.sandboxes.held(sandbox_id, caller.project) as held:
            yield Use(caller=caller, service=service, held=held)

    return Depends(use)


Running = Annotated[Use, _use_for("run")]
Reading = Annotated[Use, _use_for("read")]


async def answer_call(
    request: Request, use: Use, work: Callable[[Sink], Awaitable[Result]], *, stream: bool
) -> Response:
    """Do what has an end, and answer with its whole result, or its events; who goes away ends it."""
    live = use.held.begin(use.caller.project, work)
    if stream:
        return event_stream(live)
    return Response(await wait_or_cancel(request, live), media_type="application/json")


def event_stream(live: LiveRun) -> StreamingResponse:
    """Return the events of what goes on, which ends where nobody reads them."""
    stack = AsyncExitStack()
    stack.callback(lambda: None if live.events.is_over else live.cancel())
    return HeldStream(server_sent(live.events, 0, live), stack, media_type="text/event-stream")


class HeldStream(StreamingResponse):
    """Send pieces, and let go of what gives them at the end, also where nobody ever asked for the first one."""

    def __init__(self, pieces: AsyncIterator[Any], stack: AsyncExitStack, **more: Any) -> None:  # noqa: ANN401
        super().__init__(pieces, **more)
        self._stack = stack

    async def __call__(self, *arguments: Any) -> None:  # noqa: ANN401 - scope, receive, send
        async with self._stack:
            await super().__call__(*arguments)
