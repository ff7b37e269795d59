"""`cloche conformance`: run the public suite against one backend."""

from __future__ import annotations

from cloche.runtime.factory import backend_named

from .tables import show


def check(name: str, *, as_json: bool) -> int:
    """Print one row per promise; 0 when all of them are kept."""
    from cloche.testing.conformance import run_conformance

    rows = [row.as_dict() for row in run_conformance(backend_named(name))]
    show(rows, as_json=as_json)
    return 0 if all(row["ok"] for row in rows) else 1
