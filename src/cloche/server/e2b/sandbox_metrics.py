"""Metrics of sandboxes: processor, memory and disk. A value is measured when a client asks, at most once a second.

Nothing is measured of sandboxes that nobody asks about. Their earlier values are kept by this worker, up to a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.record import dataclass, field
from cloche.keeper import registry
from cloche.keeper.attach import visit
from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts, seconds_of

from . import states
from .calls import E2B, Call, Row, e2b_id
from .errors import E2BError
from .sandbox_lists import own_sandboxes
from .sandboxes import cpu_count

PART = "sandbox_metrics"
MOST_VALUES, MOST_AT_ONCE = 720, 100  # that are kept of one sandbox; sandboxes of one request
LEAST_S, ANSWER_S = 1.0, 2.0  # between two measurements, and for a sandbox to answer


@dataclass(slots=True, kw_only=True, eq=False)
class History:
    """Hold the values of one sandbox, and when and with how much processor time the last one was measured."""

    values: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_VALUES))
    measured_at: float
    cpu_s: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


def history_of(e2b: E2B, facts: SandboxFacts) -> History:
    """Return the values of a sandbox. Its processor time counts from its creation on."""
    histories: dict[str, History] = e2b.parts.setdefault(PART, {})
    if not histories:
        e2b.service.sandboxes.lives.listeners.append(lambda row, what: _forget(histories, row, what))
    return histories.setdefault(facts.id, History(measured_at=seconds_of(facts.created_at)))


def _forget(histories: dict[str, History], row: str, what: str) -> None:
    if what == "ended":
        histories.pop(row, None)


async def measure(e2b: E2B, facts: SandboxFacts) -> History:
    """Add a value of a sandbox that runs, unless there is one of the last second."""
    history = history_of(e2b, facts)
    async with history.turn:
        if states.state_of(facts) == states.RUNNING and (
            not history.values or time.time() >= history.measured_at + LEAST_S
        ):
            with contextlib.suppress(OutcomeUnknown, InvalidRequest):
                usage = await asyncio.to_thread(_usage, facts.name)
                _add(history, facts.document["limits"], usage, time.time())
    return history


def _usage(name: str) -> Mapping[str, Any]:
    return visit(registry.find(name), "usage", timeout_s=ANSWER_S)


def _add(history: History, limits: Mapping[str, Any], usage: Mapping[str, Any], now: float) -> None:
    cpus, cpu_s = cpu_count(limits), float(usage["cpu_s"])
    passed_s = max(0.001, now - history.measured_at)
    used_pct = 100 * max(0.0, cpu_s - history.cpu_s) / (passed_s * cpus)
    memory_total, disk_total = limits.get("memoryBytes") or 0, usage.get("disk_total_bytes") or limits["diskBytes"]
    memory = int(usage["memory_bytes"]) + int(usage.get("init_bytes", 0))
    history.values.append({
        "timestamp": moment(now), "timestampUnix": int(now), "cpuCount": cpus,
        "cpuUsedPct": round(min(100.0, used_pct), 2), "memUsed": min(memory, memory_total),
        "memTotal": memory_total, "memCache": 0, "diskUsed": int(usage.get("disk_bytes") or 0),
        "diskTotal": disk_total or 0,
    })  # fmt: skip
    history.measured_at, history.cpu_s = now, cpu_s


async def metrics(call: Call) -> Response:
    """Return the values of one sandbox between two times."""
    _, facts = await call.sandbox("metrics", "read")
    start, end = (_read_seconds(call, name) for name in ("start", "end"))
    history = await measure(call.e2b, facts)
    return JSONResponse([
        value for value in history.values
        if (start is None or value["timestampUnix"] >= start) and (end is None or value["timestampUnix"] <= end)
    ])  # fmt: skip


def _read_seconds(call: Call, name: str) -> int | None:
    text = call.request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise E2BError(400, f"{name}: give seconds since 1970")
    return int(text)


async def metrics_of_many(call: Call) -> Response:
    """Return the newest value of several sandboxes, by their ids. Those that the caller has not are left out."""
    caller = await call.caller("read")
    wanted = {text.partition("-")[0] for text in call.request.query_params.get("sandbox_ids", "").split(",") if text}
    if len(wanted) > MOST_AT_ONCE:
        raise E2BError(400, f"sandbox_ids: give at most {MOST_AT_ONCE}")
    rows = [facts for facts in await own_sandboxes(call, caller) if e2b_id(facts.id) in wanted]
    histories = await asyncio.gather(*(measure(call.e2b, facts) for facts in rows))
    newest = {
        e2b_id(facts.id): history.values[-1] for facts, history in zip(rows, histories, strict=True) if history.values
    }
    return JSONResponse({"sandboxes": newest})


ROWS = (
    Row(method="GET", path="/sandboxes/metrics", handler=metrics_of_many),
    Row(method="GET", path="/sandboxes/{sandbox_id}/metrics", handler=metrics),
)
