"""Levels of isolation, controls, and the report of the controls in force during a run.

`Level` is ordered. `Enforcement` has one `Measure` per control: its state, mechanism and reason. `shortfalls` lists
required controls that were not in force.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from .errors import InvalidRequest
from .record import dataclass, field

# From the least to the most; `network` has the rules. `bridge` is docker's own, which no rules hold for.
NetworkMode = Literal["off", "allowlist", "open", "bridge"]
LevelSource = Literal["measured", "claimed"]  # by us on this host, or by who runs the sandbox elsewhere


class Level(enum.IntEnum):
    """Order the strength of isolation; a higher level includes the promises of every lower one."""

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
            known_levels = ", ".join(str(level) for level in cls)
            raise InvalidRequest(f"unknown level {text!r}; known levels: {known_levels}") from None


class Control(enum.StrEnum):
    """Name a control that a sandbox may enforce."""

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
    """Say how far a control is in force; a `claimed` state is a provider's own statement, not measured."""

    ENFORCED = "enforced"
    PARTIAL = "partial"
    CLAIMED = "claimed"
    ABSENT = "absent"


def parse_requirements(names: str | tuple[str, ...] | list[str]) -> tuple[Level | None, tuple[Control, ...]]:
    """Split `require` into at most one level and any number of controls.

    >>> parse_requirements("jail,memory")
    (<Level.JAIL: 3>, (<Control.MEMORY: 'memory'>,))
    """
    entries = names.split(",") if isinstance(names, str) else list(names)
    level: Level | None = None
    controls: list[Control] = []
    for entry in (str(p).strip().lower() for p in entries):
        if entry.upper() in Level.__members__:
            level = max(level or Level.NONE, Level[entry.upper()])
        elif entry in set(Control):
            controls.append(Control(entry))
        elif entry:
            known_names = ", ".join([*(str(x) for x in Level), *Control])
            raise InvalidRequest(f"require: unknown level or control {entry!r}; known: {known_names}")
    return level, tuple(dict.fromkeys(controls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Say how far one control is in force, its mechanism, and the reason why it is not stronger."""

    state: State
    mechanism: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"state": str(self.state), "mechanism": self.mechanism, "reason": self.reason}


ABSENT = Measure(state=State.ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """Report the controls that held during one run.

    `hits` counts the limits that were reached (names as in `Status`), for every exit code. A level that is `claimed` is
    a provider's statement about its own sandboxes.
    """

    level: Level = Level.NONE
    controls: Mapping[Control, Measure] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)
    level_source: LevelSource = "measured"

    def __post_init__(self) -> None:
        object.__setattr__(self, "controls", MappingProxyType({c: self.controls.get(c, ABSENT) for c in Control}))
        object.__setattr__(self, "hits", MappingProxyType(dict(self.hits)))

    def __getitem__(self, control: Control | str) -> Measure:
        return self.controls[Control(control)]

    def as_dict(self) -> dict[str, object]:
        """Return plain data, ready for JSON."""
        rows = {str(control): measure.as_dict() for control, measure in self.controls.items()}
        source = {} if self.level_source == "measured" else {"level_source": self.level_source}
        return {"level": str(self.level), **source, "controls": rows, "hits": dict(self.hits)}


def shortfalls(
    enforcement: Enforcement,
    *,
    level: Level | None,
    controls: Iterable[Control],
    best_effort: Iterable[Control] = (),
    accept_claimed: bool = False,
    accept_claimed_level: bool = False,
) -> list[str]:
    """List, as sentences, the required controls that `enforcement` lacks. Empty if all of them hold.

    A control named in `controls` must be `enforced`, or `claimed` with `accept_claimed`; a level must be measured
    unless one of the two accepts a claimed one. Every other control may be `partial`; `absent` is a shortfall unless
    `best_effort` names it.
    """
    missing = []
    if level is not None and enforcement.level < level:
        missing.append(f"level {level} is required but only {enforcement.level} can be reached")
    elif level is not None and enforcement.level_source == "claimed" and not (accept_claimed or accept_claimed_level):
        missing.append(f"level {level} is required, and {enforcement.level} is only claimed (accept_claimed takes it)")
    required, excused = set(controls), set(best_effort)
    enough = (State.ENFORCED, State.CLAIMED) if accept_claimed else (State.ENFORCED,)
    for control, measure in enforcement.controls.items():
        why = f": {measure.reason}" if measure.reason else ""
        if control in required and measure.state not in enough:
            missing.append(f"{control} is required but would be {measure.state}{why}")
        elif control not in required | excused and measure.state is State.ABSENT:
            missing.append(f"{control} would not be enforced{why}")
    return missing
