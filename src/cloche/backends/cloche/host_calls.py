"""Calls of the caller's functions by programs at a service: they come here, in two streams of the program's call.

The service only passes bytes on. It may lie, so what comes is checked as if a guest had sent it here: see
`cloche.functions`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from cloche.core.errors import BackendUnavailable
from cloche.core.functions import OfferedFunctions
from cloche.core.loops import finish
from cloche.core.remote import RemoteAccount

from ..live_calls import CallChannel
from .connections import connected
from .wire import Call

Notes = Callable[[], Mapping[str, Any]]


async def tool_fields(functions: OfferedFunctions | None, account: RemoteAccount) -> dict[str, Any]:
    """Return the field that names the functions. Raises BackendUnavailable for a service that carries no calls."""
    if functions is None:
        return {}
    wire = await connected(account)
    if not wire.most_tools:
        raise BackendUnavailable(
            f"tools: Cloche {wire.version} at {account.host} carries no calls of functions to its caller; nothing has "
            "run.",
            remedy="Update it to the version of this side, or leave tools out.",
        )
    return {"tools": list(functions.names)}


@asynccontextmanager
async def served(call: Call, functions: OfferedFunctions | None) -> AsyncIterator[Notes]:
    """Serve the calls that come with a call of the wire, which has just begun. Yields what a result's meta has."""
    if functions is None:
        yield dict
        return
    channel = call.functions = CallChannel(call, functions)
    try:
        yield channel.calls.notes
    finally:
        await finish(channel.wait_closed())
