"""The secrets of a call: their hosts among the network rules, and the backends that can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.config.keys import Settings
from cloche.config.settings import load_settings
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.record import replace
from cloche.core.result import Result
from cloche.core.secrets import LEFT, SecretSet, read_secrets

from .selection import FoundBackend


def read_with_settings(arguments: Mapping[str, Any]) -> tuple[SecretSet, Settings]:
    """Return the secrets of a call, and its settings with their hosts allowed. Raises InvalidRequest, PolicyDenied."""
    own = {name: value for name, value in arguments.items() if name != "secrets"}
    secrets, given = read_secrets(arguments["secrets"]), load_settings(own)
    if given.policy.network == "open":  # where they are reached anyway
        return secrets, given
    allowed = tuple(dict.fromkeys((*given.policy.network_allow, *secrets.rules)))
    settings = load_settings({**own, "network_allow": allowed})
    if settings.policy.network != "allowlist":
        raise InvalidRequest(
            f"secrets: with network {settings.policy.network!r} no host is reached through Cloche; "
            'leave network out, or use "allowlist" or "open"'
        )
    return secrets, settings


def placeholders_sent(result: Result) -> list[Mapping[str, Any]]:
    """Return the rows of a result's network that tell of placeholders that left as they are."""
    return [row for row in result.meta.get("network", ()) if row["is_allowed"] and row["why"].startswith(LEFT)]


def with_secrets(found_backend: FoundBackend, secrets: SecretSet) -> FoundBackend:
    """Return a backend with the secrets in its policy. Raises BackendUnavailable for one that cannot hold them.

    A sandbox that was prepared in advance has no authority of its own, so each is started anew.
    """
    backend = found_backend.backend
    if not getattr(backend, "takes_secrets", False):
        raise BackendUnavailable(
            f"backend {backend.name!r} takes no secrets yet.",
            remedy='Use backend "local" at level jail, or leave secrets out and pass what the program may read in env.',
        )
    return replace(found_backend, policy=found_backend.policy.with_changes(secrets=secrets, warm=False))
