"""Tiers of trust and the backends each allows (M4, M5a)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidRequest
from .levels import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Say where a tier's code runs.

    `runs_code` is false where no run_code tool exists; `least_level` is what any backend must reach;
    `backends` are the names that a configuration may choose, the first being the tier's default.
    """

    number: int
    summary: str
    runs_code: bool
    backends: tuple[str, ...]
    least_level: Level


_ISOLATING = (
    "local", "docker", "gvisor", "firecracker", "microvm", "microsandbox", "e2b", "daytona",
    "kubernetes", "ray", "auto",
)  # fmt: skip

TIERS: Mapping[int, Tier] = {
    1: Tier(number=1, summary="no code runs", runs_code=False, backends=("none",), least_level=Level.NONE),
    2: Tier(number=2, summary="no code runs", runs_code=False, backends=("none",), least_level=Level.NONE),
    3: Tier(
        number=3,
        summary="code runs in a jail or stronger",
        runs_code=True,
        backends=_ISOLATING,
        least_level=Level.JAIL,
    ),
    4: Tier(
        number=4,
        summary="code runs on the host; a second sandbox only when asked for",
        runs_code=True,
        backends=("none", "subprocess", *_ISOLATING),
        least_level=Level.NONE,
    ),
}


BACKENDS: tuple[str, ...] = tuple(
    dict.fromkeys(("local", *(name for tier in TIERS.values() for name in tier.backends)))
)


def tier_numbered(number: int) -> Tier:
    """Return tier `number`, or raise InvalidRequest naming the known ones."""
    try:
        return TIERS[number]
    except KeyError:
        raise InvalidRequest(f"unknown tier {number!r}; known tiers: {', '.join(map(str, TIERS))}") from None


def parse_tier(value: object, *, name: str) -> int:
    """Return a tier's number, from a number or its digits."""
    by_text = {str(number): number for number in TIERS}
    number = None if isinstance(value, bool | float) else by_text.get(str(value).strip())
    if number is None:
        raise InvalidRequest(f"{name}: unknown tier {value!r}; known tiers: {', '.join(by_text)}")
    return number


def parse_backend(value: object, *, name: str) -> str:
    """Return a backend's name in lower case, or raise InvalidRequest listing the known ones."""
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in BACKENDS:
        raise InvalidRequest(f"{name}: unknown backend {value!r}; known backends: {', '.join(BACKENDS)}")
    return word


def check_backend(tier: Tier, backend: str, *, tier_origin: str = "", backend_origin: str = "") -> None:
    """Raise InvalidRequest when `backend` is outside the tier's list; the origins say who chose the two."""
    if backend not in tier.backends:
        who_tier = f" ({tier_origin})" if tier_origin else ""
        who_backend = f" ({backend_origin})" if backend_origin else ""
        allowed = ", ".join(tier.backends)
        raise InvalidRequest(
            f"tier {tier.number}{who_tier} does not allow backend {backend!r}{who_backend}; it allows: {allowed}"
        )
