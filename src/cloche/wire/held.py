"""Sandboxes that a worker itself holds, without a keeper: how one is opened, and when it must end.

Theory of operation: a keeper is a process that lets a sandbox outlive its service. A sandbox whose lifetime is a
connection or a lease needs none, and only backend `local` has keepers. So the worker has such a sandbox open, as any
program of the library has. It ends with the worker, after `lifetime_s`, when its first process ends (init enforces
`lifetime_s` and `idle_s`, too), and, with a lease, `lease_s` after its last use. A request, a command, a cell and the
call `sandbox.hold` are uses; a session that is only open is none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.policy import BACKEND_ROWS
from cloche.core.protocols import SupportsNames
from cloche.core.record import dataclass
from cloche.core.request import InputFile
from cloche.execution.prepare import prepare
from cloche.execution.sandbox import AsyncSandbox

from .attachments import Attachment

LATE_S = 1.0  # by which init's own clock is first


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Bound the time of a sandbox. `lease_s` after its last use it ends; None for a sandbox without a lease."""

    lifetime_s: float
    idle_s: float | None = None
    lease_s: float | None = None


def needs_worker(options: Mapping[str, Any], terms: Terms) -> bool:
    """Tell whether the worker holds a sandbox of these options, and no keeper.

    Raises BackendUnavailable for a backend that sends code to machines of others. Blocks.
    """
    own: Any = {name: value for name, value in options.items() if name in SandboxOptions.__annotations__}
    backend = prepare(**own).backend
    row = BACKEND_ROWS.get(backend.name)
    if row is not None and row.is_remote and not row.is_fleet:
        raise BackendUnavailable(
            f"backend {backend.name!r}: a service opens live sandboxes on its own machine, or on nodes of its fleet.",
            remedy="Name a backend of this machine, or run code there: POST /api/code/exec.",
        )
    if row is not None and row.is_fleet and terms.idle_s is not None:
        raise InvalidRequest("idle: on a node of a fleet nothing measures that; give the sandbox a lease or a lifetime")
    return terms.lease_s is not None or not isinstance(backend, SupportsNames)


async def open_held(
    options: Mapping[str, Any], files: Mapping[str, bytes | InputFile] | None, terms: Terms
) -> AsyncSandbox:
    """Open a sandbox that this worker holds, and start it. Raises ClocheError."""
    sandbox = await asyncio.to_thread(lambda: AsyncSandbox(live=True, files=files, **options))
    await sandbox.open()
    row = BACKEND_ROWS.get(sandbox.backend)
    try:
        if row is None or not row.is_fleet:  # there `until_over` alone ends it in time
            await sandbox._require_live("this").ask("limits", ends_in_s=terms.lifetime_s, idle_s=terms.idle_s)
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


async def until_over(attachment: Attachment, terms: Terms) -> str:
    """Wait until a sandbox has ended or must end, and return the reason."""
    ends = attachment.opened_at + terms.lifetime_s + LATE_S
    while True:
        if attachment.is_lost:
            return "found ended"
        now = time.monotonic()
        if now >= ends:
            return "its lifetime is over"
        lease_left_s = _lease_left_s(attachment, terms, now)
        if lease_left_s <= 0:
            return "its lease is over"
        await asyncio.wait([attachment.lost], timeout=min(ends - now, lease_left_s))


def _lease_left_s(attachment: Attachment, terms: Terms, now: float) -> float:
    """Return how long the lease lasts if the sandbox is not used any more."""
    if terms.lease_s is None:
        return float("inf")
    return terms.lease_s if attachment.is_in_use else attachment.used_at + terms.lease_s - now


def as_info(attachment: Attachment, terms: Terms) -> dict[str, Any]:
    """Return the age and the remaining time of a held sandbox, in the wire's format."""
    age_s = time.monotonic() - attachment.opened_at
    return {
        "state": "paused" if attachment.is_paused else "running", "ageSeconds": age_s,
        "secondsLeft": max(0.0, terms.lifetime_s - age_s), "clients": attachment.users,
    }  # fmt: skip
