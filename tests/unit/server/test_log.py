"""The lines of the service's log: JSON or plain, and without what a terminal would obey or an error may quote."""

from __future__ import annotations

import json
import logging
import os
import sys

import pytest

from cloche.core.errors import RecordsFailed
from cloche.server.log import MOST_CHARACTERS, LaterHandler, make_formatter

HOSTILE = "a\x1b[31m\x07\x7f\x9b\u202e\u2028\nb \U000e0001\ud800"


def _record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("cloche.service", logging.WARNING, __file__, 1, message, arguments, info)


@pytest.mark.parametrize("is_plain", [False, True], ids=["JSON", "plain"])
def test_a_line_is_one_line_and_nothing_that_a_terminal_obeys(is_plain: bool) -> None:
    """Also of what clients chose, and however long that is."""
    line = make_formatter(is_plain=is_plain).format(_record("%s said %s", HOSTILE, "x" * 2 * MOST_CHARACTERS))
    assert line.isprintable()
    assert len(line) < MOST_CHARACTERS + 500
    assert "more characters" in line


def test_a_line_of_json_gives_the_text_back() -> None:
    """With time, level, logger and message first."""
    line = json.loads(make_formatter(is_plain=False).format(_record("%s", HOSTILE)))
    assert list(line) == ["time", "level", "logger", "event"]
    assert (line["level"], line["logger"], line["event"]) == ("warning", "cloche.service", HOSTILE)


def test_an_unexpected_error_is_told_by_type_and_place() -> None:
    """And by its text where that is ours: others' quote values of rows, or what was sent."""
    try:
        try:
            int("hunter2")
        except ValueError as error:
            raise RecordsFailed("the disk is full") from error
    except RecordsFailed:
        record = _record("failed", error=sys.exc_info()[1])
    for is_plain in (False, True):
        text = make_formatter(is_plain=is_plain).format(record)
        assert "hunter2" not in text
        assert all(word in text for word in ("ValueError", "RecordsFailed", "the disk is full", "test_log.py"))


def test_who_reads_no_lines_holds_nobody_up() -> None:
    """What does not fit is left out, and told of once lines are read again; all others come in their order."""
    reader, writer = os.pipe()
    with open(reader, encoding="ascii") as lines, open(writer, "w", encoding="ascii") as stream:
        handler = LaterHandler(stream, max_waiting=5)
        handler.setFormatter(make_formatter(is_plain=False))
        for number in range(60):  # of 4 kB each: a pipe holds 64
            handler.emit(_record("%d %s", number, "x" * 3_900))
        handler.emit(_record("%d"))
        found = []
        while not found or "left out" not in found[-1]:
            found.append(json.loads(lines.readline())["event"])
        handler.close()
    numbers = [int(text.partition(" ")[0]) for text in found[:-1]]
    assert numbers == sorted(numbers)
    assert found[-1].startswith(f"{61 - len(numbers)} lines were left out")
