"""How much an action may cost if it goes wrong."""

from __future__ import annotations

import enum


class Risk(enum.IntEnum):
    """Order actions by what they can do; from HIGH on, a human is asked."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4

    def __str__(self) -> str:
        return self.name.lower()
