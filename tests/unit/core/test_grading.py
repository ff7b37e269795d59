"""Cases, comparisons and verdicts, without a run."""

import math
import time

import pytest

from cloche.core.asserts import read_asserts
from cloche.core.comparison import are_equal, compare_output
from cloche.core.errors import InvalidRequest
from cloche.core.grading import CallCase, CaseResult, StdinCase, conclude, read_cases


@pytest.mark.parametrize(
    ("answer", "expected", "compare", "is_right"),
    [
        (b"1 2\n3", b"1 2 3\n", "tokens", True),
        (b"1 2 3 4", b"1 2 3", "tokens", False),
        (b"1 2", b"1 2 3", "tokens", False),
        (b"", b" \n", "tokens", True),
        (b"1.0", b"1", "tokens", False),
        (b"a b\n\n", b"a b", "exact", True),
        (b"a  b", b"a b", "exact", False),
        (b"a b ", b"a b", "exact", False),
        (b"a\nb\nx", b"a\nb\nc", "exact", False),
        (b"0.3333334 yes", b"0.3333333 yes", "floats", True),
        (b"1e9", b"1000000000.5", "floats", True),
        (b"nan inf -inf", b"NaN inf -inf", "floats", True),
        (b"nan", b"1", "floats", False),
        (b"inf", b"1e308", "floats", False),
        (b"1_0", b"10", "floats", False),
        (b"yes", b"1.0", "floats", False),
        (b"0.34", b"0.33", "floats", False),
        ("\uff11".encode(), b"1", "floats", False),
    ],
)
def test_outputs_are_compared_as_asked(answer: bytes, expected: bytes, compare: str, is_right: bool) -> None:
    """Exactly but for line feeds at the end, by words, or by numbers within a tolerance."""
    assert (compare_output(answer, expected, compare, 1e-6) == "") is is_right  # type: ignore[arg-type]


def test_a_reason_names_the_place_and_not_the_answer() -> None:
    """A caller may show it to the author of the program."""
    why = compare_output(b"a\nb\nx\n", b"a\nb\nsecret", "exact", 0)
    assert why == "line 3 of standard output, 'x', is not the expected one"
    assert compare_output(b"1 2", b"1 secret", "tokens", 0) == "word 2 of standard output, '2', is not the expected one"


