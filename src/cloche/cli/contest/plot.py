"""A report as one picture: the median of every contestant, with its 95th and 99th percentile."""

from __future__ import annotations

import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any, TypeAlias

from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.hostfs import open_named

Axes: TypeAlias = Any  # matplotlib, and so its types, need not be there

KINDS = (".png", ".svg")
OURS, OTHERS = "#2f6f4f", "#52606d"


def check_plot(name: str) -> None:
    """Raise what is wrong with a file to plot to, before anything is measured."""
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
    figure, places = pyplot.subplots(
        len(events), 1, figsize=(9, 0.38 * sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for place, event in zip(places[:, 0], events, strict=True):
        _draw(place, event)
    suffix = Path(name).suffix.lower()[1:]
    drawn = io.BytesIO()
    figure.savefig(drawn, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    pyplot.close(figure)
    open_named(name, drawn.getvalue()).close()


def _draw(place: Axes, event: dict[str, Any]) -> None:
    """Draw one event as dots: on a logarithmic scale a bar's length would mean nothing."""
    ticker = importlib.import_module("matplotlib.ticker")
    names = list(event["rows"])
    rows = [event["rows"][name] for name in names]
    for height, (name, row) in enumerate(zip(names, rows, strict=True)):
        colour = OURS if "cloche" in name else OTHERS
        place.plot([row["p50"], row["p99"]], [height, height], color=colour, linewidth=1.5)
        place.plot([row["p95"]], [height], marker="|", color=colour)
        place.plot([row["p50"]], [height], marker="o", color=colour)
        place.text(row["p99"] * 1.06, height, f"{row['p50']:.1f}", va="center", color=colour)
    place.set_yticks(range(len(names)), names)
    place.set_ylim(len(names) - 0.5, -0.5)
    place.set_xscale("log")
    place.set_xlim(min(row["p50"] for row in rows) / 1.5, max(row["p99"] for row in rows) * 1.8)
    place.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    place.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    place.xaxis.set_minor_locator(ticker.NullLocator())
    place.grid(axis="x", color="#e4e7eb")
    place.set_axisbelow(True)
    place.set_title(f"{event['title']}: ms, median (dot), p95 (tick), p99 (line's end)", loc="left", fontsize=9)
    for side in ("top", "right"):
        place.spines[side].set_visible(False)
