"""Templates of a project: list, describe, change and delete them."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from cloche.core.limits import parse_size
from cloche.records import templates as records
from cloche.records.templates import BuildFacts, TemplateFacts
from cloche.wire.callers import Caller

from .builder import builds_in
from .calls import Call, E2BModel, Row
from .defaults import DEFAULTS
from .errors import E2BError
from .options import ENVD_VERSION
from .own_templates import OwnTemplate
from .paging import page_of
from .templates import e2b_id, find_own, own_templates, split

NEVER = "1970-01-01T00:00:00.000Z"
NO_BUILD = "00000000-0000-0000-0000-000000000000"


class TemplateChange(E2BModel):
    """Whether other keys may use a template."""

    public: bool | None = None


async def _rows(call: Call, caller: Caller, limit: int, token: str | None) -> tuple[list[dict[str, Any]], str | None]:
    listing = partial(
        records.listed, project=caller.project, kind=records.TEMPLATE, limit=limit, before=token,
        api_key=None if caller.has("admin") else caller.key_id,
    )  # fmt: skip
    rows, following = await call.service.templates.read(listing)
    return [await _described(call, row) for row in rows], following


async def listed(call: Call) -> Response:
    """List the caller's templates, the newest first."""
    rows, _ = await _rows(call, await call.caller("read"), records.MOST_TEMPLATES, None)
    return JSONResponse(rows)


async def paged(call: Call) -> Response:
    """List the caller's templates by pages."""
    caller = await call.caller("read")
    rows, following = await _rows(call, caller, *page_of(call))
    return JSONResponse(rows, headers={"x-next-token": following} if following else {})


async def defaults(call: Call) -> Response:
    """List the operator's templates."""
    await call.caller("read")
    return JSONResponse([as_own(own) for own in own_templates(call.e2b).templates.values()])


async def look(call: Call) -> Response:
    """Describe a template with its builds."""
    caller = await call.caller("read")
    reference, _ = split(call.path["template_id"], caller)
    own = own_templates(call.e2b).find(reference)
    if own is not None:
        return JSONResponse({**as_own(own), "builds": []})
    template = await find_own(call, caller, reference)
    limit, _ = page_of(call)
    builds = await call.service.templates.read(partial(records.builds_of, template_id=template.id))
    described = await _described(call, template)
    return JSONResponse({**described, "builds": [as_build(build) for build in builds[:limit]]})


async def _described(call: Call, template: TemplateFacts) -> dict[str, Any]:
    builds = await call.service.templates.read(partial(records.builds_of, template_id=template.id))
    return as_template(template, builds)


def as_template(template: TemplateFacts, builds: list[BuildFacts]) -> dict[str, Any]:
    """Return a template as E2B describes it: by its newest build."""
    build = builds[0] if builds else None
    names = [template.name] if template.name else []
    return {
        "templateID": e2b_id(template.id), "buildID": build.id if build else NO_BUILD,
        "public": bool(template.document.get("public")), "aliases": names, "names": names,
        "createdAt": template.created_at, "updatedAt": template.changed_at, "createdBy": None,
        "lastSpawnedAt": template.spawned_at, "spawnCount": template.spawn_count, "buildCount": len(builds),
        "envdVersion": ENVD_VERSION, "buildStatus": build.status if build else records.READY,
        **_size(build.document.get("size", {}) if build else {}),
    }  # fmt: skip


def as_own(own: OwnTemplate) -> dict[str, Any]:
    """Return a template of the operator in the same form."""
    return {
        "templateID": own.name, "buildID": NO_BUILD, "public": True, "aliases": [own.name], "names": [own.name],
        "createdAt": NEVER, "updatedAt": NEVER, "createdBy": None, "lastSpawnedAt": None, "spawnCount": 0,
        "buildCount": 1, "envdVersion": ENVD_VERSION, "buildStatus": records.READY, "isDefault": True,
        **_size(own.options),
    }  # fmt: skip


def as_build(build: BuildFacts) -> dict[str, Any]:
    """Return a build as E2B describes it."""
    size = _size(build.document.get("size", {}))
    ended = {"finishedAt": build.ended_at} if build.ended_at else {}
    return {
        "buildID": build.id, "status": build.status, "createdAt": build.created_at,
        "updatedAt": build.ended_at or build.created_at, **size, **ended, "envdVersion": ENVD_VERSION,
    }  # fmt: skip


def _size(options: Any) -> dict[str, int]:  # noqa: ANN401 - options of a sandbox
    options = {**DEFAULTS, **options}
    return {
        "cpuCount": max(1, round(float(options["cpus"]))),
        "memoryMB": parse_size(options["memory"], name="memory") >> 20,
        "diskSizeMB": parse_size(options["disk"], name="disk") >> 20,
    }  # fmt: skip


async def alias(call: Call) -> Response:
    """Tell which template has a name."""
    caller = await call.caller("read")
    name, _ = split(call.path["alias"], caller)
    own = own_templates(call.e2b).find(name)
    if own is not None:
        return JSONResponse({"templateID": own.name, "public": True})
    try:
        template = await find_own(call, caller, name)
    except E2BError as error:
        if error.status != 404 or not await _exists(call, caller, name):
            raise
        raise E2BError(403, f"template {name[:200]!r} is another key's") from None
    return JSONResponse({"templateID": e2b_id(template.id), "public": bool(template.document.get("public"))})


async def _exists(call: Call, caller: Caller, name: str) -> bool:
    """Tell whether any key of the project has a template of that name."""
    return await call.service.templates.read(partial(records.has_name, name=name, project=caller.project))


async def change(call: Call) -> Response:
    """Let other keys of the project use a template, or no longer."""
    caller = await call.caller()
    template = await find_own(call, caller, call.path["template_id"])
    body: TemplateChange = await call.body(TemplateChange)
    if body.public is not None:
        await call.service.templates.write(partial(records.change, template_id=template.id, public=body.public))
    return JSONResponse({"names": [template.name] if template.name else []})


async def remove(call: Call) -> Response:
    """Delete a template or a snapshot with its builds. Sandboxes that began from it live on."""
    caller = await call.caller()
    template = await find_own(call, caller, call.path["template_id"])
    builds_in(call.e2b).cancel(template.id)
    await call.service.templates.remove(template.id)
    return Response(status_code=204)


ROWS = (
    Row(method="GET", path="/templates", handler=listed),
    Row(method="GET", path="/v2/templates", handler=paged),
    Row(method="GET", path="/default-templates", handler=defaults),
    Row(method="GET", path="/templates/aliases/{alias:path}", handler=alias),
    Row(method="GET", path="/templates/{template_id}", handler=look),
    Row(method="PATCH", path="/templates/{template_id}", handler=change),
    Row(method="PATCH", path="/v2/templates/{template_id}", handler=change),
    Row(method="DELETE", path="/templates/{template_id}", handler=remove),
)
