"""What a guest tells of its value and of what it shows, read: bounded, checked for its shape, and no more believed."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from .frames import FrameReader
from .result import Output

MAX_SHOWN = 500  # outputs of one run
MAX_METADATA_BYTES = 64 * 1024  # of one output, as JSON
MAX_VALUE_BYTES = 65_536
MAX_TOLD_BYTES = 32 * 1024 * 1024  # value and figures together


def read_told(data: bytes) -> tuple[Any, bool, tuple[Output, ...]]:
    """Return the value that a one-shot guest told, whether it is a repr, and what it showed.

    (None, False, ()) for nothing, or where what came is malformed.
    """
    if data[:1] != b"F":
        return *_value(data), ()
    try:
        frames = FrameReader(MAX_TOLD_BYTES).feed(data[1:])
    except ValueError:
        return None, False, ()
    found = [one for one in map(read_output, frames) if one is not None]
    last = frames[-1].get("text") if frames else ""
    return *_value(last.encode() if isinstance(last, str) else b""), tuple(found[:MAX_SHOWN])


def _value(data: bytes) -> tuple[Any, bool]:
    if len(data) > MAX_VALUE_BYTES:
        return None, False
    kind, text = data[:1], data[1:].decode("utf-8", "replace")
    if kind == b"R":
        return text, True
    if kind == b"J":
        with contextlib.suppress(ValueError, RecursionError):  # the guest's word: not JSON, no value
            return json.loads(text), False
    return None, False


def read_output(frame: Mapping[str, Any]) -> Output | None:
    """Read a MIME bundle; binary content comes as base64. None for what is no bundle."""
    data, metadata = frame.get("data"), frame.get("metadata")
    if not isinstance(data, dict):
        return None
    content = {}
    for mime, value in data.items():
        if isinstance(value, str):
            content[mime] = _decoded(mime, value)
        elif mime.endswith("json"):
            content[mime] = _as_json(value)
    return Output(data=content, metadata=_bounded(metadata)) if content else None


def _bounded(metadata: object) -> dict[str, Any]:
    """Return an output's metadata, nothing where they are none or more than any output needs."""
    if not isinstance(metadata, dict) or not metadata:
        return {}
    return metadata if len(json.dumps(metadata)) <= MAX_METADATA_BYTES else {}


def _decoded(mime: str, value: str) -> str | bytes:
    if mime.startswith("text/") or mime.endswith(("xml", "json", "javascript")):
        return value
    with contextlib.suppress(ValueError, binascii.Error):
        return base64.b64decode(value, validate=True)
    return value


def _as_json(value: object) -> str:
    return json.dumps(value)
