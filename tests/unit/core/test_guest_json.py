"""JSON of a guest's is read strictly, within bounds of what costs time, and what is read can be written again."""

import json
import sys
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cloche.core.guest_json import (
    MAX_BESIDE_BYTES,
    MAX_DEPTH,
    MAX_ESCAPES,
    MAX_MEMBERS,
    MAX_OUTSIDE_CHARS,
    MAX_PARTS,
    MAX_PIECES,
    TooLarge,
    as_text,
    decode,
)

LONG = "x" * MAX_BESIDE_BYTES  # which makes a text large
TOKENS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    "\\ud83d",
    "\\ude00",
    "u0041",
    "1",
    "-0.0",
    "1e999",
    "NaN",
    "9" * 5000,
]
TEXTS = st.lists(st.sampled_from([*TOKENS, '"a"', "[[", "null", "true", " ", "\ud800", "é"]), max_size=40).map("".join)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
FEW = st.dictionaries(
    st.text(max_size=9), st.none() | st.integers() | st.text() | st.lists(LEAVES, max_size=5), max_size=6
)


def written(value: object) -> bytes:
    """Write a value as whoever passes it on does: strictly, and in UTF-8."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@given(body=st.binary(max_size=60) | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")), mends=st.booleans())
def test_what_is_read_can_be_written(body: bytes, *, mends: bool) -> None:
    """Whatever bytes come, they are refused by a ValueError, or their value is JSON again."""
    try:
        value, _ = decode(as_text(body), mends_text=mends)
    except ValueError:
        return
    assert json.loads(written(value)) == value
    json.dumps(value, allow_nan=False)


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=FEW, rest=FEW, indent=st.sampled_from([None, 2]))
def test_large_and_small_are_read_alike(data: dict[str, object], rest: dict[str, object], indent: int | None) -> None:
    """An object with a long text in it is what json makes of it, blanks and all."""
    whole = {**rest, "data": {**data, "long": LONG}, "after": [1]}
    assert decode(json.dumps(whole, indent=indent))[0] == whole


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "-1e999", '"\\ud800"', '{"\\udc00":1}', "9" * 4301, ""])
@pytest.mark.parametrize(
    "around", ["%s", '{"a":[%s]}', '{"long":"' + LONG + '","a":[%s]}'], ids=["bare", "in", "large"]
)
def test_what_is_no_json_is_refused(text: str, around: str) -> None:
    """Numbers that JSON has no words for or nobody can print, and lone surrogates, are none."""
    if "{" in text:
        around = around.replace("%s", '{"b":%s}')
    with pytest.raises(ValueError, match=r"."):
        decode(around % text if text else around % "]")


@pytest.mark.parametrize("number", ["2." + "2" * 300 + "e-308", "1" * 40 + ".0"])
def test_long_floats_are_refused(number: str) -> None:
    """The hardest take time with their length, and whoever means a float writes at most 25 characters."""
    with pytest.raises(ValueError, match="characters"):
        decode(number)
    assert decode("[-2.2250738585072014e-308,-0.0000012345678901234567]")[1] == 2


def test_halves_of_characters_in_large_objects() -> None:
    """Each becomes U+FFFD, in names, long texts and lists; a pair stays what it spells."""
    text = r'{"a\udc00":["\ud800"],"data":{"b\ud800":"é\ud83d\ude00' + (LONG + r"\udc00\ud83d") * 2 + '"}}'
    mended = {"a\ufffd": ["\ufffd"], "data": {"b\ufffd": "é\U0001f600" + (LONG + "\ufffd\ufffd") * 2}}
    assert decode(text, mends_text=True)[0] == mended


def test_half_a_character_costs_little_memory() -> None:
    """It makes its text take twice the memory, and that text is not copied over and over."""
    text = '{"long":"' + LONG * 8 + r'\ud83d"}'
    tracemalloc.start()
    try:
        value, _ = decode(text, mends_text=True)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (value["long"][-1], peak < 3 * kept) == ("\ufffd", True)


@pytest.fixture(params=[0, 10_000])
def digits_limit(request: pytest.FixtureRequest) -> Iterator[int]:
    """Have the interpreter print longer integers than usual."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(request.param)
    yield request.param
    sys.set_int_max_str_digits(before)


@pytest.mark.usefixtures("digits_limit")
def test_long_integers_are_refused_whatever_the_interpreter_prints() -> None:
    """Reading takes time with the square of the digits, so the bound is ours."""
    with pytest.raises(ValueError, match="digits"):
        decode("9" * 5000)


MUCH = {
    "lists": "[" + "[]," * (MAX_PARTS // 2) + "[]]",
    "commas": "[" + "1," * MAX_PARTS + "1]",
    "names": "{" + ",".join(f'"{number}":0' for number in range(MAX_PARTS + 2)) + "}",
    "texts": "[" + '"",' * MAX_PARTS + '""]',
    "escapes": '{"a":"' + r"\n" * (MAX_ESCAPES + 1) + '"}',
    "members": '{"long":"' + LONG + '",' + ",".join(f'"{number}":0' for number in range(MAX_MEMBERS)) + "}",
    "pieces": '{"long":"' + LONG + '",' + ",".join(f'"{number}":[]' for number in range(MAX_PIECES + 1)) + "}",
    "beside": '{"a":[' + "9" * MAX_BESIDE_BYTES + "]}",
    "beside in turns": '{"a":[' + " " * 600_000 + '],"b":[' + " " * 600_000 + "]}",
    "numbers": '{"a":[' + "1.5," * (MAX_OUTSIDE_CHARS // 4) + "1]}",
    "halves": '{"a":"' + r"\ud800" * 70_000 + '"}',
    "halves in a long text": '{"long":"' + LONG + r"\ud800" * 70_000 + '"}',
}


@pytest.mark.parametrize("name", MUCH)
def test_much_is_refused(name: str) -> None:
    """Each thing that takes time is counted, and too much of it is told from what is no JSON at all."""
    with pytest.raises(TooLarge):
        decode(MUCH[name], mends_text=True)


def test_long_texts_are_no_parts() -> None:
    """A page or a picture may hold whatever it likes: what stands inside a text is no part."""
    page = '<td class="a,b">[{1,2}]</td>\\\n' * 8_000
    assert decode(json.dumps(page))[0] == page
    whole = {"op": "display", "data": {"text/html": page * 9, "text/plain": "é" * 100_000}, "metadata": {}}
    value, parts = decode(json.dumps(whole))
    assert (value, parts < 10) == (whole, True)


def test_parts_are_counted_where_there_are_few_left() -> None:
    """A budget that goes down from one text to the next is kept to."""
    assert decode("[1,2,3]", 3)[1] == 3
    with pytest.raises(TooLarge, match="more than 2 parts"):
        decode("[1,2,3]", 2)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 100_000])
def test_depth_is_bounded(depth: int) -> None:
    """What is nested too deeply to be written everywhere is refused, far below what breaks an interpreter."""
    text = "[" * depth + "]" * depth
    if depth <= MAX_DEPTH:
        assert decode(text)[1] == depth
    else:
        with pytest.raises(ValueError, match=r"deeply|parts|characters"):
            decode(text)


def test_bytes_that_are_not_ascii_are_bounded_sooner() -> None:
    """In memory they may take four times as much."""
    assert as_text(b"x" * 5_000_000)
    with pytest.raises(TooLarge, match="not ASCII"):
        as_text(b"x" * 5_000_000 + "é".encode())
