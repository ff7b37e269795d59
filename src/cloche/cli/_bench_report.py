"""The tables of `cloche bench`, as they are printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloche.bench.harness import THREADS
from cloche.bench.report import _MEMORY, Report
from cloche.bench.scenarios import BUBBLEWRAP, PLAIN

from .output import show


def show_head(report: Report) -> None:
    """Print the versions and the host of a measurement."""
    host = report["host"]
    print(
        f"Cloche {report['cloche']}, Python {host['python']}, Linux {host['kernel']}, {host['processors']} processors, "
        f"level {host['level']}, {'root' if host['is_root'] else 'an ordinary user'}",
        flush=True,
    )


def show_end(report: Report, further_lines: Callable[[Report], Iterator[str]] = lambda _: iter(())) -> None:
    """Print memory and leftovers, which are not measured in turns; `further_lines` yields lines of one event only."""
    print()
    for line in _closing_lines(report, further_lines):
        print(line)


def show_event(event: Report) -> None:
    """Print the tables of one event."""
    speeds = {name: speed for name, speed in event["full_speed"].items() if "reason" not in speed}
    for title, rows in (
        (f"{event['title']}, ms", _time_rows(event)),
        (f"{event['title']}, from {THREADS} threads of one process", list(_speed_rows(speeds))),
    ):
        if rows:
            print()
            show(rows, as_json=False, title=title)
    for name, reason in event["left_out"].items():
        print(f"left out: {name}: {reason}")
    for name, speed in event["full_speed"].items():
        if "reason" in speed:
            print(f"left out from {THREADS} threads: {name}: {speed['reason']}")
    sys.stdout.flush()


def _time_rows(event: Report) -> list[dict[str, Any]]:
    reference = event["reference"]
    second = event["rows"].get(BUBBLEWRAP) if reference == PLAIN else None
    return [
        {
            "": name,
            "rounds": row["rounds"],
            **{key: f"{row[key]:.2f}" for key in ("p50", "p95", "p99")},
            f"x {reference}": f"{row['ratio']:.2f}" if "ratio" in row else "",
            **({f"x {BUBBLEWRAP}": f"{row['p50'] / second['p50']:.2f}"} if second else {}),
            "ms more": f"{row['over']:+.2f}" if "over" in row else "",
            "started": ", ".join(f"{start} {count}" for start, count in row.get("starts", {}).items()),
        }
        for name, row in event["rows"].items()
    ]


def _speed_rows(speeds: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    plain = speeds.get(PLAIN, {}).get("per_second")
    for name, speed in speeds.items():
        ratio = f"{speed['per_second'] / plain:.2f}" if plain else ""
        yield {"": name, "runs": speed["runs"], "a second": f"{speed['per_second']:.1f}", f"x {PLAIN}": ratio}


def _closing_lines(report: Report, further_lines: Callable[[Report], Iterator[str]]) -> Iterator[str]:
    for event in report["events"]:
        memory: Mapping[str, Any] = event.get("memory", {})
        if "slots" in memory:
            yield f"memory that waits for {event['title']}: " + _MEMORY.format_map(memory)
        elif memory:
            yield f"memory that waits for {event['title']}: not measured: {memory['reason']}"
        yield from further_lines(event)
    for name, source in (("leaks", "Cloche"), ("left_after_peers", "the turns with peers")):
        if name in report:
            yield from _what_is_left(source, report[name])


def _what_is_left(source: str, leftovers: list[str]) -> Iterator[str]:
    yield f"left behind by {source}: {len(leftovers) or 'no'} processes, mounts, control groups or folders"
    yield from (f"  {line}" for line in leftovers)
