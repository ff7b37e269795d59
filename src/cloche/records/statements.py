"""Work of the database that is statements alone: SQLite's driver does it, without a session.

Of each run two rows are written. A session, and what SQLAlchemy does for a statement, take four times as long as the
statement and its commit. So a statement is compiled once; PostgreSQL has it by a session, as all other work.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Insert, Update
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.orm import Session


class Encoded(str):
    """JSON text that is stored as it stands."""

    __slots__ = ()


def encode(value: Any) -> str:  # noqa: ANN401 - plain data
    """Return JSON text."""
    return value if isinstance(value, Encoded) else json.dumps(value, separators=(",", ":"))


_DIALECT: Dialect = sqlite.dialect(dbapi=sqlite3, json_serializer=encode)


class Statement:
    """A statement with names for its values; `columns` are those of an insertion."""

    __slots__ = ("_values", "text", "whole")

    def __init__(self, whole: Insert | Update, *, columns: Sequence[str] = ()):
        self.whole = whole
        compiled: Any = whole.compile(dialect=_DIALECT, column_keys=list(columns) or None)
        self.text: str = compiled.string
        self._values: tuple[tuple[str, Callable[[Any], Any] | None], ...] = tuple(
            (name, compiled.binds[name].type.dialect_impl(_DIALECT).bind_processor(_DIALECT))
            for name in compiled.positiontup
        )

    def values(self, given: Mapping[str, Any]) -> list[Any]:
        """Return values by name as the driver takes them."""
        return [given[name] if process is None else process(given[name]) for name, process in self._values]


class Statements:
    """Statements with their values, one after the other: work as a `Writer` takes it."""

    __slots__ = ("_all", "_encoded")

    def __init__(self, *statements: tuple[Statement, Mapping[str, Any]]):
        self._all = statements
        self._encoded: list[tuple[str, list[Any]]] | None = None

    @property
    def encoded(self) -> list[tuple[str, list[Any]]]:
        """Return them as the driver takes them."""
        if self._encoded is None:
            self._encoded = [(statement.text, statement.values(values)) for statement, values in self._all]
        return self._encoded

    @property
    def size(self) -> int:
        """Return about how many bytes they write."""
        return sum(len(value) for _, values in self.encoded for value in values if isinstance(value, (str, bytes)))

    def __add__(self, other: Statements) -> Statements:
        return Statements(*self._all, *other._all)

    def __call__(self, session: Session) -> None:
        """Do them in a session."""
        connection = session.connection()
        for statement, values in self._all:
            connection.execute(statement.whole, values)

    def run_by(self, connection: sqlite3.Connection) -> None:
        """Do them by the driver, in a transaction that has begun."""
        for text, values in self.encoded:
            connection.execute(text, values)


def run_by(connection: sqlite3.Connection, work: Sequence[Statements]) -> None:
    """Do some work by the driver in one transaction. Raises what the driver does."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for one in work:
            one.run_by(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # else SQLite has undone it
            connection.execute("ROLLBACK")
        raise
