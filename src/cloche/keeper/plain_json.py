"""JSON by the C parts of the `json` module: importing `json` itself costs a megabyte and several milliseconds."""

from __future__ import annotations

import _json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_inner: Any = _json


class _Settings:
    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float
    memo = None


_scan, _quote = _inner.make_scanner(_Settings), _inner.encode_basestring_ascii


def read(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises ValueError."""
    try:
        text = body.decode("utf-8", "surrogatepass")
        value, end = _scan(text, 0)
    except (StopIteration, RecursionError) as error:
        raise ValueError("this is not JSON") from error
    if not isinstance(value, dict) or end != len(text):
        raise ValueError("this is not a JSON object")
    return value


def write(value: object) -> bytes:
    """Return a plain value as ASCII JSON without spaces. Raises ValueError for any other."""
    return _text(value).encode("ascii")


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        quoted: str = _quote(value)
        return quoted
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quote(str(name))}:{_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, int | float) and value - value == 0:
        return repr(value)
    raise ValueError(f"{type(value).__name__} cannot be written as JSON")
