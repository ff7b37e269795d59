"""Messages of web sockets: no value comes in one, however it is cut, and all else comes as it was sent."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cloche.egress.credentials import Grant
from cloche.egress.http_answer import AnswerRefused, EditedAnswer
from cloche.egress.http_request import HttpRequest, RequestHead
from cloche.egress.redaction import AnswerRedaction, StreamRedactor, pairs_of
from cloche.egress.web_sockets import MessageRedaction, MessageWatch, WebSocketAnswer, without_extensions

VALUE, MARK = b"TheValue-0123456789abc", b"ItsPlace-9876543210xyz"
GRANT = Grant(name="K", placeholder=MARK, value=VALUE, hosts=frozenset(("a.example",)))
PAIRS = pairs_of([GRANT])
LIMITS = {0: 126, 2: 1 << 16, 8: 1 << 63}  # of the bytes that say a length
CONTINUATION, TEXT, BINARY, CLOSE, PING = 0, 1, 2, 8, 9


def frame(opcode: int, content: bytes, *, is_final: bool = True, mask: bytes = b"") -> bytes:
    """Write a frame."""
    size, masked = len(content), 0x80 if mask else 0
    short, width = next((short, width) for short, width in ((size, 0), (126, 2), (127, 8)) if size < LIMITS[width])
    length = bytes([masked | short]) + (size.to_bytes(width, "big") if width else b"")
    content = bytes(byte ^ mask[at % 4] for at, byte in enumerate(content)) if mask else content
    return bytes([opcode | (0x80 if is_final else 0)]) + length + mask + content


def read(data: bytes) -> list[tuple[int, bool, bytes]]:
    """Read the frames of a server."""
    frames, at = [], 0
    while at < len(data):
        more = {126: 2, 127: 8}.get(data[at + 1], 0)
        size = int.from_bytes(data[at + 2 : at + 2 + more], "big") if more else data[at + 1]
        begin = at + 2 + more
        assert begin + size <= len(data)
        frames.append((data[at] & 0x7F, bool(data[at] & 0x80), data[begin : begin + size]))
        at = begin + size
    return frames


def messages(frames: Sequence[tuple[int, bool, bytes]]) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """Return whole messages, and the other frames; each frame must be allowed where it is."""
    whole, others, opcode, content = [], [], 0, b""
    for kind, is_final, part in frames:
        if kind >= CLOSE:
            others.append((kind, part))
            continue
        assert (kind == CONTINUATION) == bool(opcode)
        opcode, content = opcode or kind, content + part
        if is_final:
            whole.append((opcode, content))
            opcode, content = 0, b""
    return whole, others


def passed(data: bytes, size: int) -> bytes:
    """Return what passes of a host's bytes that come in pieces of a size."""
    redaction = MessageRedaction(lambda: StreamRedactor(PAIRS), lambda: 0.0)
    return b"".join(redaction.feed(data[at : at + size]) for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("seed", range(20))
def test_a_value_never_comes_however_a_message_is_cut(seed: int, size: int) -> None:
    """Across frames, and with others between them; messages and other frames stay what they are."""
    chance = random.Random(seed)
    sent, came = [], b""
    for _ in range(8):
        length = chance.choice((0, 5, 200, 70_000 if size > 100 else 300))
        text = bytes(chance.choices(b"TheValue-", k=length)) + chance.choice((VALUE, VALUE[:9], b""))
        text += chance.choice((b"", b"more", VALUE.hex().encode()))
        sent.append((TEXT, text.replace(VALUE, MARK).replace(VALUE.hex().encode(), MARK.hex().encode())))
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(6)))
        parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for number, part in enumerate(parts):
            came += frame(PING, b"p") if chance.random() < 0.3 else b""
            came += frame(CONTINUATION if number else TEXT, part, is_final=number == len(parts) - 1)
    whole, others = messages(read(passed(came, size)))
    assert whole == sent
    assert others == messages(read(came))[1]


def test_a_message_in_one_frame_keeps_it_and_comes_at_once() -> None:
    """Nothing waits but what may begin a value, and the message's end brings that."""
    redaction = MessageRedaction(lambda: StreamRedactor(PAIRS), lambda: 0.0)
    event = frame(TEXT, b'{"delta": "hello"}')
    assert redaction.feed(event) == event
    begin = frame(BINARY, b"x" * 300 + VALUE)[:310]
    assert redaction.feed(begin) == begin[:304]
    assert redaction.feed(VALUE[6:]) == MARK
    ends_like_one = frame(TEXT, b"ends with " + VALUE[:6])
    assert redaction.feed(ends_like_one) == ends_like_one


