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
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.policy import BACKEND_ROWS
from cloche.core.protocols import SupportsNames
from cloche.core.record import dataclass
from cloche.core.request import InputFile
from cloche.execution.prepare import prepare
from cloche.execution.sandbox import AsyncSandbox
from cloche.keeper.life import ENDS, Life

from .attachments import Attachment

LATE_S = 1.0  # by which init's own clock is first


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Bound the time of a sandbox. `lease_s` after its last use it ends; None for a sandbox without a lease.

    `at_end` is what happens at the end of its lifetime (`cloche.keeper.life`), where a keeper holds it.
    """

    lifetime_s: float
    idle_s: float | None = None
    lease_s: float | None = None
    at_end: str = ENDS


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
            await sandbox._require_live("this").ask(
                "limits", ends_in_s=terms.lifetime_s, idle_s=terms.idle_s, pauses=terms.at_end != ENDS
            )
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


def held_attachment(sandbox_id: str, sandbox: AsyncSandbox, terms: Terms) -> Attachment:
    """Return the attachment to a sandbox that this worker has opened with these terms, and holds from now on."""
    life = Life(time.monotonic(), terms.lifetime_s, terms.at_end)
    return Attachment(id=sandbox_id, sandbox=sandbox, is_held=True, life=life, idle_s=terms.idle_s)


async def until_over(
    attachment: Attachment, terms: Terms, on_pause: Callable[[], Awaitable[object]] | None = None
) -> str:
    """Wait until a sandbox has ended or must end, and return the reason. `on_pause` pauses it when its time is over."""
    life = _life_of(attachment)
    while True:
        if attachment.is_lost:
            return "found ended"
        now = time.monotonic()
        ends_at = float("inf") if life.ends_at is None else life.ends_at + LATE_S
        if now >= ends_at:
            if life.at_end == ENDS or on_pause is None:
                return "its lifetime is over"
            await on_pause()
            continue
        lease_left_s = _lease_left_s(attachment, terms, now)
        if lease_left_s <= 0:
            return "its lease is over"
        wait_s = min(ends_at - now, lease_left_s)
        attachment.has_changed.clear()
        changed: asyncio.Future[Any] = asyncio.ensure_future(attachment.has_changed.wait())
        lost: asyncio.Future[Any] = attachment.lost
        await asyncio.wait(
            [lost, changed], timeout=None if wait_s == float("inf") else wait_s,
            return_when=asyncio.FIRST_COMPLETED,
        )  # fmt: skip
        changed.cancel()


def _lease_left_s(attachment: Attachment, terms: Terms, now: float) -> float:
    """Return how long the lease lasts if the sandbox is not used any more."""
    if terms.lease_s is None:
        return float("inf")
    return terms.lease_s if attachment.is_in_use else attachment.used_at + terms.lease_s - now


def _life_of(attachment: Attachment) -> Life:
    assert attachment.life is not None  # noqa: S101 - a held sandbox has one
    return attachment.life


async def change_held(attachment: Attachment, op: str, **order: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Do an operation of a keeper on a held sandbox: `pause`, `resume`, `lifetime` or `info`; see `init.wire`."""
    life, opened, now = _life_of(attachment), attachment.live, time.monotonic()
    was_paused, without = life.is_paused, {"memory": False} if order.get("memory") is False else {}
    if op == "lifetime":
        if order.get("left_s") is not None:
            life.renew(now, order["left_s"], only_extends=bool(order.get("only_extends")))
        life.at_end = order.get("at_end", life.at_end)
    if op == "pause":
        await opened.ask("pause", **without)
        life.pause(now, has_memory=not without)
    elif op == "resume" or (was_paused and order.get("resumes")):
        await opened.ask("resume", **without)
        life.resume(now)
    row = BACKEND_ROWS.get(attachment.sandbox.backend)
    if op != "info" and (row is None or not row.is_fleet):
        ends_in_s = None if life.ends_at is None else max(0.0, life.ends_at - now)
        await opened.ask("limits", ends_in_s=ends_in_s, idle_s=attachment.idle_s, pauses=life.at_end != ENDS)
    attachment.is_paused = life.is_paused
    attachment.has_changed.set()
    return {
        "is_paused": life.is_paused, "was_paused": was_paused, "left_s": life.left_s(now), "at_end": life.at_end,
        "has_memory": life.has_memory,
    }  # fmt: skip


def as_info(attachment: Attachment) -> dict[str, Any]:
    """Return the age and the remaining time of a held sandbox, in the wire's format."""
    now, life = time.monotonic(), _life_of(attachment)
    return {
        "state": "paused" if life.is_paused else "running", "ageSeconds": now - attachment.opened_at,
        "secondsLeft": life.left_s(now), "clients": attachment.users,
    }  # fmt: skip
