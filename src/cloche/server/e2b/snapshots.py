"""Snapshots of sandboxes and forks. Both have files alone: the memory of processes cannot be saved."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from cloche.execution.sandbox import AsyncSandbox
from cloche.records import templates as records
from cloche.records.sandboxes import SandboxFacts
from cloche.records.templates import TemplateFacts
from cloche.wire.callers import Caller

from ..forks import MOST_FORKS, with_files_of
from .calls import Call, E2BModel, Row
from .errors import E2BError, as_e2b
from .filled import with_secrets
from .new_sandbox import NewSandbox, check_timeout
from .paging import page_of
from .sandboxes import DEFAULT_TIMEOUT_S, as_sandbox, open_sandbox
from .states import ENDS, KEEPS_FILES
from .templates import Template, e2b_id, find_template, may_change, split


class E2BSnapshot(E2BModel):
    """A snapshot to take. With `memory` or without, files alone are saved."""

    name: str | None = None
    memory: bool | None = None


class E2BForks(E2BModel):
    """How many sandboxes to open with the files of one, and for how long."""

    timeout: Annotated[int, Field(ge=0)] | None = None
    count: Annotated[int, Field(ge=1, le=MOST_FORKS)] = 1


async def take(call: Call) -> Response:
    """Save the files of a sandbox."""
    caller, facts = await call.sandbox("snapshot")
    body: E2BSnapshot = await call.body(E2BSnapshot)
    name, tag = split(body.name, caller) if body.name else (None, records.DEFAULT_TAG)
    source = await template_of(call, caller, facts)
    async with call.service.sandboxes.held(facts.id, facts.project) as held:
        template, _ = await call.service.templates.snapshot(
            held.sandbox, project=caller.project, api_key=caller.key_id, name=name,
            document={"sandbox": facts.id}, build=source.as_build(), tags=[tag],
        )  # fmt: skip
    return JSONResponse(as_snapshot(template, tag), 201)


async def template_of(call: Call, caller: Caller, facts: SandboxFacts) -> Template:
    """Return what a sandbox began with, as far as it is known now; without its files."""
    own = facts.document["e2b"]
    try:
        template = await find_template(call, caller, own["templateID"])
    except E2BError:  # it was deleted meanwhile
        template = await find_template(call, caller, "base")
    return template


def as_snapshot(template: TemplateFacts, tag: str = records.DEFAULT_TAG) -> dict[str, Any]:
    """Return a snapshot as E2B describes it."""
    suffix = "" if tag == records.DEFAULT_TAG else f":{tag}"
    names = [template.name + suffix] if template.name else []
    return {"snapshotID": e2b_id(template.id) + suffix, "names": names}


async def listed(call: Call) -> Response:
    """List snapshots, the newest first."""
    caller = await call.caller("read")
    query = call.request.query_params
    limit, token = page_of(call)
    source = query.get("sandboxID")
    listing = partial(
        records.listed, project=caller.project, kind=records.SNAPSHOT, limit=limit, before=token,
        source=f"sb_{source}" if source else None, name=split(query["name"], caller)[0] if query.get("name") else None,
        api_key=None if caller.has("admin") else caller.key_id,
    )  # fmt: skip
    rows, following = await call.service.templates.read(listing)
    headers = {"x-next-token": following} if following else {}
    return JSONResponse([as_snapshot(row) for row in rows if may_change(caller, row)], headers=headers)


async def fork(call: Call) -> Response:
    """Open sandboxes with the files, metadata, variables and network of one; each succeeds or fails on its own."""
    caller, facts = await call.sandbox("fork")
    body: E2BForks = await call.body(E2BForks)
    timeout_s = check_timeout(DEFAULT_TIMEOUT_S[2] if body.timeout is None else body.timeout, caller)
    source = await template_of(call, caller, facts)
    asked = _as_new(facts)
    async with (
        call.service.sandboxes.held(facts.id, facts.project) as held,
        with_files_of(call.service, held.sandbox) as archive,
    ):
        template = _with_archive(source, archive, facts, held.sandbox)
        opening = (open_sandbox(call, caller, asked, template, timeout_s) for _ in range(body.count))
        results = await asyncio.gather(*opening, return_exceptions=True)
    return JSONResponse([_as_result(call, result) for result in results], 201)


def _as_new(facts: SandboxFacts) -> NewSandbox:
    """Return the request that creates a sandbox like one."""
    own, at_end = facts.document["e2b"], facts.document.get("atEnd", ENDS)
    return NewSandbox.model_validate({
        "templateID": own["templateID"], "metadata": own["metadata"],
        "envVars": with_secrets(own["envVars"], own.get("secrets", [])),
        "network": own.get("network"), "allow_internet_access": own.get("allowInternetAccess"),
        "autoPause": at_end != ENDS, "autoPauseMemory": at_end != KEEPS_FILES,
        "autoResume": {"enabled": own["autoResume"]},
    })  # fmt: skip


def _with_archive(source: Template, archive: str, facts: SandboxFacts, sandbox: AsyncSandbox) -> Template:
    own, limits = facts.document["e2b"], sandbox.limits
    size = {"memory": limits.memory_bytes, "cpus": limits.cpus, "disk": limits.disk_bytes}
    return Template(
        id=own["templateID"], alias=own["alias"], options={**source.options, **size, "snapshot": archive},
        env=own.get("templateEnvVars", {}), workdir=source.workdir, user=source.user, start=source.start,
        ready=source.ready, base=source.base,
    )  # fmt: skip


def _as_result(call: Call, result: SandboxFacts | BaseException) -> dict[str, Any]:
    if isinstance(result, SandboxFacts):
        return {"sandbox": as_sandbox(call, result)}
    if not isinstance(result, Exception):
        raise result
    error = as_e2b(result)
    return {"error": {"code": error.status, "message": error.message}}


ROWS = (
    Row(method="POST", path="/sandboxes/{sandbox_id}/snapshots", handler=take),
    Row(method="GET", path="/snapshots", handler=listed),
    Row(method="POST", path="/sandboxes/{sandbox_id}/fork", handler=fork),
)
