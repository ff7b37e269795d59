"""The wire cuts what comes into frames, whatever the pieces, and takes nothing that is too long or means nothing."""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.init import names, wire

FRAMES = st.lists(
    st.tuples(st.sampled_from(range(wire.PONG + 1)), st.integers(0, (1 << 32) - 1), st.binary(max_size=40)), max_size=30
)


@given(FRAMES, st.lists(st.integers(0, 60), max_size=60), st.integers(1, 7))
def test_any_split_yields_the_same_frames(frames: list[tuple[int, int, bytes]], sizes: list[int], most: int) -> None:
    """Whatever the pieces, all frames come out, in order, and never more than asked for at once."""
    sent = b"".join(wire.frame(kind, channel, body) for kind, channel, body in frames)
    buffer, received, start = wire.FrameBuffer(last_kind=wire.PONG), list[tuple[int, int, bytes]](), 0
    for size in (*sizes, len(sent)):
        piece, start = sent[start : start + size], start + size
        while True:
            some = buffer.feed(piece, most)
            received, piece = received + some, b""
            assert len(some) <= most
            if len(some) < most:
                break
    assert received == frames


@given(st.binary(max_size=300), st.integers(0, 20))
def test_any_bytes_are_frames_or_a_named_error(data: bytes, bound: int) -> None:
    """Nothing else is raised, no body exceeds its bound, and what is kept is no more than came."""
    buffer = wire.FrameBuffer(bound)
    with suppress(wire.WireError):
        assert all(len(body) <= bound and kind <= wire.CLOSE for kind, _, body in buffer.feed(data))
    assert len(buffer._buffer) <= len(data)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("send", "deliver", "consume")), st.integers(0, wire.STREAMS - 1), st.integers(1, 1 << 17)
    ),
    max_size=120,
)


@given(STEPS)
def test_credit_is_never_exceeded_and_never_lost(steps: list[tuple[str, int, int]]) -> None:
    """No stream has more than a window under way; a reader that stops blocks its own alone, and unblocks it by reading.

    Of two ends that keep to the rules, neither sees the other break them.
    """
    sender, receiver = wire.Credit(), wire.Credit()
    under_way, unread = [deque[int]() for _ in range(wire.STREAMS)], [0] * wire.STREAMS

    def send(stream: int, count: int) -> None:
        if (count := min(count, sender.sendable(stream), wire.MOST_DATA)) > 0:
            sender.note_sent(stream, count)
            under_way[stream].append(count)

    def deliver(stream: int, _: int) -> None:
        if under_way[stream]:
            receiver.note_received(stream, count := under_way[stream].popleft())
            unread[stream] += count

    def consume(stream: int, count: int) -> None:
        count = min(count, unread[stream])
        unread[stream] -= count
        if granted := receiver.note_consumed(stream, count):
            sender.note_granted(stream, granted)

    acts = {"send": send, "deliver": deliver, "consume": consume}
    for name, stream, count in steps:
        acts[name](stream, count)
        assert all(sum(under_way[one]) + unread[one] <= wire.WINDOW_BYTES for one in range(wire.STREAMS))
        assert all(sender.sendable(one) >= 0 for one in range(wire.STREAMS))
    for stream in range(wire.STREAMS):
        while under_way[stream] or unread[stream]:
            deliver(stream, 0)
            consume(stream, 1 << 30)
        assert sender.sendable(stream) > wire.WINDOW_BYTES - wire.GRANTED_AT_ONCE
        send(stream, 1)
        assert under_way[stream] == deque([1])


def test_breaking_the_window_is_named() -> None:
    """More than the window, a grant of what was not sent, and a stream that there is not are errors of the protocol."""
    credit = wire.Credit()
    credit.note_received(1, wire.WINDOW_BYTES)
    credit.note_received(2, wire.WINDOW_BYTES)
    for count in (1, 1 << 31):
        with pytest.raises(wire.WireError, match="stream 1: data exceeds its window"):
            credit.note_received(1, count)
        with pytest.raises(wire.WireError, match="stream 1: data exceeds its window"):
            credit.note_whole(1, count)
        with pytest.raises(wire.WireError, match="stream 0: a window for data that was not sent"):
            credit.note_granted(0, count)
    for stream in (wire.STREAMS, 255):
        for act in (credit.note_received, credit.note_granted):
            with pytest.raises(wire.WireError, match=f"stream {stream}"):
                act(stream, 1)
    credit.note_sent(0, 5)
    with pytest.raises(wire.WireError):
        credit.note_granted(0, 0)
    credit.note_granted(0, 5)
    credit.note_whole(3, wire.WINDOW_BYTES - 1)
    credit.note_whole(3, 1 << 20)  # a message is sent as a whole while anything is left
    with pytest.raises(wire.WireError):
        credit.note_whole(3, 1)


