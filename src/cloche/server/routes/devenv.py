"""`/api/sandbox/dev-env` (C12, C17): manifests of development environments, and sandboxes provisioned by them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import Field

from cloche.core.errors import NotFound
from cloche.hostfs import open_folder
from cloche.records.devenv import DevEnvManifest, field_names, generate, parse_manifest, read_manifest, write_manifest
from cloche.records.devenv_store import list_manifests, save_manifest, stored_manifest
from cloche.records.ids import new_id
from cloche.records.provision import provision
from cloche.wire.attachments import sandbox_name
from cloche.wire.callers import Caller
from cloche.wire.exec_options import WireModel, check_packages
from cloche.wire.problems import FIELDS, Refused

from ..auth import Reader, Runner, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..service import Service
from ..workspaces import opened_workspace
from .snapshots import Cursor, Limit, Path

T = TypeVar("T")
FIELDS.update({name: name for name in field_names()})
router = APIRouter(prefix="/api/sandbox/dev-env", tags=["development environments"], route_class=JsonRoute)


class OfWorkspace(WireModel):
    """A host folder below the operator's roots."""

    workspace_path: Path


class NewManifest(OfWorkspace):
    """A manifest for a workspace."""

    manifest: dict[str, Any]


class Provision(WireModel):
    """What to set up: the manifest of a workspace, or a given one, with the files of a given workspace."""

    workspace_path: Path | None = None
    manifest: dict[str, Any] | None = None
    keep: str | float = Field(default="1h")


@router.post("/generate", responses=RESPONSES)
async def generated(body: OfWorkspace, caller: Runner, service: TheService) -> dict[str, Any]:
    """Return a manifest of what a workspace needs. Nothing is written or executed.

    Languages, dependencies and set-up commands are detected.
    """

    def detect() -> dict[str, Any]:
        notes: list[str] = []
        with opened_workspace(service.options.roots, body.workspace_path, writes=False) as (folder, path):
            manifest = generate(folder, path, notes=notes)
        return {**manifest.as_dict(), "notes": notes} if notes else manifest.as_dict()

    caller.require("run")
    return await service.with_files(detect)


@router.get("/manifest", responses=RESPONSES)
async def manifest(workspacePath: Path, caller: Reader, service: TheService) -> dict[str, Any]:  # noqa: N803 - the wire's
    """Return the `cloche-devenv.json` of a workspace."""
    return (await service.with_files(lambda: _read(service, caller, workspacePath))).as_dict()


@router.put("/manifest", responses=RESPONSES)
async def save(body: NewManifest, caller: Runner, service: TheService) -> dict[str, Any]:
    """Check a manifest, write it into its workspace, and store it."""
    parsed = parse_manifest(body.manifest)

    def write() -> None:
        with opened_workspace(service.options.roots, body.workspace_path, writes=True) as (folder, path):
            write_manifest(folder, parsed)
            save_manifest(service.database, parsed, path, project=caller.project)

    await service.with_files(write)
    return parsed.as_dict()


@router.get("/list", responses=RESPONSES)
async def listed(caller: Reader, service: TheService, limit: Limit = 50, cursor: Cursor = None) -> dict[str, Any]:
    """List stored manifests, the newest first."""
    return await asyncio.to_thread(
        list_manifests, service.database, project=caller.project, limit=limit, cursor=cursor
    )  # fmt: skip


@router.post("/provision", status_code=201, responses=RESPONSES)
async def provisioned(body: Provision, caller: Runner, service: TheService) -> dict[str, Any]:
    """Open a sandbox, and set it up by a manifest. The answer has the outcome of each step."""
    if (body.workspace_path is None) == (body.manifest is None):
        raise Refused(422, "invalid-request", "give workspacePath or manifest, not both", field="workspacePath")
    settings = await service.settings()
    sandbox_id = new_id("sb")
    options: dict[str, Any] = {**service.options.options, "name": sandbox_name(sandbox_id), "keep": body.keep}
    if not caller.has("admin"):
        options["check_packages"] = lambda lines: check_packages(tuple(lines), settings)
    about: dict[str, Any] = {"labels": {}}
    adopted = service.sandboxes.adopted(sandbox_id, caller, about)
    async with service.runs.hold(caller.key_id), adopted, AsyncExitStack() as stack:
        if body.workspace_path is None:
            manifest, folder = parse_manifest(body.manifest), await _entered(service, stack, _empty_folder())
        else:
            opening = opened_workspace(service.options.roots, body.workspace_path, writes=False)
            folder, _ = await _entered(service, stack, opening)
            manifest = await service.with_files(partial(read_manifest, folder))
        about["manifest"] = manifest.name
        steps = (await provision(manifest, folder=folder, **options)).as_dict()
    return {**steps, "sandbox": sandbox_id}


async def _entered(service: Service, stack: AsyncExitStack, holding: AbstractContextManager[T]) -> T:
    entered = await service.with_files(holding.__enter__)
    stack.callback(holding.__exit__, None, None, None)
    return entered


@contextmanager
def _empty_folder() -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="cloche-devenv-") as empty:
        folder = open_folder(empty)
        try:
            yield folder
        finally:
            os.close(folder)


def _read(service: Service, caller: Caller, path: str) -> DevEnvManifest:
    with opened_workspace(service.options.roots, path, writes=False) as (folder, named):
        try:
            return read_manifest(folder)
        except NotFound:
            return stored_manifest(service.database, named, project=caller.project)
