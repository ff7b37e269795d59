"""What a sandbox's network has carried and refused, in rows that can be counted and that are few."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

MOST_ROWS = 256  # of what was carried, and as many of what was refused: neither takes the other's room
MORE_HOSTS = "(more hosts)"  # one row for what was carried and found no room
MOST_TEXT = 400
_COUNTED = ("connections", "sent", "received")


class Row:
    """Count the connections to one host and port that went well, failed for one reason, or were refused for one."""

    __slots__ = ("connections", "host", "is_allowed", "port", "received", "sent", "why")

    def __init__(self, host: str, port: int, why: str, *, is_allowed: bool):
        self.host, self.port, self.why, self.is_allowed = host, port, why, is_allowed
        self.connections = self.sent = self.received = 0

    def as_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def has_room(keys: Collection[tuple[str, int, str, bool]], *, is_allowed: bool) -> bool:
    """Tell whether there may be one more row of what was carried, or refused, beside those with these keys."""
    return len(keys) < MOST_ROWS or sum(key[3] == is_allowed for key in keys) < MOST_ROWS


class Ledger:
    """Hold the rows since they were taken last."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int, str, bool], Row] = {}
        self._unlisted = 0

    def row(self, host: str, port: int, why: str = "", *, is_allowed: bool = True) -> Row:
        """Count a connection, and return its row, in which its bytes are counted.

        Where there is no room for another one, that is the row of all such, or of a refusal one that is dropped.
        """
        key = (host, port, why[:MOST_TEXT], is_allowed)
        if key not in self._rows and not has_room(self._rows, is_allowed=is_allowed):
            self._unlisted += not is_allowed
            key = (MORE_HOSTS, 0, "", True) if is_allowed else key
        found = self._rows.get(key)
        if found is None:
            found = Row(*key[:3], is_allowed=is_allowed)
            if is_allowed or has_room(self._rows, is_allowed=False):
                self._rows[key] = found
        found.connections += 1
        return found

    def take(self, live: set[Row]) -> dict[str, Any]:
        """Return all rows, and begin anew; `live` ones, of connections that go on, count from nothing."""
        rows = [row.as_wire() for row in self._rows.values() if row.connections or row.sent or row.received]
        unlisted, self._unlisted = self._unlisted, 0
        self._rows = {key: row for key, row in self._rows.items() if row in live}
        for row in live:
            row.connections = row.sent = row.received = 0
        return {"rows": rows, "unlisted": unlisted}


class Sum:
    """Sum reports, in rows that are as few as those of one."""

    def __init__(self) -> None:
        self.unlisted = 0
        self._rows: dict[tuple[str, int, str, bool], dict[str, Any]] = {}

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        return tuple(self._rows.values())

    def as_wire(self) -> dict[str, Any]:
        return {"rows": list(self._rows.values()), "unlisted": self.unlisted}

    def add(self, body: Mapping[str, Any]) -> None:
        """Add one report."""
        self.unlisted += body["unlisted"]
        for row in body["rows"]:
            is_allowed = row["is_allowed"]
            key = (row["host"], row["port"], row["why"], is_allowed)
            if key not in self._rows and not has_room(self._rows, is_allowed=is_allowed):
                if not is_allowed:
                    self.unlisted += row["connections"]
                    continue
                key = (MORE_HOSTS, 0, "", True)
            found = self._rows.get(key)
            if found is None:
                self._rows[key] = {**row, "host": key[0], "port": key[1], "why": key[2]}
                continue
            for name in _COUNTED:
                found[name] += row[name]
