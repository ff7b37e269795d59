"""Variables of a new sandbox whose value is the placeholder of a secret, as `Secret.fill` makes it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloche.core.secret_names import check_names

FILLED = re.compile(r"\$\{e2b\.secrets\.([^{}]+)\}")


def variable(name: str) -> str:
    """Return the service's name of a secret with one of E2B's. Raises InvalidRequest."""
    text = name.strip().upper().replace("-", "_")
    check_names([text])
    return text


def named_secrets(variables: Mapping[str, str]) -> list[str]:
    """Return the variables that a secret gives."""
    return [name for name, value in variables.items() if FILLED.fullmatch(value) is not None]


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the other variables."""
    return {name: value for name, value in variables.items() if FILLED.fullmatch(value) is None}


def with_secrets(variables: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """Return variables as they were sent, with the placeholders of secrets."""
    return {**variables, **{name: f"${{e2b.secrets.{name.lower()}}}" for name in names}}
