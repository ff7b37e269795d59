"""Named bundles of limits and policy (S9; what the source leaves open is ours)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import InvalidRequest
from .units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Bundle changes to the default limits and policy under one name.

    Every preset says what its network is, so that choosing one takes back what was wider before.
    """

    name: str
    summary: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


_STANDARD = {"memory_bytes": 512 * MIB, "cpus": 1.0, "pids": 256, "timeout_s": 300.0}

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="standard",
            summary="room for real work, no network",
            limits=_STANDARD,
            policy={"network": "off"},
        ),
        Preset(
            name="minimal",
            summary="small and short, no network",
            limits={"memory_bytes": 128 * MIB, "cpus": 0.25, "pids": 64, "timeout_s": 30.0},
            policy={"network": "off"},
        ),
        Preset(
            name="locked-down",
            summary="user nobody, seccomp profile, no network",
            limits={"memory_bytes": 256 * MIB, "cpus": 0.5, "pids": 64, "timeout_s": 60.0},
            policy={"network": "off", "user": "nobody", "seccomp": True},
        ),
        Preset(
            name="network-open",
            summary="standard with open outbound network",
            limits=_STANDARD,
            policy={"network": "open"},
        ),
        Preset(
            name="network-allowlist",
            summary="standard with outbound network to the hosts of an explicit allowlist",
            limits=_STANDARD,
            policy={"network": "allowlist"},
        ),
    )
}


def preset_named(name: str) -> Preset:
    """Return the preset called `name`, or raise InvalidRequest naming the known ones."""
    try:
        return PRESETS[name.strip().lower()]
    except (KeyError, AttributeError):
        raise InvalidRequest(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}") from None
