"""HTTP/2 is passed on stream by stream: refused, edited, in turn, and never more of it than has room.

A guest, the relay and a host are connected over loopback. The host answers by path; both ends can break the protocol.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast
from weakref import WeakSet

import pytest
from h2.events import DataReceived, Event, RequestReceived, StreamEnded
from h2.settings import SettingCodes

from cloche.core.secrets import Capture
from cloche.egress.captures import Captures, edit_of_answer
from cloche.egress.credentials import Grant, HostCredentials
from cloche.egress.fields import HostFields
from cloche.egress.http2 import MOST_UNSENT_BYTES, relay_http2
from cloche.egress.http2_frames import FrameError, FrameReader
from cloche.egress.http2_request import read_http2_request
from cloche.egress.http2_side import Side
from cloche.egress.http_answer import WholeAnswer
from cloche.egress.http_request import Rejected, RequestHead, RequestTarget
from cloche.egress.opened import OpenedEdits
from cloche.egress.redaction import AnswerRedaction, StreamRedactor, pairs_of
from cloche.egress.stream import SocketStream, Stream
from cloche.egress.web_sockets import MessageRedaction, MessageWatch
from tests.harness.http2 import Exchanged, Http2End, frame
from tests.harness.loops import in_loop

HOST, VALUE, MARK = "a.example", "sk-TheValue0123456789", "sk-ItsPlace9876543210"
GRANT = Grant(name="KEY", placeholder=MARK.encode(), value=VALUE.encode(), hosts=frozenset((HOST,)))
KEY = [("x-api-key", MARK)]
LARGE = 3_000_000
HEADERS, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 1, 3, 4, 5, 6, 7, 8, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Site:
    """A host that answers by path, each with the key that came."""

    def __init__(self) -> None:
        self.ends: list[Http2End] = []
        self.sent_bytes = 0
        self.keeps_windows = False

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection."""
        self.ends.append(Http2End(
            reader, writer, is_client=False, on_event=self.answer, keeps_windows=self.keeps_windows,
            settings={SettingCodes.MAX_CONCURRENT_STREAMS: 10, SettingCodes.ENABLE_CONNECT_PROTOCOL: 1},
        ))  # fmt: skip

    def answer(self, end: Http2End, event: Event) -> None:
        """Answer a request when it is complete, or at once."""
        stream_id = getattr(event, "stream_id", 0)
        stream = end.streams[stream_id or 0]
        path, key = stream.headers.get(":path"), stream.headers.get("x-api-key", "")
        say = partial(end.h2.send_headers, stream_id)
        if isinstance(event, RequestReceived) and path == "/reset":
            end.h2.reset_stream(stream_id, 8)
        elif isinstance(event, RequestReceived) and path == "/forever":
            say([(":status", "200")])
            self.pour(end, stream_id)
        elif isinstance(event, RequestReceived) and path == "/early":
            say([(":status", "413")], end_stream=True)
        elif isinstance(event, DataReceived) and path == "/echo":
            if not stream.data[len(event.data) :]:
                say([(":status", "200")])
            end.h2.send_data(stream_id, event.data)
        elif isinstance(event, StreamEnded) and path == "/trailers":
            say([(":status", "103"), ("link", key)])
            say([(":status", "200"), ("x-echo", key)])
            end.h2.send_data(stream_id, f"a {key} b".encode())
            say([("grpc-status", "0"), ("grpc-message", key)], end_stream=True)
        elif isinstance(event, StreamEnded) and path == "/only-head":
            say([(":status", "200"), ("grpc-status", key)], end_stream=True)
        elif isinstance(event, StreamEnded) and path == "/gzip":
            say([(":status", "200"), ("content-encoding", "gzip")])
            end.h2.send_data(stream_id, b"x", end_stream=True)
        elif isinstance(event, StreamEnded) and path == "/malformed":
            say([(":status", "200"), ("x-a", f"b\r\nset-cookie: {key}")], end_stream=True)
        elif isinstance(event, StreamEnded) and path == "/many":
            say([(":status", "200"), *[("x", "y")] * 300], end_stream=True)
        elif isinstance(event, StreamEnded) and path == "/size":
            say([(":status", "200")])
            end.h2.send_data(stream_id, str(len(stream.data)).encode(), end_stream=True)
        elif isinstance(event, StreamEnded) and path == "/token":
            tokens = json.dumps({"access_token": VALUE, "refresh_token": VALUE[::-1]}).encode()
            say([(":status", "200"), ("content-type", "application/json"), ("content-length", str(len(tokens)))])
            end.h2.send_data(stream_id, tokens, end_stream=True)
        elif isinstance(event, StreamEnded) and path == "/":
            say([(":status", "200")], end_stream=True)

    def pour(self, end: Http2End, stream_id: int) -> None:
        """Send as much as there is room for, again and again."""
        if not end.is_closed and not end.streams[stream_id].is_over:
            while (room := min(end.h2.local_flow_control_window(stream_id), 16_384)) > 0:
                end.h2.send_data(stream_id, b"x" * room)
                self.sent_bytes += room
            end.flush()
            asyncio.get_running_loop().call_later(0.005, self.pour, end, stream_id)


