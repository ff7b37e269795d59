"""The names of settings in requests: those of the wire, and every spelling of configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.letter_case import snake
from cloche.core.limits import REQUESTED_LIMITS

from . import readers
from .keys import ARGUMENT_READERS, BY_NAME

# The wire's name -> keyword of `SandboxOptions`.
NAMES: Mapping[str, str] = {
    "runtime": "backend", **{row.wire: row.keyword for row in REQUESTED_LIMITS},
    "network": "network", "networkAllow": "network_allow", "networkDeny": "network_deny", "languages": "languages",
    "packages": "packages", "require": "require", "screen": "screen", "users": "users",
}  # fmt: skip

# Every spelling of configuration files (C1), and the wire's, also in snake case -> keyword.
SPELLINGS: Mapping[str, str] = {
    **{spelling: keyword for keyword in NAMES.values() for spelling in BY_NAME[keyword].readers()},
    **{snake(name): keyword for name, keyword in NAMES.items()},
    **NAMES,
}


def read_names(spelled: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by keyword, from any of their names.

    Raises InvalidRequest for an unknown name, for two names of the same setting, and for an invalid value.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in spelled.items():
        keyword = SPELLINGS.get(name)
        if keyword is None:
            raise InvalidRequest(f"{escape_name(name[:80])}: there is no such setting; use some of {', '.join(NAMES)}")
        if keyword in values:
            raise InvalidRequest(f"{name}: {names[keyword]} sets the same value; give one of them")
        names[keyword], values[keyword] = name, read_spelling(name, value)
        if value is not None:  # errors use the given name
            ARGUMENT_READERS[keyword](readers.check_length(values[keyword], name=name), name=name)
    return values


def read_spelling(name: str, value: Any) -> Any:  # noqa: ANN401 - as many types as settings
    """Return a setting's value from one of its names, converted if needed, such as a percentage of processors."""
    keyword = SPELLINGS[name]
    reader = BY_NAME[keyword].other_spellings.get(name)
    return value if reader is None or value is None else reader(value, name=name)[keyword]
