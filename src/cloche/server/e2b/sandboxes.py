"""Sandboxes: create, connect, list, describe, pause and end them. See `states.py` for what is allowed when."""

from __future__ import annotations

import time
from typing import Any

from pydantic import ConfigDict
from starlette.responses import JSONResponse, Response

from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts
from cloche.wire.held import Terms

from .calls import Call, E2BModel, Row, e2b_id, row_id
from .defaults import sandbox_options
from .errors import E2BError
from .options import ENVD_VERSION


class NewSandbox(E2BModel):
    """A sandbox to create, in both versions of the route."""

    model_config = ConfigDict(extra="allow")

    template_id: str
    timeout: int | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None


async def create(call: Call) -> Response:
    """Create a sandbox."""
    caller = await call.caller()
    body: NewSandbox = await call.body(NewSandbox)
    timeout_s = 300 if body.timeout is None else body.timeout
    document = {
        "name": None, "labels": {}, "lifetime": timeout_s, "idle": None, "lease": None,
        "e2b": {
            "templateID": body.template_id, "metadata": body.metadata or {}, "envVars": body.env_vars or {},
            "endAt": moment(time.time() + timeout_s),
        },
    }  # fmt: skip
    facts = await call.service.sandboxes.create(
        project=caller.project, api_key=caller.key_id, terms=Terms(lifetime_s=timeout_s), document=document,
        options=await sandbox_options(call.service), files=None,
    )  # fmt: skip
    return JSONResponse(as_sandbox(call, facts), 201)


def as_sandbox(call: Call, facts: SandboxFacts) -> dict[str, Any]:
    """Return what create and connect answer."""
    sandbox_id = e2b_id(facts.id)
    return {
        "sandboxID": sandbox_id, "templateID": facts.document["e2b"]["templateID"], "clientID": "cloche",
        "envdVersion": ENVD_VERSION, "envdAccessToken": call.e2b.access_token(sandbox_id),
        "trafficAccessToken": None, "domain": call.e2b.options.domain,
    }  # fmt: skip


async def kill(call: Call) -> Response:
    """End a sandbox."""
    caller = await call.caller()
    facts = await call.facts(call.path["sandbox_id"], caller.project)
    if facts.status == "ended":
        raise E2BError(404, f"sandbox {call.path['sandbox_id']!r} was not found")
    call.e2b.cut(e2b_id(facts.id), "killed")
    await call.service.sandboxes.end(row_id(e2b_id(facts.id)), caller.project)
    return Response(status_code=204)


ROWS = (
    Row(method="POST", path="/sandboxes", handler=create),
    Row(method="POST", path="/v2/sandboxes", handler=create),
    Row(method="DELETE", path="/sandboxes/{sandbox_id}", handler=kill),
)