@pytest.mark.parametrize("compare", ["exact", "tokens", "floats"])
@pytest.mark.parametrize("piece", [b"1 ", b"1.5\n", b"9", b" ", b"\n", b"1e", b"\xff "])
def test_a_hostile_output_is_compared_in_bounded_time(piece: bytes, compare: str) -> None:
    """8 MiB of words, digits or blanks take no longer than reading them."""
    start = time.monotonic()
    assert compare_output(piece * (8 << 20 // len(piece)), b"1 2.5 3\n" * 1000, compare, 1e-6)  # type: ignore[arg-type]
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "is_right"),
    [
        (math.nan, math.nan, 0, True), ([math.nan, 1], [math.nan, 1.0], 0, True), ([1], (1,), 0, False),
        (True, 1, 0, True),
        (1.0000001, 1.0, 1e-6, True), (1.0000001, 1.0, 0, False), ({"a": [1.0000001]}, {"a": [1]}, 1e-6, True),
        ("1", 1.0, 1, False), (True, 1.5, 1, False), ({1.0000001}, {1.0}, 1e-3, False), (1 << 2000, 1.0, 1, False),
        (math.inf, 1.0, 1, False), ({"a": 1}, {"b": 1}, 1, False), ([1], [1, 2], 1, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_asserts_do(value: object, expected: object, tolerance: float, is_right: bool) -> None:
    """`==` of plain values, but NaN equals NaN, and a tolerance is for floats."""
    assert are_equal(value, expected, tolerance) is is_right


TAKEN_APART = [
    ("assert f(1) == 2", ["f(1)"], [2], [3]),
    ("assert f(1) == 2, 'message'", ["f(1)"], [2], [None]),
    ("assert f(1) is None", ["f(1)"], [None], [0]),
    ("assert f(1) is True", ["f(1)"], [True], [1]),
    ("assert f(1)", ["f(1)"], [[0]], [[]]),
    ("assert not f(1)", ["f(1)"], [0], [1]),
    ("assert f(1) in (2, 3)", ["f(1)"], [2], [4]),
    ("assert 5 not in f(1)", ["f(1)"], [[4]], [[5]]),
    ("assert 1 < f(1) <= 3", ["f(1)"], [3], [1]),
    ("assert abs(f(3) - 1.5) < 1e-6", ["f(3)"], [1.5], [1.6]),
    ("import math\nassert math.isclose(f(1), math.pi, rel_tol=1e-3)", ["f(1)"], [3.1416], [3.2]),
    ("assert f(1) == pytest.approx(0.3)", ["f(1)"], [0.1 + 0.2], [0.31]),
    ("assert f(1) == pytest.approx([0.3, {'a': 1}])", ["f(1)"], [[0.1 + 0.2, {"a": 1}]], [[0.3]]),
    ("assert round(f(1), 2) == 3.14", ["f(1)"], [3.1415], [3.15]),
    ("assert round(f(1), ndigits=1) == 3.1", ["f(1)"], [3.14], [3.2]),
    ("assert sum(f(1), 1) == sum(f(1), start=1) == 4", ["f(1)", "f(1)"], [[1, 2]] * 2, [[1]] * 2),
    ("assert sum(f(1), []) == [1, 2]", ["f(1)"], [[[1], [2]]], [[[1]]]),
    ("assert f(1) == dict(a=1, b=[2])", ["f(1)"], [{"a": 1, "b": [2]}], [{"a": 1}]),
    ("assert int(f(1), 16) == 255", ["f(1)"], ["ff"], ["fe"]),
    ("assert sorted(f(1), reverse=True) == [2, 1]", ["f(1)"], [[1, 2]], [[1]]),
    ("assert set(f(1)) == set([1, 2])", ["set(f(1))"], [{1, 2}], [{1}]),
    ("assert isinstance(f(1), (int, str))", ["f(1)"], ["x"], [None]),
    ("assert type(f(1)) == int", ["f(1)"], [1], [True]),
    ("assert f(1)[0].name == 'x'", ["f(1)[0].name"], ["x"], ["y"]),
    ("assert Solution().twoSum([2, 7], 9) == [0, 1]", ["Solution().twoSum([2, 7], 9)"], [[0, 1]], [[1, 0]]),
    ("x = [1]\nassert f(x) == x * 2", ["f([1])"], [[1, 1]], [[1]]),
    ("assert f(1) == float('inf')", ["f(1)"], [math.inf], [1.0]),
    ("assert f(1) == 1 << 3", ["f(1)"], [8], [3]),
    ("assert f(1) == 10**9 + 7", ["f(1)"], [10**9 + 7], [7]),
    ("assert ','.join(f(1)) == 'a'", ["','.join(f(1))"], ["a"], ["b"]),
    ("assert sum([1, 2]) == 3", ["sum([1, 2])"], [3], [4]),
    ("assert answer == 3", ["answer"], [3], [4]),
    ("assert pytest.approx(3) == sum([1, 2])", ["sum([1, 2])"], [3.0], [4]),
    ("assert set(sorted([1, 2])) == {1, 2}", ["sorted([1, 2])"], [[2, 1]], [[2]]),
    ("from program import f\nassert f(1) == f(2)", ["f(1)", "f(2)"], [1, 1], [1, 2]),
    ("assert gcd(gcd(12, 8), 3) == 1", ["gcd(gcd(12, 8), 3)"], [1], [2]),
    ("from x import Counter\nassert Counter(f(1)).most_common(1) == [(1, 2)]", ["Counter(f(1)).most_common(1)"],
     [[(1, 2)]], [[]]),
    ("import math\nassert f(math.sqrt(2)) == 2", ["f(math.sqrt(2))"], [2], [1]),
    ("def check(candidate):\n    assert True\n    assert candidate(1) == 2\n\ncheck(f)", ["f(1)"], [2], [3]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "calls", "right", "wrong"), TAKEN_APART)
def test_asserts_are_taken_apart(text: str, calls: list[str], right: list[object], wrong: list[object]) -> None:
    """The calls go inside, the comparison is made outside; what is compared with is in no call."""
    (assertion,) = read_asserts(text)
    assert list(assertion.calls) == calls
    assert assertion.holds(right)
    assert not assertion.holds(wrong)


def test_and_makes_several_cases() -> None:
    """Each part of an `and` is an assert of its own."""
    assert [assertion.calls for assertion in read_asserts("assert f(1) == 2 and g(3)")] == [("f(1)",), ("g(3)",)]


@pytest.mark.parametrize(
    "text",
    [
        "assert f(3).startswith('secret')", "assert f(3).__eq__('secret')", "assert 'secret'.startswith(f(3))",
        "assert np.isclose(f(3), 5)", "import numpy as np\nassert np.isclose(f(3), 5) == 1", "assert same(f(3), 5)",
        "assert same(f(3), 5) is True", "assert np.abs(f(3) - 5) < 1", "assert all(f(x) == y for x, y in [(1, 2)])",
        "assert g(lambda: f(3) == 5)", "assert g(f(3) == 5) is not None", "assert (lambda x: x == 5)(f(3))",
        "assert f(1) == 1 or f(2)", "assert f'{f(3)}' == 'secret'", "assert [x for x in f(3)] == [5]",
        "for i in [1]:\n    assert f(i) == 5", "def test():\n    assert f(1) == 5", "assert 1 == 1.0",
        "with pytest.raises(ValueError):\n    f(1)", "def check(candidate):\n    assert candidate(1) == 5", "assert f(",
        "assert sorted(f(1), key=lambda x: x == 5) == [5]", "assert 'secret' is str(g(f(3) + 1))", "assert False",
        "assert sum(f(1), 0, 0) == 3", "assert round(f(1), digits=2) == 3", "assert len(f(1), f(1)) == 2",
"assert f(3) == str(5) + 'a'", "assert f(1) == 2 ** 10**9", "assert f(1) == [0] * 10**9",
        "assert f(1) == 1 << 10**9", "assert f(1) @ f(2) == 3", "assert f(1) == 1 + 'a'",
        "assert max(*f(3)) == 5", "assert {**f(3)} == {}",
        "import math\nassert f(2) == math.sqrt(2)", "assert f(2) == math.sqrt(2)", "assert f(255) == hex(255)",
        "from string import digits\nassert f(2) == digits", "assert f(1) == 'a-b'.upper()",
        "assert f(1) == '{}-{}'.format(1, 2)", "assert f(1) == list(map(lambda x: x + 1, [1, 2]))",
        "from collections import Counter\nassert Counter(f(1)) == Counter([1, 2])", "assert f(1) == Counter([1, 2])",
        "from math import *\nassert f(2) == sqrt(2)", "x = math.sqrt(2)\nassert f(2) == x",
        "assert abs(sum([1, 2]) - 3) < 1e-6", "assert math.isclose(sum([1, 2]), 3)", "assert len([1]) == sum([1])",
        "assert all([same(f(1), 3)])", "assert bool(same(f(1), 3))", "assert True == same(f(1), 3)",
        "from unittest import TestCase\nassert TestCase().assertEqual(f(1), 5) is None",
        "assert same([f(1), 3])", "assert all(map(same, f(1), [3]))", "import math\nassert math.fsum([f(1), -3]) == 0",
    ],
)  # fmt: skip
def test_what_cannot_be_taken_apart_is_an_error(text: str) -> None:
    """An expected value would get inside, or its statement is more than an assert: the error says what to do."""
    with pytest.raises(InvalidRequest):
        read_cases(text)


@pytest.mark.parametrize(
    "text",
    ["assert f(1) * 10**9", "assert f(1) ** f(2) == 1", "assert round(f(1) - 1, f(2))", "assert set(f(1) + f(2))",
     "assert list(range(f(1) - 0))", "assert f(1) < 5", "assert f(1) % f(2) == 3", "assert int(f(1) + f(2)) == 1"],
)  # fmt: skip
def test_hostile_values_are_computed_in_bounded_time(text: str) -> None:
    """Whatever a result is, the condition has an end, and no exception leaves the judge."""
    start = time.monotonic()
    (case,) = read_cases(text)
    assert isinstance(case, CallCase)
    for value in (1 << 130_000, "9" * 100_000, [2**61 - 1] * 100_000, -(1 << 130_000), {1: 2}, 1e308):
        case.judge([value] * len(case.calls))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"stdin": "x"}, 'no "stdout"'), ({"call": "f"}, 'no "result"'), ({"stdout": "", "more": 1}, "unknown key"),
        ({"call": "f(1) or g", "result": 1}, "no function"), ({"call": "f", "args": 1, "result": 1}, "list of"),
        ({"call": "f", "result": object()}, "result: "), ({"stdout": "", "compare": "near"}, "compare: "),
        ({"stdout": "", "tolerance": -1}, "tolerance: "), ({"stdout": 3}, "stdout: "), (3, "give a mapping"),
        ({"call": "f", "kwargs": {"a b": 1}, "result": 1}, "kwargs: "), ({"stdout": "", "timeout": 0}, "timeout: "),
    ],
)  # fmt: skip
def test_a_wrong_case_is_an_error_with_its_number(row: object, message: str) -> None:
    """The second case is at fault here."""
    with pytest.raises(InvalidRequest, match="case 2: ") as caught:
        read_cases([{"stdout": ""}, row])  # type: ignore[list-item]
    assert message in str(caught.value)