class Relayed:
    """A guest of a site behind a relay; `refused` is what a sentence was asked for."""

    def __init__(self, site: Site, address: tuple[str, int]):
        self.site, self.address = site, address
        self.refused: list[str] = []
        self.guest: Http2End

    def refuse(self, what: str) -> str:
        """Make a sentence."""
        self.refused.append(what)
        return f"refused: {what}"


class BodyInCapitals:
    """An edit of bodies."""

    most_bytes = 100_000
    answer = None

    def edit(self, body: bytes) -> bytes:
        """Return another body, unless it is not wanted."""
        if body == b"no":
            raise Rejected(403, "this body")
        return body.upper() + b"!"


class Edits:
    """Edits of credentials, of the bodies of POST, and of answers."""

    is_tls = True

    def __init__(self) -> None:
        self.edit = HostCredentials(HOST, [GRANT]).edit

    def body_edit(self, head: RequestHead) -> BodyInCapitals | None:
        """Return it."""
        return BodyInCapitals() if head.method == b"POST" else None

    def answer_edit(self, _: RequestHead) -> AnswerRedaction:
        """Return what takes values out."""
        return AnswerRedaction(StreamRedactor(pairs_of([GRANT])))

    def message_edit(self, _: RequestHead) -> None:
        """Leave messages as they are."""

    async def prepare(self) -> None:
        """Wait for nothing."""


class Answered(BodyInCapitals):
    """Answer some requests in the host's place, once they may."""

    def __init__(self, may_answer: asyncio.Event):
        self._may_answer = may_answer

    async def answer(self, body: bytes) -> WholeAnswer | None:  # type: ignore[override]
        """Return it then."""
        await self._may_answer.wait()
        if body == b"bad":
            raise Rejected(403, "this body")
        return WholeAnswer(status=200, body=b'{"a": 1}') if body == b"mine" else None


class Answers(Edits):
    """Have bodies of POST answered."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    def body_edit(self, head: RequestHead) -> Answered | None:
        """Ask for those of POST."""
        return Answered(self.may_answer) if head.method == b"POST" else None


def in_relay(
    claim: Callable[[Relayed], Awaitable[None]], *, prepares: Callable[[Site], None] = lambda _: None,
    edits: OpenedEdits | Edits | None = None,
) -> None:  # fmt: skip
    """Run what a test claims with a guest, a relay and a site."""

    async def run() -> None:
        async with relayed(prepares, edits) as it:
            await claim(it)

    in_loop(run)


@asynccontextmanager
async def relayed(
    prepares: Callable[[Site], None] = lambda _: None, edits: OpenedEdits | Edits | None = None
) -> AsyncIterator[Relayed]:
    """Connect a guest to a site."""
    site, loop = Site(), asyncio.get_running_loop()
    prepares(site)
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    it = Relayed(site, listener.getsockname())
    upstream = socket.create_connection(server.sockets[0].getsockname())
    guest = socket.create_connection(it.address)
    ends = (SocketStream(listener.accept()[0]), SocketStream(upstream))
    work = relay_http2(*ends, HOST, 443, it.refuse, edits=edits or Edits(), idle_s=20)
    task = loop.create_task(work)
    it.guest = Http2End(*await asyncio.open_connection(sock=guest), is_client=True)
    try:
        yield it
    finally:
        await it.guest.close()
        await task
        for end in site.ends:
            await end.close()
        listener.close()
        server.close()


PLACE = RequestTarget(host=HOST, port=443, is_tls=True)
GOOD = {":method": "GET", ":scheme": "https", ":authority": HOST, ":path": "/"}
CONNECT = {**GOOD, ":method": "CONNECT", ":protocol": "websocket"}


def rows(head: dict[str, str], *more: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as they come."""
    return [(name.encode(), value.encode("latin-1")) for name, value in (*head.items(), *more)]


