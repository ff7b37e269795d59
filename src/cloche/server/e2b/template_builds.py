"""Requests of E2B's builder: a template by name, its build, and the build's state and log."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from cloche.records import templates as records
from cloche.records.templates import BuildFacts, TemplateFacts
from cloche.wire.callers import Caller

from .builder import BuildOrder, begin, builds_in
from .calls import Call, E2BModel, Row
from .errors import E2BError
from .template_tags import bare
from .templates import e2b_id, find_own, own_templates, split

ENTRIES_AT_ONCE = 100
LEVELS = ("debug", "info", "warn", "error")
MIB = 1 << 20


class NewTemplate(E2BModel):
    """A template to build, in all versions of the route. An existing one of that name gets another build."""

    name: str | None = None
    alias: str | None = None
    tags: list[str] | None = None
    team_id: str | None = None
    cpu_count: Annotated[int, Field(ge=1, le=256)] | None = None
    memory_mb: Annotated[int | None, Field(alias="memoryMB", ge=64, le=1 << 22)] = None
    min_free_disk_mb: Annotated[int | None, Field(alias="minFreeDiskMB", ge=0, le=1 << 22)] = None


async def create(call: Call) -> Response:
    """Make a row for a template, and a build that waits for its order."""
    caller = await call.caller()
    body: NewTemplate = await call.body(NewTemplate)
    text = body.name or body.alias
    if not text:
        raise E2BError(400, "name: give the template a name")
    if body.team_id not in (None, caller.project):
        raise E2BError(403, "teamID: this key is of another project")
    name, tag = split(text, caller)
    records.check_name(name)
    await _check_free(call, caller, name)
    tags = bare([*([tag] if ":" in text else []), *(body.tags or [])]) or [records.DEFAULT_TAG]
    beginning = partial(
        records.begin, project=caller.project, api_key=caller.key_id, kind=records.TEMPLATE, name=name,
        worker=call.service.worker, document={}, build={"base": "base", "size": await _size(call, caller, body)},
        tags=tags,
    )  # fmt: skip
    template, build = await call.service.templates.write(beginning)
    return JSONResponse(_as_requested(template, build, tags), 202)


async def _check_free(call: Call, caller: Caller, name: str) -> None:
    """Raise E2BError (403) for a name of the operator, or of another key."""
    if own_templates(call.e2b).find(name) is not None:
        raise E2BError(403, f"name: {name!r} is a template of the operator; take another name")
    if await call.service.templates.read(partial(records.has_name, name=name, project=caller.project)):
        try:
            await find_own(call, caller, name)
        except E2BError:
            raise E2BError(403, f"name: {name!r} is another key's template; take another name") from None


async def _size(call: Call, caller: Caller, body: NewTemplate) -> dict[str, Any]:
    """Return the options of the asked size, which the caller may have. Raises PolicyDenied."""
    size: dict[str, Any] = {}
    if body.cpu_count is not None:
        size["cpus"] = body.cpu_count
    if body.memory_mb is not None:
        size["memory"] = body.memory_mb * MIB
    if body.min_free_disk_mb:
        size["disk"] = (body.min_free_disk_mb + 512) * MIB
    if size:
        await call.service.allowed_options(caller, size)
    return size


def _as_requested(template: TemplateFacts, build: BuildFacts, tags: list[str]) -> dict[str, Any]:
    names = [template.name] if template.name else []
    return {
        "templateID": e2b_id(template.id), "buildID": build.id, "public": bool(template.document.get("public")),
        "names": names, "aliases": names, "tags": tags,
    }  # fmt: skip


async def start(call: Call) -> Response:
    """Start a build."""
    caller = await call.caller()
    template = await find_own(call, caller, call.path["template_id"])
    order: BuildOrder = await call.body(BuildOrder)
    begin(call, caller, await call.service.templates.build_of(template.id, call.path["build_id"]), order)
    return Response(status_code=202)


async def _state(call: Call) -> tuple[BuildFacts, list[dict[str, Any]], int]:
    """Return a build, its log as far as it is kept, and the number of its first entry."""
    caller = await call.caller("read")
    template = await find_own(call, caller, call.path["template_id"])
    build = await call.service.templates.build_of(template.id, call.path["build_id"])
    running = builds_in(call.e2b).running.get(build.id)
    if running is not None:
        return build, running.entries, 0
    return build, build.document.get("logs", []), build.document.get("logsFrom", 0)


def _number(call: Call, name: str, default: int) -> int:
    text = call.request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise E2BError(400, f"{name}: {text[:20]!r} is not a number")
    return int(text)


def _selected(call: Call, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a level or above."""
    level = call.request.query_params.get("level", LEVELS[0])
    if level not in LEVELS:
        raise E2BError(400, f"level: give one of {', '.join(LEVELS)}")
    return [entry for entry in entries if LEVELS.index(entry["level"]) >= LEVELS.index(level)]


async def status(call: Call) -> Response:
    """Return the state of a build and the next hundred entries of its log."""
    build, entries, first = await _state(call)
    offset, limit = max(0, _number(call, "logsOffset", 0) - first), _number(call, "limit", ENTRIES_AT_ONCE)
    shown = _selected(call, entries)[offset : offset + min(limit, ENTRIES_AT_ONCE)]
    reason = build.document.get("reason") if build.status == records.ERROR else None
    return JSONResponse({
        "templateID": e2b_id(build.template_id), "buildID": build.id, "status": build.status, "logs": [],
        "logEntries": shown, **({"reason": reason} if reason else {}),
    })  # fmt: skip


async def logs(call: Call) -> Response:
    """Return entries of a build's log, from a time (ms) on or before it."""
    _, entries, _ = await _state(call)
    entries = _selected(call, entries)
    if call.request.query_params.get("direction") == "backward":
        entries = entries[::-1]
    return JSONResponse({"logs": entries[: min(_number(call, "limit", ENTRIES_AT_ONCE), ENTRIES_AT_ONCE)]})


async def by_registry(call: Call) -> Response:
    """Refuse the oldest way of building, which pushes an image to E2B's registry."""
    await call.caller()
    raise E2BError(
        501, "this way of building pushes an image, and there is no registry here; use `e2b template create`"
    )


ROWS = (
    Row(method="POST", path="/v3/templates", handler=create),
    Row(method="POST", path="/v2/templates", handler=create),
    Row(method="POST", path="/templates", handler=by_registry),
    Row(method="POST", path="/templates/{template_id}", handler=by_registry),
    Row(method="POST", path="/templates/{template_id}/builds/{build_id}", handler=by_registry),
    Row(method="POST", path="/v2/templates/{template_id}/builds/{build_id}", handler=start),
    Row(method="GET", path="/templates/{template_id}/builds/{build_id}/status", handler=status),
    Row(method="GET", path="/templates/{template_id}/builds/{build_id}/logs", handler=logs),
)
