"""Sandboxes: create, connect, describe, pause and end them, and set their time. See `states.py` for what is allowed."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from cloche.execution.sandbox import AsyncSandbox
from cloche.records.ids import moment
from cloche.records.runs import check_idempotency_key
from cloche.records.sandboxes import RequestKey, SandboxFacts
from cloche.wire.callers import Caller
from cloche.wire.held import Terms
from cloche.wire.problems import Refused

from . import states
from .calls import Call, E2BModel, Row, e2b_id
from .errors import E2BError
from .network import begin_network, network_options
from .new_sandbox import NewSandbox, Seconds, check_supported, check_timeout, document_of, environment_of
from .options import ENVD_VERSION
from .secrets import secret_options
from .start_commands import make_ready, start_and_wait
from .templates import Template, find_template

CLIENT_ID = "cloche"
DEFAULT_TIMEOUT_S = {1: 15, 2: 300}  # of the versions of the routes


class ConnectSandbox(E2BModel):
    """How much time a sandbox shall have at least; without `memory` its processes end at a resume."""

    timeout: Seconds | None = None
    memory: bool | None = None


class ResumedSandbox(ConnectSandbox):
    """The same, and whether it is paused at its next end."""

    auto_pause: bool | None = None


class Timeout(E2BModel):
    """The seconds that a sandbox has from now on; less than 0 counts as 0."""

    timeout: int


class Refresh(E2BModel):
    """The seconds that a sandbox shall have at least."""

    duration: Seconds | None = None


class Pause(E2BModel):
    """What a pause keeps. The first process of a sandbox always answers, so a pause needs no check of its health."""

    memory: bool | None = None
    require_healthy_guest: bool | None = None


async def create(call: Call, version: int) -> Response:
    """Create a sandbox."""
    caller = await call.caller()
    body: NewSandbox = await call.body(NewSandbox)
    check_supported(body)
    timeout_s = check_timeout(DEFAULT_TIMEOUT_S[version] if body.timeout is None else body.timeout, caller)
    template = await find_template(call, caller, body.template_id)
    key = _request_key(call, body, timeout_s)
    return JSONResponse(as_sandbox(call, await open_sandbox(call, caller, body, template, timeout_s, key)), 201)


async def open_sandbox(
    call: Call, caller: Caller, body: NewSandbox, template: Template, timeout_s: int, key: RequestKey | None = None
) -> SandboxFacts:
    """Open a sandbox of a template, and return its row when it is ready. Raises E2BError, Refused, ClocheError."""
    options = {**template.options, **await network_options(call, caller, body)}
    options |= await secret_options(call, caller, body.env_vars or {})
    terms = Terms(lifetime_s=timeout_s, at_end=body.at_end)
    document = document_of(body, template, timeout_s)

    async def begin(row: str, sandbox: AsyncSandbox) -> None:
        await begin_network(body, sandbox)
        await make_ready(call, template, document["e2b"], row, sandbox)

    facts = await call.service.sandboxes.create(
        project=caller.project, api_key=caller.key_id, terms=terms, document=document, options=options, files=None,
        key=key, begin=begin,
    )  # fmt: skip
    call.e2b.logs.add(e2b_id(facts.id), "the sandbox was created", template=template.id)
    return facts


def _request_key(call: Call, body: NewSandbox, timeout_s: int) -> RequestKey | None:
    """Return the request's idempotency key, and the hash of what is asked for. Raises InvalidRequest."""
    text = check_idempotency_key(call.request.headers.get("idempotency-key"))
    if text is None:
        return None
    asked = json.dumps({**body.model_dump(), "timeout": timeout_s}, sort_keys=True)
    return RequestKey(text=text, sha256=hashlib.sha256(asked.encode()).digest())


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
    return {
        "sandboxID": e2b_id(facts.id), "templateID": own["templateID"], "alias": own["alias"] or own["templateID"],
        "clientID": CLIENT_ID, "startedAt": facts.created_at,
        "endAt": document.get("pausedAt") or document.get("endsAt") or moment(time.time()),
        "cpuCount": cpu_count(limits), "memoryMB": _mebibytes(limits["memoryBytes"]),
        "diskSizeMB": _mebibytes(limits["diskBytes"]), "envdVersion": ENVD_VERSION, "state": state,
        "metadata": own["metadata"], "volumeMounts": own["volumeMounts"],
    }  # fmt: skip


def cpu_count(limits: Mapping[str, Any]) -> int:
    """Return a number of processors, of which a sandbox may have a part, as a whole number."""
    return max(1, math.ceil(limits.get("cpus") or 1))


def _mebibytes(count: int | None) -> int:
    return (count or 0) >> 20


def as_detail(call: Call, facts: SandboxFacts) -> dict[str, Any]:
    """Return the description of one sandbox."""
    own, at_end = facts.document["e2b"], facts.document["atEnd"]
    lifecycle = {"autoResume": own["autoResume"], "onTimeout": "kill" if at_end == states.ENDS else "pause"}
    optional = {"network": own["network"]} if own.get("network") is not None else {}
    if states.state_of(facts) == states.PAUSED:
        optional["pauseMode"] = "full" if states.has_memory(facts) else "filesystem"
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
    await call.service.sandboxes.end(facts.id, caller.project)
    call.e2b.cut(e2b_id(facts.id), "killed")
    return Response(status_code=204)


