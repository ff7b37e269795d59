"""Lines of E2B's code interpreter: what a cell displays is hostile, and each line must be readable."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest

from cloche.core.result import Output
from cloche.server.e2b.code.results import encode_line, result_line


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("mime", ["application/json", "application/vnd.cloche.chart+json", "application/geo+json"])
def test_numbers_that_json_lacks_are_null(number: str, mime: str) -> None:
    """JavaScript's `JSON.parse` refuses a line with one of them, and so the whole answer of a cell."""
    output = Output(data={mime: f'{{"a": [{number}, 1.5]}}'})
    line = json.loads(encode_line(result_line(output, is_value=False)), parse_constant=_refuse)
    assert {"a": [None, 1.5]} in (line.get("json"), line.get("chart"), line["extra"].get(mime))
