"""One connection of the wire, as `docs/service/wire.md` has it: calls, their channels, and credit both ways.

Theory of operation: what comes is handed to its call at once, in the event loop. Who takes content gives credit for it,
so no more than a window of each channel is ever held; more than that, and whatever else the document does not allow,
ends the connection. JSON that comes in pieces is put together up to a bound. A call that nobody waits for any more is
cancelled, and kept until the service says that it has ended.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from cloche.core.guest_json import check_parts, finite, refuse_constant
from cloche.core.remote import RemoteAccount

from ..remote.failures import Failure, remote_error
from .websocket import WebSocket, connect

HEADER, GRANT = struct.Struct(">IBB"), struct.Struct(">I")
DATA, END, CREDIT = range(3)
IN, OUT, ERR, JSON = range(4)
MOST_DATA, WINDOW = 1 << 16, 1 << 18
CREDIT_AT_ONCE = WINDOW // 4
MOST_INLINE = 1 << 18  # JSON of a call in one text frame
MOST_FIELDS = 32 << 20
MOST_JSON = 64 << 20  # of one result or event
MOST_HELD = 128 << 20  # of all JSON of one connection that is not yet whole
MOST_PARTS = 400_000  # commas, lists and objects of one result: its files alone may have a tenth of that
LONG_DIGITS, MOST_LONG_DIGITS = 40, 1 << 18  # of an integer, and of all long ones of one text
MOST_NUMBER = (1 << 32) - 1
OPEN_S = 20.0
CANCEL_S = 10.0  # for the service to say that a call has ended that was cancelled
PONG_S = 5.0
STALL_S = 60.0  # for the service to take the next fields of a call
LOOKS = 5  # at whether anything has come, in the time after which a silent connection is lost

TakeEvent = Callable[[str, Mapping[str, Any]], None]
TakeData = Callable[[int, bytes], None]


class LinkLost(Exception):
    """Report a connection that ended while a call went on."""

    def __init__(self, failure: Failure, detail: str):
        super().__init__(detail)
        self.failure, self.detail = failure, detail


class CallRefused(Exception):
    """Hold the problem that ended a call."""

    def __init__(self, problem: Mapping[str, Any]):
        super().__init__(str(problem.get("detail"))[:1000])
        self.problem = problem


class _Fault(Exception):
    """Say what the service sent that the document does not allow."""


def read_json(data: bytes) -> Any:  # noqa: ANN401 - any JSON
    """Return what a service says. Raises ValueError for what could not be written again, and for too many values.

    The scanner of `json` holds the interpreter's lock to the end, so a thread alone would keep nobody free.
    """
    text = data.decode()
    check_parts(text, MOST_PARTS)
    try:
        return json.loads(text, parse_constant=refuse_constant, parse_float=finite, parse_int=_Integers().read)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


class _Integers:
    """Read the integers of one text: a long one takes the square of its digits."""

    def __init__(self) -> None:
        self._left = MOST_LONG_DIGITS

    def read(self, digits: str) -> int:
        if len(digits) > LONG_DIGITS:
            self._left -= len(digits)
            if self._left < 0:
                raise ValueError("it has too many long integers")
        return int(digits)


def _drop_event(_: str, __: Mapping[str, Any]) -> None:
    pass


class Call:
    """Hold one call. `on_event`, `on_data` and `on_end` are told at once; who takes data gives credit for it."""

    def __init__(self, wire: Wire, number: int, *, on_event: TakeEvent | None, on_data: TakeData | None):
        self.wire, self.number = wire, number
        self._on_event: TakeEvent = on_event or _drop_event
        self.on_data: TakeData = on_data or self.grant_all
        self.on_end: Callable[[int], None] = lambda _: None
        self.keeps_events = False  # whoever is told of events gives credit for them, later
        self.event_size = 0  # of the event that is being told
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._is_cancelled = False
        self._room = {IN: WINDOW, JSON: WINDOW}  # what may be sent
        self._sent = {IN: 0, JSON: 0}
        self._has_room = asyncio.Event()
        self._left = {OUT: WINDOW, ERR: WINDOW, JSON: WINDOW}  # what may come
        self._owed = {OUT: 0, ERR: 0, JSON: 0}
        self._closed: set[int] = set()
        self._json = bytearray()

    # What comes.

    def take(self, channel: int, kind: int, data: bytes) -> None:
        """Take a binary frame. Raises _Fault."""
        if kind == CREDIT:
            self._take_credit(channel, *GRANT.unpack(data))
        elif channel in self._closed and channel != JSON:
            raise _Fault("content after the end of its channel")
        elif kind == END:
            self._closed.add(channel)
            if channel != JSON:
                self.on_end(channel)
        else:
            self._left[channel] -= len(data)
            if self._left[channel] < 0:
                raise _Fault("more content than its window")
            if channel == JSON:
                self.wire.hold(len(data))
                self._json += data
                if len(self._json) > MOST_JSON:
                    raise _Fault("a result beyond all bounds")
                self.grant(JSON, len(data))
            else:
                self.on_data(channel, data)

    def _take_credit(self, channel: int, count: int) -> None:
        if channel not in self._room or not count or self._room[channel] + count > WINDOW:
            raise _Fault("credit for what was not sent")
        self._room[channel] += count
        self._has_room.set()

    def hear(self, said: Mapping[str, Any], size: int) -> bool:
        """Take a text frame; tell whether it was the last. Raises _Fault."""
        if "event" in said:
            name = said["event"]
            if self._left[JSON] <= 0:
                raise _Fault("more events than their window")
            self._left[JSON] -= size
            data = self._whole() if said.get("dataOn") == JSON else said.get("data")
            if not isinstance(name, str) or not isinstance(data, dict):
                raise _Fault("an event without a name or data")
            self.event_size = size
            if not self.keeps_events:
                self.grant(JSON, size)
            self._on_event(name, data)
            return False
        problem = said.get("error")
        if isinstance(problem, dict):
            self.fail(CallRefused(problem))
        elif said.get("resultOn") == JSON:
            self._succeed(self._taken())
        elif "result" in said:
            self._succeed(said["result"])
        else:
            raise _Fault("neither an event nor an end")
        return True

    def _succeed(self, result: Any) -> None:  # noqa: ANN401 - any JSON, or its bytes
        self._has_room.set()
        if not self.ended.done():
            self.ended.set_result(result)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self._has_room.set()
        self.wire.hold(-len(self._json))
        self._json.clear()
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # perhaps nobody waits for it

    def _taken(self) -> bytes:
        data = bytes(self._json)
        self.wire.hold(-len(data))
        self._json.clear()
        self._closed.discard(JSON)
        return data

    def _whole(self) -> Any:  # noqa: ANN401 - any JSON
        try:
            return read_json(self._taken())
        except ValueError as error:
            raise _Fault("an event that is no JSON") from error

    def grant(self, channel: int, count: int) -> None:
        """Give credit for what was taken."""
        self._owed[channel] += count
        if self._owed[channel] >= CREDIT_AT_ONCE and not self.ended.done():
            count, self._owed[channel] = self._owed[channel], 0
            self._left[channel] += count
            self.wire.send_frame(self.number, channel, CREDIT, GRANT.pack(count))

    def grant_all(self, channel: int, data: bytes) -> None:
        """Drop what nobody takes."""
        self.grant(channel, len(data))

    # What goes.

    async def send(self, channel: int, data: bytes | memoryview) -> bool:
        """Send all of `data`, as fast as it is taken; False where the call has ended."""
        left = memoryview(data)
        while left:
            while not self._room[channel] and not self.ended.done():
                self._has_room.clear()
                await self._wait_for_room(None if channel == IN else STALL_S)
            if self.ended.done():
                return False
            piece = left[: min(self._room[channel], MOST_DATA)]
            self._room[channel] -= len(piece)
            self.wire.send_frame(self.number, channel, DATA, piece)
            left = left[len(piece) :]
        return not self.ended.done()

    async def _wait_for_room(self, timeout_s: float | None) -> None:
        """Wait until more may be sent: of content as long as it takes, as a program may not want any."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_room.wait()
        except TimeoutError:
            self.wire.lose(Failure.TIMEOUT, "the fields of a call are not taken")

    def end(self, channel: int) -> None:
        """Say that nothing more comes on a channel."""
        if not self.ended.done():
            self.wire.send_frame(self.number, channel, END, b"")

    def cancel(self) -> None:
        """Have the service end it; it is over when the service says so."""
        if not self._is_cancelled and not self.ended.done():
            self._is_cancelled = True
            self.wire.cancel(self)

    async def result(self, timeout_s: float | None = None) -> Any:  # noqa: ANN401 - any JSON
        """Wait for the end and return the result; who stops to wait cancels the call.

        Raises CallRefused, LinkLost, TimeoutError; after that one it is cancelled, too.
        """
        if not self.ended.done():
            try:
                await asyncio.wait([self.ended], timeout=timeout_s)
            except asyncio.CancelledError:
                self.cancel()
                raise
        if not self.ended.done():
            self.cancel()
            raise TimeoutError
        found = self.ended.result()
        if not isinstance(found, bytes):
            return found
        try:
            return await asyncio.to_thread(read_json, found)
        except ValueError as error:
            self.wire.lose(Failure.BAD_ANSWER, "a result is no JSON")
            raise LinkLost(Failure.BAD_ANSWER, "a result is no JSON") from error


