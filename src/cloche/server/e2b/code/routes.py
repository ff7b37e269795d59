"""`/contexts` of the code interpreter: create, list, restart and remove contexts."""

from __future__ import annotations

from contextlib import AsyncExitStack

from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from ..calls import TOKEN_HEADER, Call, Row
from .contexts import HOME, contexts_of, language_of


class NewContext(BaseModel):
    """A context to make."""

    model_config = ConfigDict(extra="ignore")

    language: str | None = None
    cwd: str | None = None


def _check(call: Call) -> None:
    """Check the access token if there is one: releases of E2B's SDKs send none here, and go by the sandbox's id."""
    if TOKEN_HEADER in call.request.headers:
        call.check_token()


async def create(call: Call) -> Response:
    """Make a context, with an interpreter that runs."""
    _check(call)
    body: NewContext = await call.body(NewContext)
    language = language_of(body.language)
    async with AsyncExitStack() as stack:
        use = await stack.enter_async_context(call.use())
        context = await (await contexts_of(call, use)).create(use, language, body.cwd or HOME)
        return JSONResponse(context.as_dict())


async def contexts(call: Call) -> Response:
    """List the contexts, oldest first."""
    _check(call)
    async with AsyncExitStack() as stack:
        use = await stack.enter_async_context(call.use())
        return JSONResponse([context.as_dict() for context in (await contexts_of(call, use)).all()])


async def restart(call: Call) -> Response:
    """Begin a context anew."""
    _check(call)
    async with AsyncExitStack() as stack:
        use = await stack.enter_async_context(call.use())
        await (await contexts_of(call, use)).get(call.path["context_id"]).restart(use)
        return JSONResponse(None)


async def remove(call: Call) -> Response:
    """End a context."""
    _check(call)
    async with AsyncExitStack() as stack:
        use = await stack.enter_async_context(call.use())
        await (await contexts_of(call, use)).remove(use, call.path["context_id"])
        return JSONResponse(None)


ROWS = (
    Row(method="POST", path="/contexts", handler=create),
    Row(method="GET", path="/contexts", handler=contexts),
    Row(method="POST", path="/contexts/{context_id}/restart", handler=restart),
    Row(method="DELETE", path="/contexts/{context_id}", handler=remove),
)
