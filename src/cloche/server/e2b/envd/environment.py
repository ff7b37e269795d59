"""`/envs` and `/metrics` of envd, and its routes that are for E2B's own machines alone."""

from __future__ import annotations

import time

from starlette.responses import JSONResponse, Response

from ..calls import Call, Row
from ..errors import E2BError
from ..measures import measure
from .files import plain

INTERNAL = ("/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


async def envs(call: Call) -> Response:
    """Return the variables that the sandbox was created with."""
    call.check_token()
    facts = await call.facts_of_port()
    return JSONResponse(facts.document["e2b"]["envVars"])


async def metrics(call: Call) -> Response:
    """Return what the sandbox uses now."""
    call.check_token()
    assert call.target is not None  # noqa: S101 - of a port
    async with call.use() as use:
        found = await measure(call.e2b, use, call.target.sandbox_id)
    return JSONResponse({
        "ts": int(time.time()), "cpu_count": found.processors, "cpu_used_pct": found.percent, "mem_used": found.memory,
        "mem_total": found.memory_limit, "mem_cache": 0, "disk_used": found.disk, "disk_total": found.disk_limit,
    })  # fmt: skip


async def refuse(call: Call) -> Response:
    """Refuse a route that is not for clients: the same answer for every sandbox, before it is looked up."""
    raise E2BError(404, f"{call.request.url.path[:80]} is reserved for the control plane; no sandbox's URL reaches it")


ROWS = (
    Row(method="GET", path="/envs", handler=plain(envs)),
    Row(method="GET", path="/metrics", handler=plain(metrics)),
    *(Row(method=method, path=path, handler=plain(refuse)) for path in INTERNAL for method in METHODS),
)
