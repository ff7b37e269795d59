"""`cloche conformance`: run the public suite against one backend."""

from __future__ import annotations

from cloche.core.levels import Level
from cloche.core.policy import Policy
from cloche.core.protocols import SupportsImages
from cloche.runtime.factory import backend_named, policy_for
from cloche.runtime.settings import load_settings

from .tables import show

_COLUMNS = ("family", "check", "outcome", "seconds", "reason")


def check(name: str, level: str | None, *, as_json: bool) -> int:
    """Print one row per check; 0 when the backend keeps all it says, named deviations apart."""
    from cloche.testing.conformance import Row, run_conformance

    policy = policy_for(name, Policy(level=Level.parse(level) if level else None))
    backend = backend_named(name)
    if isinstance(backend, SupportsImages):
        backend = backend.with_images(load_settings().images)
    rows: tuple[Row, ...] = run_conformance(backend, level=policy.level)
    as_dicts = [row.as_dict() for row in rows]
    if as_json:
        show(as_dicts, as_json=True)
    else:
        show([{column: row[column] for column in _COLUMNS} for row in as_dicts], as_json=False)
        print(f"{sum(row.ok for row in rows)} of {len(rows)} as promised")
    return 0 if all(row.ok for row in rows) else 1
