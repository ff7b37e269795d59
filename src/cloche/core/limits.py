"""The amounts that a run may use, and how they are read as people write them: `256m`, `30s`, `1.5`.

A bad amount is an error that names it, and is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import InvalidRequest
from .record import dataclass, fields, replace

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)
_SIZE_FACTOR = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}
_DURATION = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|sec|m|min|h|d)?\s*$", re.IGNORECASE)
_DURATION_FACTOR = {"": 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

# Above these an amount is a slip of the pen: no machine has it, and the kernel's own fields overflow soon after.
MOST_BYTES = 1024 * 1024 * 1024 * GIB
MOST_SECONDS = 366 * 24 * 3600.0
MOST_COUNT = 1 << 31
LEAST_CPUS, MOST_CPUS = 0.01, 65_536.0
LEAST_MEMORY_BYTES = 16 * MIB


def parse_size(value: object, *, name: str) -> int:
    """Return bytes. `256m`, `512M`, `512MB` and `512MiB` are all binary; a bare number is bytes."""
    original = value
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None:
            raise InvalidRequest(f"{name}: {value!r} is not a size; write bytes or, for example, 256m or 1g")
        value = float(match[1]) * _SIZE_FACTOR[match[2].lower()]
    size = int(_positive(value, name=name, most=MOST_BYTES))
    if size < 1:
        raise InvalidRequest(f"{name}: {original!r} is less than one byte; write bytes or, for example, 256m or 1g")
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


def exact_size(count: int) -> str:
    """Write bytes as options have them, and exactly: `256m`, `1g`, `1000`."""
    for suffix, factor in (("g", GIB), ("m", MIB), ("k", KIB)):
        if count and count % factor == 0:
            return f"{count // factor}{suffix}"
    return str(count)


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
        """Return a copy with each amount at most its ceiling; `ceilings` is keyed by this class's fields."""
        unknown = [name for name in ceilings if name not in PARSERS]
        if unknown:
            raise InvalidRequest(f"ceilings: unknown limit {unknown[0]!r}; known limits: {', '.join(PARSERS)}")
        return replace(self, **{name: min(getattr(self, name), ceiling) for name, ceiling in ceilings.items()})

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(spec.name for spec in fields(Limits))


def parse_memory(value: object, *, name: str) -> int:
    """Return bytes, at least what an interpreter needs to start."""
    size = parse_size(value, name=name)
    if size < LEAST_MEMORY_BYTES:
        raise InvalidRequest(f"{name}: {value!r} is below the smallest workable amount, 16m")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRow:
    """Describe one limit: its field of `Limits`, its keyword and configuration key, how it is parsed and shown.

    `wire` is its name in a request to the service, empty where no request has it; `aliases` are the configuration's
    other spellings. `title` names it on the page. `metavar`, `help` and `number`, its
    type where text will not do, declare the option of the command line.
    """

    field: str
    keyword: str
    parse: Callable[..., Any]
    aliases: tuple[str, ...] = ()
    variable: str = ""
    wire: str = ""
    title: str = ""
    metavar: str = "SIZE"
    help: str = ""
    number: type | None = None

    @property
    def is_requested(self) -> bool:
        """Tell whether a request, a skill or a manifest may ask for less of it."""
        return bool(self.wire)

    def shown(self, limits: Limits) -> int | float | str:
        """Return its value as the service shows it: a size as text, unless its name says that it is in bytes."""
        value: int | float = getattr(limits, self.field)
        is_text = self.field.endswith("_bytes") and not self.wire.endswith("Bytes")
        return exact_size(int(value)) if is_text else value


# Configuration, command line, requests, skills, manifests and page read this table. A new limit is a field of `Limits`,
# a row here, and a keyword of `config.options.SandboxOptions`.
LIMITS: tuple[LimitRow, ...] = (
    LimitRow(
        field="timeout_s", keyword="timeout", parse=parse_duration, aliases=("Timeout",), wire="timeout",
        title="Time-out", metavar="TIME", help="Wall clock: seconds, or 500ms, 30s, 5m.",
    ),
    LimitRow(
        field="memory_bytes", keyword="memory", parse=parse_memory,
        aliases=("memory_limit", "memoryLimit", "MemoryLimitBytes"), variable="CLOCHE_MEMORY", wire="memoryLimit",
        title="Memory", help="Memory: bytes, or 256m, 1g.",
    ),
    LimitRow(
        field="cpus", keyword="cpus", parse=parse_cpus, aliases=("cpu_limit",), variable="CLOCHE_CPUS",
        wire="cpuLimit", title="CPUs", metavar="N", number=float, help="CPUs, for example 0.5.",
    ),
    LimitRow(
        field="pids", keyword="pids", parse=parse_count, variable="CLOCHE_PIDS", wire="pidsLimit",
        title="Processes", metavar="N", number=int, help="Processes and threads at once.",
    ),
    LimitRow(
        field="disk_bytes", keyword="disk", parse=parse_size, variable="CLOCHE_DISK", wire="diskLimit",
        title="Disk", help="Size of the workspace.",
    ),
    LimitRow(field="inodes", keyword="inodes", parse=parse_count),
    LimitRow(field="tmp_bytes", keyword="tmp", parse=parse_size),
    LimitRow(
        field="output_bytes", keyword="output_limit", parse=parse_size, aliases=("outputLimit", "maxOutputBytes"),
        variable="CLOCHE_OUTPUT_LIMIT", wire="maxOutputBytes", title="Output",
        help="Output kept in the result, per stream.",
    ),
    LimitRow(field="flood_bytes", keyword="flood_limit", parse=parse_size),
)  # fmt: skip
REQUESTED_LIMITS: tuple[LimitRow, ...] = tuple(row for row in LIMITS if row.is_requested)
PARSERS: Mapping[str, Callable[..., Any]] = {row.field: row.parse for row in LIMITS}


def parse_cpu_percent(value: object, *, name: str) -> float:
    """Return CPUs from a percentage of one CPU: 50 is 0.5."""
    number = value.strip().removesuffix("%") if isinstance(value, str) else value
    return parse_cpus(parse_cpus(number, name=name) / 100, name=name)
