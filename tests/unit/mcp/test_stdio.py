"""Lines from standard input: whatever a client writes, each is one message or none."""

from __future__ import annotations

import json
import os
import threading

import pytest

from cloche.mcp import command


def lines_of(data: bytes) -> list[str]:
    """Return the lines that are read of what is written into a pipe."""
    receiving, sending = os.pipe()

    def write() -> None:
        with open(sending, "wb") as file:
            file.write(data)

    writing = threading.Thread(target=write)
    writing.start()
    try:
        return list(command._split(receiving))
    finally:
        writing.join()
        os.close(receiving)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\nlast", ["one", "", "last"]),
        (b"\xff\n", ["\ufffd"]),
        ("grün".encode(), ["grün"]),
        (b"a" * 200_000 + b"\nb\n", ["a" * 200_000, "b"]),
    ],
)
def test_lines_come_one_by_one(data: bytes, expected: list[str]) -> None:
    """However they are cut into pieces on the way, the last one with or without its end."""
    assert lines_of(data) == expected


def test_a_line_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too long is no message, and the next line is read as ever."""
    monkeypatch.setattr(command, "MOST_LINE_BYTES", 1000)
    assert lines_of(b"a" * 300_000 + b"\nnext\n") == [command.TOO_LONG, "next"]
    assert lines_of(b"next\n" + b"a" * 300_000) == ["next"]


def test_half_of_a_character_pair_is_replaced() -> None:
    """Whole pairs stay what they are; without this nobody would answer such a message."""
    line = json.dumps({"code": "\ud800 \U0001f600"}).encode()
    assert json.loads(lines_of(line)[0]) == {"code": "? \U0001f600"}
    assert lines_of(b'{"\\ud800') == ['{"\\ud800']
