"""Figures of matplotlib as data: kinds, labels, ticks and values, as clients of notebooks read them."""

from __future__ import annotations

import datetime as dt
import io
import json
from typing import Any

import pytest

from cloche.interpreter import charts

pyplot: Any = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def ax() -> Any:
    """Return the axes of a new figure without a screen."""
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def chart(figure: Any) -> dict[str, Any]:
    """Draw a figure, and return its chart."""
    figure.savefig(io.BytesIO(), format="png")
    read: dict[str, Any] = json.loads(charts.chart_of(figure) or "{}")
    return read


def test_a_line_has_points_units_ticks_and_scales(ax: Any) -> None:
    """Labels give the units; grids are no lines; dates are a scale of their own."""
    ax.plot([dt.date(2020, 1, 1), dt.date(2020, 1, 2)], [1, 2])
    ax.plot([dt.date(2020, 1, 1)], [3], label="named")
    ax.set(xlabel="Day (d)", ylabel="Size [m]", title="T")
    ax.grid(True)
    read = chart(ax.figure)
    assert (read["type"], read["title"], read["x_unit"], read["y_unit"]) == ("line", "T", "d", "m")
    first = {"label": "Line 0", "points": [["2020-01-01", 1.0], ["2020-01-02", 2.0]]}
    assert read["elements"] == [first, {"label": "named", "points": [["2020-01-01", 3.0]]}]
    assert (read["x_scale"], read["y_scale"]) == ("datetime", "linear")
    assert read["x_ticks"][0].startswith("2020-01-01T00:00:00")


@pytest.mark.parametrize("is_level", [False, True])
def test_bars_have_names_and_values_also_equal_ones(ax: Any, is_level: bool) -> None:
    """The direction is the bars' own, so equal bars and a single one keep their values."""
    (ax.barh if is_level else ax.bar)(["a", "b"], [3, 3], label="g")
    (ax.set_xlabel if is_level else ax.set_ylabel)("N (x)")
    read = chart(ax.figure)
    assert read["elements"] == [{"label": name, "group": "g", "value": 3.0} for name in "ab"]
    assert (read["type"], read["y_label"], read["y_unit"]) == ("bar", "N (x)", "x")


@pytest.mark.parametrize("orientation", ["vertical", "horizontal"])
def test_boxes_have_quartiles_ends_and_outliers(ax: Any, orientation: str) -> None:
    """Also where an end is the same as a quartile."""
    ax.boxplot([[1, 2, 3, 4, 20]], tick_labels=["A"], patch_artist=True, orientation=orientation)
    assert chart(ax.figure)["elements"] == [
        {
            "label": "A", "min": 1.0, "first_quartile": 2.0, "median": 3.0, "third_quartile": 4.0, "max": 4.0,
            "outliers": [20.0],
        }
    ]  # fmt: skip


def test_other_kinds_and_several_axes(ax: Any) -> None:
    """Wedges have angles; several axes are a chart of charts; others are unknown; nothing drawn is no chart."""
    assert chart(ax.figure) == {}
    ax.pie([30, 20], labels=["x", "y"])
    assert chart(ax.figure)["elements"][0] == {"label": "x", "angle": 216.0, "radius": 1.0}
    figure, (left, right) = pyplot.subplots(1, 2)
    left.scatter([1, 2], [3, 4], label="D")
    right.imshow([[1, 2], [3, 4]])
    figure.suptitle("S")
    both = chart(figure)
    assert (both["type"], both["title"], [part["type"] for part in both["elements"]]) == (
        "superchart", "S", ["scatter", "unknown"],
    )  # fmt: skip
    assert both["elements"][0]["elements"] == [{"label": "D", "points": [[1.0, 3.0], [2.0, 4.0]]}]
    pyplot.close(figure)
