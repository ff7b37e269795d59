"""What a backend can do on this host: measured, with reasons and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .enforcement import Enforcement, Measure
from .levels import Control, Level
from .policy import NetworkMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Describe the strongest sandbox a backend can give here, or the one of a level that was asked for.

    `controls` holds one measure per control at that level, with the network off; `networks` lists what else the network
    can be. `reason` says why the level is not higher and `remedy` says in one line what to do about it.
    """

    backend: str
    available: bool
    level: Level = Level.NONE
    controls: Mapping[Control, Measure] = field(default_factory=dict)
    reason: str = ""
    remedy: str = ""
    networks: tuple[NetworkMode, ...] = ("off",)

    def as_enforcement(self) -> Enforcement:
        """Return the enforcement that a run would report, before anything was hit."""
        return Enforcement(level=self.level, controls=self.controls)

    def as_dict(self) -> dict[str, object]:
        """Return plain data, ready for JSON."""
        rows = {str(control): measure.as_dict() for control, measure in self.controls.items()}
        return {
            "backend": self.backend,
            "available": self.available,
            "level": str(self.level),
            "controls": rows,
            "reason": self.reason,
            "remedy": self.remedy,
            "networks": list(self.networks),
        }
