"""A program's terminal output as HTML: colours become classes, all other control sequences are removed.

Characters are bounded (the middle is left out), and so are sequences, beyond which the text is unstyled. The result is
escaped HTML with `span` elements whose classes are fixed.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from cloche.core.escape import escape_output

MOST_CHARS = 200_000
MOST_SPANS = 5_000
# Control strings (OSC, DCS, APC, PM, SOS) with their text, then CSI, then other escapes; by ESC or by their C1 byte.
_SEQUENCE = re.compile(
    r"(?:\x1b[]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)(?P<parameters>[0-?]{0,64})[ -/]{0,8}(?P<final>[@-~])?"
    r"|\x1b[ -/]{0,8}[0-~]?"
)
_BACKSPACE = re.compile(r"[^\n\x08]\x08")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
# SGR parameter -> what kind of style it sets, and to which class (None: to none).
_STYLES: dict[int, tuple[str, str | None]] = {
    1: ("weight", "t-bold"), 2: ("weight", "t-dim"), 22: ("weight", None),
    3: ("slant", "t-italic"), 23: ("slant", None), 4: ("line", "t-underline"), 24: ("line", None),
    39: ("colour", None), 49: ("ground", None),
    **{base + number: ("colour", f"t-{name}") for base in (30, 90) for number, name in enumerate(_COLOURS)},
    **{base + number: ("ground", f"t-on-{name}") for base in (40, 100) for number, name in enumerate(_COLOURS)},
}  # fmt: skip
_EXTENDED = (38, 48)  # followed by 5 and an index, or 2 and three values (ECMA-48, ITU T.416): left out


def bounded(text: str, max_chars: int = MOST_CHARS) -> str:
    """Return text, without its middle if it exceeds `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are not shown here]\n{text[-half:]}"


def render_terminal(text: object) -> Markup:
    """Return a program's output as HTML."""
    plain = _settled(bounded(str(text)))
    pieces: list[str] = []
    style: dict[str, str] = {}
    offset = 0
    for number, match in enumerate(_SEQUENCE.finditer(plain), 1):
        _add(pieces, plain[offset : match.start()], style)
        offset = match.end()
        if number > MOST_SPANS:  # the remainder is unstyled
            style.clear()
            break
        if match["final"] == "m":
            _apply(style, match["parameters"])
    _add(pieces, _SEQUENCE.sub("", plain[offset:]), style)
    return Markup("".join(pieces))  # noqa: S704 - each piece was escaped


def _settled(text: str) -> str:
    """Return each line as a terminal shows it: a carriage return restarts it, a backspace deletes."""
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _BACKSPACE.sub("", text)


def _add(pieces: list[str], text: str, style: dict[str, str]) -> None:
    if not text:
        return
    safe = escape(escape_output(text))
    classes = " ".join(sorted(style.values()))
    pieces.append(f'<span class="{classes}">{safe}</span>' if classes else str(safe))


def _apply(style: dict[str, str], parameters: str) -> None:
    numbers = [
        int(parameter) if parameter.isascii() and parameter.isdigit() else 0
        for parameter in re.split("[;:]", parameters)[:16]
    ]
    while numbers:
        number = numbers.pop(0)
        if number == 0:
            style.clear()
        elif number in _EXTENDED:
            del numbers[: 4 if numbers[:1] == [2] else 2]
        elif number in _STYLES:
            kind, value = _STYLES[number]
            if value is None:
                style.pop(kind, None)
            else:
                style[kind] = value