def test_frames_have_their_fields() -> None:
    """What each function writes, its counterpart reads."""
    sent = b"".join([
        wire.json_frame(wire.HELLO, 0, version=wire.VERSION), wire.frame(wire.CLOSE, 1 << 31),
        wire.data_frame(7, wire.STDOUT, bytes(range(256))), wire.grant_frame(7, 2, 1 << 31),
        wire.frame(wire.DATA, 1, b""),
    ])  # fmt: skip
    whole = wire.FrameBuffer().feed(sent)
    assert [(kind, channel) for kind, channel, _ in whole] == [
        (wire.HELLO, 0), (wire.CLOSE, 1 << 31), (wire.DATA, 7), (wire.WINDOW, 7), (wire.DATA, 1),
    ]  # fmt: skip
    assert wire.read_object(whole[0][2]) == {"version": wire.VERSION}
    stream, data = wire.read_data(whole[2][2])
    assert (stream, bytes(data)) == (wire.STDOUT, bytes(range(256)))
    assert wire.read_grant(whole[3][2]) == (2, 1 << 31)


def test_a_frame_is_bounded_before_it_is_kept() -> None:
    """One that is too long, or of no kind, is refused by its header alone; one of exactly the bound is not."""
    limited = wire.FrameBuffer(most_body=10)
    assert limited.feed(wire.frame(wire.EVENT, 1, b"x" * 10)) == [(wire.EVENT, 1, b"x" * 10)]
    for length, kind in ((11, wire.EVENT), (wire.MOST_BODY + 1, wire.DATA), (0, wire.CLOSE + 1)):
        with pytest.raises(wire.WireError):
            wire.FrameBuffer(10).feed(wire.HEADER.pack(length, 1, kind))
    assert wire.FrameBuffer().feed(wire.HEADER.pack(wire.MOST_BODY, 1, wire.DATA)) == []


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b'{"a": ' * 100_000, b"nul"],
    ids=lambda body: str(body[:9]),
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """Whatever it is, it is an error of the protocol and no other."""
    with pytest.raises(wire.WireError):
        wire.read_object(body)


def test_pieces_and_windows_have_their_sizes() -> None:
    """A piece has a stream and no more than may be sent at once; a window has its five bytes."""
    assert wire.read_data(b"\1") == (1, b"")
    assert len(wire.read_data(b"\1" * (wire.MOST_DATA + 1))[1]) == wire.MOST_DATA
    for body in (b"", b"\1" * (wire.MOST_DATA + 2)):
        with pytest.raises(wire.WireError):
            wire.read_data(body)
    for body in (b"", bytes(4), bytes(6)):
        with pytest.raises(wire.WireError):
            wire.read_grant(body)


@pytest.mark.parametrize("name", ["", "plain", "ä ✓", "\udcff", "a\udc80b", "new\nline", "x" * 5000])
def test_names_are_exact(name: str) -> None:
    """Any bytes come through, and what stands for them is no half of a character."""
    packed = names.pack_text(name)
    wire.json_frame(wire.EVENT, 1, name=packed)[wire.HEADER.size :].decode("utf-8")
    json.dumps(packed, ensure_ascii=False).encode("utf-8")
    assert names.unpack_text(packed) == name
    assert isinstance(packed, dict) is ("\udc80" <= max(name, default="") <= "\udcff")


@pytest.mark.parametrize(
    "value", ["\ud800", "a\0", "x" * 20_000, {"hex": "f"}, {"hex": "00"}, {"hex": 1}, {}, None, 1, []]
)
def test_what_is_no_name_is_refused(value: object) -> None:
    """It is neither mended nor cut."""
    with pytest.raises(ValueError):
        names.unpack_text(value)
