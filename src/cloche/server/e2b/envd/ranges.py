"""What a request says about the part and the encoding of a file that it wants (RFC 9110, 12.5.3 and 14.2)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloche.core.processes import ByteRange

from ..errors import E2BError

_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII)
_QUALITY = re.compile(r"\s*q\s*=\s*([01](?:\.\d{0,3})?)\s*", re.ASCII | re.IGNORECASE)
MOST_CODINGS = 32
_WHOLE = ("range", "if-modified-since", "if-none-match", "if-range")  # with which a file is not compressed


def byte_range(headers: Mapping[str, str]) -> ByteRange | None:
    """Return the range that is asked for; None for the whole file, which several ranges get too."""
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None or match[1] == match[2] == "" or "if-range" in headers:
        return None
    first, last = (int(text) if text else None for text in match.groups())
    return None if first is not None and last is not None and last < first else (first, last)


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return the content encoding of an answer: `gzip` where the client accepts nothing else, or names it alone.

    Lists such as `gzip, deflate, br`, which HTTP clients send by themselves, get the file as it is: that is faster.
    Raises E2BError (406).
    """
    qualities = _qualities(headers.get("accept-encoding", ""))
    is_identity_refused = not qualities.get("identity", qualities.get("*", 1.0))
    accepts_gzip = qualities.get("gzip", qualities.get("*", 0.0)) > 0
    if any(name in headers for name in _WHOLE):
        if is_identity_refused:
            raise E2BError(406, "identity encoding not acceptable for Range or conditional request")
        return ""
    if is_identity_refused and not accepts_gzip:
        raise E2BError(406, "error parsing Accept-Encoding: no acceptable encoding found, supported: [gzip]")
    wanted = [name for name, quality in qualities.items() if quality]
    return "gzip" if accepts_gzip and (is_identity_refused or wanted == ["gzip"]) else ""


def _qualities(text: str) -> dict[str, float]:
    qualities: dict[str, float] = {}
    for word in text.split(",")[:MOST_CODINGS]:
        name, _, parameter = word.partition(";")
        match = _QUALITY.fullmatch(parameter)
        if name.strip():
            qualities[name.strip().lower()] = float(match[1]) if match is not None else 1.0
    return qualities
