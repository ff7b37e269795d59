"""What a cell asks for by `%pip install`: lines that are statements, and nothing in a text."""

from __future__ import annotations

import pytest

from cloche.core.errors import InvalidRequest
from cloche.execution.installing import _named, pip_lines


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("%pip install rich", {0: "rich"}),
        ("import os\n!pip install -q rich httpx\nimport rich", {1: "-q rich httpx"}),
        ("if True:\n    !pip3 install rich", {1: "rich"}),
        ("%uv pip install rich", {0: "rich"}),
        ("!python -m pip install rich", {0: "rich"}),
        ("x = '''\n%pip install rich\n'''", {}),
        ("f(\n%pip install rich\n)", {}),
        ("# %pip install rich", {}),
        ("%pip list", {}),
        ("print('pip install rich')", {}),
        ("%pip install rich\nnot python (", {}),
        ("%pip install rich\n" + "x = 1\n" * 20_000, {}),  # a parser would keep everybody waiting
    ],
)
def test_lines_that_install_are_found(code: str, found: dict[int, str]) -> None:
    """By their number, with what follows."""
    assert pip_lines(code) == found


def test_options_that_change_nothing_are_dropped() -> None:
    """Others stay, and are then no requirement."""
    assert _named("-q --user 'rich>=13' httpx") == ["rich>=13", "httpx"]
    assert _named("--index-url x") == ["--index-url", "x"]
    with pytest.raises(InvalidRequest, match="cannot be read"):
        _named("'rich")