async def connect(call: Call, version: int) -> Response:
    """Extend the time of a sandbox, and resume it if it is paused. Its end is never earlier than it was."""
    caller, facts = await call.sandbox("connect")
    body: ConnectSandbox = await call.body(ConnectSandbox)
    timeout_s = check_timeout(DEFAULT_TIMEOUT_S[version] if body.timeout is None else body.timeout, caller)
    was_paused = await _resume(call, caller, facts, timeout_s, memory=body.memory is not False)
    return JSONResponse(as_sandbox(call, facts), 201 if was_paused else 200)


async def resume(call: Call) -> Response:
    """Resume a paused sandbox, for SDKs before `connect`."""
    caller, facts = await call.sandbox("resume")
    body: ResumedSandbox = await call.body(ResumedSandbox)
    timeout_s = check_timeout(DEFAULT_TIMEOUT_S[1] if body.timeout is None else body.timeout, caller)
    at_end = {} if body.auto_pause is None else {"at_end": states.PAUSES if body.auto_pause else states.ENDS}
    await _resume(call, caller, facts, timeout_s, memory=body.memory is not False, **at_end)
    return JSONResponse(as_sandbox(call, facts), 201)


async def _resume(
    call: Call, caller: Caller, facts: SandboxFacts, timeout_s: int, **order: Any  # noqa: ANN401 - JSON
) -> bool:  # fmt: skip
    """Extend the time of a sandbox, which is resumed; return whether it was paused."""
    has_memory = states.has_memory(facts) and order.get("memory") is not False
    info = await change(call, facts, "lifetime", left_s=timeout_s, only_extends=True, resumes=True, **order)
    if info.get("was_paused"):
        call.e2b.logs.add(e2b_id(facts.id), "the sandbox was resumed")
        if not has_memory:
            await _start_again(call, caller, facts)
    return bool(info.get("was_paused"))


async def _start_again(call: Call, caller: Caller, facts: SandboxFacts) -> None:
    """Run the start command of a sandbox that was resumed without its processes, if its template still has one."""
    try:
        template = await find_template(call, caller, facts.document["e2b"]["templateID"])
    except E2BError:  # it was deleted meanwhile
        return
    if template.start is not None:
        async with call.service.sandboxes.held(facts.id, facts.project) as held:
            await start_and_wait(held.sandbox, template, environment_of(facts))


async def set_timeout(call: Call) -> Response:
    """Set the seconds until the end of a sandbox, which may be less than before."""
    caller, facts = await call.sandbox("timeout")
    body: Timeout = await call.body(Timeout)
    await change(call, facts, "lifetime", left_s=check_timeout(max(0, body.timeout), caller))
    return Response(status_code=204)


async def refresh(call: Call) -> Response:
    """Extend the time of a sandbox, as older SDKs did from time to time."""
    caller, facts = await call.sandbox("refresh")
    body: Refresh = await call.body(Refresh)
    left_s = check_timeout(max(DEFAULT_TIMEOUT_S[1], body.duration or 0), caller)
    await change(call, facts, "lifetime", left_s=left_s, only_extends=True)
    return Response(status_code=204)


async def pause(call: Call) -> Response:
    """Pause a sandbox, and drop its streams."""
    _, facts = await call.sandbox("pause")
    body: Pause = await call.body(Pause)
    await change(call, facts, "pause", memory=body.memory is not False)
    return Response(status_code=204)


async def change(
    call: Call, facts: SandboxFacts, op: str, **order: Any  # noqa: ANN401 - JSON
) -> Mapping[str, Any]:  # fmt: skip
    """Change the life of a sandbox; see `Sandboxes.change_life`. Raises E2BError (404) if it has ended."""
    try:
        return await call.service.sandboxes.change_life(facts, op, **order)
    except Refused as error:
        if error.kind == "sandbox-ended":
            raise states.not_found(e2b_id(facts.id)) from error
        raise


ROWS = (
    Row(method="POST", path="/sandboxes", handler=partial(create, version=1)),
    Row(method="POST", path="/v2/sandboxes", handler=partial(create, version=2)),
    Row(method="POST", path="/sandboxes/{sandbox_id}/connect", handler=partial(connect, version=1)),
    Row(method="POST", path="/v2/sandboxes/{sandbox_id}/connect", handler=partial(connect, version=2)),
    Row(method="POST", path="/sandboxes/{sandbox_id}/resume", handler=resume),
    Row(method="POST", path="/sandboxes/{sandbox_id}/timeout", handler=set_timeout),
    Row(method="POST", path="/sandboxes/{sandbox_id}/refreshes", handler=refresh),
    Row(method="POST", path="/sandboxes/{sandbox_id}/pause", handler=pause),
    Row(method="GET", path="/sandboxes/{sandbox_id}", handler=look),
    Row(method="DELETE", path="/sandboxes/{sandbox_id}", handler=kill),
)
