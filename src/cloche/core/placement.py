"""Where an agent's actions run: in the sandbox, or in the agent's own workspace process (M3, seven rows)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidRequest


class Place(enum.StrEnum):
    """Say where something runs."""

    SANDBOX = "sandbox"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Say where one kind of action runs, and why."""

    action: str
    place: Place
    why: str


def _row(action: str, place: Place, why: str) -> tuple[str, Placement]:
    return action, Placement(action=action, place=place, why=why)


PLACEMENTS: Mapping[str, Placement] = dict(
    (
        _row("generated_code", Place.SANDBOX, "nobody has read what a model has just written"),
        _row("package_install", Place.SANDBOX, "a package's set-up code is a stranger's"),
        _row("outside_write", Place.SANDBOX, "a write outside /memory and /configs could change the agent itself"),
        _row("skill_loading", Place.WORKSPACE, "SKILL.md is only read"),
        _row("tool_function", Place.WORKSPACE, "a tool's own function is the agent builder's code"),
        _row("peer_call", Place.WORKSPACE, "peers are known endpoints"),
        _row("platform_call", Place.WORKSPACE, "heartbeat and registry are known endpoints"),
    )
)


def placement(action: str) -> Placement:
    """Return where an action runs: one of the keys of PLACEMENTS. Raises InvalidRequest for any other."""
    try:
        return PLACEMENTS[action]
    except (KeyError, TypeError):
        raise InvalidRequest(f"unknown action {action!r}; known actions: {', '.join(PLACEMENTS)}") from None