def test_no_cases_are_an_error() -> None:
    """Neither no rows, nor a text without an assert, is a pass."""
    for cases in ([], "", "import math"):
        with pytest.raises(InvalidRequest, match="there are none"):
            read_cases(cases)


def test_cases_hide_what_is_expected() -> None:
    """A repr in a log does not tell it."""
    cases = read_cases([{"stdin": "1", "stdout": "secret"}, {"call": "f", "result": "secret"}])
    assert isinstance(cases[0], StdinCase)
    assert "secret" not in repr(cases)


def test_a_verdict_is_decided_by_wrong_answers_first() -> None:
    """A wrong answer is a failure whatever else happened; an undecided case is never a pass, and has no score."""
    passed, failed, undecided, not_run = (
        CaseResult(number=1, outcome="passed"), CaseResult(number=2, outcome="failed", why="wrong"),
        CaseResult(number=3, outcome="undecided", why="gone"), CaseResult(number=4, outcome="not_run"),
    )  # fmt: skip
    assert conclude([passed], "").score == 1.0
    assert (conclude([passed, failed], "").outcome, conclude([passed, failed], "").score) == ("failed", 0.5)
    assert (conclude([passed, undecided], "").outcome, conclude([passed, undecided], "").score) == ("undecided", None)
    assert (conclude([failed, undecided], "").outcome, conclude([failed, undecided], "").score) == ("failed", None)
    assert conclude([failed, not_run], "").score == 0.0
    assert conclude([passed, undecided], "").why == "case 3: gone"
    assert not conclude([passed, undecided], "").passed
