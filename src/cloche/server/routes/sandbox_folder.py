"""`/api/sandboxes/{id}/diff`, `/commit`, `/discard`: what a sandbox has changed in a folder of the host."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import ConfigDict, Field, StringConstraints

from cloche.core.changes import Diff
from cloche.core.escape import utf8_safe_data
from cloche.records.results import camel

from ..bodies import JsonRoute
from ..exec_options import WireModel, Word
from ..problems import RESPONSES
from ..sandbox_use import Reading, Running, Use
from ..workspaces import opened_workspace

router = APIRouter(prefix="/api/sandboxes", tags=["sandboxes"], route_class=JsonRoute)
FolderPath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Paths = Annotated[list[FolderPath], Field(max_length=100_000)]


class Commit(WireModel):
    """What to write: the diff with this id, or nothing. Dangerous changes only where `dangerous` names their paths."""

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
    """Which changes to take back; by default all."""

    paths: Paths | None = None


@router.get("/{sandbox_id}/diff", responses=RESPONSES)
async def diff(use: Reading) -> dict[str, Any]:
    """Compare its folder with the host's: changes, diffs of text files, and the id by which they can be committed."""
    return await asyncio.to_thread(_as_wire, await use.sandbox.diff())  # there may be a million changes


def _as_wire(found: Diff) -> dict[str, Any]:
    plain = utf8_safe_data(found.as_dict())
    rows = [{camel(name): value for name, value in row.items()} for row in plain["changes"]]
    return {
        "id": found.id, "changes": rows, "leftOut": plain["left_out"], "patch": plain["patch"],
        "isCut": found.is_cut, "questions": plain["questions"],
    }  # fmt: skip


@router.post("/{sandbox_id}/commit", responses=RESPONSES)
async def commit(use: Running, asked: Commit) -> dict[str, Any]:
    """Write what a diff showed to the host's folder, which must lie below a root that may be written to."""
    await asyncio.to_thread(_check_writable, use)
    done = await use.sandbox.commit(
        asked.id, paths=asked.paths, dangerous=asked.dangerous, ours=asked.ours, theirs=asked.theirs,
        merge=asked.merge,
        branch=asked.branch, author=asked.author, message=asked.message,
    )  # fmt: skip
    said = {"written": list(done.written), "left": done.left, "refs": done.refs}
    return dict(utf8_safe_data(said))


def _check_writable(use: Use) -> None:
    """Raise PolicyDenied where the operator's roots let nobody write there."""
    path = use.sandbox.notes.get("workspace", {}).get("path")
    if path is not None:  # else there is no folder, as the call itself says
        with opened_workspace(use.service.options.roots, path, writes=True):
            pass


@router.post("/{sandbox_id}/discard", responses=RESPONSES)
async def discard(use: Running, asked: Discard) -> dict[str, Any]:
    """Give the sandbox the host's files back."""
    return {"discarded": utf8_safe_data(list(await use.sandbox.discard(asked.paths)))}
