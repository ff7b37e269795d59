"""One connection to a service, as specified in `docs/service/wire.md`: calls, their streams, and credit in both
directions.

Theory of operation: frames are handled in the event loop, a bounded number in one turn. A consumer of content grants
the same amount of credit, so at most one window of each stream is buffered. Data beyond the window, and any other
violation of the specification, ends the connection. JSON that arrives in pieces is assembled up to a bound. A call
whose caller stopped waiting is cancelled, and kept until the service reports its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from cloche.channels import Channel, FrameTurns
from cloche.core.guest_json import check_parts, finite, refuse_constant
from cloche.core.remote import LOOKS, MOST_FIELDS, MOST_INLINE, MOST_MESSAGE, SERVICE_WIRE, HiddenText, RemoteAccount
from cloche.init import wire

from ..live_calls import CallChannel
from ..remote.failures import Failure, remote_error, scrub
from .websocket import WebSocket, connect

IN, OUT, ERR, JSON = wire.STDIN, wire.STDOUT, wire.STDERR, wire.REPORT
AT_ITS_PACE = (IN, wire.HOST_ANSWERS)  # of a program, which need not read
MOST_HELD = 128 << 20  # maximum of all incomplete JSON of one connection
MOST_PARTS = 400_000  # commas, lists and objects in one result; its files alone can have a tenth of that
MOST_EVENT_PARTS = 50_000  # in an event, which the event loop reads: more than a guest can show at once
MOST_FRAME_CHARS = MOST_INLINE + 4_096  # of JSON in one frame, which the event loop reads, too
MOST_COMMAS = 8_000  # of fields in the frame that opens a call: a service closes the connection for 20,000 values
_TOO_LARGE = {
    "type": "outcome-unknown",
    "detail": "this may have been done, but its answer, with all others at once, is too large; print less",
}
LONG_DIGITS, MOST_LONG_DIGITS = 40, 1 << 18  # digits of a long integer, and of all long integers in one text
MOST_VERSION = 40  # characters
MOST_NUMBER = (1 << 32) - 1

TakeEvent = Callable[[str, Mapping[str, Any]], None]
TakeData = Callable[[int, bytes], None]


class LinkLost(Exception):
    """Raised if the connection ends during a call. Nothing was received for the last `silent_s`."""

    def __init__(self, failure: Failure, detail: str, *, silent_s: float = 0.0):
        super().__init__(detail)
        self.failure, self.detail, self.silent_s = failure, detail, silent_s


class CallRefused(Exception):
    """Raised if a call ends with a problem."""

    def __init__(self, problem: Mapping[str, Any]):
        super().__init__(str(problem.get("detail"))[:1000])
        self.problem = problem


def read_json(data: bytes, max_parts: int = MOST_PARTS) -> Any:  # noqa: ANN401 - any JSON
    """Return the JSON value that a service sent.

    Raises ValueError for values that cannot be serialised, and for too many.

    The parser of `json` holds the GIL until its end, so a thread alone would not keep the event loop responsive.
    """
    text = data.decode()
    check_parts(text, max_parts)
    try:
        return json.loads(text, parse_constant=refuse_constant, parse_float=finite, parse_int=_Integers().read)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


class _Integers:
    """Parse the integers of one text. Parsing takes quadratic time in the digits, so their sum is bounded."""

    def __init__(self) -> None:
        self._left = MOST_LONG_DIGITS

    def read(self, digits: str) -> int:
        if len(digits) > LONG_DIGITS:
            self._left -= len(digits)
            if self._left < 0:
                raise ValueError("it has too many long integers")
        return int(digits)


def _read_object(body: bytes, max_parts: int = MOST_PARTS) -> dict[str, Any]:
    try:
        message = read_json(body, max_parts)
    except ValueError as error:
        raise wire.WireError("a frame holds no JSON") from error
    if not isinstance(message, dict):
        raise wire.WireError("a frame holds no JSON object")
    return message


def _read_frame(body: bytes) -> dict[str, Any]:
    if len(body) > MOST_FRAME_CHARS and len(body.decode(errors="replace")) > MOST_FRAME_CHARS:
        raise wire.WireError("a frame with more JSON than one may have")
    return _read_object(body)


def _count(bounds: object, name: str) -> int:
    """Return a bound that a service has said; 0 for an older one, which has no such bound."""
    count = bounds.get(name) if isinstance(bounds, dict) else None
    return count if type(count) is int and count > 0 else 0


def _drop_event(_: str, __: Mapping[str, Any]) -> None:
    pass


class Call(Channel):
    """One call. `on_event`, `on_data` and `on_end` are called at once; the consumer of data grants the same amount.

    `closed` has the result: any JSON, or its bytes if it arrived in pieces.
    """

    def __init__(self, connection: Wire, number: int, *, on_event: TakeEvent | None, on_data: TakeData | None):
        super().__init__(connection, number)
        self.connection = connection
        self._on_event: TakeEvent = on_event or _drop_event
        if on_data is not None:
            self.on_data = on_data
        self.keeps_events = False  # True if the consumer grants credit for events later
        self.functions: CallChannel | None = None  # that the program of the call may call
        self.event_size = 0  # size of the event being passed to `on_event`
        self._is_cancelled = self._is_too_large = False
        self._ended: set[int] = set()
        self._json = bytearray()

    # What comes.

    def take(self, kind: int, body: bytes) -> None:
        """Handle a frame. Raises WireError."""
        if kind == wire.EVENT:
            self.credit.note_whole(JSON, len(body))
            self._take_event(body)
        elif kind == wire.CLOSE:
            self._take_close(_read_frame(body))
        else:
            super().take(kind, body)

    def take_data(self, stream: int, data: memoryview) -> None:
        """Assemble JSON, and pass on other data."""
        if stream == wire.HOST_CALLS and self.functions is not None:
            self.functions.receive(data)
            return
        if stream not in (OUT, ERR, JSON) or stream in self._ended or not data:
            raise wire.WireError(f"stream {stream}: data after its end, an empty frame, or a stream of the client")
        if stream != JSON:
            self.on_data(stream, bytes(data))
            return
        if self._is_too_large:
            return
        self._json += data
        if self.connection.hold(len(data)) and len(self._json) <= self.connection.account.most_json:
            self.grant(JSON, len(data))
            return
        self._is_too_large = True  # a guest may have written it: other calls of the connection go on
        self._take_json()
        self.cancel()

    def take_end(self, stream: int) -> None:
        """Record the end of a stream. After an end, the JSON stream may carry another text."""
        if stream != JSON:
            self._ended.add(stream)
            self.on_end(stream)

    def _take_event(self, body: bytes) -> None:
        if self._on_event is _drop_event or self._is_too_large:  # not worth to be read
            self._take_json()
            self.grant(JSON, len(body))
            return
        message = _read_frame(body)
        name, data = message.get("event"), message.get("data")
        if message.get("dataOn") == JSON:
            data = _read_object(self._take_json(), MOST_EVENT_PARTS)
        if not isinstance(name, str) or not isinstance(data, dict):
            raise wire.WireError("an event without a name or data")
        self.event_size = len(body)
        if not self.keeps_events:
            self.grant(JSON, len(body))
        self._on_event(name, data)

    def _take_close(self, message: Mapping[str, Any]) -> None:
        problem = _TOO_LARGE if self._is_too_large else message.get("error")
        if isinstance(problem, dict):
            self.conclude(CallRefused(problem))
        elif message.get("resultOn") == JSON:
            self.conclude(None, self._take_json())
        elif "result" in message:
            self.conclude(None, message["result"])
        else:
            raise wire.WireError("an end without a result or an error")

    def conclude(self, error: Exception | None, result: object = None) -> None:
        """Record the end of the call."""
        self._take_json()
        if self.functions is not None:
            self.functions.close()
        super().conclude(error, result)

    def _take_json(self) -> bytes:
        data = bytes(self._json)
        self.connection.hold(-len(data))
        self._json.clear()
        return data

    # What goes.

    async def sendable(self, stream: int) -> int:
        """Wait for credit and return the number of bytes that may be sent.

        Only the fields of a call have a time-out: a program need not read its input, nor answers to its calls.
        """
        if (count := self.credit.sendable(stream)) > 0 or stream in AT_ITS_PACE:
            return count if count > 0 else await super().sendable(stream)
        try:
            async with asyncio.timeout(self.connection.account.stall_s):
                return await super().sendable(stream)
        except TimeoutError:
            self.connection.lose(Failure.TIMEOUT, "the service does not read the fields of a call")
            return 0

    def cancel(self) -> None:
        """Ask the service to end the call, which is over when the service reports its end."""
        if not self._is_cancelled and not self.closed.done():
            self._is_cancelled = True
            self.connection.cancel(self)

    async def result(self, timeout_s: float | None = None) -> Any:  # noqa: ANN401 - any JSON
        """Wait for the end and return the result. If the caller is cancelled, so is the call.

        Raises CallRefused, LinkLost, TimeoutError; the last also cancels the call.
        """
        if not self.closed.done():
            try:
                await asyncio.wait([self.closed], timeout=timeout_s)
            except asyncio.CancelledError:
                self.cancel()
                raise
        if not self.closed.done():
            self.cancel()
            raise TimeoutError
        result = self.closed.result()
        if not isinstance(result, bytes):
            return result
        try:
            return await asyncio.to_thread(read_json, result)
        except ValueError as error:
            self.connection.lose(Failure.BAD_ANSWER, "a result is not JSON")
            raise LinkLost(Failure.BAD_ANSWER, "a result is not JSON") from error


class Wire:
    """One connection, which carries many calls."""

    def __init__(self, account: RemoteAccount):
        self.account = account
        self._socket: WebSocket | None = None
        self._turns = FrameTurns(
            self._take, self._break, self._pause_reading, wire.FrameBuffer(MOST_MESSAGE, wire.PONG)
        )
        self._loop = asyncio.get_running_loop()
        self.calls: dict[int, Call] = {}
        self._number, self._held = 0, 0
        self.most_calls = 1
        self.version, self.most_tools = "", 0  # of the service; functions of a caller that its programs may call
        self.most_streamed = 0  # bytes of files and input of a run; 0 for a service that takes no stream of them
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._pong: asyncio.Future[None] | None = None
        self._heard_at = self._loop.time()
        self._watching: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self._loss: LinkLost | None = None
        self.on_idle: Callable[[Wire], None] = lambda _: None

    async def open(self) -> None:
        """Connect and wait for the service's greeting. Raises BackendUnavailable."""
        ends = self._loop.time() + self.account.open_s
        self._socket = await connect(self.account, self._hear, timeout_s=self.account.open_s)
        self._socket.on_end = lambda failure, why: self._turns.finish(lambda: self._ended(failure, why))
        try:
            async with asyncio.timeout_at(ends):
                await self._hello
        except TimeoutError:
            self._close()
            raise remote_error(self.account.provider, Failure.TIMEOUT, account=self.account) from None
        except LinkLost as error:
            raise remote_error(
                self.account.provider, error.failure, detail=error.detail, account=self.account
            ) from error
        except BaseException:
            self._close()
            raise

    @property
    def is_lost(self) -> bool:
        """Tell whether the connection has ended."""
        return self._loss is not None

    async def is_alive(self) -> bool:
        """Return whether the connection works. It is pinged if nothing was received for a while."""
        if not self.calls:
            await asyncio.sleep(0)  # let a loop that was stopped read data received meanwhile
            await asyncio.sleep(0)
        if self.is_lost or self._loop.time() - self._heard_at < self.account.pong_s:
            return not self.is_lost
        pong = self._pong
        if pong is None:
            pong = self._pong = self._loop.create_future()
            self.send(wire.frame(wire.PING, 0))
        await asyncio.wait([pong], timeout=self.account.pong_s)
        if not pong.done():
            self.lose(Failure.TIMEOUT, "no answer to a ping")
        elif self._pong is pong:  # several callers wait for one answer
            self._pong = None
        return not self.is_lost

    async def begin(
        self,
        verb: str,
        fields: Mapping[str, Any],
        *,
        credential: HiddenText | None = None,
        on_event: TakeEvent | None = None,
        on_data: TakeData | None = None,
    ) -> Call:
        """Begin a call, with the credential of a lease where the service is a node. Raises ValueError for fields that
        are too large, or have half a surrogate pair: the service would close the connection, with all of its calls.
        """
        text = json.dumps(fields, allow_nan=False)
        if "\\ud" in text:
            json.dumps(fields, ensure_ascii=False).encode()
        if len(text) > MOST_FIELDS:
            raise ValueError(f"{len(text)} bytes of JSON, where {MOST_FIELDS} are the most")
        self._number = self._number % MOST_NUMBER + 1
        while self._number in self.calls:
            self._number = self._number % MOST_NUMBER + 1
        right = {} if credential is None else {"credential": credential.reveal()}
        call = Call(self, self._number, on_event=on_event, on_data=on_data)
        if self._loss is not None:  # since it was chosen for this call
            call.conclude(self._loss)
            return call
        self.calls[call.number] = call
        self._watch()
        if len(text) <= MOST_INLINE and text.count(",") <= MOST_COMMAS:
            head = json.dumps({"verb": verb, **right})
            body = f"{head[:-1]}{', ' if fields else ''}{text[1:]}"
            self.send(wire.frame(wire.OPEN, call.number, body.encode()))
            return call
        self.send(wire.json_frame(wire.OPEN, call.number, verb=verb, fieldsOn=JSON, **right))
        try:
            if await call.send(JSON, text.encode()):
                call.end(JSON)
        except BaseException:
            call.cancel()
            raise
        return call

    # What comes.

    def _hear(self, message: bytes, is_text: bool) -> None:
        self._heard_at, self._unanswered = self._loop.time(), 0
        if self.is_lost:
            return
        if not is_text:
            self._turns.feed(message)
            return
        try:
            self._greeted(_read_object(message))
        except wire.WireError as error:
            self._break(error)

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if not self._hello.done():
            raise wire.WireError("frames before a greeting")
        if kind == wire.PING:
            self.send(wire.frame(wire.PONG, number, body))
        elif kind == wire.PONG:
            if self._pong is not None and not self._pong.done():
                self._pong.set_result(None)
        elif (call := self.calls.get(number)) is not None:
            call.take(kind, body)
            if kind == wire.CLOSE:
                self._let_go(call)
        elif kind not in (wire.DATA, wire.END, wire.WINDOW):
            raise wire.WireError("an answer without a request")

    def _break(self, error: ValueError) -> None:
        self.lose(Failure.BAD_ANSWER, str(error))

    def _pause_reading(self, is_paused: bool) -> None:
        if self._socket is not None:
            self._socket.pause_reading(is_paused=is_paused)

    def _greeted(self, message: Mapping[str, Any]) -> None:
        hello = message.get("hello")
        hello = hello if isinstance(hello, dict) else {}
        bounds = hello.get("bounds")
        calls = bounds.get("calls") if isinstance(bounds, dict) else None
        if hello.get("wire") != SERVICE_WIRE or type(calls) is not int or calls < 1 or self._hello.done():
            raise wire.WireError(
                f"its wire is not version {SERVICE_WIRE}: use the same version of Cloche on both sides"
            )
        self.most_calls = calls
        self.version = scrub(str(hello.get("version")))[:MOST_VERSION]
        self.most_tools, self.most_streamed = _count(bounds, "tools"), _count(bounds, "streamed")
        self._hello.set_result(None)

    def hold(self, count: int) -> bool:
        """Add to the number of buffered JSON bytes; return whether it is within the bound."""
        self._held += count
        return self._held <= MOST_HELD

    # What goes.

    @property
    def is_full(self) -> bool:
        """Return False: unsent data is bounded by the windows and by the socket."""
        return False

    async def drain(self) -> None:
        """Return at once: sending never has to wait."""

    def send(self, data: bytes) -> None:
        """Send a frame."""
        if self._socket is not None:
            self._socket.send_bytes(data)

    def cancel(self, call: Call) -> None:
        """Ask the service to end a call. If it does not report the end in time, the connection is lost."""
        self.send(wire.frame(wire.CLOSE, call.number))
        late = self._loop.call_later(
            self.account.cancel_s, self.lose, Failure.TIMEOUT, "a call that was cancelled did not end"
        )
        call.closed.add_done_callback(lambda _: late.cancel())

    # How it ends.

    def _let_go(self, call: Call) -> None:
        self.calls.pop(call.number, None)
        if not self.calls:
            self.on_idle(self)

    def _watch(self) -> None:
        if self._watching is None:
            self._heard_at = self._loop.time()
            self._watching = self._loop.call_later(self.account.look_s, self._look)

    def _look(self) -> None:
        """Ping the service if nothing arrived since the last check; after several unanswered pings the connection is
        lost.

        Pings are counted, because elapsed time alone is misleading: a loop that was blocked has not read the answers
        yet.
        """
        self._watching = None
        if self.is_lost or not self.calls:
            return
        every_s = self.account.look_s
        if self._loop.time() - self._heard_at >= every_s:
            if self._unanswered >= LOOKS - 2:
                self.lose(Failure.TIMEOUT, f"nothing was heard for {self._loop.time() - self._heard_at:.1f} s")
                return
            self._unanswered += 1
            self.send(wire.frame(wire.PING, 0))
        self._watching = self._loop.call_later(every_s, self._look)

    def lose(self, failure: Failure, why: str) -> None:
        """Close the connection; its calls end with the reason."""
        self._close()
        self._ended(failure, why)

    def close(self) -> None:
        """Close the connection and end its calls."""
        self.lose(Failure.NO_NETWORK, "the connection was closed here")

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _ended(self, failure: Failure, why: str) -> None:
        self._loss = self._loss or LinkLost(failure, why)
        self._turns.stop()
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if not self._hello.done():
            self._hello.set_exception(LinkLost(failure, why))
            self._hello.exception()
        calls, self.calls = list(self.calls.values()), {}
        silent_s = self._loop.time() - self._heard_at
        for call in calls:
            call.on_end(OUT)
            call.on_end(ERR)
            call.conclude(LinkLost(failure, why, silent_s=silent_s))
        self.on_idle(self)
