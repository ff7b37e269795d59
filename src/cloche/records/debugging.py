"""Debug namespaces stored in the database. Every worker of the service applies them."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from cloche.core.debugging import NAMESPACES

from .ids import now
from .tables import DebugNamespace


def read_switches(session: Session) -> dict[str, bool]:
    """Return the stored namespaces; those unknown to this version are left out."""
    rows = session.execute(select(DebugNamespace.name, DebugNamespace.is_on)).all()
    return {name: is_on for name, is_on in rows if name in NAMESPACES}


def store_switches(session: Session, values: Mapping[str, bool], *, by: str) -> None:
    """Store namespaces as on or off. Every worker applies them within a second."""
    for name, is_on in values.items():
        session.merge(DebugNamespace(name=name, is_on=is_on, changed_at=now(), changed_by=by))
