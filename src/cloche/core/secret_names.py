"""Secrets that another machine holds, and that its callers use by name: those of a service, or of a fleet's nodes.

A value of the caller's own is refused, so nothing but names leaves the caller's process. `SecretStore` is what the
other machine asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from .errors import InvalidRequest
from .record import dataclass
from .secrets import MOST_SECRETS, Secret, SecretSet, is_secret_name

_HOLDERS: Mapping[str, tuple[str, str]] = {
    "cloche": ("its service", "store it there with `cloche secrets set {name}`"),
    "ray": ("the operator of its nodes", "have it put into secrets_from of the nodes"),
    "kubernetes": ("the operator of its pods", "have it put into the Kubernetes Secret of fleet.secret"),
}
MOST_NAME = 128  # characters
_NAME_OF_TEXT = re.compile(r"[^=@]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSecret:
    """A secret that this machine holds for callers: `projects` may use it, and all of them if there are none."""

    name: str
    secret: Secret
    projects: tuple[str, ...] = ()

    def is_for(self, project: str) -> bool:
        """Tell whether a project may use it."""
        return not self.projects or project in self.projects


class SecretNames(SecretSet):
    """Hold the names of secrets that another machine holds, which have neither a source nor hosts here."""

    __slots__ = ()


class SecretStore(Protocol):
    """Hold secrets for callers."""

    async def of(self, project: str, names: Sequence[str]) -> dict[str, Secret]:
        """Return secrets of a project. Raises InvalidRequest for a name that it does not have."""
        ...


def holds_secrets(backend: str) -> bool:
    """Tell whether a backend uses secrets that are held elsewhere."""
    return backend in _HOLDERS


def read_secret_names(given: object, backend: str) -> SecretNames:
    """Read the keyword `secrets` for a backend that takes names alone. Raises InvalidRequest, also for a value."""
    if isinstance(given, Mapping):
        rows: Iterable[tuple[object, object]] = given.items()
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        rows = ((text, Secret()) for text in given)
    else:
        raise InvalidRequest(f'secrets: backend {backend!r} takes a list of names, such as ["OPENAI_API_KEY"]')
    names = [_name(name, secret, backend) for name, secret in rows]
    check_names(names)
    return SecretNames((name, Secret()) for name in names)


def _name(name: object, secret: object, backend: str) -> str:
    """Return the name of a secret that has nothing but that. Its text may be a value, which no error repeats."""
    who, how = _HOLDERS[backend]
    leading = _NAME_OF_TEXT.match(name) if isinstance(name, str) else None
    shown = leading[0] if leading and can_be_held(leading[0]) else "NAME"
    if shown == name and secret == Secret():
        return shown
    raise InvalidRequest(
        f"secrets: backend {backend!r} takes names alone, as {who} holds values and hosts, and {shown} has a source or "
        f'hosts here, which were not sent; {how.format(name=shown)}, and give secrets=["{shown}"]'
    )


def can_be_held(name: str) -> bool:
    """Tell whether a held secret can have this name."""
    return is_secret_name(name) and len(name) <= MOST_NAME


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidRequest for too many names, one that is none, and one that is given twice."""
    if len(names) > MOST_SECRETS:
        raise InvalidRequest(f"secrets: {len(names)} are given; a sandbox has {MOST_SECRETS} at most")
    if len(set(names)) < len(names):
        raise InvalidRequest("secrets: a name is given twice")
    if not all(map(can_be_held, names)):
        raise InvalidRequest("secrets: a name is that of a variable, such as OPENAI_API_KEY")


def unknown(name: str, by: str, remedy: str) -> InvalidRequest:
    """Return the error for a secret that a caller does not have: it does not exist, or is for others alone."""
    return InvalidRequest(f"secrets: {by} holds no secret {name} for this caller; {remedy}")
