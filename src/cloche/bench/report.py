"""Run all events and report them as plain values; draw the report: median, 95th and 99th percentile of each row."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import platform
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import cloche
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.hostfs import open_named
from cloche.testing.conformance.subject import leaks

from .harness import (
    THREADS,
    Case,
    SkippedCase,
    adopting_orphans,
    drain_pool,
    full_speed,
    leaks_after,
    measure_interleaved,
    memory_of_pool,
    reason_of,
    row,
)
from .scenarios import CODE, EVENTS, BenchSize, Scenario

Report = dict[str, Any]
Tell = Callable[[str], None]
_MEMORY = (
    "{slot_mib} MiB PSS per idle slot ({slot_private_mib} MiB its own, {processes_per_slot} processes, {slots} slots), "
    "template {template_mib} MiB, all {all_mib} MiB"
)
Axes: TypeAlias = Any  # matplotlib, and so its types, need not be there
KINDS = (".png", ".svg")
OURS, OTHERS = "#2f6f4f", "#52606d"


def measure(
    setting: BenchSize,
    report: Report,
    log: Tell,
    show_event: Callable[[Report], None] = lambda _: None,
    *,
    events: Iterable[Scenario] = EVENTS,
) -> None:
    """Run every scenario and add each to `report` as soon as it is over, after the head.

    `log` is called with the name of each measured case, `show_event` with each scenario's report.
    """
    report |= {"cloche": cloche.__version__, "rounds": setting.rounds, "host": _host(), "events": []}
    report["leaks"] = run_events(events, setting, report, log, show_event)


def run_events(
    events: Iterable[Scenario],
    setting: BenchSize,
    report: Report,
    log: Tell,
    show_event: Callable[[Report], None] = lambda _: None,
) -> list[str]:
    """Run scenarios, add each to a report that has a head, and return the leaks."""
    with adopting_orphans():
        before = leaks()
        for event in events:
            report["events"].append(_run_scenario(event, setting, log))
            show_event(report["events"][-1])
        return leaks_after(before)


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


def _run_scenario(event: Scenario, setting: BenchSize, log: Tell) -> Report:
    rounds = event.rounds(setting.rounds)
    log(f"{event.title}: {rounds} rounds")
    drain_pool()
    with ExitStack() as stack:
        entered: list[Case | SkippedCase] = []
        try:
            entered.extend(event.enter(setting, stack))  # keeps cases yielded before an error
        except BackendUnavailable as error:
            entered.append(SkippedCase(name=f"the rest of {event.title}", reason=reason_of(error)))
        present = [entry for entry in entered if isinstance(entry, Case)]
        left_out = {entry.name: entry.reason for entry in entered if isinstance(entry, SkippedCase)}
        times, failed = measure_interleaved(present, rounds, reference=event.reference)
        reference = times.get(event.reference)
        rows = {
            case.name: {"call": case.call, **row(times[case.name], reference)} for case in present if case.name in times
        }
        for name, measured in rows.items():
            measured["ms"] = [round(ms, 3) for ms in times[name].ms]
        fit = [case for case in present if case.name in event.at_full_speed and case.name in times]
        if fit:
            log(f"{', '.join(case.name for case in fit)}: up to {setting.runs} runs from {THREADS} threads, in stints")
        speeds = full_speed(fit, setting.runs, event.speed_limit_s)
    memory = {"memory": memory_of_pool()} if event.looks_at_memory and rows else {}
    also = {name: _looked(look, setting) for name, look in event.also.items()} if rows else {}
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


def _looked(look: Callable[[BenchSize], dict[str, Any]], setting: BenchSize) -> dict[str, Any]:
    try:
        return look(setting)
    except BackendUnavailable as error:  # a feature that this host lacks
        return {"reason": reason_of(error)}


def check_plot(name: str) -> None:
    """Raise the error that plotting to a file would raise, before anything is measured."""
    if Path(name).suffix.lower() not in KINDS:
        raise InvalidRequest(f"--plot {name}: the name must end in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs the package matplotlib (pip install matplotlib)")


def write_plot(report: dict[str, Any], name: str) -> None:
    """Draw every event of a report that has rows, one below the other, on logarithmic scales. Raises OSError."""
    check_plot(name)
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    # Text stays text and names stay the same, so that a picture in a repository is small and changes little.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cloche", "font.size": 9})
    pyplot = importlib.import_module("matplotlib.pyplot")
    events = [event for event in report["events"] if event["rows"]]
    heights = [len(event["rows"]) + 1.5 for event in events]
    figure, axes_grid = pyplot.subplots(
        len(events), 1, figsize=(9, 0.38 * sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axes, event in zip(axes_grid[:, 0], events, strict=True):
        _draw(axes, event)
    suffix = Path(name).suffix.lower()[1:]
    drawn = io.BytesIO()
    figure.savefig(drawn, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    pyplot.close(figure)
    open_named(name, drawn.getvalue()).close()


def _draw(axes: Axes, event: dict[str, Any]) -> None:
    """Draw one event as dots: on a logarithmic scale a bar's length would mean nothing."""
    ticker = importlib.import_module("matplotlib.ticker")
    names = list(event["rows"])
    rows = [event["rows"][name] for name in names]
    for height, (name, times) in enumerate(zip(names, rows, strict=True)):
        colour = OURS if "cloche" in name else OTHERS
        axes.plot([times["p50"], times["p99"]], [height, height], color=colour, linewidth=1.5)
        axes.plot([times["p95"]], [height], marker="|", color=colour)
        axes.plot([times["p50"]], [height], marker="o", color=colour)
        axes.text(times["p99"] * 1.06, height, f"{times['p50']:.1f}", va="center", color=colour)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlim(min(row["p50"] for row in rows) / 1.5, max(row["p99"] for row in rows) * 1.8)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(axis="x", color="#e4e7eb")
    axes.set_axisbelow(True)
    axes.set_title(f"{event['title']}: ms, median (dot), p95 (tick), p99 (line's end)", loc="left", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
