"""One page of a list of records, the newest first, in the format of all lists of the service and the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Text, cast, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from cloche.core.errors import InvalidRequest

from .tables import Owned

MOST_ITEMS, FEW_ITEMS = 200, 50
MOST_BYTES = 8 << 20  # of the large columns of one page
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
    large: ColumnElement[Any] | InstrumentedAttribute[Any] | None = None,
    **equal: object,
) -> dict[str, Any]:
    """Return `{"items": […], "nextCursor": id or None}`.

    `equal` maps columns to required values, None for any; `where` has further conditions. The JSON column `large`
    bounds the page as well: its items must fit `MOST_BYTES`, but one is always returned.

    Raises InvalidRequest for an invalid limit.
    """
    if not 1 <= limit <= MOST_ITEMS:
        raise InvalidRequest(f"limit: {limit} is not between 1 and {MOST_ITEMS}")
    query = select(table).where(table.project == project).where(*where)
    for column, value in equal.items():
        if value is not None:
            query = query.where(getattr(table, column) == value)
    if cursor is not None:
        query = query.where(table.id < cursor)
    query = query.order_by(table.id.desc())
    if large is not None:
        limit = _fitting(session.scalars(query.with_only_columns(func.length(cast(large, Text))).limit(limit)))
    rows = list(session.scalars(query.limit(limit + 1)))
    more = len(rows) > limit
    return {"items": [show(row) for row in rows[:limit]], "nextCursor": rows[limit - 1].id if more else None}


def _fitting(sizes: Iterable[int]) -> int:
    """Return how many leading sizes fit the bound together, at least one."""
    return max(1, sum(total <= MOST_BYTES for total in accumulate(sizes)))
