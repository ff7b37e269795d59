"""`/api/sandboxes/{id}/diff`, `/commit`, `/discard`: a sandbox's changes to its copy of a host folder."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import ConfigDict, Field, StringConstraints

from cloche.core.changes import Diff
from cloche.core.escape import utf8_safe_data
from cloche.core.letter_case import camel
from cloche.wire.exec_options import WireModel, Word
from cloche.wire.uses import Use

from ..auth import TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..sandbox_use import Reading, Running
from ..service import Service
from ..workspaces import opened_workspace

router = APIRouter(prefix="/api/sandboxes", tags=["sandboxes"], route_class=JsonRoute)
FolderPath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Paths = Annotated[list[FolderPath], Field(max_length=100_000)]


class Commit(WireModel):
    """What to commit: the diff with this id, or nothing. Dangerous changes need their paths in `dangerous`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "0" * 64, "paths": ["src"], "dangerous": []}]})

    id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    paths: Paths | None = None
    dangerous: Paths = Field(default_factory=list)
    ours: Paths = Field(default_factory=list)
    theirs: Paths = Field(default_factory=list)
    merge: Paths = Field(default_factory=list)
    branch: Word | None = None
    author: Word | None = None
    message: Annotated[str, StringConstraints(max_length=65_536)] | None = None


class Discard(WireModel):
    """The changes to discard, by default all."""

    paths: Paths | None = None


@router.get("/{sandbox_id}/diff", responses=RESPONSES)
async def diff(use: Reading) -> dict[str, Any]:
    """Compare the folder in a sandbox with the host's. The answer has changes, text diffs, and the id for a commit."""
    return await asyncio.to_thread(_as_wire, await use.sandbox.diff())  # there may be a million changes


def _as_wire(diff: Diff) -> dict[str, Any]:
    plain = utf8_safe_data(diff.as_dict())
    rows = [{camel(name): value for name, value in row.items()} for row in plain["changes"]]
    return {
        "id": diff.id, "changes": rows, "leftOut": plain["left_out"], "patch": plain["patch"],
        "isCut": diff.is_cut, "questions": plain["questions"],
    }  # fmt: skip


@router.post("/{sandbox_id}/commit", responses=RESPONSES)
async def commit(use: Running, service: TheService, body: Commit) -> dict[str, Any]:
    """Write the changes of a diff to the host's folder. The folder must be below a writable root."""
    await asyncio.to_thread(_check_writable, use, service)
    committed = await use.sandbox.commit(
        body.id, paths=body.paths, dangerous=body.dangerous, ours=body.ours, theirs=body.theirs,
        merge=body.merge,
        branch=body.branch, author=body.author, message=body.message,
    )  # fmt: skip
    document = {"written": list(committed.written), "left": committed.left, "refs": committed.refs}
    return dict(utf8_safe_data(document))


def _check_writable(use: Use, service: Service) -> None:
    """Raise PolicyDenied if the host's folder is not below a writable root."""
    path = use.sandbox.notes.get("workspace", {}).get("path")
    if path is not None:  # without a folder, the call itself raises
        with opened_workspace(service.options.roots, path, writes=True):
            pass


@router.post("/{sandbox_id}/discard", responses=RESPONSES)
async def discard(use: Running, body: Discard) -> dict[str, Any]:
    """Discard changes: the sandbox gets the host's files again."""
    return {"discarded": utf8_safe_data(list(await use.sandbox.discard(body.paths)))}
