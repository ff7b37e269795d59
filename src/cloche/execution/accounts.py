"""Accounts at providers of sandboxes on other machines, as the settings have them, and where their use is counted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

from cloche.audit.log import default_folder
from cloche.config.keys import Settings
from cloche.core.protocols import Backend
from cloche.core.remote import Quota, RemoteAccount

QUOTA_FILE = "quota.db"  # of this user, wherever the audit log of a call is
_QUOTA = tuple(field.name for field in fields(Quota))


def accounts_of(settings: Settings) -> Mapping[str, RemoteAccount]:
    """Return the account at each provider of which the settings say anything."""
    if not settings.remotes:
        return {}
    found: dict[str, dict[str, object]] = {}
    for where, value in settings.remotes.items():
        provider, _, name = where.partition("/")
        found.setdefault(provider, {})[name] = value
    return {provider: _account(provider, said) for provider, said in found.items()}


def account_of(backend: Backend) -> RemoteAccount | None:
    """Return the account that a backend sends code with, None for one of this host."""
    account: RemoteAccount | None = getattr(backend, "account", None)  # asked at every run that is recorded
    return account


def _account(provider: str, said: Mapping[str, object]) -> RemoteAccount:
    quota = Quota(**{name: said[name] for name in _QUOTA if name in said})  # type: ignore[arg-type]  # as keys parse it
    others = {name: value for name, value in said.items() if name not in _QUOTA}
    return RemoteAccount(
        provider=provider, quota=quota, quota_file=os.path.join(default_folder(), QUOTA_FILE),
        **others,  # type: ignore[arg-type]
    )  # fmt: skip
