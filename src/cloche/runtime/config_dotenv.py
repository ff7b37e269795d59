"""The few lines of a `.env` that speak to Cloche; the rest belongs to somebody else and is not even
parsed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from cloche.core.errors import InvalidRequest

_LINE = re.compile(r"[ \t]*(?:export[ \t]+)?(?P<key>(?:SANDBOX|CLOCHE)_[A-Za-z0-9_]*)[ \t]*=[ \t]*(?P<rest>.*)")
_VALUE = re.compile(r"""(?:'(?P<single>[^']*)'|"(?P<double>[^"\\]*)"|(?P<bare>[^\s'"#][^\s#]*)?)[ \t]*(?:#.*)?""")
# What names another file, and the option that does so as well.
OTHER_FILES: Mapping[str, str] = {"CLOCHE_CONFIG": "--config", "CLOCHE_ENV_FILE": "--env-file"}


def read_dotenv(text: str, *, file: str, known: Container[str]) -> dict[str, str]:
    """Return the variables of `text` that are in `known`, empty ones left out.

    Raises InvalidRequest naming file, line and key for a value that is not one word, given twice differently,
    or for one of OTHER_FILES, which only the real environment may set.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None or match["key"] not in known:
            continue
        key, value = match["key"], _read_value(match["rest"], where=f"{file}, line {number}: {match['key']}")
        if key in OTHER_FILES:
            raise InvalidRequest(
                f"{file}, line {number}: {key} cannot be set here, as no .env may name another file; "
                f"set it in the environment, or name the file with {OTHER_FILES[key]}"
            )
        if found.get(key, value) != value:
            raise InvalidRequest(f"{file}, line {number}: {key} is given twice with different values; keep one of them")
        found[key] = value
    return {key: value for key, value in found.items() if value}


def _read_value(rest: str, *, where: str) -> str:
    match = _VALUE.fullmatch(rest.rstrip())
    if match is None:
        raise InvalidRequest(f"{where}: the value is not one word; put quotes around it, without escapes")
    return next((part for part in match.groups() if part is not None), "").strip()
