"""Any bytes are a request of one meaning, or rejected; and any bytes of an answer are followed without a fault."""

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloche.egress.http_answer import AnswerReader
from cloche.egress.http_request import (
    Body,
    HeadFinder,
    HttpRequest,
    Rejected,
    RequestHead,
    RequestTarget,
    read_request,
)

PLACE = RequestTarget(host="good.example", port=80)
PIECES = [
    b"GET / HTTP/1.1\r\n", b"POST http://good.example/ HTTP/1.1\r\n", b"GET /x HTTP/1.0\r\n", b"Host: good.example\r\n",
    b"hOST: evil.example\r\n", b"Content-Length: 3\r\n", b"content-length:4\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Upgrade: websocket\r\n", b"Connection: upgrade, close\r\n", b"X: y\r\n", b"X", b":", b" ", b"\t", b"\r", b"\n",
    b"\r\n", b"\r\n\r\n", b"\0", b"\xff", b"HTTP/1.1", b"abc",
]  # fmt: skip
HEADS = st.lists(st.sampled_from(PIECES), max_size=9).map(lambda pieces: b"".join(pieces) + b"\r\n\r\n")
HEADS |= HEADS.map(lambda head: b"GET / HTTP/1.1\r\nHost: good.example\r\n" + head)
CUTS = st.lists(st.integers(0, 100), max_size=8)
CHUNKED = b"POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = st.lists(
    st.sampled_from(
        [b"1\r\na\r\n", b"3;x\r\nabc\r\n", b"0\r\n", b"\r\n", b"X: y\r\n", b"A\r\n", b"0123456789", b"\n", b"f"]
    )
).map(b"".join)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut bytes at these places."""
    ends = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[i:j] for i, j in itertools.pairwise(ends)]


def read(pieces: list[bytes]) -> tuple[HttpRequest, Body] | None:
    """Read a head as it comes in pieces; None for one that is rejected, or has no end."""
    buffer, finder = bytearray(), HeadFinder()
    try:
        for piece in pieces:
            buffer += piece
            if end := finder.find(buffer):
                return read_request(bytes(buffer[:end]), PLACE)
    except Rejected:
        return None
    return None


@given(head=HEADS, cuts=CUTS)
@example(b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n", [])
def test_what_is_not_rejected_means_our_host_to_anybody(head: bytes, cuts: list[int]) -> None:
    """Whatever is passed on has one Host, ours, one framing at most, and no line that might be two."""
    found = read(cut(head, cuts))
    if found is None:
        return
    line, *headers = found[0].head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert re.fullmatch(rb"[\w!#$%&'*+.^`|~-]+ /[!-~]* HTTP/1\.[01]", line)
    assert not re.search(rb"[\r\n\0]", b"".join(headers))
    names = [header.partition(b":")[0].lower() for header in headers]
    assert headers[0] == b"Host: good.example"
    assert names.count(b"host") == 1
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1


def decoded(sent: bytes) -> bytes:
    """Return the content of chunks in the one form in which they go on."""
    content, at = b"", 0
    while size := re.compile(rb"([1-9a-f][0-9a-f]*)\r\n").match(sent, at):
        end = size.end() + int(size[1], 16)
        assert sent[end : end + 2] == b"\r\n"
        content += sent[size.end() : end]
        at = end + 2
    assert sent[at:] in (b"", b"0\r\n\r\n")
    return content


def feed(pieces: list[bytes]) -> tuple[bool, bytes, bytes] | None:
    """Return whether a body of these pieces ended, its content and what follows; None for a malformed one."""
    found = read([CHUNKED])
    assert found is not None
    body, sent, rest = found[1], b"", b""
    try:
        for piece in pieces:
            if body.has_ended:
                rest += piece
            else:
                sent += body.feed(piece)
    except Rejected:
        return None
    return body.has_ended, decoded(sent), body.rest + rest


@given(body=CHUNKS, cuts=CUTS)
def test_a_body_in_chunks_is_the_same_however_it_comes(body: bytes, cuts: list[int]) -> None:
    """The same content goes on, and the same bytes follow it, or both are malformed."""
    assert feed([body]) == feed(cut(body, cuts))


def request(method: bytes = b"GET", *, is_upgrade: bool = False) -> HttpRequest:
    """Return a request of which only what matters for the answer is true."""
    edited = RequestHead(method=method, target="/", headers=[])
    return HttpRequest(method=method, head=b"", is_upgrade=is_upgrade, is_last=False, edited=edited)


UPGRADE = request(is_upgrade=True)
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize(
    ("asked", "answer", "progress"),
    [
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "complete"),
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no", "open"),
        (request(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: y\r\n\r\n", "complete"),
        (request(), b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 204 No\r\n\r\n", "complete"),
        (request(), b"HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\n\r\n", "complete"),
        (request(b"HEAD"), b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", "complete"),
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", "last"),
        (request(), b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", "last"),
        (request(), b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "last"),
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: x, Close\r\n\r\nok", "last"),
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\nContent-Length: 2\r\n\r\nok", "complete"),
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "unknown"),
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 101 S\r\n\r\n", "last"),
        (request(), b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 101 S\r\n\r\n", "open"),
        (request(), b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + SWITCH, "open"),
        (request(), SWITCH, "unknown"),
        (request(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "unknown"),
        (request(), b"SSH-2.0-OpenSSH\r\n\r\n", "unknown"),
        (request(), b"\0", "unknown"),
        (UPGRADE, SWITCH + b"\x81\x02ok", "switched"),
        (UPGRADE, b"HTTP/1.1 100 Continue\r\n\r\n" + SWITCH, "switched"),
        (UPGRADE, SWITCH[:-1], "open"),
        (UPGRADE, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + SWITCH, "open"),
        (UPGRADE, b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n", "complete"),
    ],
)
def test_an_answer_ends_where_it_ends(asked: HttpRequest, answer: bytes, progress: str) -> None:
    """However it comes, only a complete answer lets a request follow, and only an asked 101 ends HTTP."""
    at_once, in_bytes = AnswerReader(asked), AnswerReader(asked)
    at_once.feed(answer)
    assert at_once.progress == progress
    for at in range(len(answer)):
        in_bytes.feed(answer[at : at + 1])
    # What follows the last byte that was asked for is seen as such when it comes by itself.
    assert in_bytes.progress == (progress if progress != "last" or not answer.endswith(b"S\r\n\r\n") else "unknown")


@given(answer=st.binary(max_size=200) | st.binary(max_size=200).map(lambda data: b"HTTP/1.1 200 OK\r\n" + data))
def test_any_answer_is_followed(answer: bytes) -> None:
    """Whatever a site sends raises nothing."""
    for asked in (request(), UPGRADE, request(b"HEAD")):
        reader = AnswerReader(asked)
        for at in range(0, len(answer), 7):
            reader.feed(answer[at : at + 7])
        assert reader.progress in {"open", "complete", "last", "switched", "unknown"}