@pytest.mark.parametrize(
    "headers",
    [
        rows({**GOOD, ":authority": "b.example"}),
        rows({**GOOD, ":authority": f"{HOST}@b.example"}),
        rows({**GOOD, ":authority": f"{HOST}:80"}),
        rows({**GOOD, ":authority": ""}),
        rows(GOOD, ("host", "b.example")),
        rows(GOOD, ("host", HOST), ("host", HOST)),
        rows(GOOD, (":authority", "b.example")),
        rows(GOOD, ("x", "1"), (":path", "/b")),
        [(b"x", b"1"), *rows(GOOD)],
        rows({**GOOD, ":status": "200"}),
        rows({**GOOD, ":scheme": "http"}),
        rows({**GOOD, ":path": "https://b.example/"}),
        rows({**GOOD, ":path": "*"}),
        rows({**GOOD, ":path": ""}),
        rows({**GOOD, ":path": "/ HTTP/1.1\r\nhost: b.example"}),
        rows({**GOOD, ":path": "/a b"}),
        rows({**GOOD, ":method": "GET /b HTTP/1.1"}),
        rows({**GOOD, ":method": "CONNECT"}),
        rows({**GOOD, ":method": "connect", ":protocol": "websocket"}),
        rows({**GOOD, ":protocol": "websocket"}),
        rows({**CONNECT, ":protocol": "connect-udp"}),
        rows({":method": "CONNECT", ":authority": "b.example:443"}),
        *(rows({name: value for name, value in GOOD.items() if name != missing}) for missing in GOOD),
        rows(GOOD, ("X-Key", "1")),
        rows(GOOD, ("x key", "1")),
        rows(GOOD, ("", "1")),
        rows(GOOD, ("x", "1\r\nx-api-key: 2")),
        rows(GOOD, ("x", "1\0")),
        rows(GOOD, ("x", " 1")),
        rows(GOOD, ("connection", "x")),
        rows(GOOD, ("upgrade", "websocket")),
        rows(GOOD, ("transfer-encoding", "chunked")),
        rows(GOOD, ("transfer_encoding", "chunked")),
        rows(GOOD, ("content_length", "1")),
        rows(GOOD, ("content-length", "1"), ("content-length", "1")),
        rows(GOOD, ("content-length", "+1")),
        rows(GOOD, ("te", "gzip")),
        rows(GOOD, *(("x", "1"),) * 200),
    ],
    ids=lambda headers: b" ".join(b"=".join(row) for row in headers)[-60:].decode("latin-1"),
)
def test_a_request_that_servers_read_in_several_ways_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    """Of each pseudo header there is one, the host is that of the connection, and a header would be one in HTTP/1."""
    with pytest.raises(Rejected):
        read_http2_request(headers, PLACE, takes_web_sockets=True)


