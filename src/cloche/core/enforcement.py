"""What was really enforced: one row per control, with mechanism and reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .levels import Control, Level, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Say how far one control is in force, by which mechanism, and why not further."""

    state: State
    mechanism: str = ""
    reason: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"state": str(self.state), "mechanism": self.mechanism, "reason": self.reason}


ABSENT = Measure(state=State.ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforcement:
    """Report what held during one run.

    `hits` counts the limits that were reached (names as in `Status`), whatever the exit code was.
    """

    level: Level = Level.NONE
    controls: Mapping[Control, Measure] = field(default_factory=dict)
    hits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "controls", MappingProxyType({c: self.controls.get(c, ABSENT) for c in Control}))
        object.__setattr__(self, "hits", MappingProxyType(dict(self.hits)))

    def __getitem__(self, control: Control | str) -> Measure:
        return self.controls[Control(control)]

    def as_dict(self) -> dict[str, object]:
        """Return plain data, ready for JSON."""
        rows = {str(control): measure.as_dict() for control, measure in self.controls.items()}
        return {"level": str(self.level), "controls": rows, "hits": dict(self.hits)}


def shortfalls(
    enforcement: Enforcement,
    *,
    level: Level | None,
    controls: Iterable[Control],
    best_effort: Iterable[Control] = (),
) -> list[str]:
    """List, as sentences, what `enforcement` lacks of what was required. Empty means that all of it holds.

    A control named in `controls` must be `enforced`. Every other control may be `partial`, but `absent` is a
    shortfall unless `best_effort` names it.
    """
    missing = []
    if level is not None and enforcement.level < level:
        missing.append(f"level {level} is required but only {enforcement.level} can be reached")
    required, excused = set(controls), set(best_effort)
    for control, measure in enforcement.controls.items():
        why = f": {measure.reason}" if measure.reason else ""
        if control in required and measure.state is not State.ENFORCED:
            missing.append(f"{control} is required but would be {measure.state}{why}")
        elif control not in required | excused and measure.state is State.ABSENT:
            missing.append(f"{control} would not be enforced{why}")
    return missing
