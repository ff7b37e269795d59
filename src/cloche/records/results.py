"""Results as the wire and records have them: the fields of `Result.as_dict` in camelCase, and nothing but JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cloche.core.result import Result

_AFTER_BAR, _CAPITAL = re.compile(r"_([a-z])"), re.compile("[A-Z]")


@lru_cache(maxsize=256)
def camel(name: str) -> str:
    """Return a name of Python's as the wire has it."""
    return _AFTER_BAR.sub(lambda found: found[1].upper(), name)


def snake(name: str) -> str:
    """Return a name of the wire's as Python has it."""
    return _CAPITAL.sub(lambda found: f"_{found[0].lower()}", name)


def result_as_wire(result: Result) -> dict[str, Any]:
    """Return a whole result; `enforcement` is by control, and the level in `meta`.

    The keys inside `meta` and `value` are a backend's and a guest's own. What is of this host alone, `host_advice`, is
    left out: its readers may be elsewhere.
    """
    plain = result.as_dict()
    plain["meta"] = {name: value for name, value in plain["meta"].items() if name != "host_advice"}
    document = {camel(name): value for name, value in plain.items()}
    document["usage"] = {camel(name): value for name, value in plain["usage"].items()}
    document["enforcement"], document["hits"] = plain["enforcement"]["controls"], plain["enforcement"]["hits"]
    if "fix" in plain:
        document["fix"] = _with_camel_keys(plain["fix"])
    return document


def as_json(document: Mapping[str, Any]) -> str:
    """Return JSON text in ASCII: halves of character pairs, which a guest may send, stay escaped.

    What no JSON can hold, such as NaN, becomes text.
    """
    try:
        return json.dumps(document, allow_nan=False)
    except (ValueError, TypeError):
        plain = json.loads(json.dumps(document, default=str), parse_constant=str)
        return json.dumps(plain)


def _with_camel_keys(value: Any) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, Mapping):
        return {camel(str(name)): _with_camel_keys(one) for name, one in value.items()}
    return [_with_camel_keys(one) for one in value] if isinstance(value, list) else value
