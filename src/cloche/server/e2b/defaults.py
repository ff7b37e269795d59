"""The options of sandboxes of this mode: the service's, and the mode's own where its operator set none."""

from __future__ import annotations

import asyncio
from typing import Any

from cloche.config.settings import load_settings
from cloche.execution.prepare import prepare_in_thread

from ..service import Service

ACCOUNT = "user"  # of E2B's own template
# E2B's own template has two processors, 512 MiB, and commands without a time-out but the client's.
DEFAULTS: dict[str, Any] = {
    "timeout": "1h", "memory": "512m", "cpus": 2, "pids": 256, "disk": "512m", "users": True, "account": ACCOUNT,
}  # fmt: skip


async def sandbox_options(service: Service) -> dict[str, Any]:
    """Return the options of a sandbox without a template's own. Raises InvalidRequest, BackendUnavailable."""
    await service.use_stored()
    origins = load_settings(dict(service.options.options)).origins
    own = {key: value for key, value in DEFAULTS.items() if str(origins.get(key, "default")) == "default"}
    prepared = await prepare_in_thread(**service.own_options)
    capabilities = await asyncio.to_thread(prepared.backend.capabilities)
    if capabilities.not_users:
        own.pop("users", None)
    if not capabilities.names_accounts or prepared.policy.user is not None:
        own.pop("account", None)
    return {**service.options.options, **own}
