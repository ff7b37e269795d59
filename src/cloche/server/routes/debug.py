"""`/api/sandbox/debug` (C16): the active debug namespaces, and switching them in every worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body

from cloche.audit.log import audit_for
from cloche.core.debugging import DebugState, check_namespaces
from cloche.records.debugging import read_switches, store_switches
from cloche.wire.exec_options import WireModel

from ..auth import Admin, Reader, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES
from ..service import Service

router = APIRouter(prefix="/api/sandbox", tags=["sandbox"], route_class=JsonRoute)
_EXAMPLE = {
    "enabled": True, "namespaces": {"jail": True, "warm": False}, "source": "stored",
    "appliesTo": {"workers": "within 1 second", "helpers": "at their next start"},
}  # fmt: skip
_DOCUMENTED = {**RESPONSES, 200: {"content": {"application/json": {"example": _EXAMPLE}}}}


class Switches(WireModel):
    """Namespaces to switch on or off. `*` means all; the others are unchanged."""

    namespaces: dict[str, bool]


@router.get("/debug", responses=_DOCUMENTED)
async def debug(_: Reader, service: TheService) -> dict[str, Any]:
    """Return which debug namespaces are on. `source` says who decided, `appliesTo` when it takes effect."""
    return service.debugging.use(await service.read(read_switches)).as_dict()


@router.put("/debug", responses=_DOCUMENTED)
async def change_debug(
    caller: Admin,
    service: TheService,
    switches: Annotated[Switches, Body(examples=[{"namespaces": {"jail": True}}])],
) -> dict[str, Any]:
    """Switch debug namespaces on or off in every worker.

    A namespace that argument or environment of a worker switch on stays on there.
    """
    return (await switch(service, switches.namespaces, by=caller.name)).as_dict()


async def switch(service: Service, namespaces: Mapping[str, bool], *, by: str) -> DebugState:
    """Switch namespaces, store and audit the change; return the new state. Raises InvalidRequest."""
    values: dict[str, bool] = {}
    for name, is_on in namespaces.items():
        values |= dict.fromkeys(check_namespaces([name], where="namespaces"), is_on)
    before = await service.read(read_switches)
    await service.write(partial(store_switches, values=values, by=by))
    if (audit := audit_for(await service.settings())) is not None:
        changed = {f"debug.{name}": [before.get(name, False), is_on] for name, is_on in values.items()}
        await asyncio.to_thread(audit.record, "settings", by=by, changed=changed)
    return service.debugging.use({**before, **values})
