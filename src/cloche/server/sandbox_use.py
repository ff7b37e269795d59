"""The use of one sandbox by one request: the caller, and the sandbox, held until the response has been sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from starlette.requests import HTTPConnection

from cloche.audit.log import act_for
from cloche.core.events import Sink
from cloche.core.record import dataclass
from cloche.core.result import Result
from cloche.execution.sandbox import AsyncSandbox

from .attachments import Attachment
from .auth import find_caller, service_of
from .events import wait_or_cancel
from .identities import Caller
from .service import Service
from .streams import event_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Hold the caller and the sandbox of a request."""

    caller: Caller
    service: Service
    held: Attachment

    @property
    def sandbox(self) -> AsyncSandbox:
        """Return the sandbox."""
        return self.held.sandbox


@asynccontextmanager
async def using(service: Service, caller: Caller, sandbox_id: str) -> AsyncIterator[Use]:
    """Yield a sandbox of the caller's project. Raises NotFound, Refused (409), ClocheError."""
    act_for(sandbox=sandbox_id)
    async with service.sandboxes.held(sandbox_id, caller.project) as held:
        yield Use(caller=caller, service=service, held=held)


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