class Wire:
    """Hold one connection, which carries many calls."""

    def __init__(self, account: RemoteAccount):
        self.account = account
        self._socket: WebSocket | None = None
        self._loop = asyncio.get_running_loop()
        self.calls: dict[int, Call] = {}
        self._number, self._held = 0, 0
        self.most_calls = 1
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._pong: asyncio.Future[None] | None = None
        self._heard_at = self._loop.time()
        self._watching: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self.is_lost = False
        self.on_idle: Callable[[Wire], None] = lambda _: None

    async def open(self, timeout_s: float = OPEN_S) -> None:
        """Connect, and wait for the service's greeting. Raises BackendUnavailable."""
        ends = self._loop.time() + timeout_s
        self._socket = await connect(self.account, self._take, timeout_s=timeout_s)
        self._socket.on_end = self._ended
        try:
            async with asyncio.timeout_at(ends):
                await self._hello
        except TimeoutError:
            self._close()
            raise remote_error("cloche", Failure.TIMEOUT, account=self.account) from None
        except LinkLost as error:
            raise remote_error("cloche", error.failure, detail=error.detail, account=self.account) from error
        except BaseException:
            self._close()
            raise

    async def is_alive(self) -> bool:
        """Ask whether it still holds, where nothing was heard for a while."""
        if not self.calls:
            await asyncio.sleep(0)  # where the loop stood still, what has come meanwhile is read first
            await asyncio.sleep(0)
        if self.is_lost or self._loop.time() - self._heard_at < PONG_S:
            return not self.is_lost
        if self._pong is None:
            self._pong = self._loop.create_future()
            self._say({"ping": 1})
        await asyncio.wait([self._pong], timeout=PONG_S)
        if not self._pong.done():
            self.lose(Failure.TIMEOUT, "no answer to a ping")
        else:
            self._pong = None
        return not self.is_lost

    async def begin(
        self,
        verb: str,
        fields: Mapping[str, Any],
        *,
        on_event: TakeEvent | None = None,
        on_data: TakeData | None = None,
    ) -> Call:
        """Begin a call. Raises ValueError for fields that are too much for one."""
        text = json.dumps(fields, allow_nan=False)
        if len(text) > MOST_FIELDS:
            raise ValueError(f"{len(text)} bytes of JSON, where {MOST_FIELDS} are the most")
        self._number = self._number % MOST_NUMBER + 1
        while self._number in self.calls:
            self._number = self._number % MOST_NUMBER + 1
        call = self.calls[self._number] = Call(self, self._number, on_event=on_event, on_data=on_data)
        self._watch()
        head = f'{{"call": {call.number}, "verb": {json.dumps(verb)}'
        if len(text) <= MOST_INLINE:
            self._send_text(f"{head}, {text[1:]}" if fields else f"{head}}}")
            return call
        self._send_text(f'{head}, "fieldsOn": {JSON}}}')
        try:
            if await call.send(JSON, text.encode()):
                call.end(JSON)
        except BaseException:
            call.cancel()
            raise
        return call

    # What comes.

    def _take(self, message: bytes, is_text: bool) -> None:
        self._heard_at, self._unanswered = self._loop.time(), 0
        if self.is_lost:
            return
        try:
            if is_text:
                self._hear(message)
            else:
                self._take_frame(message)
        except _Fault as fault:
            self.lose(Failure.BAD_ANSWER, str(fault))

    def _take_frame(self, frame: bytes) -> None:
        if len(frame) < HEADER.size:
            raise _Fault("a frame without a header")
        number, channel, kind = HEADER.unpack_from(frame)
        data = frame[HEADER.size :]
        if kind > CREDIT or channel not in ((IN, JSON) if kind == CREDIT else (OUT, ERR, JSON)):
            raise _Fault(f"kind {kind} on channel {channel}")
        if (
            len(data) > MOST_DATA
            or (kind == CREDIT and len(data) != GRANT.size)
            or (kind == END and data)
            or (kind == DATA and not data)
        ):
            raise _Fault(f"a frame of kind {kind} with {len(data)} bytes")
        call = self.calls.get(number)
        if call is not None:
            call.take(channel, kind, data)

    def _hear(self, message: bytes) -> None:
        try:
            said = read_json(message)
        except ValueError as error:
            raise _Fault("text that is no JSON") from error
        if not isinstance(said, dict):
            raise _Fault("text that is no JSON object")
        if "call" in said:
            call = self.calls.get(said["call"]) if type(said["call"]) is int else None
            if call is None:
                raise _Fault("an answer to what was not asked")
            if call.hear(said, len(message)):
                self._let_go(call)
        elif "ping" in said:
            self._say({"pong": True})
        elif "pong" in said:
            if self._pong is not None and not self._pong.done():
                self._pong.set_result(None)
        elif "hello" in said and not self._hello.done():
            self._greeted(said["hello"])
        else:
            raise _Fault("text of an unknown kind")

    def _greeted(self, hello: object) -> None:
        said = hello if isinstance(hello, dict) else {}
        bounds = said.get("bounds")
        calls = bounds.get("calls") if isinstance(bounds, dict) else None
        if said.get("wire") != 1 or type(calls) is not int or calls < 1:
            raise _Fault("it speaks another version of the wire; have the same version of Cloche on both sides")
        self.most_calls = calls
        self._hello.set_result(None)

    def hold(self, count: int) -> None:
        """Count bytes of JSON that are held. Raises _Fault for too many."""
        self._held += count
        if self._held > MOST_HELD:
            raise _Fault("results beyond all bounds")

    # What goes.

    def send_frame(self, number: int, channel: int, kind: int, data: bytes | memoryview) -> None:
        """Send a binary frame."""
        if self._socket is not None:
            self._socket.send_bytes(HEADER.pack(number, channel, kind) + data)

    def cancel(self, call: Call) -> None:
        """Have a call ended, and give the connection up where the service does not say that it has."""
        self._say({"cancel": call.number})
        late = self._loop.call_later(CANCEL_S, self.lose, Failure.TIMEOUT, "a call that was cancelled did not end")
        call.ended.add_done_callback(lambda _: late.cancel())

    def _say(self, said: Mapping[str, Any]) -> None:
        self._send_text(json.dumps(said))

    def _send_text(self, text: str) -> None:
        if self._socket is not None:
            self._socket.send_text(text)

    # How it ends.

    def _let_go(self, call: Call) -> None:
        self.calls.pop(call.number, None)
        if not self.calls:
            self.on_idle(self)

    def _watch(self) -> None:
        if self._watching is None:
            self._heard_at = self._loop.time()
            self._watching = self._loop.call_later(self.account.silence_s / LOOKS, self._look)

    def _look(self) -> None:
        """Ask where nothing came since the last look, and give it up where several in turn were not answered.

        They are counted, and not the time alone: a loop that stood still has not read yet what came meanwhile.
        """
        self._watching = None
        if self.is_lost or not self.calls:
            return
        every_s = self.account.silence_s / LOOKS
        if self._loop.time() - self._heard_at >= every_s:
            if self._unanswered >= LOOKS - 2:
                self.lose(Failure.TIMEOUT, f"nothing was heard for {self._loop.time() - self._heard_at:.1f} s")
                return
            self._unanswered += 1
            self._say({"ping": 1})
        self._watching = self._loop.call_later(every_s, self._look)

    def lose(self, failure: Failure, why: str) -> None:
        """Give it up: its calls end with the reason."""
        self._close()
        self._ended(failure, why)

    def close(self) -> None:
        """Close it; nothing goes on."""
        self.lose(Failure.NO_NETWORK, "the connection was closed here")

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _ended(self, failure: Failure, why: str) -> None:
        self.is_lost = True
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if not self._hello.done():
            self._hello.set_exception(LinkLost(failure, why))
            self._hello.exception()
        calls, self.calls = list(self.calls.values()), {}
        for call in calls:
            call.on_end(OUT)
            call.on_end(ERR)
            call.fail(LinkLost(failure, why))
        self.on_idle(self)
