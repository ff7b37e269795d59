"""`/api/keys`: create, list, rotate and revoke the keys of a project. A key's text is in one answer only."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from cloche.records.keys import create_key, list_keys, revoke_key, rotate_key
from cloche.wire.exec_options import WireModel

from ..auth import Admin, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES

router = APIRouter(prefix="/api/keys", tags=["keys"], route_class=JsonRoute)


class NewKey(WireModel):
    """A key to make; with `e2b` it has the form that E2B's SDKs accept."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    scopes: list[str] = Field(default=["run", "read"], max_length=8)
    lifetime_seconds: Annotated[float, Field(gt=0, le=10 * 366 * 86_400)] | None = None
    e2b: bool = False


@router.get("", responses=RESPONSES)
async def keys(caller: Admin, service: TheService) -> dict[str, Any]:
    """List the keys of the service. Their texts are not stored."""
    stored_keys = await asyncio.to_thread(list_keys, service.database, project=caller.project)
    return {"items": [key.as_dict() for key in stored_keys], "nextCursor": None}


@router.post("", status_code=201, responses=RESPONSES)
async def make_key(body: NewKey, caller: Admin, service: TheService) -> dict[str, Any]:
    """Create a key. `key` in the answer is its text, which cannot be retrieved again."""
    key, text = await asyncio.to_thread(
        create_key, service.database, name=body.name, scopes=body.scopes, lifetime_s=body.lifetime_seconds,
        project=caller.project, audit=await service.audit(), is_e2b=body.e2b,
    )  # fmt: skip
    return {**key.as_dict(), "key": text}


@router.post("/{key_id}/rotate", status_code=201, responses=RESPONSES)
async def rotate(key_id: str, caller: Admin, service: TheService, e2b: bool = False) -> dict[str, Any]:
    """Replace a key by a new one with the same name and scopes. The old one is revoked."""
    rotate_it = partial(
        rotate_key, service.database, key_id, project=caller.project, audit=await service.audit(), is_e2b=e2b
    )  # fmt: skip
    key, text = await asyncio.to_thread(rotate_it)
    service.identities.forget()
    return {**key.as_dict(), "key": text}


@router.delete("/{key_id}", responses=RESPONSES)
async def revoke(key_id: str, caller: Admin, service: TheService) -> dict[str, Any]:
    """Revoke a key. Other workers refuse it within a second."""
    revoke_it = partial(revoke_key, service.database, key_id, project=caller.project, audit=await service.audit())
    revoked = await asyncio.to_thread(revoke_it)
    service.identities.forget()
    return revoked.as_dict()
