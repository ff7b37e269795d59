"""What an agent's network did: hosts that were reached and refused, and telemetry, in a bounded number of rows. Pure.

In: the rows of `AsyncNetwork.traffic`, which a guest can cause; out: a summary for people, and for programs as JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cloche.core.escape import escape_line
from cloche.core.host_rules import parse_deny_rule
from cloche.core.limits import format_size
from cloche.core.record import asdict, dataclass
from cloche.core.refusals import listed

MOST_ROWS = 50
MOST_WHY = 300
# What agents ask for by themselves and can do without: updates, connectors of an account, reports of errors.
NOISE = (
    "downloads.claude.ai", "mcp-proxy.anthropic.com", "bridge.claudeusercontent.com", "play.googleapis.com",
    "rum.aliyuncs.com", "*.ingest.sentry.io", "*.datadoghq.com", "*.statsigapi.net",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """Count the connections to one host and port; `why` is the refusal, with method and path where these are read."""

    host: str
    port: int
    connections: int
    sent: int = 0
    received: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSummary:
    """Hold the rows, most connections first, and how many more there are; `telemetry` has hosts alone."""

    reached: tuple[HostRow, ...] = ()
    refused: tuple[HostRow, ...] = ()
    telemetry: tuple[str, ...] = ()
    more: int = 0

    def lines(self) -> list[str]:
        """Return what is told at the end of a session: a line for each kind, escaped; none without traffic."""
        lines = []
        if self.reached:
            names = list(dict.fromkeys(row.host for row in self.reached))
            lines.append(f"reached: {listed(names, len(names))}")
        if self.refused:
            names = list(dict.fromkeys(f"{row.host}:{row.port}" for row in self.refused))
            lines.append(f"refused: {listed(names, len(names))}")
        if self.telemetry:
            lines.append(f"telemetry refused: {listed(self.telemetry, len(self.telemetry))}")
        return lines

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a table."""
        return [
            {"host": f"{row.host}:{row.port}", "": word, "connections": row.connections,
             "sent": format_size(row.sent), "received": format_size(row.received), "why": row.why}
            for word, rows in (("reached", self.reached), ("refused", self.refused)) for row in rows
        ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self)


def never_asked(telemetry: Iterable[str], allowed: Collection[str] = ()) -> list[str]:
    """Return rules of `network_deny` for an agent's telemetry and for noise, but for hosts that are `allowed`.

    They are refused at once, and nobody is asked.
    """
    return [host for host in dict.fromkeys((*telemetry, *NOISE)) if host not in allowed]


def summarize(rows: Iterable[Mapping[str, Any]], telemetry: Sequence[str] = ()) -> NetworkSummary:
    """Return the summary of traffic. `telemetry` are the hosts that `never_asked` was given."""
    quiet = [parse_deny_rule(text) for text in never_asked(telemetry)]
    names, below = {rule.host for rule in quiet if not rule.is_wildcard}, [r.host for r in quiet if r.is_wildcard]

    def is_quiet(host: str) -> bool:
        return host in names or any(host.endswith(f".{suffix}") for suffix in below)

    reached: dict[tuple[str, int, str], HostRow] = {}
    refused: dict[tuple[str, int, str], HostRow] = {}
    silent: dict[str, None] = {}
    for row in rows:
        if not row["is_allowed"] and is_quiet(row["host"]):
            silent[escape_line(row["host"])] = None
        elif row["is_allowed"] and (row["sent"] or row["received"] or not row["why"]):
            _add(reached, row, "")
        elif not row["is_allowed"]:
            _add(refused, row, escape_line(row["why"])[:MOST_WHY])
    kept = [sorted(part.values(), key=lambda one: -one.connections)[:MOST_ROWS] for part in (reached, refused)]
    more = len(reached) + len(refused) - sum(map(len, kept))
    return NetworkSummary(
        reached=tuple(kept[0]), refused=tuple(kept[1]), telemetry=tuple(silent)[:MOST_ROWS], more=more
    )


def _add(rows: dict[tuple[str, int, str], HostRow], row: Mapping[str, Any], why: str) -> None:
    key = (row["host"], row["port"], why)
    old = rows.get(key)
    count, sent, received = (old.connections, old.sent, old.received) if old is not None else (0, 0, 0)
    rows[key] = HostRow(
        host=escape_line(row["host"]), port=row["port"], connections=count + row["connections"],
        sent=sent + row["sent"], received=received + row["received"], why=why,
    )  # fmt: skip