def test_a_ping_between_frames_does_not_wait() -> None:
    """Also where the frame before it ended with what may begin a value."""
    redaction = MessageRedaction(lambda: StreamRedactor(PAIRS), lambda: 0.0)
    first = redaction.feed(frame(TEXT, b"a" * 500 + VALUE[:10], is_final=False) + frame(PING, VALUE))
    assert read(first)[-1] == (PING, True, MARK)
    assert b"".join(content for _, _, content in read(first)[:-1]) == b"a" * 500
    assert read(redaction.feed(frame(CONTINUATION, VALUE[10:]))) == [(CONTINUATION, True, MARK)]


@pytest.mark.parametrize(
    "data",
    [
        frame(TEXT | 0x40, b"compressed"),
        frame(TEXT, b"x", mask=b"abcd"),
        frame(CONTINUATION, b"x"),
        frame(TEXT, b"x", is_final=False) + frame(TEXT, b"x"),
        frame(3, b"x"),
        frame(11, b""),
        frame(PING, b"", is_final=False),
        frame(PING, b"x" * 126),
        b"\x82\x7f" + b"\xff" * 8,
        b"HTTP/1.1 200 OK\r\n\r\n",
        frame(PING, b"") * 2000,
        frame(TEXT, b"", is_final=False) + frame(CONTINUATION, b"", is_final=False) * 2000,
    ],
    ids=lambda data: data[:6].hex(),
)
def test_what_cannot_be_searched_ends_the_web_socket(data: bytes) -> None:
    """Compressed, malformed, or without end."""
    with pytest.raises(AnswerRefused):
        passed(data, 1000)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_placeholders_of_the_guest_are_seen(size: int) -> None:
    """Across masked frames; its bytes pass as they are, and what is no web socket does not."""
    seen: list[bytes] = []
    watch = MessageWatch(seen.append, len(MARK), lambda: 0.0)
    data = frame(TEXT, b"x" * 300 + MARK[:9], is_final=False, mask=b"abcd") + frame(PING, b"", mask=b"wxyz")
    data += frame(CONTINUATION, MARK[9:], mask=b"efgh")
    assert b"".join(watch.feed(data[at : at + size]) for at in range(0, len(data), size)) == data
    assert any(MARK in text for text in seen)
    with pytest.raises(AnswerRefused):
        watch.feed(frame(TEXT, b"not masked"))


def answered(answer: bytes, *, is_upgrade: bool, size: int = 1000) -> bytes:
    """Return what passes of an answer in HTTP/1.1 that comes in pieces of a size."""
    head = RequestHead(method=b"GET", target="/", headers=[])
    request = HttpRequest(method=b"GET", head=b"", is_upgrade=is_upgrade, is_last=False, edited=head)
    redaction = MessageRedaction(lambda: StreamRedactor(PAIRS), lambda: 0.0)
    reader = EditedAnswer(request, WebSocketAnswer(AnswerRedaction(StreamRedactor(PAIRS)), redaction))
    return b"".join(reader.feed(answer[at : at + size]) for at in range(0, len(answer), size))


SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"


@pytest.mark.parametrize("size", [1, 90, 1000])
def test_messages_begin_behind_the_head(size: int) -> None:
    """Whatever of them comes with it; and what is no web socket is an answer as any other."""
    passed = answered(SWITCH + b"\r\n" + frame(TEXT, VALUE) * 3, is_upgrade=True, size=size)
    assert passed.endswith(b"\r\n\r\n" + frame(TEXT, MARK) * 3)
    refusal = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 22\r\n\r\n"
    assert answered(refusal + VALUE, is_upgrade=True) == refusal + MARK


@pytest.mark.parametrize(
    ("answer", "is_upgrade"),
    [(SWITCH + b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n", True), (SWITCH + b"\r\n", False)],
)
def test_a_web_socket_that_cannot_be_searched_is_refused(answer: bytes, is_upgrade: bool) -> None:
    """With extensions, or where none was asked for."""
    with pytest.raises(AnswerRefused):
        answered(answer, is_upgrade=is_upgrade)


def test_no_extension_is_offered() -> None:
    """Whatever its letters."""
    headers = [(b"Sec-WebSocket-Extensions", b"permessage-deflate"), (b"Upgrade", b"websocket")]
    head = RequestHead(method=b"GET", target="/", headers=headers)
    assert without_extensions(head).headers == headers[1:]
