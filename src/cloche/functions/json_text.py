"""Results of the caller's functions as JSON, within bounds of bytes, parts and depth."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from cloche.core.guest_json import MAX_DEPTH

MOST_PARTS = 40_000  # lists, objects and their items; the writer of JSON holds the interpreter's lock for all of them
_WRITER = json.JSONEncoder(separators=(",", ":"))


class NotJson(ValueError):
    """Say why a value cannot be sent."""


def as_json(value: Any, max_bytes: int, *, max_parts: int = MOST_PARTS) -> bytes:  # noqa: ANN401
    """Return a value as JSON in ASCII. Raises NotJson for what JSON does not have, and above the bounds."""
    plain = _plain(value)
    _measure(plain, max_bytes, max_parts)
    text = _WRITER.encode(plain).encode("ascii")
    if len(text) > max_bytes:
        raise NotJson(f"it has {len(text)} bytes as JSON, more than {max_bytes}; return less, or a part of it")
    return text


def is_small(value: Any) -> bool:  # noqa: ANN401
    """Tell whether writing a value takes no time that matters."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 1 << 14)


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return models of pydantic, and records of the standard library, as plain data."""
    if isinstance(value, str | int | float | list | dict | tuple | None):
        return value
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    if hasattr(type(value), "__dataclass_fields__"):
        return sys.modules["dataclasses"].asdict(value)  # which has made the class, or described it just now
    return value


def _measure(value: Any, max_bytes: int, max_parts: int) -> None:  # noqa: ANN401
    """Raise NotJson above the bounds, before anything is written: level by level, and no level that is too large."""
    level, parts, size = [value], 1, 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict | list | tuple):
                parts += len(item)
                if parts > max_parts:
                    raise NotJson(f"it has more than {max_parts} items; return less, or a part of it")
                inner += _items(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise NotJson(f"it has the number {item}, which JSON has not; return None instead")
            elif isinstance(item, int):
                size += item.bit_length() // 4
            elif item is not None and not isinstance(item, float):
                raise NotJson(f"it has a {type(item).__name__}, which JSON has not; return text, numbers, lists, dicts")
            if size > max_bytes:
                raise NotJson(f"it has more than {max_bytes} bytes; return less, or a part of it")
        if not inner:
            return
        level = inner
    raise NotJson(f"it is nested more than {MAX_DEPTH} deep")


def _items(item: Any) -> list[Any]:  # noqa: ANN401
    if not isinstance(item, dict):
        return list(item)
    if not all(isinstance(name, str) for name in item):
        raise NotJson("it has an object with a name that is no text")
    return [*item, *item.values()]
