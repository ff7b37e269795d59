"""The verbs of role coordinator: heartbeat, leases, state."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field, StringConstraints

from cloche import __version__
from cloche.core.errors import ClocheError
from cloche.execution.prepare import prepare_in_thread
from cloche.wire.calls import Call, CallRequest
from cloche.wire.exec_options import WireModel, Word
from cloche.wire.verbs import VERBS, Verb

from .admission import COORDINATOR
from .host import NodeHost

LEAST_TTL_S, MOST_TTL_S = 1.0, 3_600.0
MOST_DENIED, MOST_TOLD = 65_536, 65_536
LeaseId = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Heartbeat(WireModel):
    """That the coordinator lives, for `ttl` seconds; later ends of leases; addresses that no guest may reach.

    Without these they stay as they are.
    """

    denied: Annotated[list[Word], Field(max_length=MOST_DENIED)] | None = None
    ttl: Annotated[float, Field(ge=LEAST_TTL_S, le=MOST_TTL_S)]
    leases: dict[LeaseId, Annotated[float, Field(ge=0)]] = Field(default_factory=dict, max_length=MOST_TOLD)


class Drain(WireModel):
    """That no further lease is to be taken; with `undo` they are taken again."""

    undo: bool = False


class OneLease(WireModel):
    """A lease, and when its last credential is over; 0 if that is not known."""

    lease: LeaseId
    until: Annotated[float, Field(ge=0)] = 0.0


def _host(request: CallRequest) -> NodeHost:
    return cast("NodeHost", request.service)


async def status(_: Call, request: CallRequest) -> object:
    """Describe the node: what it is, what it enforces, and what is used of it."""
    host = _host(request)
    return {
        "version": __version__, "boot": host.boot, "python": platform.python_version(), "isDraining": host.is_draining,
        "clock": time.time(), **await _enforced(host), **host.load(), "digests": host.digests.all,
        "digestsTag": host.digests.tag,
    }  # fmt: skip


async def _enforced(host: NodeHost) -> dict[str, Any]:
    """Return the configured backend with its level and controls; why there is none, if it is not available."""
    try:
        backend = (await prepare_in_thread(**host.own_options)).backend
        capabilities = backend.capabilities()
    except ClocheError as error:
        return {"level": "", "backends": {}, "reason": str(error)}
    enforcement = capabilities.as_enforcement().as_dict()
    controls = enforcement["controls"]
    return {
        "level": enforcement["level"],
        "backends": {backend.name: {"level": enforcement["level"], "controls": controls}},
    }


async def keep(_: Call, request: CallRequest) -> object:
    """Note that the coordinator lives; answer by tags of the node's digests and of the addresses that it denies."""
    told, host = request.fields, _host(request)
    await host.keep(told.denied, told.ttl, told.leases)
    return {"digestsTag": host.digests.tag, "deniedTag": host.denied.tag}


async def leases(_: Call, request: CallRequest) -> object:
    """Return the ends of the leases that are held, by id."""
    return {"leases": dict(_host(request).leases.until)}


async def release(_: Call, request: CallRequest) -> object:
    """End a lease; answered when nothing of it is left."""
    told: OneLease = request.fields
    await _host(request).end_lease(told.lease, until=min(told.until, time.time() + MOST_TTL_S))
    return {}


async def drain(_: Call, request: CallRequest) -> object:
    """Take no further lease, or take them again."""
    told: Drain = request.fields
    _host(request).is_draining = not told.undo
    return {}


async def renewed(_: Call, request: CallRequest) -> object:
    """Return when the lease ends, which a call's credential may have moved."""
    return {"until": _host(request).leases.until[request.caller.project]}


NODE_VERBS: Mapping[str, Verb] = {
    "lease.renew": Verb("run", renewed, of=(), is_inside=False),
    "node.status": Verb(COORDINATOR, status, of=(), is_inside=False),
    "node.keep": Verb(COORDINATOR, keep, Heartbeat, of=(), is_inside=False),
    "node.leases": Verb(COORDINATOR, leases, of=(), is_inside=False),
    "node.release": Verb(COORDINATOR, release, OneLease, of=(), is_inside=False),
    "node.drain": Verb(COORDINATOR, drain, Drain, of=(), is_inside=False),
}
ALL_VERBS: Mapping[str, Verb] = {**VERBS, **NODE_VERBS}
