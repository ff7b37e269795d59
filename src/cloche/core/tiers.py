"""Backends by name, and the tiers of trust with the backends that each allows (M4, M5a)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """Hold all that is said of one backend's name, but for its code, which `runtime.factory` alone imports.

    `provider` is "module:attribute", called without arguments; without one, `needs` says what it will need. `level` is
    the one level that this name stands for. `instead` is another such place, for whoever names no image and the first
    cannot serve. `takes_image` says whether an image can be chosen, `asks_around` whether it takes a word with somebody
    else to find out if it is there. `isolates` makes it one that tiers 3 and 4 may choose. `strength` orders the names
    that a file which nobody vetted may move between, upwards only: remote ones have none, as they would send the code
    elsewhere. `auto_most` is the level that it gives to `auto` at most, without which `auto` never takes it;
    `auto_level` is what `auto` then asks it for, where it has several.
    """

    summary: str
    provider: str | None = None
    instead: str | None = None
    level: Level | None = None
    needs: str = ""
    takes_image: bool = False
    asks_around: bool = False
    isolates: bool = True
    strength: int | None = None
    auto_most: Level | None = None
    auto_level: Level | None = None


_LOCAL = "cloche.backends.local:LocalBackend"
_DOCKER = "cloche.backends.docker:DockerBackend"
# One row per backend: adding one is a row here and its own module. Of what `auto` may take, the fastest stands first.
BACKEND_ROWS: Mapping[str, BackendRow] = {
    "local": BackendRow(
        summary="native Linux jail, nothing to set up", provider=_LOCAL, strength=2, auto_most=Level.JAIL
    ),
    "auto": BackendRow(summary="the strongest backend here that meets the policy, or the fastest", asks_around=True),
    "subprocess": BackendRow(
        summary="child process with limits, no isolation",
        provider=_LOCAL,
        level=Level.PROCESS,
        isolates=False,
        strength=1,
    ),
    "none": BackendRow(
        summary="the host itself; a child process with limits",
        provider=_LOCAL,
        level=Level.PROCESS,
        isolates=False,
        strength=0,
    ),
    "docker": BackendRow(
        summary="throwaway container",
        provider=_DOCKER,
        takes_image=True,
        asks_around=True,
        strength=3,
        auto_most=Level.JAIL,
        auto_level=Level.JAIL,
    ),
    "gvisor": BackendRow(
        summary="gVisor: containers of docker on it, or runsc by itself",
        provider=_DOCKER,
        instead="cloche.backends.runsc:RunscBackend",
        level=Level.GVISOR,
        takes_image=True,
        asks_around=True,
        strength=4,
        auto_most=Level.GVISOR,
        auto_level=Level.GVISOR,
    ),
    "firecracker": BackendRow(
        summary="throwaway virtual machine on Firecracker",
        provider="cloche.backends.microvm:FirecrackerBackend",
        asks_around=True,
        strength=5,
        auto_most=Level.VM,
        auto_level=Level.VM,
    ),
    "microvm": BackendRow(
        summary="throwaway virtual machine on QEMU",
        provider="cloche.backends.microvm:MicroVMBackend",
        asks_around=True,
        strength=5,
        auto_most=Level.VM,
        auto_level=Level.VM,
    ),
    "microsandbox": BackendRow(
        summary="machine of microsandbox",
        provider="cloche.backends.microsandbox:MicrosandboxBackend",
        takes_image=True,
        asks_around=True,
        strength=5,
    ),
    "e2b": BackendRow(summary="E2B cloud", needs="a remote service"),
    "daytona": BackendRow(summary="Daytona cloud", needs="a remote service"),
    "kubernetes": BackendRow(summary="pods of a cluster", needs="a cluster"),
    "ray": BackendRow(summary="workers of a Ray cluster", needs="a cluster"),
}
_ISOLATING = (*(name for name, row in BACKEND_ROWS.items() if row.isolates and name != "auto"), "auto")
# Names that stand for the host itself: what a model or a stranger wrote does not run there.
ON_HOST = tuple(name for name, row in BACKEND_ROWS.items() if row.level is not None and row.level < Level.CONFINED)

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
