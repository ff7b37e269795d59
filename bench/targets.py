"""What we set out to reach, held against a report; a target that was missed is said as plainly as one that was met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Report = dict[str, Any]
Rows = dict[str, dict[str, float]]
PLAIN, BUBBLEWRAP, COLD, WARM = "plain subprocess", "bubblewrap", "cloche, cold", "cloche, warm"


def _p50(first: str, second: str) -> Callable[[Rows], float]:
    return lambda rows: rows[first]["p50"] / rows[second]["p50"]


# event, which part of it, what is meant, the limit, whether more is better, and how it is computed
TARGETS: tuple[tuple[str, str, str, float, bool, Callable[[Rows], float]], ...] = (
    ("print", "rows", "cold p50 / bubblewrap p50", 1.3, False, _p50(COLD, BUBBLEWRAP)),
    ("print", "rows", "warm p50 / plain p50", 0.15, False, _p50(WARM, PLAIN)),
    ("print", "rows", "warm p99 / plain p50", 0.6, False, lambda rows: rows[WARM]["p99"] / rows[PLAIN]["p50"]),
    ("print", "full_speed", "warm runs a second / plain runs a second", 2.5, True,
     lambda rows: rows[WARM]["per_second"] / rows[PLAIN]["per_second"]),
    ("import", "rows", "what import cloche adds / what import asyncio adds", 1.0, False,
     lambda rows: rows["import cloche"]["over"] / rows["import asyncio"]["over"]),
)  # fmt: skip


def held_against(report: Report) -> Iterator[str]:
    """Yield one line per target that the report has figures for."""
    events = {event["name"]: event for event in report["events"]}
    for name, part, meaning, limit, is_more_better, compute in TARGETS:
        try:
            found = compute(events[name][part])
        except KeyError:
            continue  # a contestant was left out
        is_met = found >= limit if is_more_better else found <= limit
        wanted = f"at {'least' if is_more_better else 'most'} {limit}"
        yield f"target: {meaning} {wanted}: {found:.2f}, {'met' if is_met else 'missed'}"
