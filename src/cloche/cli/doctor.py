"""`cloche doctor`: what this host can enforce, measured, and how to get more."""

from __future__ import annotations

import json

from cloche.core.capabilities import Capabilities
from cloche.core.levels import Level
from cloche.runtime.factory import capabilities_of

from .tables import Row, show


def examine(*, as_json: bool) -> int:
    """Print the local backend's controls and this host's probes; 0 when code can run at least confined."""
    found = capabilities_of("local")
    probes = _probe_rows()
    if as_json:
        print(json.dumps({**found.as_dict(), "probes": probes}, default=str, indent=2))
    else:
        _print_report(found, probes)
    return 0 if found.available and found.level >= Level.CONFINED else 1


def _print_report(found: Capabilities, probes: list[Row]) -> None:
    print(f"level: {found.level}" if found.available else "level: none; the local backend cannot run here")
    for label, text in (("why not more", found.reason), ("what to do", found.remedy)):
        if text:
            print(f"{label}: {text}")
    controls = [{"control": str(control), **measure.as_dict()} for control, measure in found.controls.items()]
    for rows in (controls, probes):
        if rows:
            show(rows, as_json=False)


def _probe_rows() -> list[Row]:
    """Return the single measurements, one row each, where the jail offers them."""
    try:
        from cloche.jail import probe
    except ImportError:
        return []
    probe_host = getattr(probe, "probe_host", None)
    return [_row(row) for row in probe_host()] if probe_host is not None else []


def _row(row: object) -> Row:
    return {name: getattr(row, name) for name in ("name", "ok", "detail", "remedy")}
