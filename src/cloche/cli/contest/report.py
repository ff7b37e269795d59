"""The whole contest, event by event, as one report of plain values; and the report as tables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import cloche
from cloche.cli.output import show
from cloche.testing.conformance_leftovers import leftovers

from .contestants import BUBBLEWRAP, CODE, EVENTS, PLAIN, Event, Setting
from .peers import PEER_EVENTS
from .remains import adopt_orphans, cool_down, leaks_after, memory_of_pool
from .sessions import SESSION_EVENTS, session_lines
from .turns import THREADS, Contestant, LeftOut, full_speed, row, take_turns

Report = dict[str, Any]
Tell = Callable[[str], None]
PEER_RUNS = 200
_MEMORY = (
    "{slot_mib} MiB PSS per idle slot ({slot_private_mib} MiB its own, {processes_per_slot} processes, {slots} slots), "
    "template {template_mib} MiB, all {all_mib} MiB"
)


def measure(
    setting: Setting, report: Report, tell: Tell, show_event: Callable[[Report], None] = lambda _: None
) -> None:
    """Hold every event of a setting and put it into `report` as soon as it is over, the head before the first one.

    `tell` is told what is being measured, `show_event` gets each event.
    """
    adopt_orphans()
    report |= {"cloche": cloche.__version__, "rounds": setting.rounds, "host": _host(), "events": []}

    def hold(events: Iterable[Event], runs: int) -> None:
        for event in events:
            report["events"].append(_hold(event, setting, runs, tell))
            show_event(report["events"][-1])

    def named(events: Iterable[Event]) -> list[Event]:
        return [event for event in events if setting.events is not None and event.name in setting.events]

    own = (*EVENTS, *SESSION_EVENTS)
    before = leftovers()
    hold(own if setting.events is None else named(own), setting.runs)
    report["leaks"] = leaks_after(before)
    if setting.peers_folder is not None:
        # Last: what a peer leaves behind is not taken for Cloche's.
        hold(named(PEER_EVENTS) or PEER_EVENTS, min(setting.runs, PEER_RUNS))
        report["left_after_peers"] = leaks_after(before)


def _host() -> dict[str, Any]:
    enforcement = cloche.run(CODE, warm=False).enforcement
    has_version_2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "cgroups": 2 if has_version_2 else 1,
        "is_root": os.geteuid() == 0,
        "level": str(enforcement.level),
    }


def _hold(event: Event, setting: Setting, runs: int, tell: Tell) -> Report:
    rounds = event.rounds(setting.rounds)
    tell(f"{event.title}: {rounds} rounds")
    cool_down()
    with ExitStack() as stack:
        entrants = list(event.enter(setting, stack))
        present = [entrant for entrant in entrants if isinstance(entrant, Contestant)]
        left_out = {entrant.name: entrant.reason for entrant in entrants if isinstance(entrant, LeftOut)}
        times, failed = take_turns(present, rounds, reference=event.reference)
        reference = times.get(event.reference)
        rows = {one.name: {"call": one.call, **row(times[one.name], reference)} for one in present if one.name in times}
        for name, one in rows.items():
            one["ms"] = [round(ms, 3) for ms in times[name].ms]
        fit = [one for one in present if one.name in event.at_full_speed and one.name in times]
        if fit:
            tell(f"{', '.join(one.name for one in fit)}: up to {runs} runs from {THREADS} threads, in stints")
        speeds = full_speed(fit, runs, event.speed_limit_s)
    memory = {"memory": memory_of_pool()} if event.looks_at_memory and rows else {}
    also = {name: look(setting) for name, look in event.also.items()} if rows else {}
    return {
        "name": event.name,
        "title": event.title,
        "reference": event.reference,
        "rows": rows,
        "left_out": {**left_out, **failed},
        "full_speed": speeds,
        **memory,
        **also,
    }


def show_report(report: Report) -> None:
    """Print the tables of a report, which may have been broken off."""
    show_head(report)
    for event in report["events"]:
        show_event(event)
    show_end(report)


def show_head(report: Report) -> None:
    """Print what was measured where."""
    host = report["host"]
    print(
        f"Cloche {report['cloche']}, Python {host['python']}, Linux {host['kernel']}, {host['processors']} processors, "
        f"level {host['level']}, {'root' if host['is_root'] else 'an ordinary user'}",
        flush=True,
    )


def show_end(report: Report) -> None:
    """Print what was not measured turn by turn."""
    print()
    for line in _closing_lines(report):
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
            "rounds": one["rounds"],
            **{key: f"{one[key]:.2f}" for key in ("p50", "p95", "p99")},
            f"x {reference}": f"{one['ratio']:.2f}" if "ratio" in one else "",
            **({f"x {BUBBLEWRAP}": f"{one['p50'] / second['p50']:.2f}"} if second else {}),
            "ms more": f"{one['over']:+.2f}" if "over" in one else "",
            "started": ", ".join(f"{start} {count}" for start, count in one.get("starts", {}).items()),
        }
        for name, one in event["rows"].items()
    ]


def _speed_rows(speeds: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    plain = speeds.get(PLAIN, {}).get("per_second")
    for name, speed in speeds.items():
        ratio = f"{speed['per_second'] / plain:.2f}" if plain else ""
        yield {"": name, "runs": speed["runs"], "a second": f"{speed['per_second']:.1f}", f"x {PLAIN}": ratio}


def _closing_lines(report: Report) -> Iterator[str]:
    for event in report["events"]:
        memory: Mapping[str, Any] = event.get("memory", {})
        if "slots" in memory:
            yield f"memory that waits for {event['title']}: " + _MEMORY.format_map(memory)
        elif memory:
            yield f"memory that waits for {event['title']}: not measured: {memory['reason']}"
        yield from session_lines(event)
    for name, who in (("leaks", "Cloche"), ("left_after_peers", "the turns with peers")):
        if name in report:
            yield from _what_is_left(who, report[name])


def _what_is_left(who: str, left: list[str]) -> Iterator[str]:
    yield f"left behind by {who}: {len(left) or 'no'} processes, mounts, control groups or folders"
    yield from (f"  {line}" for line in left)
