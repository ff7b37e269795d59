"""Sandboxes: create, connect, describe, pause and end them, and set their time. See `states.py` for what is allowed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts
from cloche.wire.held import Terms

from . import states
from .calls import Call, Row, e2b_id
from .errors import E2BError
from .network import network_options
from .new_sandbox import NewSandbox, check_supported, check_timeout, document_of
from .options import ENVD_VERSION
from .templates import find_template

CLIENT_ID = "cloche"
DEFAULT_TIMEOUT_S = {1: 15, 2: 300}  # of the versions of the routes


async def create(call: Call, version: int) -> Response:
    """Create a sandbox."""
    caller = await call.caller()
    body: NewSandbox = await call.body(NewSandbox)
    check_supported(body)
    timeout_s = check_timeout(DEFAULT_TIMEOUT_S[version] if body.timeout is None else body.timeout, caller)
    template = await find_template(call, caller, body.template_id)
    options = {**template.options, **await network_options(call, caller, body)}
    document = {**document_of(body, template, timeout_s), "endsAt": moment(time.time() + timeout_s)}
    facts = await call.service.sandboxes.create(
        project=caller.project, api_key=caller.key_id, terms=Terms(lifetime_s=timeout_s), document=document,
        options=options, files=None,
    )  # fmt: skip
    return JSONResponse(as_sandbox(call, facts), 201)


def as_sandbox(call: Call, facts: SandboxFacts) -> dict[str, Any]:
    """Return what create and connect answer."""
    sandbox_id, own = e2b_id(facts.id), facts.document["e2b"]
    is_public = (own.get("network") or {}).get("allowPublicTraffic") is not False
    return {
        "sandboxID": sandbox_id, "templateID": own["templateID"], "alias": own["alias"] or own["templateID"],
        "clientID": CLIENT_ID, "envdVersion": ENVD_VERSION, "envdAccessToken": call.e2b.access_token(sandbox_id),
        "trafficAccessToken": None if is_public else call.e2b.traffic_token(sandbox_id),
        "domain": call.e2b.options.domain,
    }  # fmt: skip


def as_listed(facts: SandboxFacts) -> dict[str, Any]:
    """Return what lists have of a sandbox."""
    document, state = facts.document, states.state_of(facts)
    own, limits = document["e2b"], document["limits"]
    ends_at = document.get("endsAt")
    return {
        "sandboxID": e2b_id(facts.id), "templateID": own["templateID"], "alias": own["alias"] or own["templateID"],
        "clientID": CLIENT_ID, "startedAt": facts.created_at,
        "endAt": document.get("pausedAt") or ends_at or moment(time.time()),
        "cpuCount": max(1, round(limits["cpus"] or 1)), "memoryMB": _mebibytes(limits["memoryBytes"]),
        "diskSizeMB": _mebibytes(limits["diskBytes"]), "envdVersion": ENVD_VERSION, "state": state,
        "metadata": own["metadata"], "volumeMounts": own["volumeMounts"],
    }  # fmt: skip


def _mebibytes(count: int | None) -> int:
    return (count or 0) >> 20


def as_detail(call: Call, facts: SandboxFacts) -> dict[str, Any]:
    """Return the description of one sandbox."""
    own, at_end = facts.document["e2b"], facts.document["atEnd"]
    lifecycle = {"autoResume": own["autoResume"], "onTimeout": "kill" if at_end == states.ENDS else "pause"}
    optional = {"network": own["network"]} if own.get("network") is not None else {}
    return {
        **as_listed(facts), **optional, "envdAccessToken": call.e2b.access_token(e2b_id(facts.id)),
        "allowInternetAccess": own["allowInternetAccess"], "domain": call.e2b.options.domain, "lifecycle": lifecycle,
    }  # fmt: skip


async def look(call: Call) -> Response:
    """Describe a sandbox."""
    _, facts = await call.sandbox("read", "read")
    return JSONResponse(as_detail(call, facts))


async def kill(call: Call) -> Response:
    """End a sandbox."""
    caller, facts = await call.sandbox("kill")
    call.e2b.cut(e2b_id(facts.id), "killed")
    await call.service.sandboxes.end(facts.id, caller.project)
    return Response(status_code=204)


async def connect(call: Call) -> Response:
    """Connect to a sandbox."""
    _, facts = await call.sandbox("connect")
    if states.state_of(facts) == states.PAUSED:
        raise E2BError(501, "a paused sandbox cannot be resumed yet")
    return JSONResponse(as_sandbox(call, facts))


ROWS = (
    Row(method="POST", path="/sandboxes", handler=partial(create, version=1)),
    Row(method="POST", path="/v2/sandboxes", handler=partial(create, version=2)),
    Row(method="POST", path="/sandboxes/{sandbox_id}/connect", handler=connect),
    Row(method="POST", path="/v2/sandboxes/{sandbox_id}/connect", handler=connect),
    Row(method="GET", path="/sandboxes/{sandbox_id}", handler=look),
    Row(method="DELETE", path="/sandboxes/{sandbox_id}", handler=kill),
)
