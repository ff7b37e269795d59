"""What a caller and a driver say to each other, and that no bytes from a driver do more than raise ValueError."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.core.frames import BashCodec, FrameReader, encode
from cloche.core.guest_json import MAX_PARTS

Reader = FrameReader | BashCodec
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
OBJECTS = st.dictionaries(st.text(), VALUES)
CUTS = st.lists(st.integers(0, 400))


def framed(body: bytes) -> bytes:
    """Put a length before a body, whatever the body is."""
    return len(body).to_bytes(4, "big") + body


def feed_in_pieces(reader: Reader, data: bytes, cuts: list[int]) -> list[dict[str, Any]]:
    """Feed `data` cut at the given places."""
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [one for i, j in itertools.pairwise(places) for one in reader.feed(data[i:j])]


@given(messages=st.lists(OBJECTS, max_size=5), cuts=CUTS)
def test_what_is_encoded_comes_out_again(messages: list[dict[str, Any]], cuts: list[int]) -> None:
    """Objects survive the way, in whatever pieces their bytes arrive."""
    assert feed_in_pieces(FrameReader(1 << 20), b"".join(map(encode, messages)), cuts) == messages


@given(data=st.binary(max_size=200), cuts=CUTS)
def test_any_bytes_are_frames_or_an_error(data: bytes, cuts: list[int]) -> None:
    """A hostile driver makes the reader give objects or raise ValueError, and buffers no more than it was sent."""
    reader = FrameReader(64)
    try:
        assert all(isinstance(one, dict) for one in feed_in_pieces(reader, data, cuts))
    except ValueError:
        with pytest.raises(ValueError, match="before"):
            reader.feed(b"")


@given(body=st.binary(max_size=100))
def test_any_body_is_an_object_or_an_error(body: bytes) -> None:
    """What a complete frame holds is a JSON object, or refused."""
    try:
        (found,) = FrameReader(100).feed(framed(body))
    except ValueError:
        return
    assert found == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b'"text"',
        b"null",
        b"{",
        b"{}x",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a":[' + b"[]," * MAX_PARTS + b"[]]}",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    """Anything but one object of strict JSON, bounded in depth and in parts, breaks the stream for good."""
    reader = FrameReader()
    with pytest.raises(ValueError, match=r"."):
        reader.feed(framed(body))
    with pytest.raises(ValueError, match="before"):
        reader.feed(encode({}))


def test_a_frame_may_be_as_long_as_the_limit() -> None:
    """The limit counts the body; one more byte is refused before it has arrived."""
    assert FrameReader(9).feed(framed(b'{"a":"b"}')) == [{"a": "b"}]
    with pytest.raises(ValueError, match="10 bytes is longer than 9"):
        FrameReader(9).feed((10).to_bytes(4, "big"))


def test_half_a_character_does_not_come_through() -> None:
    """A lone surrogate becomes U+FFFD, in keys as in values; pairs stay what they spell."""
    body = rb'{"a\udc00":["\ud800","\ud83d\ude00","\\ud800",{"b":"x\uDFFFy"}]}'
    expected = {"a\ufffd": ["\ufffd", "\U0001f600", "\\ud800", {"b": "x\ufffdy"}]}
    assert FrameReader(1000).feed(framed(body)) == [expected]


def test_code_with_half_a_character_can_be_sent() -> None:
    """What a caller has read from somewhere must not fail in the codec."""
    assert json.loads(encode({"code": "\ud800"})[4:]) == {"code": "\ud800"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_json_is_sent(value: float) -> None:
    """Numbers that JSON has no words for are refused."""
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": value})


def test_a_bash_session() -> None:
    """Its lines become the words of frames."""
    codec = BashCodec()
    assert codec.encode_run(7, "echo 'é'\n") == b"7 10\necho '\xc3\xa9'\n"
    assert codec.encode_run(8, "") == b"8 0\n"
    assert codec.feed(b"ready 5.2.15(1)-release\ndone 7 3\ndo") == [
        {"op": "ready", "runtime": "Bash 5.2.15(1)-release"},
        {"op": "done", "id": 7, "exit_code": 3},
    ]
    (done,) = codec.feed(b"ne 8 130\n")
    assert done["exit_code"] == 130
    assert done["error"]["name"] == "KeyboardInterrupt"


def test_a_bash_run_ends_once() -> None:
    """An end that nobody waits for is passed over."""
    codec = BashCodec()
    codec.encode_run(1, ":")
    assert len(codec.feed(b"done 1 0\ndone 1 0\ndone 2 0\n")) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"done 1",
        b"done 1 256",
        b"done -1 0",
        b"done 1 0 ",
        b"done 1 0\r",
        b"done \xb2 0",
        b"done 9999999999999999999 0",
        b"ready",
        b"ready a b",
        b"ready \x1b[31m",
        b"display 1",
        b"done 1 0" + b" " * 200,
    ],
)
def test_other_lines_are_refused(line: bytes) -> None:
    """A line outside the grammar breaks the stream for good."""
    codec = BashCodec()
    codec.encode_run(1, ":")
    with pytest.raises(ValueError, match="not an answer"):
        codec.feed(line + b"\n")
    with pytest.raises(ValueError, match="before"):
        codec.feed(b"done 1 0\n")


def test_a_line_without_end_is_refused() -> None:
    """What is no line yet is bounded."""
    codec = BashCodec()
    codec.feed(b"r" * 100)
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        codec.feed(b"r")


@given(
    data=st.lists(st.sampled_from([b"done", b"ready", b" ", b"\n", b"1", b"0", b"x", b"\xff"]), max_size=60), cuts=CUTS
)
def test_any_bytes_from_bash_are_answers_or_an_error(data: list[bytes], cuts: list[int]) -> None:
    """A hostile shell makes the codec give the two kinds of objects, or raise ValueError."""
    codec = BashCodec()
    codec.encode_run(1, ":")
    try:
        found = feed_in_pieces(codec, b"".join(data), cuts)
    except ValueError:
        return
    assert {one["op"] for one in found} <= {"ready", "done"}
    assert all(0 <= one["exit_code"] <= 255 for one in found if one["op"] == "done")


def test_nul_in_bash_code_is_named() -> None:
    """No shell can hold a NUL, and dropping it in silence would run something else."""
    with pytest.raises(ValueError, match=r"NUL character .*index 5"):
        BashCodec().encode_run(1, "echo \0")


@pytest.mark.parametrize("run_id", [-1, 10**18])
def test_bash_runs_have_small_numbers(run_id: int) -> None:
    """An id travels as digits, so it is bounded."""
    with pytest.raises(ValueError, match="not a number of a run"):
        BashCodec().encode_run(run_id, ":")


def test_bytes_that_are_no_text_reach_bash() -> None:
    """Code read with surrogateescape is sent as the bytes that it was."""
    assert BashCodec().encode_run(1, "echo '\udcff'") == b"1 8\necho '\xff'"
