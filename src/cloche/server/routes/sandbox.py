"""`/api/sandbox/config` and `/api/sandbox/backends` (C9): effective settings, available backends, changing settings."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Body

from cloche.audit.log import audit_for
from cloche.config.keys import CEILING_FIELDS, Settings
from cloche.config.spellings import NAMES, SPELLINGS, read_names
from cloche.core.escape import escape_name
from cloche.core.limits import REQUESTED_LIMITS
from cloche.core.policy import BACKEND_ROWS, Policy
from cloche.execution.accounts import accounts_of
from cloche.execution.selection import BackendCriteria, describe
from cloche.wire.exec_options import MOST_FAULTS
from cloche.wire.problems import Refused

from ..auth import Admin, Reader, TheService
from ..bodies import JsonRoute
from ..problems import RESPONSES

router = APIRouter(prefix="/api/sandbox", tags=["sandbox"], route_class=JsonRoute)
DETECTED_FOR_S = 30.0  # querying a daemon is slow
_detected: dict[str, tuple[float, asyncio.Task[dict[str, Any]]]] = {}


@router.get("/config", responses=RESPONSES)
async def config(_: Reader, service: TheService) -> dict[str, Any]:
    """Return the settings that apply to runs: runtime, limits, network, languages, and where each comes from."""
    return await _shown(await service.settings())


@router.put("/config", responses=RESPONSES)
async def change_config(
    caller: Admin,
    service: TheService,
    given: Annotated[dict[str, Any], Body(examples=[{"timeout": "20s", "memoryLimit": "128m"}])],
) -> dict[str, Any]:
    """Change settings for the runs of all callers. `null` resets a setting to the configuration files.

    Changed settings take precedence over files. Environment and arguments of the service take precedence over them.
    Ceilings always apply.
    """
    unknown = [escape_name(name[:80]) for name in given if name not in SPELLINGS][:MOST_FAULTS]
    if unknown:
        raise Refused(
            422, "invalid-request", "; ".join(f"{name}: there is no such field" for name in unknown), field=unknown[0],
            remedy=f"use some of {', '.join(NAMES)}",
        )  # fmt: skip
    values = read_names(given)
    async with service.changing:  # no change between the comparison and the write
        settings = await service.settings()
        before = shown_values(settings)
        after = await service.change_settings(values, by=caller.name)
    if (audit := audit_for(after)) is not None:
        changed = {
            name: [before[name], shown_values(after)[name]] for name, keyword in NAMES.items() if keyword in values
        }
        await asyncio.to_thread(audit.record, "settings", by=caller.name, changed=changed)
    return await _shown(after)


@router.get("/backends", responses=RESPONSES)
async def backends(_: Reader, service: TheService) -> dict[str, Any]:
    """List the backends: availability, level, the reason if unavailable, and the remedy."""
    return {"backends": await list_backends(await service.settings())}


async def list_backends(settings: Settings) -> list[dict[str, Any]]:
    """Return each backend in the wire's format."""
    return list(await asyncio.gather(*(_backend(name, settings) for name in BACKEND_ROWS)))


async def _shown(settings: Settings) -> dict[str, Any]:
    docker, gvisor = await asyncio.gather(_backend("docker", settings), _backend("gvisor", settings))
    rows = CEILING_FIELDS.items()
    return {
        "dockerAvailable": docker["available"],
        "gvisorAvailable": gvisor["available"],
        **shown_values(settings),
        "tier": settings.tier,
        "origins": {name: str(settings.origins.get(keyword, "default")) for name, keyword in NAMES.items()},
        "ceilings": {name: str(settings.ceilings[where]) for name, where in rows if where in settings.ceilings},
    }


def shown_values(settings: Settings) -> dict[str, Any]:
    """Return each setting by the wire's name."""
    limits, policy = settings.limits, settings.policy
    required = [policy.require_level] if policy.require_level is not None else []
    return {
        "runtime": settings.backend,
        **{row.wire: row.shown(limits) for row in REQUESTED_LIMITS},
        "network": policy.network,
        "networkAllow": list(policy.network_allow),
        "networkDeny": list(policy.network_deny),
        "languages": list(policy.languages),
        "packages": policy.packages if isinstance(policy.packages, str) else list(policy.packages),
        "require": [*map(str, required), *map(str, policy.require_controls)],
        "screen": policy.screen,
        "users": policy.users,
    }


async def _backend(name: str, settings: Settings) -> dict[str, Any]:
    """Return one backend. Concurrent requests share one detection, which takes one thread."""
    detected_at, task = _detected.get(name, (0.0, None))
    is_old = time.monotonic() - detected_at > DETECTED_FOR_S
    if task is None or not _is_ours(task) or (task.done() and (is_old or _has_failed(task))):
        task = asyncio.ensure_future(_detect(name, settings))
        _detected[name] = (time.monotonic(), task)
    return await asyncio.shield(task)


def _has_failed(task: asyncio.Task[dict[str, Any]]) -> bool:
    return task.cancelled() or task.exception() is not None


def _is_ours(task: asyncio.Task[dict[str, Any]]) -> bool:
    return task.done() or task.get_loop() is asyncio.get_running_loop()


async def _detect(name: str, settings: Settings) -> dict[str, Any]:
    criteria = BackendCriteria(policy=Policy(), images=settings.images, accounts=accounts_of(settings))
    row = await asyncio.to_thread(describe, name, criteria)
    return {
        "name": name, "available": row.available, "level": str(row.level) if row.available else None,
        "levelSource": row.level_source, "reason": row.reason, "remedy": row.remedy,
        "summary": BACKEND_ROWS[name].summary,
    }  # fmt: skip
