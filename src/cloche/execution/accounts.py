"""Accounts at providers of remote sandboxes, as configured, and the quota of their use."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from cloche.audit.log import default_folder
from cloche.config.keys import Settings
from cloche.core.errors import ClocheError, OutcomeUnknown
from cloche.core.fleet_settings import FleetSettings
from cloche.core.loops import finish
from cloche.core.processes import Detached
from cloche.core.protocols import Backend, SupportsAccount
from cloche.core.record import fields
from cloche.core.remote import Quota, RemoteAccount
from cloche.core.result import Result

from .registry import counter_of, has_power

ENGINES = ("kubernetes", "ray")
QUOTA_FILE = "quota.db"  # in the user's default folder, even if a call's audit log is elsewhere
_QUOTA = tuple(field.name for field in fields(Quota))


def accounts_of(settings: Settings) -> Mapping[str, RemoteAccount]:
    """Return the configured account at each provider."""
    engines = {}
    if settings.fleet != FleetSettings():
        engines = {name: RemoteAccount(provider=name, fleet=settings.fleet) for name in ENGINES}
    if not settings.remotes:
        return engines
    values_by_provider: dict[str, dict[str, object]] = {}
    for where, value in settings.remotes.items():
        provider, _, name = where.partition("/")
        values_by_provider.setdefault(provider, {})[name] = value
    return engines | {provider: _account(provider, values) for provider, values in values_by_provider.items()}


def account_of(backend: Backend) -> RemoteAccount | None:
    """Return the account with which a backend sends code, None for a backend of this host."""
    if not has_power(backend, SupportsAccount):
        return None
    return cast("SupportsAccount", backend).account()


async def counted(run: Callable[[], Awaitable[Result]], backend: Backend, timeout_s: float | None) -> Result:
    """Run, and count the run against the quota of the backend's account, if it has one.

    Without a time-out no seconds are reserved. A run that did not start is refunded; one whose outcome is unknown keeps
    its reservation. Raises BackendUnavailable if the quota is used up.
    """
    account = account_of(backend)
    if account is None:
        return await run()
    counter = counter_of(account)
    if counter is None:
        return await run()
    ticket = await asyncio.to_thread(counter.begin_run, timeout_s or 0.0)
    began = time.monotonic()
    try:
        result = await run()
    except (OutcomeUnknown, Detached):
        raise
    except (ClocheError, OSError):
        await finish(asyncio.to_thread(ticket.refund))
        raise
    took_s = time.monotonic() - began  # measured here, since the provider reports the result's duration
    seconds = took_s if timeout_s is None else min(timeout_s, took_s)
    cost = (result.meta.get("remote") or {}).get("cost")
    await finish(asyncio.to_thread(ticket.settle, seconds, cost))
    return result


def _account(provider: str, values: Mapping[str, object]) -> RemoteAccount:
    quota = Quota(**{name: values[name] for name in _QUOTA if name in values})  # type: ignore[arg-type]  # as keys parse it
    options = {name: value for name, value in values.items() if name not in _QUOTA}
    try:
        file = os.path.join(default_folder(), QUOTA_FILE)
    except ClocheError:  # no home: with a quota, runs are then refused
        file = None
    return RemoteAccount(provider=provider, quota=quota, quota_file=file, **options)  # type: ignore[arg-type]
