"""`/health` of envd: whether the sandbox runs. It needs no token."""

from __future__ import annotations

from starlette.responses import Response

from ..calls import Call, Row


async def health(call: Call) -> Response:
    """Answer 204 for a sandbox that runs; otherwise the proxy's error (502)."""
    await call.facts_of_port()
    return Response(status_code=204)


ROWS = (Row(method="GET", path="/health", handler=health),)
