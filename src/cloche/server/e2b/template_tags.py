"""Tags of templates: each names a build."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from cloche.records import templates as records

from .calls import Call, E2BModel, Row
from .errors import E2BError
from .own_templates import OwnTemplate
from .template_routes import NEVER, NO_BUILD
from .templates import find_own, find_row, own_templates, split

Tags = Annotated[list[str], Field(min_length=1, max_length=records.MOST_TAGS)]


class NewTags(E2BModel):
    """Tags for the build that `target` (`name:tag`) names."""

    target: str
    tags: Tags


class OldTags(E2BModel):
    """Tags to remove from a template."""

    name: str
    tags: Tags


def bare(tags: list[str]) -> list[str]:
    """Return tags without the name of the template before them. Raises InvalidRequest."""
    return [records.check_tag(tag.rpartition(":")[2]) for tag in tags]


async def assign(call: Call) -> Response:
    """Let tags name a build."""
    caller = await call.caller()
    body: NewTags = await call.body(NewTags)
    name, tag = split(body.target, caller)
    template = await find_own(call, caller, name)
    _, build = await find_row(call, caller, template.id, tag)
    tags = bare(body.tags)
    setting = partial(records.set_tags, template_id=template.id, build_id=build.id, tags=tags)
    await call.service.templates.write(setting)
    return JSONResponse({"tags": tags, "buildID": build.id}, 201)


async def remove(call: Call) -> Response:
    """Remove tags. A build without one is removed."""
    caller = await call.caller()
    body: OldTags = await call.body(OldTags)
    template = await find_own(call, caller, body.name)
    removing = partial(records.remove_tags, template_id=template.id, tags=bare(body.tags))
    if not await call.service.templates.write(removing):
        raise E2BError(404, f"template {body.name[:200]!r} has none of these tags")
    superseding = partial(records.supersede, template_id=template.id)
    await call.service.templates.remove_archives(await call.service.templates.write(superseding))
    return Response(status_code=204)


async def _tags(call: Call) -> list[dict[str, Any]]:
    caller = await call.caller("read")
    name, _ = split(call.path["template_id"], caller)
    own: OwnTemplate | None = own_templates(call.e2b).find(name)
    if own is not None:
        return [{"tag": records.DEFAULT_TAG, "buildID": NO_BUILD, "createdAt": NEVER}]
    template = await find_own(call, caller, name)
    rows = await call.service.templates.read(partial(records.tags_of, template_id=template.id))
    return [{"tag": tag, "buildID": build_id, "createdAt": created_at} for tag, build_id, created_at in rows]


async def listed(call: Call) -> Response:
    """List the tags of a template."""
    return JSONResponse(await _tags(call))


async def count(call: Call) -> Response:
    """Count the tags of a template."""
    return JSONResponse({"total": len(await _tags(call))})


async def exists(call: Call) -> Response:
    """Tell whether a template has a tag."""
    tags = [row["tag"] for row in await _tags(call)]
    tag = bare([call.request.query_params.get("tag", "")])[0]
    return JSONResponse({"exists": tag in tags, "normalizedTag": tag})


ROWS = (
    Row(method="POST", path="/templates/tags", handler=assign),
    Row(method="DELETE", path="/templates/tags", handler=remove),
    Row(method="GET", path="/templates/{template_id}/tags", handler=listed),
    Row(method="GET", path="/templates/{template_id}/tags/count", handler=count),
    Row(method="GET", path="/templates/{template_id}/tags/exists", handler=exists),
)
