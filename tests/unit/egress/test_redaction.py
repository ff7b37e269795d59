"""Values in answers: replaced by their placeholders in every listed encoding, wherever the pieces are cut."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from urllib.parse import quote

import pytest

from cloche.egress.credentials import Grant
from cloche.egress.http_answer import AnswerReader, AnswerRefused, EditedAnswer
from cloche.egress.http_request import HttpRequest, RequestHead
from cloche.egress.redaction import AnswerRedaction, StreamRedactor, pairs_of

VALUE, MARK = b"sk-The/Value+Of=0123", b"sk-Its/Place+Hol=4567"[:20]
GRANT = Grant(name="K", placeholder=MARK, value=VALUE, hosts=frozenset(("a.example",)))
PAIRS = pairs_of([GRANT])
ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": bytes,
    "percent": lambda data: quote(data, safe="").encode(),
    "percent, in small letters": lambda data: (
        quote(data, safe="").replace("%2F", "%2f").replace("%2B", "%2b").replace("%3D", "%3d").encode()
    ),
    "every byte percent": lambda data: b"".join(b"%%%02X" % byte for byte in data),
    "JSON": lambda data: json.dumps({"k": data.decode()}).replace("/", "\\/").encode(),
    "JSON, escaped": lambda data: b"".join(b"\\u%04x" % byte for byte in data),
    "JSON, escaped in capitals": lambda data: b"".join(b"\\u%04X" % byte for byte in data),
    "JSON of Gson": lambda data: data.replace(b"=", b"\\u003d"),
    "JSON of .NET": lambda data: data.replace(b"+", b"\\u002B"),
    "JSON for scripts": lambda data: data.replace(b"=", b"\\u003D"),
    "every byte percent, in small letters": lambda data: b"".join(b"%%%02x" % byte for byte in data),
    "hex": lambda data: data.hex().encode(),
    "hex in capitals": lambda data: data.hex().upper().encode(),
    **{f"base64 behind {n}": lambda data, n=n: base64.b64encode(b"x" * n + data + b"more") for n in range(4)},  # type: ignore[misc]
    "base64 at the end": base64.b64encode,
    "base64 for addresses": lambda data: base64.urlsafe_b64encode(b"y" + data),
}


def passed(data: bytes, size: int) -> bytes:
    """Return what passes of bytes that come in pieces of a size."""
    redactor = StreamRedactor(PAIRS)
    return b"".join(redactor.feed(data[at : at + size]) for at in range(0, len(data), size)) + redactor.end()


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_value_is_replaced_in_any_encoding_and_pieces(encode: Callable[[bytes], bytes], size: int) -> None:
    """What arrives has the placeholder in the same encoding, and the same length."""
    text = b"before " + encode(VALUE) + b" after"
    after = passed(text, size)
    assert len(after) == len(text)
    assert after.startswith(b"before ")
    assert after.endswith(b" after")
    if b"base64" not in encode.__qualname__.encode():
        assert VALUE[3:17] not in after
    kept = sum(one == other for one, other in zip(text, after, strict=True)) - len(b"before  after")
    shared = sum(one == other for one, other in zip(encode(VALUE), encode(MARK), strict=True))
    assert kept <= shared + 2


def test_what_looks_like_a_long_value_holds_no_loop() -> None:
    """A host that repeats the beginning of one, as it may be written, costs time with the length of that alone."""
    value = bytes(33 + number * 7 % 90 for number in range(16_000))
    long = Grant(name="K", placeholder=value[::-1], value=value, hosts=frozenset(("a.example",)))
    pairs = pairs_of([long])
    began = time.thread_time()
    for _ in range(10):
        for text in (b"\\" * 100_000, b"%" * 100_000, b"\\u0021" * 20_000, b"!" * 100_000):
            redactor = StreamRedactor(pairs)
            assert redactor.feed(text) + redactor.end() == text
    assert time.thread_time() - began < 2


def test_other_bytes_pass_at_once() -> None:
    """Nothing is held back that no value begins with: an event of a stream arrives whole."""
    redactor = StreamRedactor(PAIRS)
    event = b'data: {"delta": "hello"}\n\n'
    assert redactor.feed(event) == event


def answered(answer: bytes, size: int = 5, method: bytes = b"GET") -> tuple[bytes, EditedAnswer]:
    """Return what passes of an answer, and its reader."""
    edited = RequestHead(method=method, target="/", headers=[])
    request = HttpRequest(method=method, head=b"", is_upgrade=False, is_last=False, edited=edited)
    reader = EditedAnswer(request, AnswerRedaction(StreamRedactor(PAIRS)))
    return b"".join(reader.feed(answer[at : at + size]) for at in range(0, len(answer), size)), reader


@pytest.mark.parametrize("line", [b"a:\r\n", b"a: b\r\n c\r\n"])
def test_a_head_of_many_lines_is_refused(line: bytes) -> None:
    """To parse one of 256 KiB would hold the loop."""
    head = b"HTTP/1.1 200 OK\r\n" + line * 40_000 + b"\r\n"
    with pytest.raises(AnswerRefused):
        answered(head, 4096)
    edited = RequestHead(method=b"GET", target="/", headers=[])
    request = HttpRequest(method=b"GET", head=b"", is_upgrade=False, is_last=False, edited=edited)
    plain = AnswerReader(request)
    assert b"".join(plain.feed(head[at : at + 4096]) for at in range(0, len(head), 4096)) == head
    assert plain.progress == "unknown"


def chunked(*pieces: bytes) -> bytes:
    """Return a body in chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n"


