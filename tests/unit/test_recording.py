"""The picture of a terminal session that tests record."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tests.harness.recording import Screenshot, Style, lines_of, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_each_line_once_in_its_place_and_colour() -> None:
    """Two screens that share a line have it once; colours hold beyond the end of a line."""
    screens = [
        Screenshot("\x1b[1;31mred\nstill\x1b[0m plain\n", 1.0),
        Screenshot("\x1b[1;31mred\n\x1b[0mnew <&>\n", 3.0),
    ]
    text = picture(screens, 20, 2, "A session")
    root = ET.fromstring(text)
    assert [one.text for one in root.iter(f"{SVG}text")] == ["red", "still", "plain", "new <&>"]
    assert [one.get("y") for one in root.iter(f"{SVG}use")] == ["12", "30", "72", "90"]
    assert ".s0{fill:#e06c75;font-weight:bold}" in text
    assert "25%{transform:translateY(-60px)}" in text


def test_colours_of_terminals_are_read() -> None:
    """Bright ones, those of a table, any, and inverse ones."""
    ((first, second, third),) = lines_of("\x1b[94;48;5;196mA\x1b[38;2;1;2;3;49mB\x1b[7mC")
    assert first.style == Style("#83c5ff", "#ff0000")
    assert second.style.colours == ("#010203", "")
    assert third.style.colours == ("#16181d", "#010203")
