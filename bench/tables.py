"""The tables of a whole report, as they are printed."""

from __future__ import annotations

from cloche.bench.report import Report
from cloche.cli._bench_report import show_end, show_event, show_head

from .sessions import session_lines


def show_report(report: Report) -> None:
    """Print the tables of a report, which may have been broken off."""
    show_head(report)
    for event in report["events"]:
        show_event(event)
    show_end(report, session_lines)
