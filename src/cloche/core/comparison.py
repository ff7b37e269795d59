"""Whether an answer is the expected one: standard output, and values that were read by `literal`.

Answers are hostile, so each comparison takes time and memory in proportion to the expected answer and the answer's
size: an output is split into as many words as are expected, a long word is never read as a number, and no differences
are searched. A reason names a place in the answer, and nothing of what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Compare = Literal["exact", "tokens", "floats"]
COMPARISONS: tuple[Compare, ...] = ("exact", "tokens", "floats")
MAX_NUMBER_CHARS = 400
MAX_SHOWN_BYTES = 40
DEFAULT_TOLERANCE = 1e-6
_NUMBER = re.compile(
    rb"[-+]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,5})?|inf(?:inity)?|nan)", re.IGNORECASE
)


def compare_output(answer: bytes, expected: bytes, compare: Compare, tolerance: float) -> str:
    """Return why an output is not the expected one, empty if it is."""
    if compare == "exact":
        return _compare_exactly(answer, expected)
    expected_words = expected.split()
    words = answer.split(None, len(expected_words))
    if len(words) != len(expected_words):
        return _count_differs(len(words), len(expected_words))
    if words == expected_words:
        return ""
    for number, (word, expected_word) in enumerate(zip(words, expected_words, strict=True), 1):
        if word != expected_word and not (compare == "floats" and _is_near(word, expected_word, tolerance)):
            return f"word {number} of standard output, {_shown(word)}, is not the expected one"
    return ""


def _compare_exactly(answer: bytes, expected: bytes) -> str:
    answer, expected = answer.rstrip(b"\r\n"), expected.rstrip(b"\r\n")
    if answer == expected:
        return ""
    place = _first_difference(answer, expected)
    number = answer.count(b"\n", 0, place) + 1
    start = answer.rfind(b"\n", 0, place) + 1
    line = answer[start : start + MAX_SHOWN_BYTES + 1].split(b"\n", 1)[0]
    return f"line {number} of standard output, {_shown(line)}, is not the expected one"


def _first_difference(answer: bytes, expected: bytes) -> int:
    """Return how many bytes two different texts have in common at their beginning."""
    equal, differs = 0, min(len(answer), len(expected)) + 1
    while differs - equal > 1:
        middle = (equal + differs) // 2
        if answer[equal:middle] == expected[equal:middle]:
            equal = middle
        else:
            differs = middle
    return equal


def _count_differs(count: int, expected_count: int) -> str:
    if count > expected_count:
        return "standard output has more words than expected"
    return f"standard output has {count} words, which are fewer than expected" if count else "standard output is empty"


def _is_near(word: bytes, expected_word: bytes, tolerance: float) -> bool:
    number, expected_number = _read_number(word), _read_number(expected_word)
    return number is not None and expected_number is not None and are_close(number, expected_number, tolerance)


def _read_number(word: bytes) -> float | None:
    if len(word) > MAX_NUMBER_CHARS or not _NUMBER.fullmatch(word):
        return None
    return float(word)


def are_close(number: float, expected: float, tolerance: float) -> bool:
    """Tell whether two numbers differ by at most the tolerance, absolute or relative; NaN is close to NaN."""
    if number == expected or (number != number and expected != expected):
        return True
    try:
        difference = abs(float(number) - float(expected))
        return difference <= tolerance * max(1.0, abs(float(expected))) and math.isfinite(difference)
    except OverflowError:
        return False


def _shown(word: bytes) -> str:
    text = repr(word[:MAX_SHOWN_BYTES].decode("utf-8", "replace"))
    return f"{text}..." if len(word) > MAX_SHOWN_BYTES else text


def are_equal(value: Any, expected: Any, tolerance: float = 0.0) -> bool:  # noqa: ANN401 - plain values
    """Tell whether a value of plain classes equals the expected one, as `==` does, but NaN equals NaN.

    With a tolerance, floats in lists, tuples and values of dictionaries may differ by it. Members of sets and keys are
    compared as they are.
    """
    if value == expected:
        return True
    if isinstance(expected, float) or (tolerance and isinstance(value, float)):
        return _is_number(value) and _is_number(expected) and are_close(value, expected, tolerance)
    if isinstance(expected, list | tuple):
        return type(value) is type(expected) and _are_items_equal(value, expected, tolerance)
    if isinstance(expected, dict):
        return isinstance(value, dict) and _are_members_equal(value, expected, tolerance)
    return False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_items_equal(values: Sequence[Any], expected: Sequence[Any], tolerance: float) -> bool:
    return len(values) == len(expected) and all(
        are_equal(value, wanted, tolerance) for value, wanted in zip(values, expected, strict=True)
    )


def _are_members_equal(values: Mapping[Any, Any], expected: Mapping[Any, Any], tolerance: float) -> bool:
    return values.keys() == expected.keys() and all(
        are_equal(values[key], wanted, tolerance) for key, wanted in expected.items()
    )
