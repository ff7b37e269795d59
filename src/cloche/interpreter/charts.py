"""What a figure of matplotlib draws, as data: points of lines and scatters, bars, wedges, boxes, with titles and axes.

The kind of a chart follows from what its axes hold. Several axes make a `superchart` of charts; what has no rule is
`unknown` and has its title alone. Nothing here imports matplotlib. Figures must have been drawn, which makes labels.
"""

from __future__ import annotations

import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Chart = dict[str, Any]

DIGITS = 8
_UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


def chart_of(figure: Any) -> str | None:
    """Return the chart of a figure as JSON; None for a figure without data."""
    import json

    axes = figure.get_axes()
    if not any(ax.has_data() for ax in axes):
        return None
    if len(axes) == 1:
        return json.dumps(_chart(axes[0]))
    charts = {"type": "superchart", "title": figure.get_suptitle(), "elements": [_chart(ax) for ax in axes]}
    return json.dumps(charts)


def _chart(ax: Any) -> Chart:
    kind = _kind(ax)
    chart: Chart = {"type": kind, "title": ax.get_title() or None, "elements": []}
    _FILL[kind](ax, chart)
    return chart


def _class(module: str, name: str) -> Any:
    return getattr(sys.modules.get(f"matplotlib.{module}"), name, ())


def _kind(ax: Any) -> str:
    line, text = _class("lines", "Line2D"), _class("text", "Text")
    artists = [artist for artist in ax._children if not isinstance(artist, text)]
    box = _class("patches", "PathPatch")
    for kind, classes in (("line", line), ("box_and_whisker", (box, line))):
        if all(isinstance(artist, classes) for artist in artists):
            return kind
    artists = [artist for artist in artists if not (isinstance(artist, line) and _is_rule(artist))]
    table = (
        ("scatter", _class("collections", "PathCollection")),
        ("pie", _class("patches", "Wedge")),
        ("bar", _class("patches", "Rectangle")),
    )
    return next((name for name, kind in table if all(isinstance(artist, kind) for artist in artists)), "unknown")


def _is_rule(line: Any) -> bool:
    """Tell whether a line is one of a grid: it has two points, and is level or upright."""
    x, y = line.get_xdata(), line.get_ydata()
    return len(x) == 2 and len(y) == 2 and bool(x[0] == x[1] or y[0] == y[1])


# Axes.


def _add_labels(ax: Any, chart: Chart) -> None:
    for axis, label in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())):
        unit = _UNIT.search(label)
        chart[f"{axis}_label"], chart[f"{axis}_unit"] = label or None, (unit[1] or unit[2]) if unit else None


def _swap(chart: Chart) -> None:
    for name in ("label", "unit"):
        chart[f"x_{name}"], chart[f"y_{name}"] = chart[f"y_{name}"], chart[f"x_{name}"]


