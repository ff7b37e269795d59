"""Levels of isolation, ordered, and the controls they are made of."""

from __future__ import annotations

import enum

from .errors import InvalidRequest


class Level(enum.IntEnum):
    """Order the strength of isolation; a higher level includes what a lower one promises."""

    NONE = 0
    PROCESS = 1
    CONFINED = 2
    JAIL = 3
    GVISOR = 4
    VM = 5

    def __str__(self) -> str:
        return self._name_.lower()  # what `name` looks up, a property of several calls, at every run

    @classmethod
    def parse(cls, text: str | Level) -> Level:
        """Return the level called `text` (any case), or raise InvalidRequest naming the known ones."""
        if isinstance(text, Level):
            return text
        try:
            return cls[text.strip().upper()]
        except KeyError:
            known = ", ".join(str(level) for level in cls)
            raise InvalidRequest(f"unknown level {text!r}; known levels: {known}") from None


class Control(enum.StrEnum):
    """Name what a sandbox may enforce."""

    FILESYSTEM = "filesystem"
    NETWORK = "network"
    MEMORY = "memory"
    CPU = "cpu"
    PIDS = "pids"
    DISK = "disk"
    TIME = "time"
    OUTPUT = "output"
    SYSCALLS = "syscalls"
    IDENTITY = "identity"


class State(enum.StrEnum):
    """Say how far a control is in force."""

    ENFORCED = "enforced"
    PARTIAL = "partial"
    ABSENT = "absent"


def parse_requirements(names: str | tuple[str, ...] | list[str]) -> tuple[Level | None, tuple[Control, ...]]:
    """Split `require` into at most one level and any number of controls.

    >>> parse_requirements("jail,memory")
    (<Level.JAIL: 3>, (<Control.MEMORY: 'memory'>,))
    """
    parts = names.split(",") if isinstance(names, str) else list(names)
    level: Level | None = None
    controls: list[Control] = []
    for part in (str(p).strip().lower() for p in parts):
        if part.upper() in Level.__members__:
            level = max(level or Level.NONE, Level[part.upper()])
        elif part in set(Control):
            controls.append(Control(part))
        elif part:
            known = ", ".join([*(str(x) for x in Level), *Control])
            raise InvalidRequest(f"require: unknown level or control {part!r}; known: {known}")
    return level, tuple(dict.fromkeys(controls))
