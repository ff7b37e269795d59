"""The secrets of a call, and rules with methods and paths, which are enforced in the same way.

Both need connections that are opened. A call with such rules and no secrets has an empty set of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.config.keys import Settings
from cloche.config.origins import DEFAULT
from cloche.config.settings import load_settings
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.network import parse_rule
from cloche.core.policy import Policy
from cloche.core.record import replace
from cloche.core.result import Result
from cloche.core.secret_names import SecretNames, holds_secrets, read_secret_names
from cloche.core.secrets import LEFT, PORT, SecretSet, noun_of, read_secrets

from .selection import FoundBackend


def read_with_settings(arguments: Mapping[str, Any], backend: str | None = None) -> tuple[SecretSet, Settings]:
    """Return the secrets of a call, and its settings with their hosts allowed. `backend` is that of a backend object.

    Raises InvalidRequest, PolicyDenied.
    """
    own = {name: value for name, value in arguments.items() if name != "secrets"}
    given = load_settings(own)
    if holds_secrets(backend or given.backend):
        return _held_elsewhere(arguments["secrets"], backend or given.backend, given), given
    secrets = read_secrets(arguments["secrets"])
    if given.policy.network == "open":  # where they are reached anyway
        return secrets, given
    if given.policy.network == "bridge":
        raise _not_reached("bridge")
    # Rules that a file of the working directory leaves out hold, too: else it would have their hosts opened as a whole.
    limited = {**_limited(load_settings(own, has_checkout=False).policy), **_limited(given.policy)}
    further = (text for rule in secrets.rules for text in limited.get(rule.removesuffix(f":{PORT}"), [rule]))
    allowed = tuple(dict.fromkeys((*given.policy.network_allow, *further)))
    settings = load_settings({**own, "network_allow": allowed})
    if settings.policy.network != "allowlist":
        raise _not_reached(settings.policy.network)
    return secrets, settings


def _limited(policy: Policy) -> dict[str, list[str]]:
    """Return the rules with methods and paths by their hosts; few policies have any."""
    limited: dict[str, list[str]] = {}
    if any("/" in rule for rule in policy.network_allow):
        for rule in policy.network_rules().limited:
            if PORT in rule.ports:
                limited.setdefault(rule.host, []).append(rule.text)
    return limited


def with_limits(hosts: Sequence[str], policy: Policy) -> tuple[str, ...]:
    """Return a shorter list of hosts that somebody else chose for a call with secrets, and what it must not leave out.

    A secret opens its hosts as a whole where no rule limits them to some requests.
    """
    named = {parse_rule(host).host for host in hosts}
    return (*hosts, *(rule.text for rule in policy.network_rules().limited if rule.host not in named))


def opens_for_rules(policy: Policy) -> SecretSet | None:
    """Return an empty set if there are rules with methods and paths, which need what secrets need; else None."""
    return SecretSet(()) if policy.network in ("allowlist", "open") and policy.network_rules().limited else None


def _held_elsewhere(secrets: object, backend: str, given: Settings) -> SecretSet:
    """Return secrets that another machine holds, which also knows their hosts."""
    names = read_secret_names(secrets, backend)
    is_chosen = given.origins.get("network", DEFAULT) != DEFAULT
    if given.policy.network == "bridge" or (given.policy.network == "off" and is_chosen):
        raise _not_reached(given.policy.network)
    return names


def _not_reached(network: str) -> InvalidRequest:
    return InvalidRequest(
        f"secrets: with network {network!r} no host is reached through Cloche; "
        'leave network out, or use "allowlist" or "open"'
    )


def placeholders_sent(result: Result) -> list[Mapping[str, Any]]:
    """Return the rows of a result's network that tell of placeholders that left as they are."""
    return [row for row in result.meta.get("network", ()) if row["is_allowed"] and row["why"].startswith(LEFT)]


@functools.cache
def _check_packages() -> None:
    """Raise BackendUnavailable without what opens connections."""
    from importlib import util

    from cloche.egress.client import OPENING

    if missing := [name for name in OPENING if util.find_spec(name) is None]:
        raise BackendUnavailable(
            f"secrets, and rules with methods and paths, need the package {missing[0]}, which is not installed.",
            remedy='Install it with: pip install "cloche[secrets]"',
        )


def with_secrets(found_backend: FoundBackend, secrets: SecretSet) -> FoundBackend:
    """Return a backend with the secrets in its policy. Raises BackendUnavailable for one that cannot hold them.

    A sandbox that most backends prepare in advance has no authority of its own, so each is started anew there.
    """
    backend = found_backend.backend
    is_named = isinstance(secrets, SecretNames)
    if holds_secrets(backend.name) and (is_named or noun_of(secrets) != "secrets"):
        return replace(found_backend, policy=found_backend.policy.with_changes(secrets=secrets))
    if is_named or not getattr(backend, "takes_secrets", False):
        instead = (
            "leave secrets out and pass what the program may read in env"
            if noun_of(secrets) == "secrets"
            else "name the host alone"
        )
        raise BackendUnavailable(
            f"backend {backend.name!r} takes no {noun_of(secrets)} yet.",
            remedy=f'Use backend "local" at level jail, "docker" or "gvisor"; or {instead}.',
        )
    if secrets.has_files and not getattr(backend, "writes_secret_files", False):
        raise BackendUnavailable(
            f"backend {backend.name!r} writes no files_inside of secrets yet.",
            remedy='Use backend "local", or have the program write the file, with the placeholder in its environment.',
        )
    _check_packages()
    warm = found_backend.policy.warm and bool(getattr(backend, "prepares_for_secrets", False))
    return replace(found_backend, policy=found_backend.policy.with_changes(secrets=secrets, warm=warm))
