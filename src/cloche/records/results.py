"""Results in the format of the wire and of records: the fields of `Result.as_dict` in camelCase, as pure JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cloche.core.letter_case import camel
from cloche.core.result import Result


def result_as_wire(result: Result) -> dict[str, Any]:
    """Return a whole result. `enforcement` is by control, and the level is in `meta`.

    Keys inside `meta` and `value` belong to the backend and the guest. `host_advice` is left out: it concerns only this
    host, and readers may be elsewhere.
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
    """Return ASCII JSON: lone surrogates, which a guest may send, stay escaped.

    Values that JSON does not have, such as NaN, become text.
    """
    try:
        return json.dumps(document, allow_nan=False)
    except (ValueError, TypeError):
        plain = json.loads(json.dumps(document, default=str), parse_constant=str)
        return json.dumps(plain)


def _with_camel_keys(value: Any) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, Mapping):
        return {camel(str(name)): _with_camel_keys(item) for name, item in value.items()}
    return [_with_camel_keys(item) for item in value] if isinstance(value, list) else value
