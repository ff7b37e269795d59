"""`/api/login-links`: admit another browser without a restart."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from ..auth import Admin, TheService
from ..below import address
from ..identities import LINK_S, make_link_code
from ..problems import RESPONSES

router = APIRouter(prefix="/api/login-links", tags=["keys"])


@router.post("", status_code=201, responses=RESPONSES)
async def make_link(_: Admin, service: TheService) -> dict[str, Any]:
    """Create a one-time login link for a browser, valid for ten minutes. `path` is to be put after scheme and host."""
    await service.record("login", what="link")
    code = await asyncio.to_thread(make_link_code, service.database)
    return {"path": address(f"/login?code={code}"), "seconds": LINK_S}