def test_a_request_is_written_anew() -> None:
    """The host is the decided one, and a web socket is for edits what it is in HTTP/1."""
    plain = read_http2_request(rows(GOOD, ("proxy-authorization", "x"), ("a", "1")), PLACE, takes_web_sockets=False)
    assert [tuple(header) for header in plain.headers] == [
        (b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a.example"), (b":path", b"/"), (b"a", b"1"),
    ]  # fmt: skip
    socket_request = read_http2_request(rows(CONNECT), PLACE, takes_web_sockets=True)
    assert socket_request.edited.method == b"GET"
    assert (b"upgrade", b"websocket") in socket_request.edited.headers
    assert (b":protocol", b"websocket") in socket_request.headers
    with pytest.raises(Rejected, match="the host has not said"):
        read_http2_request(rows(CONNECT), PLACE, takes_web_sockets=False)


def settings(*values: tuple[int, int]) -> bytes:
    """Write settings."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack("!HI", *value) for value in values))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        PREFACE + frame(0, 0, 1, b"x" * 16_385),
        PREFACE + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 20,
        PREFACE + (frame(HEADERS, 0, 1, b"x" * 16_384) + frame(CONTINUATION, 0, 1, b"x" * 16_384)) * 2,
        PREFACE + frame(HEADERS, 0, 1, b"\x82") + frame(0, 0, 1, b"x"),
        PREFACE + frame(HEADERS, 0, 1, b"\x82") + frame(CONTINUATION, 4, 3),
        PREFACE + frame(CONTINUATION, 4, 1),
        PREFACE + frame(HEADERS, 4, 1, b"\x20" * 100 + b"\x82"),
        PREFACE + frame(HEADERS, 4, 1, b"\x3f\xe1\x1f" * 3 + b"\x82"),
        PREFACE + frame(HEADERS, 4 | 8, 1, b"\x09abc"),
        PREFACE + frame(PUSH, 4, 1, struct.pack("!I", 2) + b"\x82"),
        PREFACE + frame(SETTINGS, 0, 0, b"12345"),
        PREFACE + frame(PING, 0, 0, bytes(8)) * 2000,
        PREFACE + settings((1, 0), (1, 4096)) * 2000,
        PREFACE + frame(RST, 0, 1, bytes(4)) * 2000,
        PREFACE + frame(2, 0, 1, bytes(5)) * 2000,
        PREFACE + frame(0, 0, 1) * 2000,
        PREFACE + frame(200, 0, 0) * 2000,
    ],
    ids=lambda data: data[24:40].hex(),
)
def test_frames_that_cost_more_than_they_say_end_the_connection(data: bytes) -> None:
    """Blocks of headers without end, bombs, and floods of what carries nothing."""
    reader = FrameReader(has_preface=True, most_block_bytes=32 << 10)
    with pytest.raises(FrameError):
        list(reader.feed(data, 0.0))


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_frames_are_read_in_any_pieces(size: int) -> None:
    """Headers come as a whole, without padding and priorities; the table of headers stays small."""
    data = PREFACE + settings((1, 1 << 31), (99, 1), (4, 7)) + frame(2, 0, 1, bytes(5)) + frame(10, 0, 0, b"x")
    data += frame(HEADERS, 1 | 8 | 32, 1, b"\x02" + bytes(5) + b"\x82\x84" + b"\0\0") + frame(
        CONTINUATION, 4, 1, b"\x87"
    )
    reader = FrameReader(has_preface=True, most_block_bytes=100)
    frames = [read for at in range(0, len(data), size) for read in reader.feed(data[at : at + size], 0.0)]
    assert [bytes(read) for read in frames] == [settings((1, 4096), (4, 7)), frame(HEADERS, 5, 1, b"\x82\x84\x87")]


def test_a_request_is_answered_in_the_place_of_its_host() -> None:
    """While others go on; one that the guest gives up meanwhile is forgotten."""
    edits = Answers()

    async def claim(it: Relayed) -> None:
        bodies = (b"mine", b"bad", b"hers", b"mine")
        asked = [it.guest.ask([], body, method="POST", path="/size") for body in bodies]
        it.guest.h2.reset_stream(asked[3])
        it.guest.flush()
        assert (await it.guest.answer_to(it.guest.ask(KEY, path="/only-head"))).headers[":status"] == "200"
        edits.may_answer.set()
        mine, bad, hers = [await it.guest.answer_to(stream_id) for stream_id in asked[:3]]
        assert (mine.headers["content-type"], bytes(mine.data)) == ("application/json", b'{"a": 1}')
        assert bad.headers[":status"] == "403"
        assert bytes(hers.data) == b"5"
        paths = [stream.headers[":path"] for stream in it.site.ends[0].streams.values() if stream.headers]
        assert sorted(paths) == ["/only-head", "/size"]

    in_relay(claim, edits=edits)


def test_values_go_up_and_none_comes_down() -> None:
    """In heads, bodies and trailers; an answer of headers alone stays one, as gRPC needs it."""

    async def claim(it: Relayed) -> None:
        first, second = it.guest.ask(KEY, path="/trailers"), it.guest.ask(KEY, path="/only-head")
        answer, only_head = await it.guest.answer_to(first), await it.guest.answer_to(second)
        assert answer.informed == ["103"]
        assert answer.headers["x-echo"] == MARK
        assert bytes(answer.data) == f"a {MARK} b".encode()
        assert answer.trailers == {"grpc-status": "0", "grpc-message": MARK}
        assert only_head == Exchanged(headers={":status": "200", "grpc-status": MARK}, has_ended=True)
        assert [stream.headers.get("x-api-key") for stream in it.site.ends[0].streams.values()][1:] == [VALUE, VALUE]

    in_relay(claim)


def test_a_refusal_is_an_answer_and_others_go_on() -> None:
    """With the sentence, on its stream alone; nothing of it reaches the host."""

    async def claim(it: Relayed) -> None:
        going_on = it.guest.ask([], b"one", ends=False, method="PUT", path="/echo")
        await it.guest.until(lambda: it.guest.streams[going_on].data == b"one")
        refused = it.guest.ask([("x-api-key", "sk-another-key-0123")], b"body of it")
        answer = await it.guest.answer_to(refused)
        assert answer.headers[":status"] == "403"
        assert "a credential in the header" in answer.data.decode()
        assert answer.data.decode().strip() == f"refused: {it.refused[0]}"
        it.guest.h2.send_data(going_on, b"two")
        it.guest.flush()
        await it.guest.until(lambda: it.guest.streams[going_on].data == b"onetwo")
        assert [stream.headers[":path"] for stream in it.site.ends[0].streams.values() if stream.headers] == ["/echo"]

    in_relay(claim)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/gzip", "502", "compressed"),
        ("/malformed", "502", "malformed"),
        ("/many", "502", "headers"),
        ("/early", "413", ""),
    ],
)
def test_what_cannot_be_searched_is_not_passed_on(path: str, status: str, says: str) -> None:
    """The guest reads why."""

    async def claim(it: Relayed) -> None:
        answer = await it.guest.answer_to(it.guest.ask(KEY, path=path))
        assert answer.headers[":status"] == status
        assert says in answer.data.decode()

    in_relay(claim)


def test_the_text_of_headers_is_not_packed() -> None:
    """That takes the square of its length: one head would hold up all connections."""
    side = Side(cast("Stream", None), is_host=True, window_bytes=1 << 20)
    side.begin()
    side.send_headers(1, [(b":method", b"GET"), (b"x", b"v" * 9000)], ends=True)
    assert b"v" * 9000 in side.next_batch()


def test_a_body_that_is_edited_is_sent_with_its_new_length() -> None:
    """Several at once, longer than the windows; and one that is too long, or not wanted, is refused."""

    async def claim(it: Relayed) -> None:
        bodies = [it.guest.ask([("content-length", "60000")], None, method="POST", path="/size") for _ in range(3)]
        for stream_id in bodies:
            for _ in range(6):
                it.guest.h2.send_data(stream_id, b"x" * 10_000)
                it.guest.flush()
                await it.guest.until(lambda at=stream_id: it.guest.h2.local_flow_control_window(at) >= 10_000)  # type: ignore[misc]
            it.guest.h2.end_stream(stream_id)
            it.guest.flush()
        for stream_id in bodies:
            assert (await it.guest.answer_to(stream_id)).data == b"60001"
        assert [stream.headers.get("content-length") for stream in it.site.ends[0].streams.values()][1:] == [
            "60001"
        ] * 3
        assert (await it.guest.answer_to(it.guest.ask([], b"no", method="POST"))).headers[":status"] == "403"
        too_long = it.guest.ask([], None, method="POST")
        while not it.guest.streams[too_long].headers:
            it.guest.h2.send_data(too_long, b"x" * min(10_000, it.guest.h2.local_flow_control_window(too_long)))
            it.guest.flush()
            await asyncio.sleep(0)
        assert it.guest.streams[too_long].headers[":status"] == "413"

    in_relay(claim)


def test_tokens_of_an_answer_are_captured() -> None:
    """And come back in a later request, as over HTTP/1.1: the answer has no length, since it is read whole."""
    grants: list[Grant] = []
    capture = Capture(url=f"https://{HOST}/token", hosts=(HOST,))
    captures = Captures([("LOGIN", capture)], grants, lambda _: None)
    edits = OpenedEdits(
        lambda head: head, HostCredentials(HOST, grants),
        HostFields(HOST, grants, captures.rows, WeakSet(), lambda _: None), lambda _: None,
        partial(edit_of_answer, captures, HOST, lambda: AnswerRedaction(StreamRedactor(pairs_of(grants)))),
        partial(MessageRedaction, lambda: StreamRedactor([]), lambda: 0.0),
        partial(MessageWatch, lambda _: None, 1, lambda: 0.0),
    )  # fmt: skip

    async def claim(it: Relayed) -> None:
        kind = [("content-type", "application/json")]
        answer = await it.guest.answer_to(it.guest.ask(kind, b'{"code": "a"}', method="POST", path="/token"))
        tokens = json.loads(answer.data)
        assert "content-length" not in answer.headers
        assert {grant.placeholder.decode() for grant in grants} == set(tokens.values())
        body = json.dumps({"refresh_token": tokens["refresh_token"]}).encode()
        bearer = ("authorization", f"Bearer {tokens['access_token']}")
        again = await it.guest.answer_to(it.guest.ask([*kind, bearer], body, method="POST", path="/token"))
        assert json.loads(again.data) == tokens
        *_, stream = it.site.ends[0].streams.values()
        assert json.loads(stream.data) == {"refresh_token": VALUE[::-1]}
        assert stream.headers["authorization"] == f"Bearer {VALUE}"

    in_relay(claim, edits=edits)


def test_a_slow_guest_slows_the_host() -> None:
    """What one stream has no room for waits at the host; other streams go on."""

    async def claim(it: Relayed) -> None:
        it.guest.keeps_windows = True
        it.guest.ask(path="/forever")
        await it.guest.until(lambda: it.guest.streams[1].data[65_534:] != b"")
        sent_bytes = -1
        while sent_bytes < it.site.sent_bytes:
            sent_bytes = it.site.sent_bytes
            await asyncio.sleep(0.1)
        assert sent_bytes < 65_535 + (1 << 20) + MOST_UNSENT_BYTES
        assert (await it.guest.answer_to(it.guest.ask())).headers == {":status": "200"}

    in_relay(claim)


def test_a_slow_host_slows_the_guest() -> None:
    """The guest's window is not given back before the host's is."""

    async def claim(it: Relayed) -> None:
        stream_id = it.guest.ask([], b"x" * 10, ends=False, method="PUT", path="/size")
        sent_bytes = 10
        for _ in range(100):
            room = min(it.guest.h2.local_flow_control_window(stream_id), 16_384)
            it.guest.h2.send_data(stream_id, b"x" * room)
            sent_bytes += room
            it.guest.flush()
            await asyncio.sleep(0.002)
        assert it.guest.h2.local_flow_control_window(stream_id) == 0
        assert sent_bytes < 3 * 65_536

    in_relay(claim, prepares=lambda site: setattr(site, "keeps_windows", True))


def test_more_streams_than_the_host_takes_wait() -> None:
    """And all are answered."""

    async def claim(it: Relayed) -> None:
        asked = [it.guest.ask(path="/only-head") for _ in range(60)]
        assert {(await it.guest.answer_to(stream_id)).headers[":status"] for stream_id in asked} == {"200"}

    in_relay(claim)


def test_resets_pass_both_ways() -> None:
    """With their codes."""

    async def claim(it: Relayed) -> None:
        assert (await it.guest.answer_to(it.guest.ask(path="/reset"))).reset == 8
        stream_id = it.guest.ask([], b"x", ends=False, method="PUT", path="/echo")
        await it.guest.until(lambda: bool(it.guest.streams[stream_id].data))
        it.guest.h2.reset_stream(stream_id, 5)
        it.guest.flush()
        host = it.site.ends[0]
        await host.until(lambda: any(stream.reset == 5 for stream in host.streams.values()))

    in_relay(claim)


def test_a_host_that_ends_lets_streams_go_on() -> None:
    """After GOAWAY those that it has begun are answered; the guest is told, and others may be sent again."""

    async def claim(it: Relayed) -> None:
        reader, writer = it.guest.reader, it.guest.writer
        await it.guest.stop_reading()  # the library takes nothing behind a GOAWAY
        request = b"\x82\x87\x41\x09a.example\x44\x05/echo"
        writer.write(frame(HEADERS, 4, 1, request) + frame(0, 0, 1, b"one"))
        heard = bytearray()
        while b"one" not in heard:
            heard += await reader.read(1000)
        it.site.ends[0].writer.write(frame(GOAWAY, 0, 0, struct.pack("!II", 1, 0)))
        while frame(GOAWAY, 0, 0, struct.pack("!II", 1, 0)) not in heard:
            heard += await reader.read(1000)
        writer.write(frame(HEADERS, 5, 3, request) + frame(0, 0, 1, b"two"))
        while b"two" not in heard or frame(RST, 0, 3, struct.pack("!I", 7)) not in heard:
            heard += await reader.read(1000)
        assert it.site.ends[0].streams.keys() <= {0, 1}

    in_relay(claim)


def test_a_host_that_is_gone_is_told() -> None:
    """By 502 where there is no answer yet."""

    async def claim(it: Relayed) -> None:
        stream_id = it.guest.ask([], b"x", ends=False, method="PUT", path="/size")
        await it.guest.until(lambda: bool(it.site.ends) and len(it.site.ends[0].streams) > 1)
        it.site.ends[0].writer.close()
        assert (await it.guest.answer_to(stream_id)).headers[":status"] == "502"

    in_relay(claim)


@pytest.mark.parametrize(
    "data",
    [
        frame(PING, 0, 0, bytes(8)) * 3000,
        frame(HEADERS, 4, 1, b"\x40\x01a\x7f\x81\x1f" + b"x" * 4000 + b"\xbe" * 1000),
        b"".join(frame(HEADERS, 4, number, b"\x82\x87\x84\x41\x09a.example") for number in range(1, 301, 2)),
        frame(WINDOW, 0, 0, struct.pack("!I", 0)),
        frame(WINDOW, 0, 0, struct.pack("!I", 0x7FFFFFFF)) * 2,
        settings((4, 1 << 31)),
        frame(0, 0, 7, b"x"),
        frame(HEADERS, 5, 2, b"\x82"),
        frame(HEADERS, 5, 1, b"\xff\xff\xff\xff\xff"),
    ],
    ids=lambda data: data[:16].hex(),
)
def test_a_guest_that_breaks_the_protocol_is_told_and_ended(data: bytes) -> None:
    """By GOAWAY; nothing of it makes the relay fail."""

    async def claim(it: Relayed) -> None:
        await it.guest.until(lambda: bool(it.guest.settings))
        await it.guest.stop_reading()
        it.guest.writer.write(data)
        assert b"\0\0\x08\x07\0\0\0\0\0" in await it.guest.reader.read()

    in_relay(claim)
