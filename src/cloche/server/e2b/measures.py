"""What a running sandbox uses of its processors, its memory and its disk."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from cloche.core.record import dataclass
from cloche.wire.uses import Use

from .calls import E2B

FIRST_S = 0.1  # between the two looks at the first request about a sandbox
MOST_SAMPLES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Hold what is used, and the limits of it: percent of all processors, bytes."""

    processors: int
    percent: float
    memory: int
    memory_limit: int
    disk: int
    disk_limit: int


async def measure(e2b: E2B, use: Use, sandbox_id: str) -> Measures:
    """Measure a sandbox: its processors since the last look, all else now. Raises ClocheError."""
    samples: dict[str, tuple[float, float]] = e2b.parts.setdefault("measures", {})
    if sandbox_id not in samples:
        samples[sandbox_id] = await _sample(use)
        await asyncio.sleep(FIRST_S)
    usage, disk = await asyncio.gather(use.held.live.ask("usage"), use.held.live.disk_used())
    at, cpu_s = samples.pop(sandbox_id)
    samples[sandbox_id] = time.monotonic(), _number(usage.get("cpu_s"))
    while len(samples) > MOST_SAMPLES:
        samples.pop(next(iter(samples)))
    limits = use.sandbox.limits
    processors = max(1, round(limits.cpus or 1))
    busy = (samples[sandbox_id][1] - cpu_s) / max(samples[sandbox_id][0] - at, 0.001) / processors
    return Measures(
        processors=processors, percent=round(100 * min(max(busy, 0.0), 1.0), 2),
        memory=int(_number(usage.get("memory_bytes"))), memory_limit=limits.memory_bytes or 0, disk=disk,
        disk_limit=limits.disk_bytes or 0,
    )  # fmt: skip


async def _sample(use: Use) -> tuple[float, float]:
    return time.monotonic(), _number((await use.held.live.ask("usage")).get("cpu_s"))


def _number(value: Any) -> float:  # noqa: ANN401 - any JSON of a guest
    return float(value) if isinstance(value, int | float) else 0.0
