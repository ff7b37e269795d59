"""Debug namespaces that were switched on or off in the database: every worker of the service follows them."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from cloche.core.debugging import NAMESPACES

from .ids import now
from .tables import DebugNamespace


def read_switches(session: Session) -> dict[str, bool]:
    """Return what is stored, by namespace; those of another version of Cloche are left out."""
    rows = session.execute(select(DebugNamespace.name, DebugNamespace.is_on)).all()
    return {name: is_on for name, is_on in rows if name in NAMESPACES}


def store_switches(session: Session, values: Mapping[str, bool], *, by: str) -> None:
    """Switch namespaces on or off, from within a second on in every worker."""
    for name, is_on in values.items():
        session.merge(DebugNamespace(name=name, is_on=is_on, changed_at=now(), changed_by=by))
