"""Lines of E2B's code interpreter: what a cell displays is hostile, and each line must be readable."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest

from cloche.core.result import Output
from cloche.server.e2b.code.results import MOST_JSON, encode_line, result_line


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("mime", ["application/json", "application/vnd.cloche.chart+json", "application/geo+json"])
def test_numbers_that_json_lacks_are_null(number: str, mime: str) -> None:
    """JavaScript's `JSON.parse` refuses a line with one of them, and so the whole answer of a cell."""
    output = Output(data={mime: f'{{"a": [{number}, 1.5]}}'})
    line = json.loads(encode_line(result_line(output, is_value=False)), parse_constant=_refuse)
    assert {"a": [None, 1.5]} in (line.get("json"), line.get("chart"), line["extra"].get(mime))


@pytest.mark.parametrize("count", [1, 3])
def test_only_so_much_is_read_as_json_as_does_not_hold_the_event_loop(count: int) -> None:
    """Eight MiB of nested lists took five seconds, in which nothing else was answered: more is sent as text."""
    mimes = ("application/json", "application/vnd.cloche.chart+json", "application/geo+json")[:count]
    text = json.dumps([[]] * (MOST_JSON // 4 // count - 2))
    assert result_line(Output(data=dict.fromkeys(mimes, text)), is_value=False)["json"]
    line = result_line(Output(data=dict.fromkeys(mimes, text + " " * 99)), is_value=False)
    assert line["extra"][mimes[-1]] == text + " " * 99
