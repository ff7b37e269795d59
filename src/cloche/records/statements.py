"""Database work that consists of statements alone: SQLite's driver runs it without a session.

Each run writes two rows. A session and SQLAlchemy's work for a statement take four times as long as the statement and
its commit. Therefore statements are compiled once. PostgreSQL runs them in a session, like all other work.
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
    """JSON text that is stored unchanged."""

    __slots__ = ()


def encode(value: Any) -> str:  # noqa: ANN401 - plain data
    """Return JSON text."""
    return value if isinstance(value, Encoded) else json.dumps(value, separators=(",", ":"))


_DIALECT: Dialect = sqlite.dialect(dbapi=sqlite3, json_serializer=encode)


class Statement:
    """A statement with named values. `columns` are those of an insertion."""

    __slots__ = ("_values", "text", "whole")

    def __init__(self, statement: Insert | Update, *, columns: Sequence[str] = ()):
        self.whole = statement
        compiled: Any = statement.compile(dialect=_DIALECT, column_keys=list(columns) or None)
        self.text: str = compiled.string
        self._values: tuple[tuple[str, Callable[[Any], Any] | None], ...] = tuple(
            (name, compiled.binds[name].type.dialect_impl(_DIALECT).bind_processor(_DIALECT))
            for name in compiled.positiontup
        )

    def values(self, by_name: Mapping[str, Any]) -> list[Any]:
        """Return named values in the driver's order and types."""
        return [by_name[name] if process is None else process(by_name[name]) for name, process in self._values]


class Statements:
    """A sequence of statements with their values, as work for a `Writer`."""

    __slots__ = ("_all", "_encoded")

    def __init__(self, *statements: tuple[Statement, Mapping[str, Any]]):
        self._all = statements
        self._encoded: list[tuple[str, list[Any]]] | None = None

    @property
    def encoded(self) -> list[tuple[str, list[Any]]]:
        """Return the statements in the driver's format."""
        if self._encoded is None:
            self._encoded = [(statement.text, statement.values(values)) for statement, values in self._all]
        return self._encoded

    @property
    def size(self) -> int:
        """Return the approximate number of bytes written."""
        return sum(len(value) for _, values in self.encoded for value in values if isinstance(value, (str, bytes)))

    def __add__(self, other: Statements) -> Statements:
        return Statements(*self._all, *other._all)

    def __call__(self, session: Session) -> None:
        """Run the statements in a session."""
        connection = session.connection()
        for statement, values in self._all:
            connection.execute(statement.whole, values)

    def run_by(self, connection: sqlite3.Connection) -> None:
        """Run the statements by the driver, in a begun transaction."""
        for text, values in self.encoded:
            connection.execute(text, values)


def run_by(connection: sqlite3.Connection, work: Sequence[Statements]) -> None:
    """Run statements by the driver in one transaction. Raises the driver's errors."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statements in work:
            statements.run_by(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # else SQLite has rolled it back
            connection.execute("ROLLBACK")
        raise
