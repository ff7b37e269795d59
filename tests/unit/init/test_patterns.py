"""Patterns of paths."""

from __future__ import annotations

import pytest

from cloche.init.patterns import matches

TABLE = {
    "*.csv": (["a.csv", ".csv", "*.csv"], ["a.csv.gz", "d/a.csv", "acsv"]),
    "**": (["a", "a/b", ".hidden/x"], []),
    "out/**": (["out/a", "out/d/e", "out"], ["outer/a", "d/out/a"]),
    "**/*.py": (["a.py", "d/a.py", "d/e/a.py"], ["a.pyc", "a.py/b"]),
    "a/**/b/*": (["a/b/x", "a/x/y/b/z"], ["a/b", "a/x/b", "b/x"]),
    "?[x]*": (["a[x]", "b[x]y"], ["ax", "[x]", "aax"]),
    "a*b*c": (["abc", "aXbYbZc"], ["abcd", "ac", "ab/c"]),
    "a//b": ([], ["a/b"]),
}


@pytest.mark.parametrize("pattern", TABLE)
def test_patterns_match_as_documented(pattern: str) -> None:
    """Within a name, and over any number of names."""
    yes, no = TABLE[pattern]
    assert [path for path in (*yes, *no) if matches(pattern, path)] == yes


def test_no_path_makes_a_match_take_long() -> None:
    """Steps are at most the product of the lengths: this would take for ever by trying each way."""
    assert not matches("*a" * 100 + "b", "a" * 255)
    assert not matches("**/x/" * 40 + "y", "x/" * 2000 + "z")