def test_a_body_of_known_length_has_just_that_length() -> None:
    """It is searched without being parsed: what follows it does not pass, and half of one is an error."""
    body = b"a" + VALUE + b"b" * 20
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    after, reader = answered(head + body + b"more of it, " + VALUE)
    assert after == head + b"a" + MARK + b"b" * 20
    assert (reader.progress, reader.end()) == ("last", b"")
    assert answered(head + body)[1].progress == "complete"
    _, half = answered(head + body[:-1])
    with pytest.raises(AnswerRefused, match="before its body does"):
        half.end()


def test_a_value_across_chunks_is_replaced() -> None:
    """The framing is written anew, and trailers are left out."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    after, reader = answered(head + chunked(b"a" + VALUE[:9], VALUE[9:] + b"b") + b"X-Key: " + VALUE + b"\r\n\r\n")
    content = b"".join(line for line in after[len(head) :].split(b"\r\n")[1::2])
    assert content == b"a" + MARK + b"b"
    assert VALUE not in after
    assert b"X-Key" not in after
    assert reader.progress == "complete"


def test_a_value_in_the_head_is_replaced() -> None:
    """In headers; the reason is that of the status, whatever the host said."""
    after, reader = answered(b"HTTP/1.1 400 No " + VALUE + b"\r\nX-Echo: " + VALUE + b"\r\nContent-Length: 0\r\n\r\n")
    assert after == b"HTTP/1.1 400 Bad Request" + b"\r\nX-Echo: " + MARK + b"\r\nContent-Length: 0\r\n\r\n"
    assert reader.progress == "complete"


def test_an_answer_that_ends_with_its_connection_is_flushed() -> None:
    """The bytes held back arrive with the end."""
    after, reader = answered(b"HTTP/1.0 200 OK\r\n\r\nends with " + VALUE[:6])
    assert (after + reader.end()).endswith(b"ends with " + VALUE[:6])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Encoding: br\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"not HTTP: " + VALUE + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + VALUE,
    ],
)
def test_an_answer_that_cannot_be_searched_is_refused(answer: bytes) -> None:
    """Compressed, another protocol, or malformed: no byte of it passes but a head."""
    with pytest.raises(AnswerRefused):
        answered(answer)


def test_half_an_answer_is_an_error() -> None:
    """A connection that ends within a body is no end of the body."""
    _, reader = answered(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
    with pytest.raises(AnswerRefused):
        reader.end()


@pytest.mark.parametrize(
    ("method", "status", "reason"),
    [(b"HEAD", 200, b"OK"), (b"GET", 304, b"Not Modified"), (b"GET", 204, b"No Content")],
)
def test_an_answer_without_a_body_has_no_framing(method: bytes, status: int, reason: bytes) -> None:
    """Whatever its headers say."""
    head = b"HTTP/1.1 %d %b\r\nTransfer-Encoding: chunked\r\n\r\n" % (status, reason)
    assert answered(head, method=method)[0] == head


@pytest.mark.parametrize("prefix", [b"sk-ant-api03-", b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9."])
def test_what_is_known_of_a_value_may_be_missing(prefix: bytes) -> None:
    """A prefix and the claims of a web token are the placeholder's, too: the rest alone is the secret."""
    grant = Grant(
        name="K", placeholder=prefix + b"Placeholder0123", value=prefix + b"TheRealValue456", hosts=frozenset()
    )
    assert StreamRedactor(pairs_of([grant])).whole(b"... TheRealValue456 ...") == b"... Placeholder0123 ..."


def test_a_cookie_is_left_out() -> None:
    """It is a credential, which the program could use from elsewhere."""
    headers = [(b"Set-Cookie", b"session=1"), (b"X-A", b"b")]
    assert AnswerRedaction(StreamRedactor(PAIRS)).head(200, headers) == [(b"X-A", b"b")]
    assert AnswerRedaction(StreamRedactor(PAIRS), has_cookies=True).head(200, headers) == headers
