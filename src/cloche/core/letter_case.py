"""Names in the letter case of Python and in that of the wire."""

from __future__ import annotations

import re
from functools import lru_cache

_AFTER_BAR, _CAPITAL = re.compile(r"_([a-z])"), re.compile("[A-Z]")


@lru_cache(maxsize=256)
def camel(name: str) -> str:
    """Return a snake_case name in camelCase."""
    return _AFTER_BAR.sub(lambda match: match[1].upper(), name)


def snake(name: str) -> str:
    """Return a camelCase name in snake_case."""
    return _CAPITAL.sub(lambda match: f"_{match[0].lower()}", name)
