"""Ids of records: a prefix for the kind, then 20 characters of base32, sortable by time and unguessable."""

from __future__ import annotations

import re
import secrets
import time
from datetime import UTC, datetime

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's, in the order of the characters' codes
_LENGTH, _TIME_LENGTH = 20, 9  # 45 bits of milliseconds, 55 of chance
_RANDOM_BITS = 5 * (_LENGTH - _TIME_LENGTH)
_SHAPE = re.compile(rf"[a-z]+_[{_ALPHABET}]{{{_LENGTH}}}")


def new_id(kind: str) -> str:
    """Return a new id, such as `run_01k9z…`."""
    number = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    digits = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return f"{kind}_{''.join(reversed(digits))}"


def check_id(text: str, kind: str) -> str:
    """Return a valid id. Raises InvalidRequest for an invalid one, which must not become a file's name."""
    if _SHAPE.fullmatch(text) is None or not text.startswith(f"{kind}_"):
        raise InvalidRequest(f"{escape_name(text[:80])} is not an id; one looks like {kind}_ and {_LENGTH} characters")
    return text


def now() -> str:
    """Return the current time in the format of records: RFC 3339 in UTC, with milliseconds."""
    return moment(time.time())


def moment(seconds: float) -> str:
    """Return seconds since 1970 in the format of records."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
