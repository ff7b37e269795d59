"""A report as one picture: the median of every contestant, with its 95th and 99th percentile."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, TypeAlias

from cloche.core.errors import BackendUnavailable, InvalidRequest

Axes: TypeAlias = Any  # matplotlib, and so its types, need not be there

KINDS = (".png", ".svg")
BAR, OURS, MARK = "#9aa5b1", "#2f6f4f", "#1f2933"


def check_plot(name: str) -> None:
    """Raise what is wrong with a file to plot to, before anything is measured."""
    if Path(name).suffix.lower() not in KINDS:
        raise InvalidRequest(f"--plot {name}: the name must end in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs the package matplotlib (pip install matplotlib)")


def write_plot(report: dict[str, Any], name: str) -> None:
    """Draw every event of a report that has rows, one below the other, on logarithmic scales."""
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
    figure.savefig(name, format=suffix, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
    pyplot.close(figure)


def _draw(place: Axes, event: dict[str, Any]) -> None:
    names = list(event["rows"])
    rows = [event["rows"][name] for name in names]
    heights = range(len(names))
    medians = [row["p50"] for row in rows]
    place.barh(heights, medians, color=[OURS if "cloche" in name else BAR for name in names], height=0.7)
    for height, row in zip(heights, rows, strict=True):
        place.plot([row["p50"], row["p99"]], [height, height], color=MARK, linewidth=1)
        place.plot([row["p95"]], [height], marker="|", color=MARK)
        place.text(row["p99"] * 1.06, height, f"{row['p50']:.1f}", va="center")
    place.set_yticks(list(heights), names)
    place.invert_yaxis()
    place.set_xscale("log")
    place.set_xlim(min(medians) / 2, max(row["p99"] for row in rows) * 2)
    place.set_title(f"{event['title']}: ms, median (bar), p95 (tick), p99 (line's end)", loc="left", fontsize=9)
    for side in ("top", "right"):
        place.spines[side].set_visible(False)
