"""Placeholders of values, by the system's random numbers: made where a value is known first."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterator

from cloche.core.secrets import is_web_token, make_placeholder

FAR_AHEAD = 4_102_444_800  # 2100-01-01, in seconds
RANDOM_BYTES = 64  # at once: one system call for each character would take longer than all else


def new_placeholder(name: str, value: str) -> str:
    """Return a placeholder; raises as `core.secrets.make_placeholder` does."""
    numbers = _random_numbers()

    def choose(alphabet: str) -> str:
        fair = 256 - 256 % len(alphabet)
        return alphabet[next(number for number in numbers if number < fair) % len(alphabet)]

    return make_placeholder(name, value, choose)


def lasting_placeholder(name: str, value: str) -> str:
    """Return a placeholder for a value and those after it: a web token's claims say that it is good for long.

    Raises as `new_placeholder` does.
    """
    placeholder = new_placeholder(name, value)
    if not is_web_token(value):
        return placeholder
    head, claims, signature = placeholder.split(".", 2)
    try:
        told = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    except (binascii.Error, ValueError):
        return placeholder
    if not isinstance(told, dict) or "exp" not in told:
        return placeholder
    packed = json.dumps({**told, "exp": FAR_AHEAD}, separators=(",", ":")).encode()
    return f"{head}.{base64.urlsafe_b64encode(packed).decode().rstrip('=')}.{signature}"


def _random_numbers() -> Iterator[int]:
    while True:
        yield from os.urandom(RANDOM_BYTES)
