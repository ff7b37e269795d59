"""`cloche ps` and `cloche sandbox list`: the named sandboxes and their state."""

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
    """List the named sandboxes and their state.

    For the processes of a sandbox: cloche sandbox ps NAME.
    """
    return list_sandboxes(as_json=as_json)


def list_sandboxes(*, as_json: bool) -> int:
    """Print a row for each named sandbox."""
    from cloche.keeper import registry

    rows = [_row(sandbox) for sandbox in registry.found()]
    if not rows and not as_json:
        print("there are no named sandboxes")
        return 0
    if not as_json:
        rows = [{**row, **{name: spelled(row[name]) for name in TIMES}} for row in rows]
    show(rows, as_json=as_json, below=("owner", "secrets"))
    return 0


def _row(sandbox: Found) -> dict[str, object]:
    facts = info(sandbox)
    return {
        "name": sandbox.name, "state": state(facts), "owner": owner(sandbox), "backend": sandbox.entry.get("backend"),
        "clients": facts.get("clients"),
        "age": _seconds(facts.get("age_s")), "keep": _seconds(facts.get("keep_s")),
        "left": _seconds(facts.get("left_s")), "unused": _seconds(facts.get("without_client_s")),
        "secrets": secrets_of(sandbox),
    }  # fmt: skip


def spelled(seconds: object) -> object:
    """Return a time in its two largest units."""
    if not isinstance(seconds, int):
        return seconds
    counts = [(seconds // size % modulus, unit) for size, modulus, unit in UNITS]
    first = next((index for index, (count, _) in enumerate(counts) if count), len(counts) - 1)
    return " ".join(f"{count}{unit}" for count, unit in counts[first : first + 2])


def owner(sandbox: Found) -> str | None:
    """Return the key and database of the service that opened a sandbox, and its labels; None for the user's own."""
    about = sandbox.entry.get("owner")
    if not isinstance(about, Mapping):
        return None
    labels = f" ({about['labels']})" if about.get("labels") else ""
    return f"{about.get('key')} of {about.get('service')}{labels}"


def secrets_of(sandbox: Found) -> str | None:
    """Return the names of a sandbox's secrets with their hosts; None without any."""
    policy = sandbox.entry.get("policy")
    hosts = policy.get("secrets") if isinstance(policy, Mapping) else None
    return "; ".join(f"{name} for {', '.join(names)}" for name, names in hosts.items()) if hosts else None


def info(sandbox: Found) -> Mapping[str, Any]:
    """Return the keeper's facts; empty if it starts, ends or has another version."""
    from cloche.keeper.attach import visit

    with contextlib.suppress(OutcomeUnknown):
        return visit(sandbox, "info", timeout_s=INFO_S)
    return {}


def state(facts: Mapping[str, Any]) -> str:
    """Return `paused`, `running` or `unknown`."""
    return ("paused" if facts.get("is_paused") else "running") if facts else "unknown"


def _seconds(value: object) -> int | None:
    return round(value) if isinstance(value, int | float) else None
