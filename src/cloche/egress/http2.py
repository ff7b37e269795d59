"""The relay of HTTP/2 between a guest and one host: each request is decided, written anew, and answered on its stream.

Theory of operation: both connections speak HTTP/2, each with its own numbers of streams. A side is a connection: one
task reads its frames and acts on them, another one writes. A request becomes an *exchange* with two flows. The bytes of
a flow are kept until the other side's windows take them, and only then does their sender get room for more, so a slow
reader on one side slows the other, and what is held is bounded by the windows that this relay gives. What has no window
(headers, resets, acknowledgements) is bounded too: nothing is read from any side while much waits to be written. The
guest hears nothing before the host's settings are there, since its own repeat whether the host takes web sockets.

A refused request is answered on its stream, and the others go on. A connection that breaks the protocol ends. What the
host ends by GOAWAY ends for the guest in the same way: streams that go on, go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    InformationalResponseReceived,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

from .http import LINGER_S, MOST_LINGER_BYTES, TEXT, AnswerBody, Edits, Turn
from .http2_frames import GOAWAY, HEADERS, Frame, FrameError
from .http2_request import Http2Request, read_http2_answer, read_http2_request, read_http2_trailers
from .http2_side import GUEST_WINDOW_BYTES, Flow, Side
from .http_answer import AnswerRefused, WholeAnswer
from .http_request import Headers, Rejected, RequestTarget
from .stream import Stream, Turns, idle_limit, sharing

IDLE_S, SETTINGS_S = 300.0, 20.0
MOST_COLLECTING = 16  # requests whose bodies have to be read, one of them after the other
LEAST_WINDOW_BYTES = 128 << 10
MOST_UNSENT_BYTES = 256 << 10
_READ_BYTES, _PART_BYTES = 256 << 10, 512


async def relay_http2(
    guest: Stream, upstream: Stream, host: str, port: int, refuse: Callable[[str], str],
    *, edits: Edits, idle_s: float = IDLE_S, turns: Turns | None = None,
) -> None:  # fmt: skip
    """Carry a guest's requests for `host` to `upstream`, a connection to it, and the answers; close both at the end.

    Both speak HTTP/2. The other arguments are those of `http.relay`. Returns at the end, for any cause.
    """
    place = RequestTarget(host=host, port=port, is_tls=edits.is_tls, edit=edits.edit)
    with sharing() as size:
        window_bytes = max(LEAST_WINDOW_BYTES, 4 * size())
        relay = _Relay(guest, upstream, place, refuse, edits, turns or Turns(), window_bytes)
        try:
            async with idle_limit(idle_s) as note:
                relay.note = note
                await relay.serve()
            await relay.finish_guest()
        except (OSError, ProtocolError, FrameError):  # an end is gone or broke the protocol, or nothing moved for long
            pass
        finally:
            guest.close()
            upstream.close()


class _Exchange:
    """One request and its answer; `on_done` is called when either has passed."""

    def __init__(self, request: Http2Request, relay: _Relay, guest_id: int):
        self.request, self.guest_id = request, guest_id
        on_done = partial(relay.finish, self)
        self.up, self.down = Flow(relay.guest, relay.host, on_done), Flow(relay.host, relay.guest, on_done)
        self.up.source_id = self.down.target_id = guest_id
        self.body = relay.edits.body_edit(request.edited)
        self.answer = relay.edits.answer_edit(request.edited)
        self.messages = relay.edits.message_edit(request.edited)
        bounds = [reader.most_bytes for reader in (self.body, request.edited.signing) if reader is not None]
        self.most_bytes = min(bounds, default=None)  # of a body that has to be read
        self.content = bytearray()  # of such a body
        self.added: Headers = ()  # headers that depend on it
        self.status = 0  # of an answer whose head the guest has

    @property
    def host_id(self) -> int:
        """Return the number of the host's stream, 0 before there is one."""
        return self.up.target_id

    def parts(self, data: bytes) -> list[bytes]:
        """Return data as it may be looked at in one turn: the frames of a web socket may be tiny."""
        if not self.request.is_upgrade:
            return [data]
        return [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]

    def open(self, host_id: int) -> None:
        """Note the host's stream."""
        self.up.target_id = self.down.source_id = host_id

    def edit_body(self) -> None:
        """Have the body that was read edited, and the request signed. Raises Rejected."""
        content, signing = bytes(self.content), self.request.edited.signing
        content = content if self.body is None else self.body.edit(content)
        self.body = None  # which counts as one that is read
        self.added = () if signing is None else signing.headers(content)
        self.content.clear()
        self.up.owed_bytes = 0
        self.up.held += content


