"""`/api/sandboxes/{id}/snapshots`, `…/fork` and `/api/sandbox-snapshots`: files of sandboxes, for other ones."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import ConfigDict, Field

from cloche.records import templates as records
from cloche.records.templates import BuildFacts, TemplateFacts
from cloche.wire import sandboxes as sandboxes_inside
from cloche.wire.exec_options import Amount, OptionFields, WireModel, Word
from cloche.wire.problems import problem_of

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..forks import MOST_FORKS, Forking, forked
from ..problems import RESPONSES
from ..sandbox_use import Running
from ..service import Service

router = APIRouter(tags=["sandboxes"], route_class=JsonRoute)


class NewSandboxSnapshot(WireModel):
    """A snapshot to take. One with a name replaces that of the same name."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "with-data"}]})

    name: Word | None = None


class NewForks(OptionFields):
    """Sandboxes to open with the files of this one. Their options are those given here, as for a new sandbox."""

    count: Annotated[int, Field(ge=1, le=MOST_FORKS)] = 1
    lifetime: Amount | None = None
    labels: dict[sandboxes_inside.Label, sandboxes_inside.LabelValue] = Field(default_factory=dict, max_length=32)


@router.post("/api/sandboxes/{sandbox_id}/snapshots", status_code=201, responses=RESPONSES)
async def take(use: Running, body: NewSandboxSnapshot, service: TheService, response: Response) -> dict[str, Any]:
    """Save all files of a sandbox, while its processes stand still. Their memory is not saved; they go on."""
    template, build = await service.templates.snapshot(
        use.sandbox, project=use.caller.project, api_key=use.caller.key_id, name=body.name,
        document={"sandbox": use.held.id}, build={},
    )  # fmt: skip
    response.headers["Location"] = f"/api/sandbox-snapshots/{template.id}"
    return as_dict(template, build)


@router.post("/api/sandboxes/{sandbox_id}/fork", status_code=201, responses=RESPONSES)
async def fork(use: Running, body: NewForks, service: TheService) -> dict[str, Any]:
    """Open sandboxes with the files of this one. Each has a `sandbox`, or a `problem` if it could not be opened."""
    asked = sandboxes_inside.NewSandbox(lifetime=body.lifetime, labels=body.labels)
    terms = sandboxes_inside.terms_of(asked, use.caller)
    opening = Forking(
        options=await service.allowed_options(use.caller, body.options()), terms=terms, count=body.count,
        document=sandboxes_inside.document_of(asked, terms),
    )  # fmt: skip
    rows = await forked(service, use.sandbox, use.caller, opening)
    return {"items": [
        {"problem": problem_of(row).content} if isinstance(row, Exception) else {"sandbox": row.as_dict()}
        for row in rows
    ]}  # fmt: skip


@router.get("/api/sandbox-snapshots", responses=RESPONSES)
async def snapshots(
    caller: Reader,
    service: TheService,
    sandbox: Annotated[str | None, Query(max_length=64)] = None,
    name: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List snapshots of sandboxes, the newest first."""
    listing = partial(
        records.listed, project=caller.project, kind=records.SNAPSHOT, limit=limit, before=cursor, source=sandbox,
        name=name,
    )  # fmt: skip
    rows, following = await service.read(listing)
    return {"items": [await _described(service, row) for row in rows], "nextCursor": following}


async def _described(service: Service, row: TemplateFacts) -> dict[str, Any]:
    builds = await service.read(partial(records.builds_of, template_id=row.id))
    return as_dict(row, next((build for build in builds if build.size), builds[0]))


@router.get("/api/sandbox-snapshots/{snapshot}", responses=RESPONSES)
async def look(snapshot: str, caller: Reader, service: TheService) -> dict[str, Any]:
    """Return a snapshot by its id or name."""
    template, build = await service.templates.find(snapshot, records.DEFAULT_TAG, caller.project)
    return as_dict(template, build)


@router.delete("/api/sandbox-snapshots/{snapshot}", responses=RESPONSES)
async def remove(snapshot: str, caller: Runner, service: TheService) -> dict[str, Any]:
    """Delete a snapshot by its id or name. Sandboxes that began with it live on."""
    template, build = await service.templates.find(snapshot, records.DEFAULT_TAG, caller.project)
    await service.templates.remove(template.id)
    return as_dict(template, build)


def as_dict(template: TemplateFacts, build: BuildFacts) -> dict[str, Any]:
    """Return plain data in the wire's format."""
    return {
        "id": template.id, "kind": template.kind, "name": template.name, "apiKey": template.api_key,
        "sandbox": template.document.get("sandbox"), "state": build.status, "size": build.size,
        "createdAt": template.created_at, "changedAt": template.changed_at, "usedAt": template.spawned_at,
        "uses": template.spawn_count,
    }  # fmt: skip
