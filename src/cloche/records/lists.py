"""One page of a list of records, the newest first, as every list of the service and the command line has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from cloche.core.errors import InvalidRequest

from .tables import Owned

MOST_ITEMS, FEW_ITEMS = 200, 50
T = TypeVar("T", bound=Owned)


def list_page(
    session: Session,
    table: type[T],
    *,
    project: str,
    show: Callable[[T], dict[str, Any]],
    limit: int = FEW_ITEMS,
    cursor: str | None = None,
    where: Sequence[ColumnElement[bool]] = (),
    **equal: object,
) -> dict[str, Any]:
    """Return `{"items": […], "nextCursor": id or None}`; `equal` names columns and values, None for any;
    `where` says what else must hold.

    Raises InvalidRequest for a limit that is none.
    """
    if not 1 <= limit <= MOST_ITEMS:
        raise InvalidRequest(f"limit: {limit} is not between 1 and {MOST_ITEMS}")
    query = select(table).where(table.project == project).where(*where)
    for column, value in equal.items():
        if value is not None:
            query = query.where(getattr(table, column) == value)
    if cursor is not None:
        query = query.where(table.id < cursor)
    rows = list(session.scalars(query.order_by(table.id.desc()).limit(limit + 1)))
    more = len(rows) > limit
    return {"items": [show(row) for row in rows[:limit]], "nextCursor": rows[limit - 1].id if more else None}
