"""The carried and refused connections of a sandbox's network, in a bounded number of rows with counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

# Of what was carried, and as many of what was refused: neither takes the other's room. For who comes into a sandbox
# that is kept, more of them are.
MOST_ROWS, KEPT_ROWS = 256, 10_000
MORE_HOSTS = "(more hosts)"  # one row for what was carried and found no room
MOST_TEXT = 400
_COUNTED = ("connections", "sent", "received")
_Key = tuple[str, int, str]


class LedgerRow:
    """Count the connections to one host and port that went well, failed for one reason, or were refused for one."""

    __slots__ = ("connections", "host", "is_allowed", "port", "received", "sent", "why")

    def __init__(self, host: str, port: int, why: str, *, is_allowed: bool):
        self.host, self.port, self.why, self.is_allowed = host, port, why, is_allowed
        self.connections = self.sent = self.received = 0

    def as_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def has_room(keys: Collection[tuple[str, int, str, bool]], *, is_allowed: bool) -> bool:
    """Tell whether there may be another row of this kind, carried or refused, beside those with these keys."""
    return len(keys) < MOST_ROWS or sum(key[3] == is_allowed for key in keys) < MOST_ROWS


class Ledger:
    """Hold the rows since they were taken last; `on_full` takes them when there is no room for another one."""

    def __init__(self, on_full: Callable[[], None] | None = None) -> None:
        self._on_full = on_full
        self._rows: dict[tuple[str, int, str, bool], LedgerRow] = {}
        self._unlisted = 0

    def row(self, host: str, port: int, why: str = "", *, is_allowed: bool = True) -> LedgerRow:
        """Count a connection, and return its row, which counts its bytes.

        Without room for another row, that is the common row of all such connections; for a refusal, a row that is
        dropped.
        """
        key = (host, port, why[:MOST_TEXT], is_allowed)
        if self._on_full is not None and key not in self._rows and not has_room(self._rows, is_allowed=is_allowed):
            self._on_full()
        if key not in self._rows and not has_room(self._rows, is_allowed=is_allowed):
            self._unlisted += not is_allowed
            key = (MORE_HOSTS, 0, "", True) if is_allowed else key
        row = self._rows.get(key)
        if row is None:
            row = LedgerRow(*key[:3], is_allowed=is_allowed)
            if is_allowed or has_room(self._rows, is_allowed=False):
                self._rows[key] = row
        row.connections += 1
        return row

    def take(self, live: set[LedgerRow]) -> dict[str, Any]:
        """Return all rows, and begin anew; `live` ones, of connections that go on, count from nothing."""
        rows = [row.as_wire() for row in self._rows.values() if row.connections or row.sent or row.received]
        unlisted, self._unlisted = self._unlisted, 0
        self._rows = {key: row for key, row in self._rows.items() if row in live}
        for row in live:
            row.connections = row.sent = row.received = 0
        return {"rows": rows, "unlisted": unlisted}


class Sum:
    """Sum reports. Of each kind, carried and refused, it keeps the rows that changed last."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.unlisted = 0
        self._most_rows = most_rows
        self._rows: dict[bool, OrderedDict[_Key, dict[str, Any]]] = {True: OrderedDict(), False: OrderedDict()}
        self._more: dict[str, Any] | None = None  # the row of what was carried and is in no other

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        return (*self._rows[True].values(), *((self._more,) if self._more else ()), *self._rows[False].values())

    def as_wire(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "unlisted": self.unlisted}

    def add(self, body: Mapping[str, Any]) -> None:
        """Add one report."""
        self.unlisted += body["unlisted"]
        for row in body["rows"]:
            if row["host"] == MORE_HOSTS:
                self._drop(row)
                continue
            rows, key = self._rows[row["is_allowed"]], (row["host"], row["port"], row["why"])
            counted = rows.get(key)
            if counted is None:
                rows[key] = dict(row)
                if len(rows) > self._most_rows:
                    self._drop(rows.popitem(last=False)[1])
                continue
            _count(counted, row)
            rows.move_to_end(key)

    def _drop(self, row: Mapping[str, Any]) -> None:
        """Count a connection without a row."""
        if not row["is_allowed"]:
            self.unlisted += row["connections"]
        elif self._more is None:
            self._more = {**row, "host": MORE_HOSTS, "port": 0, "why": ""}
        else:
            _count(self._more, row)


def _count(counted: dict[str, Any], row: Mapping[str, Any]) -> None:
    for name in _COUNTED:
        counted[name] += row[name]
