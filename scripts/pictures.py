"""Draw docs/pictures/layers.svg from the table of allowed imports, and docs/pictures/processes.svg.

Run it after a change of MAY_IMPORT in tests/unit/test_layering.py; a unit test compares the files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
STYLE = """<style>text{font:13px sans-serif;fill:#222;text-anchor:middle}.small{font-size:11px;fill:#555}
.box{fill:#eef3fa;stroke:#456}.line{stroke:#89a;fill:none;marker-end:url(#head)}.area{fill:#fafafa;stroke:#ccc}</style>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path d="M0 0L8 4L0 8z" fill="#678"/></marker>"""
ROW, GAP, HEIGHT, MARGIN = 62, 14, 28, 20


class Box(NamedTuple):
    """A labelled rectangle; x and y are its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]

    def drawn(self) -> Iterator[str]:
        """Yield its elements: the first line is the name, the others are smaller."""
        size = f'width="{self.width:g}" height="{self.height:g}"'
        yield f'<rect class="box" x="{self.x:g}" y="{self.y:g}" {size} rx="4"/>'
        top = self.y + self.height / 2 - 8 * (len(self.lines) - 1) + 4
        for number, line in enumerate(self.lines):
            font = ' class="small"' if number else ""
            yield f'<text{font} x="{self.x + self.width / 2:g}" y="{top + 16 * number:g}">{escape(line)}</text>'


def picture(width: float, height: float, title: str, elements: Sequence[str]) -> str:
    """Return a whole SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    ground = f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, ground, *elements, "</svg>", ""])


def levels(table: Mapping[str, Set[str]]) -> dict[str, int]:
    """Return each layer's height: 0 without imports of layers, else one more than the highest import."""
    heights: dict[str, int] = {}

    def height(layer: str) -> int:
        if layer not in heights:
            heights[layer] = 1 + max((height(target) for target in table[layer] if target != layer), default=-1)
        return heights[layer]

    for layer in table:
        height(layer)
    return heights


def direct_arrows(table: Mapping[str, Set[str]]) -> dict[str, list[str]]:
    """Return for each layer the imports that do not follow from those of the layers that it imports."""
    heights = levels(table)
    reached: dict[str, set[str]] = {}
    for layer in sorted(table, key=heights.__getitem__):
        reached[layer] = set(table[layer]).union(*(reached[target] for target in table[layer] if target != layer))
    return {
        layer: sorted(one for one in targets if not any(one in reached[other] for other in targets if other != one))
        for layer, targets in table.items()
    }


def rows_of(table: Mapping[str, Set[str]], arrows: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return each layer's row, 0 at the bottom. One with more importers than imports is just below its importers."""
    heights = levels(table)
    importers = {layer: [one for one in table if layer in arrows[one]] for layer in table}
    return {
        layer: min(heights[one] for one in above) - 1 if len(above) > len(arrows[layer]) else heights[layer]
        for layer, above in importers.items()
    }


def layers(table: Mapping[str, Set[str]]) -> str:
    """Draw each layer above all that it may import."""
    arrows = direct_arrows(table)
    heights = rows_of(table, arrows)
    top = max(heights.values())
    rows = [[layer for layer in table if heights[layer] == level] for level in range(top + 1)]
    widths = {layer: 8 * len(layer) + 22 for layer in table}
    width = max(sum(widths[layer] + GAP for layer in row) for row in rows) + 2 * MARGIN
    boxes: dict[str, Box] = {}
    for level, row in enumerate(rows):
        row.sort(key=lambda layer: sum(_middle(boxes[to]) for to in arrows[layer]) / max(len(arrows[layer]), 1))
        x = (width - sum(widths[layer] for layer in row) - GAP * (len(row) - 1)) / 2
        for layer in row:
            boxes[layer] = Box(x, MARGIN + ROW * (top - level), widths[layer], HEIGHT, (layer,))
            x += widths[layer] + GAP
    lines = [_line(boxes[layer], boxes[to]) for layer in table for to in arrows[layer]]
    drawn = [element for box in boxes.values() for element in box.drawn()]
    return picture(width, 2 * MARGIN + ROW * top + HEIGHT, "Layers: an arrow is an allowed import", [*lines, *drawn])


def _line(above: Box, below: Box) -> str:
    ends = f"M{_middle(above):g} {above.y + HEIGHT:g}L{_middle(below):g} {below.y:g}"
    return f'<path class="line" d="{ends}"/>'


def _middle(box: Box) -> float:
    return box.x + box.width / 2


PROCESSES = (
    Box(20, 60, 150, 90, ("caller", "your process,", "never forked")),
    Box(260, 60, 170, 90, ("helper", "control group, ids, clock,", "memory sums, kill")),
    Box(560, 60, 150, 90, ("pid 1", "builds the jail,", "reaps")),
    Box(790, 60, 130, 90, ("guest", "becomes the code",)),
    Box(260, 210, 170, 60, ("template", "fork server")),
)  # fmt: skip
AREAS = ((10, 190, "caller's side"), (240, 210, "outside, Cloche's own"), (540, 400, "inside the namespaces"))
# path, label, and where the label is
ARROWS = (
    ("M170 90L258 90", "socket", 214, 84), ("M430 90L558 90", "clone", 485, 84), ("M430 125L558 125", "link", 495, 119),
    ("M558 125L430 125", "", 0, 0), ("M710 105L788 105", "fork", 749, 99),
    ("M130 150L130 240L258 240", "socket", 195, 234), ("M345 210L345 152", "fork", 365, 185),
    ("M95 150L95 310L635 310L635 152", "handoff socket: order in; “ready”, “started”, “ended” out", 370, 304),
    ("M635 310L835 310L835 152", "", 0, 0),
    ("M60 150L60 350L880 350L880 152", "pipes: stdin, stdout, stderr, value", 470, 344),
)  # fmt: skip


def processes() -> str:
    """Draw the processes of a run in the jail, and what connects them."""
    areas = [
        f'<rect class="area" x="{x}" y="20" width="{width}" height="350"/>'
        f'<text x="{x + width / 2:g}" y="42">{label}</text>'
        for x, width, label in AREAS
    ]
    arrows = [
        f'<path class="line" d="{path}"/><text class="small" x="{x}" y="{y}">{escape(label)}</text>'
        for path, label, x, y in ARROWS
    ]
    boxes = [element for box in PROCESSES for element in box.drawn()]
    return picture(950, 385, "Processes of a run in the jail", [*areas, *arrows, *boxes])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.unit.test_layering import MAY_IMPORT

    (FOLDER / "layers.svg").write_text(layers(MAY_IMPORT))
    (FOLDER / "processes.svg").write_text(processes())
