"""One call while it runs: the client hears how far it is, and a call that is cancelled ends what it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
from mcp.server.mcpserver import Context

from cloche.agent.answering import Answer
from cloche.agent.toolbox import Toolbox

TICK_S = 1.0


async def run_to_end(toolbox: Toolbox, name: str, arguments: Mapping[str, Any], context: Context[Any, Any]) -> Answer:
    """Call a tool and report progress: the seconds so far, of those that it may take.

    The call is a task of its own, cancelled once and waited for: what it has to tidy up is not cancelled again.
    """
    begun = time.monotonic()
    total = _most_seconds(toolbox, arguments)
    calling = asyncio.ensure_future(toolbox.call(name, arguments))
    try:
        while True:
            seconds = time.monotonic() - begun
            if total is None or seconds < total:  # a call that waits for its turn may take longer
                await _report(context, seconds, total)
            done, _ = await asyncio.wait({calling}, timeout=TICK_S)
            if done:
                return calling.result()
    finally:
        if not calling.done():
            calling.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({calling})


def _most_seconds(toolbox: Toolbox, arguments: Mapping[str, Any]) -> float | None:
    timeout = arguments.get("timeout", toolbox.limits.timeout_s)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        return None
    return float(min(timeout, toolbox.limits.timeout_s))


async def _report(context: Context[Any, Any], seconds: float, total: float | None) -> None:
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # nobody listens: the call goes on
        await context.report_progress(
            seconds, total, f"running for {seconds:.0f} s" if seconds >= TICK_S else "started"
        )
