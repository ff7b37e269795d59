"""Amounts as people write them: `256m`, `30s`, `1.5`. Bad ones are named, never guessed."""

from __future__ import annotations

import re

from .errors import InvalidRequest

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)
_SIZE_FACTOR = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}
_DURATION = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|sec|m|min|h|d)?\s*$", re.IGNORECASE)
_DURATION_FACTOR = {"": 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


# Above these an amount is a slip of the pen: no machine has it, and the kernel's own fields overflow soon
# after.
MOST_BYTES = 1024 * 1024 * 1024 * GIB
MOST_SECONDS = 366 * 24 * 3600.0
MOST_COUNT = 1 << 31
LEAST_CPUS, MOST_CPUS = 0.01, 65_536.0


def parse_size(value: object, *, name: str) -> int:
    """Return bytes. `256m`, `512M`, `512MB` and `512MiB` are all binary; a bare number is bytes."""
    asked = value
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None:
            raise InvalidRequest(f"{name}: {value!r} is not a size; write bytes or, for example, 256m or 1g")
        value = float(match[1]) * _SIZE_FACTOR[match[2].lower()]
    size = int(_positive(value, name=name, most=MOST_BYTES))
    if size < 1:
        raise InvalidRequest(f"{name}: {asked!r} is less than one byte; write bytes or, for example, 256m or 1g")
    return size


def parse_duration(value: object, *, name: str, bare_unit_s: float = 1.0) -> float:
    """Return seconds. A bare number is in units of `bare_unit_s` seconds (0.001 in the JSON of C8)."""
    if isinstance(value, str):
        match = _DURATION.match(value)
        if match is None:
            raise InvalidRequest(f"{name}: {value!r} is not a duration; write seconds or, for example, 30s or 500ms")
        unit = (match[2] or "").lower()
        value = float(match[1]) * (_DURATION_FACTOR[unit] if unit else bare_unit_s)
        return _positive(value, name=name, most=MOST_SECONDS)
    return float(_positive(value, name=name, most=MOST_SECONDS / bare_unit_s) * bare_unit_s)


def parse_count(value: object, *, name: str) -> int:
    """Return a whole number of at least one."""
    if isinstance(value, str) and len(value) < 20 and (digits := value.strip()).isdecimal():
        value = int(digits)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}: {value!r} is not a whole number of at least 1")
    return int(_positive(value, name=name, most=MOST_COUNT))


def parse_cpus(value: object, *, name: str) -> float:
    """Return a number of CPUs, for example 0.5."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            message = f"{name}: {value!r} is not a number of CPUs; write, for example, 0.5"
            raise InvalidRequest(message) from None
    cpus = float(_positive(value, name=name, most=MOST_CPUS))
    if cpus < LEAST_CPUS:
        raise InvalidRequest(f"{name}: {value!r} CPUs are too few to be enforced; the least is {LEAST_CPUS}")
    return cpus


def _positive(value: object, *, name: str, most: float) -> float:
    """Refuse zero, negatives, NaN, infinities and booleans: a limit of 0 must never mean "no limit"."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidRequest(f"{name}: {value!r} must be a number greater than 0")
    if value > most:
        raise InvalidRequest(f"{name}: it is out of range; the most is {most:g}")
    return value


def format_size(count: int) -> str:
    """Write bytes the short way: `256MiB`, `1.5GiB`, `12B`."""
    for suffix, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= factor:
            return f"{count / factor:.4g}{suffix}"
    return f"{count}B"