class _Relay:
    """The exchanges of one guest's connection."""

    def __init__(
        self, guest: Stream, host: Stream, place: RequestTarget, refuse: Callable[[str], str], edits: Edits,
        turns: Turns, window_bytes: int,
    ):  # fmt: skip
        self.guest = Side(guest, is_host=False, window_bytes=GUEST_WINDOW_BYTES)
        self.host = Side(host, is_host=True, window_bytes=window_bytes)
        self.edits, self._place, self._refuse, self._turns = edits, place, refuse, turns
        self._exchanges: dict[int, _Exchange] = {}  # by the guest's number
        self._by_host: dict[int, _Exchange] = {}
        self._waiting: deque[_Exchange] = deque()  # for the host to take one more
        self._collecting: deque[_Exchange] = deque()  # the first of them gets room for its body
        self._answering: set[asyncio.Task[None]] = set()
        self._room, self._has_settings = asyncio.Event(), asyncio.Event()
        self._ends = self._has_said_end = False  # nothing new begins; the guest was told
        self._dropped_bytes = 0
        self.note: Callable[[], None] = lambda: None

    async def serve(self) -> None:
        """Carry exchanges until either side has ended, and those that may go on have passed."""
        self.host.begin()
        guest = _start(self._read(self.guest, self._take_of_guest), self._write_guest())
        host = _start(self._read(self.host, self._take_of_host), self._write(self.host))
        try:
            await asyncio.wait(guest | host, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in guest):
                await _cancel(host)
                self._lose_host()
                await asyncio.wait(guest, return_when=asyncio.FIRST_COMPLETED)
            errors = [task.exception() for task in guest if task.done()]
            if broken := [error for error in errors if isinstance(error, ProtocolError | FrameError)]:
                self._break_off(isinstance(broken[0], FrameError))
                await asyncio.wait(guest, timeout=LINGER_S)
        finally:
            await _cancel(guest | host | self._answering)

    async def finish_guest(self) -> None:
        """Let the guest read what was sent: closing with bytes unread would reset the connection."""
        self.guest.stream.end_sending()
        budget = MOST_LINGER_BYTES
        async with asyncio.timeout(LINGER_S):
            while budget > 0 and (data := await self.guest.stream.receive(_READ_BYTES)):
                budget -= len(data)

    async def _read(self, side: Side, take: Callable[[Frame], Iterator[None]]) -> None:
        loop, turn = asyncio.get_running_loop(), Turn(self._turns)
        with sharing() as size:
            while data := await side.stream.receive(min(size(), _READ_BYTES)):
                self.note()
                for frame in side.frames.feed(data, loop.time()):
                    if frame.kind == HEADERS and side is self.guest:
                        await self.edits.prepare()
                    for _ in take(frame):
                        await turn.pass_on()
                    self.guest.wake()
                    self.host.wake()
                    await turn.pass_on()
                    await self._await_room()

    async def _await_room(self) -> None:
        """Wait while much is to be written to either side."""
        while max(len(self.guest.unsent), len(self.host.unsent)) > MOST_UNSENT_BYTES:
            self._room.clear()
            await self._room.wait()

    async def _write(self, side: Side) -> None:
        turn = Turn(self._turns)
        while not (self._ends and not self._exchanges and side.has_nothing_to_send):
            await side.wakes.wait()
            side.wakes.clear()
            while batch := side.next_batch():
                await side.stream.send(batch)
                self.note()
                self._room.set()
                await turn.pass_on()

    async def _write_guest(self) -> None:
        async with asyncio.timeout(SETTINGS_S):
            await self._has_settings.wait()
        self.guest.begin(takes_web_sockets=self._takes_web_sockets)
        await self._write(self.guest)
        if not self._has_said_end:  # for some clients nothing may come behind it
            self.guest.send_goaway(ErrorCodes.NO_ERROR)
            await self.guest.stream.send(self.guest.next_batch())

    @property
    def _takes_web_sockets(self) -> bool:
        return self.host.h2.remote_settings.enable_connect_protocol == 1

    # What the guest sends.

    def _take_of_guest(self, frame: Frame) -> Iterator[None]:
        """Act on a frame, part by part."""
        if frame.kind == GOAWAY:  # it begins nothing new
            return
        for event in self.guest.h2.receive_data(bytes(frame)):
            if isinstance(event, RequestReceived):
                self._begin(event.stream_id, event.headers, ends=event.stream_ended is not None)
            elif isinstance(event, DataReceived):
                yield from self._take_body(event.stream_id, event.data, event.flow_controlled_length)
            elif isinstance(event, StreamEnded):
                self._end_body(event.stream_id)
            elif isinstance(event, StreamReset) and (exchange := self._exchanges.get(event.stream_id)):
                self._give_up(exchange, event.error_code)

    def _begin(self, guest_id: int, headers: Headers, *, ends: bool) -> None:
        """Decide about a request."""
        if self._ends:
            self.guest.reset(guest_id, ErrorCodes.REFUSED_STREAM)
            return
        try:
            request = read_http2_request(headers, self._place, takes_web_sockets=self._takes_web_sockets)
            exchange = _Exchange(request, self, guest_id)
        except Rejected as rejected:
            self._say(guest_id, rejected.status, self._refuse(rejected.what), method=dict(headers).get(b":method"))
            return
        self._exchanges[guest_id] = exchange
        exchange.up.has_ended = ends
        if exchange.most_bytes is None:
            self._open(exchange)
        elif len(self._collecting) >= MOST_COLLECTING:
            self._give_up(exchange, ErrorCodes.REFUSED_STREAM)
        else:
            self._collecting.append(exchange)
            if request.awaits_continue and not ends:
                self.guest.send_headers(guest_id, [(b":status", b"100")], ends=False)

    def _take_body(self, guest_id: int, data: bytes, size: int) -> Iterator[None]:
        exchange = self._exchanges.get(guest_id)
        if exchange is None:  # it was answered here
            self.guest.h2.acknowledge_received_data(size, guest_id)
            self._dropped_bytes += size
            if self._dropped_bytes > MOST_LINGER_BYTES:
                self.guest.reset(guest_id, ErrorCodes.NO_ERROR)
            return
        exchange.up.owed_bytes += size
        if exchange.most_bytes is not None:
            self._collect(exchange, exchange.most_bytes, data, size)
            return
        try:
            for part in exchange.parts(data):
                exchange.up.held += part if exchange.messages is None else exchange.messages.feed(part)
                yield
        except AnswerRefused:  # a web socket that is none
            self._give_up(exchange, ErrorCodes.PROTOCOL_ERROR)
            return
        exchange.up.pay()
        self.host.add(exchange.up)

    def _end_body(self, guest_id: int) -> None:
        exchange = self._exchanges.get(guest_id)
        if exchange is None:
            return
        exchange.up.has_ended = True
        if exchange.most_bytes is None:
            self.host.add(exchange.up)
        elif exchange.body is not None and exchange.body.answer is not None:
            self._collecting.remove(exchange)  # whose body is there; the answer may take long
            self._give_room()
            task = asyncio.create_task(self._answer(exchange, exchange.body.answer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._open_edited(exchange)

    def _open_edited(self, exchange: _Exchange) -> None:
        try:
            exchange.edit_body()
        except Rejected as rejected:
            self._reject(exchange, rejected)
        else:
            self._open(exchange)

    async def _answer(self, exchange: _Exchange, ask: AnswerBody) -> None:
        """Answer a request here, or have it go on."""
        try:
            answer = await ask(bytes(exchange.content))
        except Rejected as rejected:
            self._reject(exchange, rejected)
        else:
            if self._exchanges.get(exchange.guest_id) is not exchange:
                return
            if answer is None:
                self._open_edited(exchange)
            else:
                self._forget(exchange)
                self._give(exchange.guest_id, answer, has_body=True)
        self.guest.wake()
        self.host.wake()

    def _collect(self, exchange: _Exchange, most_bytes: int, data: bytes, size: int) -> None:
        """Keep a body that has to be read. The connection has room for others, so that these do not wait for it."""
        exchange.content += data
        if size:
            self.guest.h2.increment_flow_control_window(size)
        if len(exchange.content) > most_bytes:
            what = f"a request whose body has more than {most_bytes} bytes where it has to be read"
            self._reject(exchange, Rejected(413, what))
        self._give_room()

    def _give_room(self) -> None:
        """Let the first body that has to be read come on."""
        if self._collecting and (flow := self._collecting[0].up).owed_bytes:
            with suppress(ProtocolError):
                self.guest.h2.increment_flow_control_window(flow.owed_bytes, flow.source_id)
            flow.owed_bytes = 0

    def _open(self, exchange: _Exchange) -> None:
        self._waiting.append(exchange)
        self._open_waiting()

    def _open_waiting(self) -> None:
        """Send heads of requests to the host, as far as it takes more."""
        while self._waiting and self.host.has_room_for_stream:
            exchange = self._waiting.popleft()
            request, flow = exchange.request, exchange.up
            is_read = exchange.most_bytes is not None
            headers = request.headers_for(len(flow.held), exchange.added) if is_read else request.headers
            exchange.open(self.host.h2.get_next_available_stream_id())
            self._by_host[exchange.host_id] = exchange
            ends = flow.has_ended and not flow.held
            self.host.send_headers(exchange.host_id, headers, ends=ends)
            if ends:
                flow.finish()
            self.host.add(flow)

    def _reject(self, exchange: _Exchange, rejected: Rejected) -> None:
        self._forget(exchange)
        self._say(exchange.guest_id, rejected.status, self._refuse(rejected.what))

    # What the host sends.

    def _take_of_host(self, frame: Frame) -> Iterator[None]:
        """Act on a frame, part by part."""
        if frame.kind == GOAWAY:
            self._take_goaway(frame.content)
            return
        for event in self.host.h2.receive_data(bytes(frame)):
            if isinstance(event, RemoteSettingsChanged):
                self._has_settings.set()
                self._open_waiting()
            elif (exchange := self._by_host.get(getattr(event, "stream_id", 0) or 0)) is not None:
                try:
                    yield from self._take_answer(exchange, event)
                except AnswerRefused as refused:
                    self._fail(exchange, str(refused.strerror))
        self._open_waiting()

    def _take_answer(self, exchange: _Exchange, event: Event) -> Iterator[None]:
        flow = exchange.down
        if isinstance(event, ResponseReceived | InformationalResponseReceived):
            self._take_head(exchange, event.headers, ends=getattr(event, "stream_ended", None) is not None)
        elif isinstance(event, DataReceived):
            flow.owed_bytes += event.flow_controlled_length
            for part in exchange.parts(event.data):
                flow.held += exchange.answer.feed(part) if exchange.answer is not None else part
                yield
            flow.pay()
        elif isinstance(event, TrailersReceived):
            trailers = read_http2_trailers(event.headers)
            flow.trailers = exchange.answer.head(exchange.status, trailers) if exchange.answer is not None else trailers
        elif isinstance(event, StreamEnded):
            flow.held += exchange.answer.end() if exchange.answer is not None else b""
            flow.has_ended = True
        elif isinstance(event, StreamReset):
            self._take_reset(exchange, event.error_code)
        self.guest.add(flow)

    def _take_head(self, exchange: _Exchange, raw: Headers, *, ends: bool) -> None:
        status, headers = read_http2_answer(raw)
        is_switch = exchange.request.is_upgrade and 200 <= status < 300
        if exchange.answer is not None:
            headers = exchange.answer.head(101 if is_switch else status, headers)
            if not exchange.answer.keeps_length:
                headers = [header for header in headers if header[0] != b"content-length"]
        exchange.status = status if status >= 200 else 0
        if ends and exchange.answer is not None:
            exchange.down.held += exchange.answer.end()
        is_whole = ends and not exchange.down.held
        self.guest.send_headers(exchange.guest_id, [(b":status", b"%d" % status), *headers], ends=is_whole)
        if is_whole:
            exchange.down.finish()

    def _take_reset(self, exchange: _Exchange, code: int) -> None:
        """End an exchange as the host did; an answer that is complete passes before."""
        if exchange.down.has_ended:
            exchange.up.drop()
            self.finish(exchange)
        else:
            self.guest.reset(exchange.guest_id, code)
            self._forget(exchange)

    def _take_goaway(self, content: bytes) -> None:
        """Begin nothing new; what the host has not begun can be sent again on another connection."""
        last_id, code = int.from_bytes(content[:4], "big") & 0x7FFFFFFF, int.from_bytes(content[4:8], "big")
        for exchange in list(self._exchanges.values()):
            if not 0 < exchange.host_id <= last_id:
                self._give_up(exchange, ErrorCodes.REFUSED_STREAM)
        self._end(code)

    def _lose_host(self) -> None:
        """Answer what will have no answer any more."""
        for exchange in list(self._exchanges.values()):
            if exchange.down.has_ended:
                exchange.up.drop()
                self.finish(exchange)
            else:
                self._fail(exchange, "the connection ended before the answer did")
        self._end(None)

    # The ends of exchanges.

    def _end(self, code: int | None) -> None:
        """Take no new request, and say so with this code, or at the end."""
        if code is not None and not self._has_said_end:
            self.guest.send_goaway(code)
            self._has_said_end = True
        self._ends = True
        self.guest.wake()

    def _break_off(self, is_unsaid: bool) -> None:
        """End everything, since the guest broke the protocol; what `h2` notices, it says."""
        self._has_said_end = not is_unsaid
        for exchange in list(self._exchanges.values()):
            self._forget(exchange)
        self.guest.clear()
        self._end(ErrorCodes.PROTOCOL_ERROR if is_unsaid else None)

    def finish(self, exchange: _Exchange) -> None:
        """Take note that one direction of an exchange has passed."""
        if exchange.down.is_done and not exchange.up.is_done and not exchange.host_id:
            exchange.up.drop()
        if exchange.up.is_done and exchange.down.is_done:
            self._forget(exchange)
        elif exchange.up.is_done and exchange in self._collecting:
            self._collecting.remove(exchange)
            self._give_room()

    def _forget(self, exchange: _Exchange) -> None:
        self._exchanges.pop(exchange.guest_id, None)
        self._by_host.pop(exchange.host_id, None)
        for queue in (self._waiting, self._collecting):
            with suppress(ValueError):
                queue.remove(exchange)
        if exchange.most_bytes is not None:
            exchange.up.owed_bytes = 0
        for flow in (exchange.up, exchange.down):
            flow.drop()
        self._give_room()
        if self._ends:
            self.guest.wake()

    def _give_up(self, exchange: _Exchange, code: int) -> None:
        """End an exchange on both sides."""
        if exchange.host_id:
            self.host.reset(exchange.host_id, code)
        self.guest.reset(exchange.guest_id, code)
        self._forget(exchange)

    def _fail(self, exchange: _Exchange, why: str) -> None:
        """End an exchange for which there is no answer that can be passed on."""
        if exchange.host_id:
            self.host.reset(exchange.host_id, ErrorCodes.CANCEL)
        self._forget(exchange)
        if exchange.status:
            self.guest.reset(exchange.guest_id, ErrorCodes.INTERNAL_ERROR)
        else:
            sentence = f"{self._place.host}: {why}"
            self._say(exchange.guest_id, 502, sentence, method=exchange.request.edited.method)

    def _say(self, guest_id: int, status: int, sentence: str, *, method: bytes | None = None) -> None:
        """Answer in the host's place."""
        body = f"{sentence}\n".encode(errors="replace")
        self._give(guest_id, WholeAnswer(status=status, body=body, content_type=TEXT), has_body=method != b"HEAD")

    def _give(self, guest_id: int, answer: WholeAnswer, *, has_body: bool) -> None:
        body = answer.body
        headers = [
            (b":status", b"%d" % answer.status), (b"content-type", answer.content_type.encode()),
            (b"content-length", b"%d" % len(body)),
        ]  # fmt: skip
        self.guest.send_headers(guest_id, headers, ends=not has_body)
        flow = Flow(self.host, self.guest, lambda: None)
        flow.target_id, flow.has_ended, flow.is_done = guest_id, True, not has_body
        flow.held += body
        self.guest.add(flow)


def _start(*works: Coroutine[Any, Any, None]) -> set[asyncio.Task[None]]:
    return {asyncio.create_task(work) for work in works}


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """End tasks, and report a failure that is no broken connection."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError | ProtocolError | FrameError):
            raise error
