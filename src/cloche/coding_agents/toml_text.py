"""Edit TOML as text: add a table at the end, or take tables out; all else of a user's file stays as it is."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.core.errors import InvalidRequest

_HEADER = re.compile(r"^\s*\[")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"the file is not TOML ({error}); mend it, or move it away") from error


def _header(path: Sequence[str]) -> str:
    return "[" + ".".join(name if _BARE.fullmatch(name) else json.dumps(name) for name in path) + "]"


def with_table(text: str, path: Sequence[str], values: Mapping[str, str | list[str]]) -> str:
    """Return the text with a new table of strings and lists of strings at its end. Raises InvalidRequest."""
    expected = _parsed(text)
    lines = [_header(path), *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())]
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    after = f"{text}{gap}" + "\n".join(lines) + "\n"
    parsed, table = _parsed(after), expected
    for name in path[:-1]:
        table = table.setdefault(name, {})
    table[path[-1]] = dict(values)
    if parsed != expected:  # the table is written in another place already
        raise InvalidRequest(f"{_header(path)}: cannot be added to this file as it is written; add it by hand")
    return after


def without(text: str, paths: Sequence[Sequence[str]]) -> str:
    """Return the text without some tables, and those in them."""
    headers = tuple(map(_header, paths))
    kept: list[str] = []
    is_inside = False
    for line in text.splitlines(keepends=True):
        if _HEADER.match(line):
            header = line.partition("#")[0].strip()
            is_inside = header in headers or header.startswith(tuple(f"{own[:-1]}." for own in headers))
            if is_inside and kept and not kept[-1].strip():
                kept.pop()
        if not is_inside:
            kept.append(line)
    return "".join(kept)
