"""Placeholders of values, by the system's random numbers: made where a value is known first."""

from __future__ import annotations

import os
from collections.abc import Iterator

from cloche.core.secrets import make_placeholder

RANDOM_BYTES = 64  # at once: one system call for each character would take longer than all else


def new_placeholder(name: str, value: str) -> str:
    """Return a placeholder; raises as `core.secrets.make_placeholder` does."""
    numbers = _random_numbers()

    def choose(alphabet: str) -> str:
        fair = 256 - 256 % len(alphabet)
        return alphabet[next(number for number in numbers if number < fair) % len(alphabet)]

    return make_placeholder(name, value, choose)


def _random_numbers() -> Iterator[int]:
    while True:
        yield from os.urandom(RANDOM_BYTES)
