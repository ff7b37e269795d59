"""A picture of a terminal session, as SVG: screens one after the other, without a script or another tool.

Theory of operation. The screens lie below each other, and an animation in steps moves one after the other into view;
what shows no animations, and who wants none, sees the last one. Lines that stand in several screens are written once.
Each run of characters with one style is a text of its own with its exact width, so that columns meet in any font.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, PADDING, FONT = 8.4, 18, 12, 14
GROUND, INK = "#16181d", "#d7dae0"
COLOURS = (
    "#2b2f36", "#e06c75", "#98c379", "#d9b162", "#61afef", "#c678dd", "#56b6c2", "#c8ccd4",
    "#6b7280", "#ff7b86", "#b5e08d", "#f0cf7e", "#83c5ff", "#dd9bf0", "#7fd5e0", "#ffffff",
)  # fmt: skip
_SGR = re.compile(r"\x1b\[([0-9;:]*)m")
_OTHER = re.compile(r"\x1b(\[[0-9;?]*[A-Za-ln-z]|[()][A-Z0-9]|\][^\x07\x1b]*(\x07|\x1b\\))")
_FLAGS = {1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse"}
_ENDS = {22: ("bold", "dim"), 23: ("italic",), 24: ("underline",), 27: ("inverse",)}


class Screenshot(NamedTuple):
    """A screen with the terminal's sequences for colours, and how long it is shown."""

    text: str
    seconds: float


class Style(NamedTuple):
    """How characters look; a colour is empty where it is the terminal's own."""

    ink: str = ""
    ground: str = ""
    flags: frozenset[str] = frozenset()

    @property
    def css(self) -> str:
        """Return its declarations."""
        ink, _ = self.colours
        words = {"bold": "font-weight:bold", "dim": "opacity:.6", "italic": "font-style:italic"}
        words["underline"] = "text-decoration:underline"
        return ";".join([f"fill:{ink}", *(words[flag] for flag in sorted(self.flags & words.keys()))])

    @property
    def colours(self) -> tuple[str, str]:
        """Return the colours of a character and of the ground below it."""
        ink, ground = self.ink or INK, self.ground
        return (ground or GROUND, ink) if "inverse" in self.flags else (ink, ground)


def colour(number: int) -> str:
    """Return one of the 256 colours of terminals."""
    if number < 16:
        return COLOURS[number]
    if number > 231:
        level = 8 + 10 * (number - 232)
        return f"#{level:02x}{level:02x}{level:02x}"
    levels = (0, 95, 135, 175, 215, 255)
    red, green, blue = (levels[(number - 16) // part % 6] for part in (36, 6, 1))
    return f"#{red:02x}{green:02x}{blue:02x}"


def styled(style: Style, codes: str) -> Style:
    """Return a style after a sequence for colours and fonts."""
    numbers = [int(code or 0) for code in re.split("[;:]", codes)]
    while numbers:
        number = numbers.pop(0)
        if number == 0:
            style = Style()
        elif number in (38, 48):
            field = "ink" if number == 38 else "ground"
            style = style._replace(**{field: _extended(numbers)})
        elif number in _FLAGS:
            style = style._replace(flags=style.flags | {_FLAGS[number]})
        elif number in _ENDS:
            style = style._replace(flags=style.flags - set(_ENDS[number]))
        elif number % 10 < 8 and number // 10 in (3, 9):
            style = style._replace(ink=colour(number % 10 + (8 if number > 89 else 0)))
        elif number % 10 < 8 and number // 10 in (4, 10):
            style = style._replace(ground=colour(number % 10 + (8 if number > 99 else 0)))
        elif number in (39, 49):
            style = style._replace(**{"ink" if number == 39 else "ground": ""})
    return style


def _extended(numbers: list[int]) -> str:
    """Take the rest of a colour's numbers away, and return it."""
    if numbers.pop(0) == 5:
        return colour(numbers.pop(0))
    red, green, blue = (numbers.pop(0) for _ in range(3))
    return f"#{red:02x}{green:02x}{blue:02x}"


class Run(NamedTuple):
    """Characters of one style in a line."""

    column: int
    columns: int
    text: str
    style: Style


def lines_of(screen: str) -> Iterator[tuple[Run, ...]]:
    """Yield the lines of a screen; a style holds until the next sequence, also beyond the end of a line."""
    style = Style()
    for line in screen.splitlines():
        found, column = [], 0
        for number, part in enumerate(_SGR.split(_OTHER.sub("", line))):
            if number % 2:
                style = styled(style, part)
            elif part:
                columns = sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in part)
                found.append(Run(column, columns, part, style))
                column += columns
        yield tuple(found)


def drawn(line: Sequence[Run], classes: dict[Style, str]) -> str:
    """Return the elements of a line."""
    elements = []
    for column, columns, text, style in line:
        _, ground = style.colours
        x, width = PADDING + WIDTH * column, WIDTH * columns
        if ground:
            elements.append(f'<rect x="{x:.5g}" width="{width:.5g}" height="{HEIGHT}" fill="{ground}"/>')
        words = text.rstrip()
        if not words.strip():
            continue
        lead = len(words) - len(words.lstrip())
        x, width = x + WIDTH * lead, WIDTH * (columns - lead - (len(text) - len(words)))
        name = classes.setdefault(style, f"s{len(classes)}")
        length = f' textLength="{width:.5g}"' if len(words.strip()) > 1 else ""
        elements.append(f'<text class="{name}" x="{x:.5g}" y="{FONT}"{length}>{escape(words.lstrip())}</text>')
    return "".join(elements)


def picture(screens: Sequence[Screenshot], columns: int, rows: int, title: str) -> str:
    """Return a whole SVG file of screens of this size."""
    width, height = columns * WIDTH + 2 * PADDING, rows * HEIGHT + 2 * PADDING
    classes: dict[Style, str] = {}
    lines: dict[tuple[Run, ...], str] = {}
    placed = []
    for number, screen in enumerate(screens):
        for row, line in enumerate(lines_of(screen.text)):
            if elements := lines.get(line) or drawn(line, classes):
                lines[line] = elements
                name = list(lines).index(line)
                placed.append(f'<use href="#l{name}" y="{number * height + PADDING + row * HEIGHT:g}"/>')
    shared = [f'<g id="l{name}">{elements}</g>' for name, elements in enumerate(lines.values())]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_style(screens, height, classes)}</style>",
        f'<defs>{"".join(shared)}</defs>',
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{GROUND}"/>',
        f'<g class="film">{"".join(placed)}</g>', "</svg>", "",
    ])  # fmt: skip


def _style(screens: Sequence[Screenshot], height: float, classes: Mapping[Style, str]) -> str:
    """Return the rules: fonts, colours, and which screen is shown when."""
    whole = sum(screen.seconds for screen in screens)
    steps, begin = [], 0.0
    for number, screen in enumerate(screens):
        steps.append(f"{100 * begin / whole:.4g}%{{transform:translateY({-number * height:g}px)}}")
        begin += screen.seconds
    last = f"transform:translateY({-(len(screens) - 1) * height:g}px)"
    return "".join([
        f"text{{font:{FONT}px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}}",
        *(f".{name}{{{style.css}}}" for style, name in classes.items()),
        f".film{{{last};animation:film {whole:g}s step-end infinite}}",
        f"@keyframes film{{{''.join(steps)}}}",
        "@media(prefers-reduced-motion:reduce){.film{animation:none}}",
    ])  # fmt: skip
