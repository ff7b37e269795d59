"""TOML that a stranger wrote, read in time and memory in proportion to its length.

`tomllib` takes, for each key, the square of its parts and those of its table, in time and memory: gigabytes for a key
with 40,000 dots. So dots are counted before it reads, line by line, as no key is longer than its line: those of the
line, and the most of any line before that may have begun a table.
"""

from __future__ import annotations

import tomllib
from typing import Any

FEW_DOTS = 30  # of a line and its table, which are not counted
MOST_SQUARES = 1_000_000  # of all others, and two more for each character: 4 MiB and 50 ms


def read_toml(text: str) -> dict[str, Any]:
    """Return a parsed document. Raises ValueError for invalid TOML, and for more dots than keys have."""
    budget = MOST_SQUARES + 2 * len(text)
    position = table = 0
    while position < len(text) and "." in text:
        end = text.find("\n", position) + 1 or len(text)
        dots = text.count(".", position, end)
        if dots > table and text[position:end].lstrip().startswith("["):
            table = dots
        if table + dots > FEW_DOTS:
            budget -= (table + dots) ** 2
        if budget < 0:
            raise ValueError("its keys have too many parts")
        position = end
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
