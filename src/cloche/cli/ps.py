"""`cloche ps`, which `cloche sandbox list` is as well: the sandboxes with a name, and how they are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloche.core.errors import OutcomeUnknown

from .app import root
from .options import json_option
from .output import show

if TYPE_CHECKING:
    from cloche.keeper.registry import Found

INFO_S = 2.0
TIMES = ("age", "keep", "left", "unused")
UNITS = ((86_400, 1_000_000, "d"), (3600, 24, "h"), (60, 60, "m"), (1, 60, "s"))


@root.command("ps")
@json_option()
def _ps(as_json: bool) -> int:
    """List the sandboxes with a name, and their state.

    The processes of one: cloche sandbox ps NAME.
    """
    return list_sandboxes(as_json=as_json)


def list_sandboxes(*, as_json: bool) -> int:
    """Print a row for each that lives."""
    from cloche.keeper import registry

    rows = [_row(one) for one in registry.found()]
    if not rows and not as_json:
        print("no sandbox with a name lives")
        return 0
    if not as_json:
        rows = [{**row, **{name: spelled(row[name]) for name in TIMES}} for row in rows]
    show(rows, as_json=as_json, below=("owner",))
    return 0


def _row(found: Found) -> dict[str, object]:
    said = info(found)
    return {
        "name": found.name, "state": state(said), "owner": owner(found), "backend": found.entry.get("backend"),
        "clients": said.get("clients"),
        "age": _seconds(said.get("age_s")), "keep": _seconds(said.get("keep_s")), "left": _seconds(said.get("left_s")),
        "unused": _seconds(said.get("without_client_s")),
    }  # fmt: skip


def spelled(seconds: object) -> object:
    """Return a time in its two largest units."""
    if not isinstance(seconds, int):
        return seconds
    parts = [(seconds // size % most, unit) for size, most, unit in UNITS]
    first = next((at for at, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2])


def owner(found: Found) -> str | None:
    """Return whose one is that a service has opened: by which key, of which database."""
    about = found.entry.get("owner")
    return f"{about.get('key')} of {about.get('service')}" if isinstance(about, Mapping) else None


def info(found: Found) -> Mapping[str, Any]:
    """Return what its keeper says; nothing of one that is just being made or ended, or of another version."""
    from cloche.keeper.attach import visit

    with contextlib.suppress(OutcomeUnknown):
        return visit(found, "info", timeout_s=INFO_S)
    return {}


def state(said: Mapping[str, Any]) -> str:
    """Return how one is."""
    return ("paused" if said.get("is_paused") else "running") if said else "unknown"


def _seconds(value: object) -> int | None:
    return round(value) if isinstance(value, int | float) else None
