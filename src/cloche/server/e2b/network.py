"""The network of sandboxes."""

from __future__ import annotations

from typing import Any

from cloche.wire.callers import Caller

from .calls import Call
from .errors import E2BError
from .new_sandbox import NewSandbox


async def network_options(call: Call, caller: Caller, body: NewSandbox) -> dict[str, Any]:
    """Return the options of a new sandbox's network, which the caller may have. Raises E2BError."""
    del call, caller
    if body.network is not None and body.network.model_dump(exclude_none=True):
        raise E2BError(501, "network: rules at creation are not supported yet")
    return {}
