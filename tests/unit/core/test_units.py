"""Amounts as people write them."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloche.core.errors import InvalidRequest
from cloche.core.limits import GIB, MIB, exact_size, format_size, parse_count, parse_cpus, parse_duration, parse_size

PARSERS: list[Any] = [parse_size, parse_duration, parse_count, parse_cpus]


@pytest.mark.parametrize("text", ["256m", "256M", "256MB", "256MiB", "256 mib", "262144k", "268435456", "0.25g"])
def test_sizes_are_binary(text: str) -> None:
    """Every common spelling of 256 MiB is 256 MiB."""
    assert parse_size(text, name="memory") == 256 * MIB


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("30", 30), ("500ms", 0.5), ("2m", 120), ("1.5 h", 5400), (7, 7), (0.5, 0.5)],
)
def test_durations(text: Any, seconds: float) -> None:
    """A bare number is seconds; a unit says otherwise."""
    assert parse_duration(text, name="timeout") == seconds


def test_bare_durations_in_another_unit() -> None:
    """A bare number takes the given unit, one with a unit keeps its own."""
    assert parse_duration(30000, name="timeout", bare_unit_s=0.001) == 30
    assert parse_duration("30000", name="timeout", bare_unit_s=0.001) == 30
    assert parse_duration("30s", name="timeout", bare_unit_s=0.001) == 30


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        True,
        None,
        [],
        {},
        "",
        "x",
        "-1",
        "0",
        float("nan"),
        float("inf"),
        "nan",
        "inf",
        "1e9999",
        "9" * 400,
        10**400,
    ],
)
def test_bad_amounts_are_named(parse: Any, value: Any) -> None:
    """What is no amount is refused by name; zero and infinity never mean "no limit"."""
    with pytest.raises(InvalidRequest, match=r"^memory: "):
        parse(value, name="memory")


@pytest.mark.parametrize("value", [0.5, "0.1", 1.5, "\u00b2"])
def test_counts_are_whole(value: Any) -> None:
    """A count is a whole number."""
    with pytest.raises(InvalidRequest, match="pids"):
        parse_count(value, name="pids")


def test_amounts_too_small_to_enforce() -> None:
    """Less than a byte, or less CPU than a kernel can meter, is refused instead of rounded to nothing."""
    with pytest.raises(InvalidRequest, match="less than one byte"):
        parse_size("0.5", name="disk")
    with pytest.raises(InvalidRequest, match="too few"):
        parse_cpus(0.001, name="cpus")


@given(st.integers(1, 1 << 50))
def test_a_bare_size_is_bytes(count: int) -> None:
    """A number of bytes comes back as it is, as a number and as text."""
    assert parse_size(count, name="disk") == parse_size(str(count), name="disk") == count


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()))
@example("\x1c5")
def test_parsers_fail_in_one_way(value: Any) -> None:
    """Whatever is given, a parser returns a positive amount or raises InvalidRequest."""
    for parse in PARSERS:
        try:
            assert parse(value, name="x") > 0
        except InvalidRequest:
            continue


@pytest.mark.parametrize(("count", "text"), [(256 * MIB, "256MiB"), (3 * GIB // 2, "1.5GiB"), (12, "12B")])
def test_sizes_are_written_the_short_way(count: int, text: str) -> None:
    """A size is shown in the largest unit that fits."""
    assert format_size(count) == text


def test_an_exact_size_is_read_as_it_was_written() -> None:
    """Nothing is rounded, and the largest unit that fits is used."""
    written = {0: "0", 1000: "1000", 1024: "1k", 256 * MIB: "256m", 3 * GIB: "3g", GIB + 1: str(GIB + 1)}
    assert {count: exact_size(count) for count in written} == written
    assert [parse_size(text, name="memory") for text in written.values() if text != "0"] == [*written][1:]
