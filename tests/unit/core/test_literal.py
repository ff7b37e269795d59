"""Typed literals: what the guest's encoder writes is what the reader accepts, and nothing else."""

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche.core.comparison import are_equal
from cloche.core.errors import InvalidRequest
from cloche.core.literal import MAX_DEPTH, NotLiteral, expression, read_values, shown
from cloche.interpreter import graded_call, graded_ends

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=4,
)
VALUES = st.recursive(
    HASHABLE | st.floats() | st.integers(min_value=1 << 4000, max_value=1 << 4001) | st.sets(HASHABLE, max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(HASHABLE, inner, max_size=4),
    max_leaves=8,
)
ENDS = Path(graded_ends.__file__ or "").read_text()


def sent(*values: object) -> bytes:
    """Return what the guest sends for values."""
    parts = [b"=%d\n" % len(values)]
    for value in values:
        graded_call.encode(value, parts, ENDS)
    return b"".join(parts)


def types_of(value: object) -> object:
    """Return the types of a value and of its items."""
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    if isinstance(value, dict):
        return type(value), sorted(repr(types_of(item)) for item in value.items())
    return type(value)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    """Reader and encoder agree on every plain value, its types, signs of zero and NaN included."""
    (read,) = read_values(sent(value))
    assert are_equal(read, value)
    assert types_of(read) == types_of(value)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_an_argument_is_the_value_that_was_given(value: object) -> None:
    """The source of an argument evaluates to it."""
    assert are_equal(eval(expression(value, what="args")), value)
    assert shown(value)


@given(
    st.binary(max_size=60)
    | st.lists(st.sampled_from([b"l2\n", b"d1\n", b"e2\n", b"i1\n", b"s3\n", b"T\n"])).map(b"".join)
)
def test_other_bytes_are_refused_or_read_in_whole(tail: bytes) -> None:
    """Whatever a guest sends is a value or NotLiteral, and a value is written the one way."""
    data = b"=1\n" + tail
    try:
        values = read_values(data)
    except NotLiteral:
        return
    assert len(values) == 1


NO_LITERALS = {
    "nothing": b"", "too few": b"=1\n", "too many": b"=1\ni1\ni1\n", "leading zero": b"=1\ni01\n", "sign": b"=1\ni-\n",
    "decimal": b"=1\nf1.5\n", "float out of range": b"=1\nf0x1.0p+9999\n", "cut text": b"=1\ns4\nabc\n",
    "no UTF-8": b"=1\ns1\n\xff\n", "long text": b"=1\ns99999999999\n", "negative count": b"=1\nl-1\n",
    "no hash": b"=1\ne1\nl0\n", "an item twice": b"=1\ne2\ni1\nT\n", "letter": b"=1\nx\n", "rest": b"=1\nT1\n",
    "a result in a result": b"=2\n=1\ni1\n", "depth": b"=1\n" + b"l1\n" * (MAX_DEPTH + 1) + b"N\n",
    "digits": b"=1\ni" + b"f" * 40_000 + b"\n", "items": b"=1\nl1000001\nN\n",
    "equal hashes": b"=1\ne5000\n" + b"".join(b"i%x\n" % (n * (2**61 - 1)) for n in range(5000)),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_LITERALS)
def test_what_is_no_literal_is_refused(name: str) -> None:
    """Cut, doubled, endless, deep and colliding data is no value."""
    with pytest.raises(NotLiteral):
        read_values(NO_LITERALS[name])


def test_some_equal_hashes_are_accepted() -> None:
    """-1 and -2 have the same hash, and so have all tuples of them."""
    value = set(itertools.product((-1, -2), repeat=8))
    assert read_values(sent(value)) == (value,)


def test_derived_classes_are_read_by_the_plain_ones_methods() -> None:
    """A class of the program's that lies about its content is sent as what it holds."""

    class Lie(dict):  # type: ignore[type-arg]
        def __iter__(self) -> object:  # type: ignore[override]
            return iter([1])

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Number(int):
        def __pos__(self) -> int:
            return 5

    assert read_values(sent(Lie(a=Number(3)), bytearray(b"x"))) == ({"a": 3}, b"x")


def test_what_is_no_data_is_no_argument() -> None:
    """The error names the argument."""
    for value in (object(), 1j, [1, {2: print}], 1 << 200_000):
        with pytest.raises(InvalidRequest, match="args: "):
            expression(value, what="args")


def test_long_values_are_shown_in_part() -> None:
    """A text for people is bounded, also that of a number that Python would not print."""
    assert len(shown([1 << 100_000] * 1000)) < 5000
    assert shown(math.nan) == "nan"
    assert shown({1: ({2}, frozenset({b"x"}))}) == "{1: ({2}, frozenset({b'x'}))}"
