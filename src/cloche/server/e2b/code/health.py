"""`/health` of the code interpreter."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from ..calls import Call, Row


async def health(call: Call) -> Response:
    """Answer for a sandbox that runs; otherwise the proxy's error (502)."""
    await call.facts_of_port()
    return JSONResponse("OK")


ROWS = (Row(method="GET", path="/health", handler=health),)
