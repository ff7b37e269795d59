"""Targets, compared with a report; a missed one is printed as plainly as one that was met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Report = dict[str, Any]
Rows = dict[str, Any]
PLAIN, BUBBLEWRAP, COLD, WARM = "plain subprocess", "bubblewrap", "cloche, cold", "cloche, warm"
ON_DEMAND = "cloche, on demand"
PRELOADED = "cloche, pandas preloaded"
CELL, FORK, ROLLBACK = "cloche, session cell", "cloche, fork(1)", "cloche, rollback"
DOCKER_RUN, DOCKER_RUN_GVISOR = "docker run", "docker run, gVisor"
DOCKER_WARM, GVISOR_WARM = "cloche, docker warm", "cloche, gVisor warm"
NOTHING, VERSION, COMMAND = "python -c pass", "cloche --version", "cloche run, a new process"
EXEC, EXEC_NAMED = "cloche exec", "cloche exec NAME"
LIVE_OPENED, LIVE_COLD = "live sandbox, opened", "live sandbox, opened cold"
LIVE_COMMAND, LIVE_RUN, ECHO = "live sandbox, true", "live sandbox, print(1)", "live sandbox, terminal echo"
DIRECT, FORWARDED = "64 MiB by loopback", "64 MiB by a forwarded port"
IN_BLOCKS, BY_LINES = "cloche, warm, in blocks", "cloche, warm, line by line"
ANSWERED_LINE = "a line that waits for its answer"
FIRST, FIRST_COLD = "first cloche.run", "first cloche.run, cold"


def _p50(first: str, second: str) -> Callable[[Rows], float]:
    return lambda rows: rows[first]["p50"] / rows[second]["p50"]


# event, which part of it, what is meant, the limit, whether more is better, and how it is computed
Target = tuple[str, str, str, float, bool, Callable[[Rows], float]]
TARGETS: tuple[Target, ...] = (
    ("print", "rows", "cold p50 / bubblewrap p50", 1.3, False, _p50(COLD, BUBBLEWRAP)),
    ("print", "rows", "warm p50 / plain p50", 0.15, False, _p50(WARM, PLAIN)),
    ("print", "rows", "on demand p50 / plain p50", 0.35, False, _p50(ON_DEMAND, PLAIN)),
    ("print", "rows", "warm p99 / plain p50", 0.6, False, lambda rows: rows[WARM]["p99"] / rows[PLAIN]["p50"]),
    ("print", "full_speed", "warm runs a second / plain runs a second", 2.5, True,
     lambda rows: rows[WARM]["per_second"] / rows[PLAIN]["per_second"]),
    ("import", "rows", "what import cloche adds / what import asyncio adds", 0.5, False,
     lambda rows: rows["import cloche"]["over"] / rows["import asyncio"]["over"]),
    ("first", "rows", "first run of a process, p50 / the same cold", 1.05, False, _p50(FIRST, FIRST_COLD)),
    ("start", "rows", "cloche --version / python -c pass, processor time", 4.0, False, _p50(VERSION, NOTHING)),
    ("start", "rows", "cloche run / python -c pass, processor time", 12.0, False, _p50(COMMAND, NOTHING)),
    ("start", "rows", "a process with one cloche.run / python -c pass, processor time", 6.0, False,
     _p50(f"{FIRST}, whole process", NOTHING)),
    ("start", "rows", "cloche exec NAME -- true / python -c pass, processor time", 2.2, False,
     _p50(EXEC_NAMED, NOTHING)),
    ("start", "rows", "the same by the clock", 2.2, False, _p50(f"{EXEC_NAMED}, wall", f"{NOTHING}, wall")),
    ("start", "rows", "cloche exec -- true / python -c pass, processor time", 14.0, False, _p50(EXEC, NOTHING)),
    ("containers", "rows", "cloche run p50 / docker run p50", 0.6, False, _p50(COMMAND, DOCKER_RUN)),
    ("pandas", "rows", "pandas preloaded p50 / plain p50", 0.03, False, _p50(PRELOADED, PLAIN)),
    ("live", "rows", "a live sandbox, opened p50 / plain p50", 1.0, False, _p50(LIVE_OPENED, PLAIN)),
    ("live", "rows", "the same cold p50 / bubblewrap p50", 1.5, False, _p50(LIVE_COLD, BUBBLEWRAP)),
    ("live", "rows", "exec of true in an open one p50 / plain p50", 0.3, False, _p50(LIVE_COMMAND, PLAIN)),
    ("live", "rows", "run of print(1) in an open one p50 / plain p50", 0.2, False, _p50(LIVE_RUN, PLAIN)),
    ("live", "rows", "ms of a terminal's echo", 5.0, False, lambda rows: rows[ECHO]["p50"]),
    ("live", "idle", "MiB of PSS of an idle live sandbox", 8.0, False, lambda idle: idle["session_mib"]),
    ("lines 100", "rows", "100 lines p50 / in blocks p50", 1.1, False, _p50(BY_LINES, IN_BLOCKS)),
    ("lines 1000", "rows", "1,000 lines p50 / in blocks p50", 1.5, False, _p50(BY_LINES, IN_BLOCKS)),
    ("lines 10000", "rows", "10,000 lines p50 / in blocks p50", 3.0, False, _p50(BY_LINES, IN_BLOCKS)),
    ("lines million", "rows", "a million lines / in blocks, processor time", 8.0, False, _p50(BY_LINES, IN_BLOCKS)),
    ("answered", "rows", "ms from an answer to the next line, p99", 50.0, False,
     lambda rows: rows[ANSWERED_LINE]["p99"]),
    ("port", "rows", "bytes a second of a forwarded port / direct", 0.5, True, _p50(DIRECT, FORWARDED)),
    ("session", "rows", "session cell p50 / plain p50", 0.05, False, _p50(CELL, PLAIN)),
    ("session", "idle", "MiB of PSS of an idle session", 8.0, False, lambda idle: idle["session_mib"]),
    ("containers", "rows", "warm docker p50 / docker run p50", 0.10, False, _p50(DOCKER_WARM, DOCKER_RUN)),
    ("containers", "rows", "warm gVisor p50 / docker run --runtime=runsc p50", 0.10, False,
     _p50(GVISOR_WARM, DOCKER_RUN_GVISOR)),
    ("data", "rows", "fork(1) at 500 MB p50 / plain p50", 2.0, False, _p50(FORK, PLAIN)),
    ("data", "rows", "rollback at 500 MB p50 / plain p50", 2.0, False, _p50(ROLLBACK, PLAIN)),
)  # fmt: skip

# Of `bench.network`. Each event is a table of its own.
DIRECT, INSIDE, OFF, LISTED = "direct", "in a sandbox", "network off", "allowlist"
ALONE, BESIDE = "alone", "beside"
_OF_NETWORK: tuple[Target, ...] = (
    *(
        (f"large {route}", "rows", f"bytes a second of 100 MB over {route} / direct", 0.5, True, _p50(DIRECT, INSIDE))
        for route in ("TLS", "HTTP", "TCP")
    ),
    *(
        (f"{which} {route}", "rows", f"ms more of a {which} request over {route}", 5.0, False,
         lambda rows: rows[INSIDE]["over"])
        for which in ("small", "first") for route in ("TLS", "HTTP", "TCP")
    ),
    ("beside", "rows", "p99 of a small request beside 30 connections of another sandbox / alone", 5.0, False,
     lambda rows: rows[BESIDE]["p99"] / rows[ALONE]["p99"]),
    ("warm", "rows", "warm run with an allowlist p50 / without a network p50", 1.3, False, _p50(LISTED, OFF)),
)  # fmt: skip
OPENED_NAMES = ("direct", "spliced, in a sandbox", "opened, in a sandbox")
_OUTSIDE, _SPLICED, _OPENED = OPENED_NAMES
_OF_SECRETS: tuple[Target, ...] = (
    ("opened first byte", "rows", "ms more of the first byte of a stream, opened / direct", 5.0, False,
     lambda rows: rows[_OPENED]["over"]),
    ("opened small", "rows", "ms more of a small request, opened / spliced", 3.0, False,
     lambda rows: rows[_OPENED]["over"]),
    ("opened again", "rows", "the same by a connection that is kept", 3.0, False, lambda rows: rows[_OPENED]["over"]),
    ("opened small HTTP/2", "rows", "the same by HTTP/2", 3.0, False, lambda rows: rows[_OPENED]["over"]),
    ("opened large", "rows", "bytes a second of 100 MB, opened / direct", 0.4, True, _p50(_OUTSIDE, _OPENED)),
    ("opened warm", "rows", "warm run with a secret and a tool p50 / with its host in the allow list p50", 1.3, False,
     _p50(_OPENED, _SPLICED)),
)  # fmt: skip
USER = ", user"  # at the end of an event's name
OF_NETWORK = (*_OF_NETWORK, *((f"{row[0]}{USER}", row[1], f"{row[2]}{USER}", *row[3:]) for row in _OF_NETWORK))
OF_SECRETS = (*_OF_SECRETS, *((f"{row[0]}{USER}", row[1], f"{row[2]}{USER}", *row[3:]) for row in _OF_SECRETS))


# What an ordinary user, without control groups, shall have of it.
_OWN_LIMITS = {
    "cloche --version / python -c pass, processor time": 4.0,
    "cloche run / python -c pass, processor time": 12.0,
    "a process with one cloche.run / python -c pass, processor time": 6.0,
    "warm p50 / plain p50": 0.20,
    "warm p99 / plain p50": 0.6,
    "warm runs a second / plain runs a second": 1.8,
}
OF_ORDINARY_USER = tuple((*row[:3], _OWN_LIMITS[row[2]], *row[4:]) for row in TARGETS if row[2] in _OWN_LIMITS)

# What a plain container shall have of it, as root and as an ordinary user.
_CONTAINER_LIMITS = {"warm p50 / plain p50": 0.35, "warm runs a second / plain runs a second": 1.5}
OF_CONTAINER = tuple((*row[:3], _CONTAINER_LIMITS[row[2]], *row[4:]) for row in TARGETS if row[2] in _CONTAINER_LIMITS)


def held_against(report: Report, targets: tuple[Target, ...] = TARGETS) -> Iterator[str]:
    """Yield one line per target that the report has figures for."""
    events = {event["name"]: event for event in report["events"]}
    for name, part, meaning, limit, is_more_better, compute in targets:
        try:
            found = compute(events[name][part])
        except KeyError:
            continue  # a contestant was left out
        is_met = found >= limit if is_more_better else found <= limit
        wanted = f"at {'least' if is_more_better else 'most'} {limit}"
        yield f"target: {meaning} {wanted}: {found:.2f}, {'met' if is_met else 'missed'}"