def _texts(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def _is_of_dates(axis: Any) -> bool:
    get = getattr(axis, "get_converter", None)
    converter = get() if get is not None else axis.converter
    return isinstance(converter, _class("dates", "_SwitchableDateConverter")) and converter is not None


def _add_ticks(ax: Any, chart: Chart) -> None:
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        positions, texts = axis.get_ticklocs(), _texts(axis)
        is_date = _is_of_dates(axis)
        to_date = getattr(sys.modules.get("matplotlib.dates"), "num2date", None)
        ticks = [to_date(tick).isoformat() if is_date and to_date else float(tick) for tick in positions]
        chart[f"{name}_ticks"], chart[f"{name}_tick_labels"] = ticks, texts
        chart[f"{name}_scale"] = "datetime" if is_date else _scale(axis.get_scale(), ticks, texts)


def _scale(scale: str, ticks: list[Any], texts: list[str]) -> str:
    """Return `categorical` for ticks from 0 on that all have a name other than their number."""
    if scale != "linear":
        return scale
    pairs = zip(ticks, texts, strict=False)
    is_named = all(tick == index and text != str(index) for index, (tick, text) in enumerate(pairs))
    return "categorical" if is_named else "linear"


def _point(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "datetime64":
        return str(value.astype("datetime64[s]"))
    return _number(value)


def _number(value: Any) -> float | None:
    number = float(value)
    return number if number - number == 0 else None


def _points(x: Iterable[Any], y: Iterable[Any]) -> list[list[Any]]:
    return [[_point(a), _point(b)] for a, b in zip(x, y, strict=False)]


# Each kind.


def _fill_line(ax: Any, chart: Chart) -> None:
    _add_labels(ax, chart)
    _add_ticks(ax, chart)
    for line in ax.get_lines():
        if not _is_rule(line):
            label = str(line.get_label())
            label = f"Line {int(label[6:])}" if re.fullmatch(r"_child\d+", label) else label
            chart["elements"].append({"label": label, "points": _points(line.get_xdata(), line.get_ydata())})


def _fill_scatter(ax: Any, chart: Chart) -> None:
    _add_labels(ax, chart)
    _add_ticks(ax, chart)
    for collection in ax.collections:
        offsets = collection.get_offsets()
        points = _points(offsets[:, 0], offsets[:, 1])
        chart["elements"].append({"label": str(collection.get_label()), "points": points})


def _fill_bar(ax: Any, chart: Chart) -> None:
    _add_labels(ax, chart)
    containers = [container for container in ax.containers if hasattr(container, "patches")]
    is_level = bool(containers) and all(_is_level(container) for container in containers)
    if is_level:
        _swap(chart)
    axis = ax.yaxis if is_level else ax.xaxis
    for container in containers:
        label = str(container.get_label())
        group = f"Group {int(label[10:])}" if re.fullmatch(r"_container\d+", label) else label
        for bar in container:
            start, size = (bar.get_y(), bar.get_height()) if is_level else (bar.get_x(), bar.get_width())
            value = bar.get_width() if is_level else bar.get_height()
            name = _name_at(axis, start, size)
            chart["elements"].append({"label": name, "group": group, "value": _number(value)})


def _is_level(container: Any) -> bool:
    return getattr(container, "orientation", None) == "horizontal"


def _name_at(axis: Any, start: float, size: float) -> str:
    """Return the label of the tick below a bar, the one nearest to its middle; else its position."""
    middle, half = start + size / 2, abs(size) / 2 + 1e-9
    pairs = zip(axis.get_ticklocs(), _texts(axis), strict=False)
    near = [(abs(place - middle), text) for place, text in pairs if abs(place - middle) <= half and text]
    return min(near)[1] if near else f"{middle:g}"


def _fill_pie(ax: Any, chart: Chart) -> None:
    for wedge in ax.patches:
        angle = abs(_rounded(float(wedge.theta2) - float(wedge.theta1)))
        chart["elements"].append({"label": str(wedge.get_label()), "angle": angle, "radius": _number(wedge.r)})


def _rounded(value: Any) -> float:
    """Return a number without the error of its last digits."""
    exponent = int(f"{float(value):e}".partition("e")[2])
    return float(f"{float(value):.{max(1, DIGITS - exponent)}g}")


def _fill_boxes(ax: Any, chart: Chart) -> None:
    _add_labels(ax, chart)
    boxes = [_bounds(patch.get_path().vertices) for patch in ax.patches]
    lines = [_line(line) for line in ax.lines]
    is_upright = any(_is_median(box, x, y) for box in boxes for x, y in lines)
    if not is_upright:
        _swap(chart)
        boxes, lines = [((low, high), wide) for wide, (low, high) in boxes], [(y, x) for x, y in lines]
    texts = _texts(ax.xaxis if is_upright else ax.yaxis)
    chart["elements"] = [_box(text, box, lines) for text, box in zip(texts, boxes, strict=False)]


def _bounds(vertices: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    x, y = [_rounded(value) for value in vertices[:, 0]], [_rounded(value) for value in vertices[:, 1]]
    return (min(x), max(x)), (min(y), max(y))


def _line(line: Any) -> tuple[list[float], list[float]]:
    return [_rounded(x) for x in line.get_xdata()], [_rounded(y) for y in line.get_ydata()]


def _is_in(values: list[float], bounds: tuple[float, float]) -> bool:
    return bool(values) and bounds[0] <= min(values) and max(values) <= bounds[1]


def _is_median(box: Any, x: list[float], y: list[float]) -> bool:
    return len(y) == 2 and y[0] == y[1] and x[0] != x[1] and _is_in(x, box[0]) and _is_in(y, box[1])


def _box(label: str, box: Any, lines: list[Any]) -> Chart:
    wide, (low, high) = box
    own = [(x, y) for x, y in lines if _is_in(x, wide)]
    ends = [value for x, y in own if len(y) == 2 and y[0] != y[1] for value in y]
    median = [y[0] for x, y in own if _is_median(box, x, y)]
    outliers = [value for x, y in lines if len(set(x)) == 1 and _is_in(x, wide) and len(y) != 2 for value in y]
    return {
        "label": label,
        "min": min([low, *ends]),
        "first_quartile": low,
        "median": median[-1] if median else (low + high) / 2,
        "third_quartile": high,
        "max": max([high, *ends]),
        "outliers": outliers,
    }


_FILL: dict[str, Callable[[Any, Chart], None]] = {
    "line": _fill_line,
    "scatter": _fill_scatter,
    "bar": _fill_bar,
    "pie": _fill_pie,
    "box_and_whisker": _fill_boxes,
    "unknown": lambda *_: None,
}
