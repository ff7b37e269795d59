"""The wire cuts what comes into frames, whatever the pieces, and takes nothing that is too long or means nothing."""

from __future__ import annotations

import json

import pytest

from cloche.init import names, wire


def test_frames_come_in_any_pieces() -> None:
    """Byte by byte, all at once, or cut anywhere, the same frames come out."""
    sent = b"".join([
        wire.json_frame(wire.HELLO, 0, version=wire.VERSION), wire.frame(wire.CLOSE, 1 << 31),
        wire.data_frame(7, wire.STDOUT, bytes(range(256))), wire.grant_frame(7, 2, 1 << 31),
        wire.frame(wire.DATA, 1, b""),
    ])  # fmt: skip
    whole = wire.FrameBuffer().feed(sent)
    assert [(kind, channel) for kind, channel, _ in whole] == [
        (wire.HELLO, 0), (wire.CLOSE, 1 << 31), (wire.DATA, 7), (wire.WINDOW, 7), (wire.DATA, 1),
    ]  # fmt: skip
    for size in (1, 2, 8, 9, 10, 100):
        buffer = wire.FrameBuffer()
        pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
        assert [frame for piece in pieces for frame in buffer.feed(piece)] == whole
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
