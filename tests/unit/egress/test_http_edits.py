"""Requests and answers that are edited on their way: the relay frames anew what an edit made of a body."""

import asyncio
from dataclasses import dataclass, replace

import pytest

from cloche.egress.http_answer import WholeAnswer
from cloche.egress.http_request import Headers, Rejected, RequestHead
from tests.harness.loops import in_loop
from tests.unit.egress.test_http import head, relayed


@dataclass(frozen=True)
class Upper:
    """Write a body in capitals, twice."""

    most_bytes: int = 10
    answer = None

    def edit(self, body: bytes) -> bytes:
        """Return it so."""
        if body == b"bad":
            raise Rejected(403, "a bad body")
        return body.upper() * 2


class Signs:
    """Tell a body in a header."""

    most_bytes = 5

    def headers(self, body: bytes) -> Headers:
        """Return the header."""
        return [(b"X-Body", body)]


class Longer:
    """Write an answer behind a word."""

    keeps_length = False

    def head(self, status: int, headers: Headers) -> Headers:
        """Tell the status in a header."""
        return [*headers, (b"X-Status", b"%d" % status)]

    def feed(self, data: bytes) -> bytes:
        """Return bytes as they are."""
        return data

    def end(self) -> bytes:
        """Return more."""
        return b", and more"


class Edits:
    """Edit bodies of POST, and every answer; count what was asked."""

    is_tls = False

    def edit(self, asked: RequestHead) -> RequestHead:
        """Add a key to the target, and sign what comes with PUT."""
        signing = Signs() if asked.method in (b"PUT", b"POST") and asked.target == "/signed" else None
        return replace(asked, target=asked.target + "?key=1", signing=signing)

    def body_edit(self, asked: RequestHead) -> Upper | None:
        """Edit those of POST."""
        return Upper() if asked.method == b"POST" else None

    def answer_edit(self, asked: RequestHead) -> Longer:
        """Edit all."""
        assert asked.target.endswith("?key=1")
        return Longer()

    def message_edit(self, _: RequestHead) -> None:
        """Leave messages as they are."""

    async def prepare(self) -> None:
        """Wait for nothing."""


class Answered:
    """Answer some requests in the host's place."""

    most_bytes = 10

    async def answer(self, body: bytes) -> WholeAnswer | None:
        """Return it, a while later."""
        await asyncio.sleep(0)
        if body == b"bad ":
            raise Rejected(403, "a bad body")
        return WholeAnswer(status=200, body=b"{}") if body == b"mine" else None

    edit = staticmethod(bytes.upper)


class Answers(Edits):
    """Have bodies of POST answered, once something is there."""

    prepared = 0

    async def prepare(self) -> None:
        """Count requests."""
        self.prepared += 1

    def body_edit(self, asked: RequestHead) -> Answered | None:  # type: ignore[override]
        """Ask for those of POST."""
        return Answered() if asked.method == b"POST" else None


def test_a_request_is_answered_in_the_place_of_its_host() -> None:
    """Then nothing of it goes upstream; another one is edited and sent, a refused one is told."""

    async def claim() -> None:
        edits = Answers()
        for body, status, sent in ((b"mine", b"200", b""), (b"bad", b"403", b""), (b"hers", b"200", b"HERS")):
            async with relayed(edits=edits) as one:
                answer = await one.send(
                    head(b"Content-Length: 4", line=b"POST / HTTP/1.1") + body.ljust(4)[:4], ends=True
                )
                assert answer[9:12] == status
                assert bytes(one.site.received).endswith(sent)
                assert one.site.connections == bool(sent)
            if body == b"mine":
                assert b"Content-Type: application/json\r\nContent-Length: 2\r\n" in answer
                assert answer.endswith(b"\r\n\r\n{}")
        assert edits.prepared == 3

    in_loop(claim)


@pytest.mark.parametrize(
    "sent",
    [
        head(b"Content-Length: 3", line=b"POST /size HTTP/1.1") + b"abc",
        head(b"Transfer-Encoding: chunked", line=b"POST /size HTTP/1.1") + b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
    ],
)
def test_a_body_is_sent_as_it_was_edited(sent: bytes) -> None:
    """Whole, with its new length, whatever the framing was; the next request follows, and answers may be longer."""

    async def claim() -> None:
        async with relayed(edits=Edits()) as one:
            answer = await one.send(*(sent[at : at + 1] for at in range(len(sent))), head(), ends=True)
            first = head(b"Content-Length: 6", line=b"POST /size?key=1 HTTP/1.1")
            assert bytes(one.site.received) == first + b"ABCABC" + head(line=b"GET /?key=1 HTTP/1.1")
            assert answer.count(b"X-Status: 200\r\nTransfer-Encoding: chunked\r\n") == 2
            assert b"1\r\n6\r\na\r\n, and more\r\n0\r\n\r\n" in answer
            assert answer.endswith(b"2\r\nok\r\na\r\n, and more\r\n0\r\n\r\n")

    in_loop(claim)


@pytest.mark.parametrize(("method", "body"), [(b"PUT", b"abc"), (b"POST", b"ABCABC")])
def test_a_request_is_signed_over_the_body_that_is_sent(method: bytes, body: bytes) -> None:
    """An edit of the body comes first; a body that is too large for either is refused."""

    async def claim() -> None:
        line = method + b" /signed HTTP/1.1"
        async with relayed(edits=Edits()) as one:
            await one.send(head(b"Content-Length: 3", line=line) + b"abc", ends=True)
            added = (b"X-Body: " + body, b"Content-Length: %d" % len(body))
            assert bytes(one.site.received) == head(*added, line=method + b" /signed?key=1 HTTP/1.1") + body
        async with relayed(edits=Edits()) as one:
            answer = await one.send(head(b"Content-Length: 6", line=line) + b"abcdef", ends=True)
            assert answer[9:12] == b"413"
            assert one.site.connections == 0

    in_loop(claim)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"bad", b"403"), (b"more than ten bytes", b"413"), (b"half", b"")],
    ids=["bad", "large", "half"],
)
def test_a_refused_body_is_not_sent_in_part(body: bytes, status: bytes) -> None:
    """The host sees nothing of the request."""

    async def claim() -> None:
        async with relayed(edits=Edits()) as one:
            length = len(body) + (body == b"half")
            answer = await one.send(head(b"Content-Length: %d" % length, line=b"POST / HTTP/1.1"), body, ends=True)
            assert answer[9:12] == status
            assert one.site.connections == 0

    in_loop(claim)


def test_a_client_that_waits_for_100_gets_it_before_its_body_is_edited() -> None:
    """The host is not asked: it gets the body with the head."""

    async def claim() -> None:
        async with relayed(edits=Edits()) as one:
            reader, writer = await asyncio.open_connection(*one.address)
            writer.write(head(b"Content-Length: 3", b"Expect: 100-continue", line=b"POST / HTTP/1.1"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert bytes(one.site.received).endswith(b"Content-Length: 6\r\n\r\nABCABC")
            writer.close()

    in_loop(claim)
