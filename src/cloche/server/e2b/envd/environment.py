"""`/envs` and `/metrics` of envd, and its routes that are for E2B's own machines alone."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from ..calls import Call, Row
from ..errors import E2BError
from .files import plain

INTERNAL = ("/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


async def envs(call: Call) -> Response:
    """Return the variables that the sandbox was created with."""
    call.check_token()
    facts = await call.facts_of_port()
    return JSONResponse(facts.document["e2b"]["envVars"])


async def refuse(call: Call) -> Response:
    """Refuse a route that is not for clients: the same answer for every sandbox, before it is looked up."""
    raise E2BError(404, f"{call.request.url.path[:80]} is reserved for the control plane; no sandbox's URL reaches it")


ROWS = (
    Row(method="GET", path="/envs", handler=plain(envs)),
    *(Row(method=method, path=path, handler=plain(refuse)) for path in INTERNAL for method in METHODS),
)
