"""The amounts a run may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import InvalidRequest
from .units import KIB, MIB, parse_count, parse_cpus, parse_duration, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bound one run. Sizes are in bytes, times in seconds of wall clock, `cpus` in whole CPUs.

    `output_bytes` is kept per stream, half from the head and half from the tail; `flood_bytes` per stream
    ends the run. `tmp_bytes` holds for each of /tmp and /dev/shm.
    """

    timeout_s: float = 30.0
    memory_bytes: int = 256 * MIB
    cpus: float = 0.5
    pids: int = 64
    disk_bytes: int = 256 * MIB
    inodes: int = 32_768
    tmp_bytes: int = 64 * MIB
    output_bytes: int = 64 * KIB
    flood_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        for spec in fields(self):
            parse = PARSERS[spec.name]
            object.__setattr__(self, spec.name, parse(getattr(self, spec.name), name=spec.name))

    def with_changes(self, **changes: Any) -> Limits:  # noqa: ANN401  # checked by __post_init__
        """Return a copy; a change of None is no change."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def capped_by(self, ceilings: Mapping[str, float]) -> Limits:
        """Return a copy in which no amount exceeds its ceiling; `ceilings` is keyed by this class's
        fields.
        """
        unknown = [name for name in ceilings if name not in PARSERS]
        if unknown:
            raise InvalidRequest(f"ceilings: unknown limit {unknown[0]!r}; known limits: {', '.join(PARSERS)}")
        return replace(self, **{name: min(getattr(self, name), most) for name, most in ceilings.items()})

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(spec.name for spec in fields(Limits))
LEAST_MEMORY_BYTES = 16 * MIB


def parse_memory(value: object, *, name: str) -> int:
    """Return bytes, at least what an interpreter needs to start."""
    size = parse_size(value, name=name)
    if size < LEAST_MEMORY_BYTES:
        raise InvalidRequest(f"{name}: {value!r} is below the smallest workable amount, 16m")
    return size


PARSERS: Mapping[str, Callable[..., Any]] = {
    "timeout_s": parse_duration,
    "memory_bytes": parse_memory,
    "cpus": parse_cpus,
    "pids": parse_count,
    "disk_bytes": parse_size,
    "inodes": parse_count,
    "tmp_bytes": parse_size,
    "output_bytes": parse_size,
    "flood_bytes": parse_size,
}


def parse_cpu_percent(value: object, *, name: str) -> float:
    """Return CPUs from a percentage of one CPU: 50 is 0.5."""
    number = value.strip().removesuffix("%") if isinstance(value, str) else value
    return parse_cpus(parse_cpus(number, name=name) / 100, name=name)
