"""Origins of values, values with an origin, and the layer of each source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from ..core.record import dataclass

OriginKind = Literal["default", "tier", "preset", "file", "stored", "environment", "argument", "ceiling", "several"]


class Origin(str):
    """The source of a value, as text with a kind. The default kind is a file, and the text its path.

    `first` is the original source: the argument behind `preset minimal (argument)`, or the argument whose value a
    ceiling lowered.
    """

    __slots__ = ("_behind", "kind")
    kind: OriginKind
    _behind: Origin | None

    def __new__(cls, text: str, kind: OriginKind = "file", behind: Origin | None = None) -> Self:
        origin = super().__new__(cls, text)
        origin.kind, origin._behind = kind, behind
        return origin

    @classmethod
    def variable(cls, name: str) -> Self:
        return cls(f"environment {name}", "environment")

    @classmethod
    def tier(cls, number: int) -> Self:
        return cls(f"tier {number}", "tier")

    @classmethod
    def preset(cls, name: str, chosen_by: Origin) -> Self:
        return cls(f"preset {name} ({chosen_by})", "preset", chosen_by)

    @classmethod
    def ceiling(cls, file: Origin, asked_by: Origin) -> Self:
        return cls(f"ceiling in {file} (asked by {asked_by})", "ceiling", asked_by)

    @classmethod
    def joined(cls, origins: Iterable[Origin]) -> Origin:
        """Return one origin for several keys that share a line; keys with their default value are ignored."""
        distinct = [origin for origin in dict.fromkeys(origins) if origin != DEFAULT]
        return distinct[0] if len(distinct) == 1 else cls("; ".join(distinct), "several") if distinct else DEFAULT

    @property
    def first(self) -> Origin:
        return self if self._behind is None else self._behind.first


DEFAULT, ARGUMENT = Origin("default", "default"), Origin("argument", "argument")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredValue:
    """The value of one key from one source, with the source and the key's spelling there."""

    value: Any
    origin: Origin
    key: str


Layer = Mapping[str, ConfiguredValue]


def with_value(configured: ConfiguredValue, value: object) -> ConfiguredValue:
    """Return a copy with another value."""
    return ConfiguredValue(value=value, origin=configured.origin, key=configured.key)
