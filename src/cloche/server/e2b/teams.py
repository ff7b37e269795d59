"""The team of a key, which E2B's command line asks for: the project."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from .calls import KEY_HEADER, Call, Row


async def listed(call: Call) -> Response:
    """Return the project of the key as its only team."""
    caller = await call.caller("read")
    key = call.request.headers.get(KEY_HEADER, "")
    return JSONResponse([{"teamID": caller.project, "name": caller.project, "apiKey": key, "isDefault": True}])


ROWS = (Row(method="GET", path="/teams", handler=listed),)
