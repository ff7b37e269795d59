"""One connection of the wire: reads frames, starts and ends calls, and reports their outcome.

Reading never waits for a call: a frame is handed to its call at once, within the call's window. When the connection
ends, its calls are cancelled. Each call is checked anew: the key, its scope, and that the sandbox belongs to the key's
project.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from cloche.core.escape import escape_name
from cloche.core.record import replace
from cloche.core.remote import LEAST_SILENCE_S, LOOKS, MOST_MESSAGE, SERVICE_WIRE, SILENCE_S
from cloche.init import wire

from .bodies import validated
from .callers import Caller
from .calls import JSON, Call, CallRequest
from .host import WireHost
from .host_calls import MOST_TOOLS
from .load import MOST_SPOOLED
from .problems import Refused, problem_of
from .shares import Shares
from .sockets import BadMessage, Disconnected, MessageSocket, read_object, run_first
from .uses import using
from .verbs import VERBS, Verb

SILENCE_HEADER = "cloche-silence"
MOST_SILENCE_S = 300.0
IDLE_S = 20.0  # between two pings to a client without calls
MOST_ID = 256
MOST_CALLS = 64  # of one connection, at once
MOST_PING = 128  # bytes


# Returns the caller of a call, whose credential it may take out of the fields. Raises Refused (401).
FindCaller = Callable[[dict[str, Any]], Awaitable[Caller]]


class Wire:
    """Serve one client over an open socket. `silence` is what the client asked for by `SILENCE_HEADER`."""

    def __init__(
        self, socket: MessageSocket, host: WireHost, find_caller: FindCaller, *, version: str,
        silence: str | None = None, verbs: Mapping[str, Verb] = VERBS,
    ):  # fmt: skip
        self._socket, self._host, self._find_caller, self._verbs = socket, host, find_caller, verbs
        self._calls: dict[int, Call] = {}
        self._heard_at = asyncio.get_running_loop().time()
        self._silence_s, self._version = silence_s(silence), version
        self._is_over = False

    async def serve(self, *watches: Coroutine[Any, Any, None]) -> BaseException | None:
        """Serve until the client disconnects or one of `watches` ends; return the error that ended it."""
        try:
            return await run_first(self._receive(), self._watch_client(), *watches)
        finally:
            self._is_over = True
            await self._end_calls()

    async def _end_calls(self) -> None:
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for call in self._calls.values():
            call.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # From the client.

    async def _receive(self) -> None:
        await self._socket.send(_hello(self._version))
        buffer = wire.FrameBuffer(MOST_MESSAGE, wire.PONG)
        while True:
            data = await self._socket.receive()
            self._heard_at = asyncio.get_running_loop().time()
            if isinstance(data, str):
                raise BadMessage(
                    f"this is version {SERVICE_WIRE} of the wire: send binary frames, see docs/service/wire.md"
                )
            try:
                await self._take_all(buffer, data)
            except wire.WireError as error:
                raise BadMessage(str(error)) from error

    async def _take_all(self, buffer: wire.FrameBuffer, data: bytes) -> None:
        """Handle the complete frames, a bounded number in each turn of the event loop."""
        while True:
            frames = buffer.feed(data, wire.MOST_AT_ONCE)
            for kind, number, body in frames:
                await self._take(kind, number, body)
            if len(frames) < wire.MOST_AT_ONCE:
                return
            data = b""
            await asyncio.sleep(0)

    async def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == wire.OPEN:
            await self._begin(number, read_object(body, "an OPEN frame"))
        elif kind == wire.PING:
            if len(body) > MOST_PING:
                raise BadMessage(f"a ping of {len(body)} bytes; at most {MOST_PING} are answered")
            await self.send_frame(wire.frame(wire.PONG, number, body))
            await asyncio.sleep(0)  # an answer costs more than a frame: others have their turn
        elif kind == wire.PONG:
            pass
        elif kind in (wire.HELLO, wire.EVENT, wire.ASK):
            raise BadMessage(f"call {number}: a client sends no frame of kind {kind}")
        elif (call := self._calls.get(number)) is None:  # it has just ended
            pass
        elif kind == wire.CLOSE:
            call.cancel()
        else:
            try:
                call.take(kind, body)
            except wire.WireError as error:
                raise BadMessage(f"call {number}: {error}") from error

    async def _begin(self, number: int, fields: dict[str, Any]) -> None:
        if "verb" not in fields:
            raise BadMessage(f"call {number}: an OPEN frame has a verb")
        if not number:
            raise BadMessage("call 0: give a number from 1 on")
        if number in self._calls:
            raise BadMessage(f"call {number} goes on already; use another number")
        call = Call(self, number)
        if len(self._calls) >= MOST_CALLS:
            error = Refused(429, "too-many-calls", f"{MOST_CALLS} calls go on over this connection")
            await self.send_frame(_error(number, error)[1])
            return
        self._calls[number] = call
        call.task = asyncio.ensure_future(self._carry_out(call, fields))
        await asyncio.sleep(0)  # lets it start: a task cancelled before its first step runs no `except`

    # Calls.

    async def _carry_out(self, call: Call, fields: dict[str, Any]) -> None:
        """Do the work of a call, and send the one frame that ends it."""
        begun, status = asyncio.get_running_loop().time(), 200
        try:
            last = await call.prepared(await self._answer(call, fields))
        except asyncio.CancelledError:  # by the client, or with the connection, where the frame is dropped
            status, last = self._error(call, Refused(409, "cancelled", "the call was cancelled"))
        except Exception as error:  # sent to the client, and logged if unexpected
            if call.verb in self._verbs and self._verbs[call.verb].scope != "read":
                await self._host.note_refusal(error, what=f"WIRE {call.verb}")
            status, last = self._error(call, error)
        finally:
            self._host.wire.held.give_back(call.whose, call.held)
            self._host.wire.results.give_back(call.whose, call.result_size)
            self._calls.pop(call.number, None)
        seconds = asyncio.get_running_loop().time() - begun
        self._host.note_call(call.verb, status, seconds, call.caller)
        await self.send_frame(last)

    async def _answer(self, call: Call, fields: dict[str, Any]) -> object:
        caller = await self._find_caller(fields)
        call.whose, call.caller, call.project = caller.key_id, caller.name, caller.project
        with self._host.calling(caller, call):
            return await self._work(call, caller, fields)

    def _error(self, call: Call, error: Exception) -> tuple[int, bytes]:
        return _error(call.number, self._host.explain(error, call.project))

    async def _work(self, call: Call, caller: Caller, fields: dict[str, Any]) -> object:
        verb = self._verb(fields["verb"])
        call.verb = fields.pop("verb")
        caller.require(verb.scope)
        if "fieldsOn" in fields:
            if fields != {"fieldsOn": JSON}:
                raise Refused(422, "invalid-request", f"fieldsOn: it is {JSON}, and stands alone", field="fieldsOn")
            fields = await call.read_fields(self._host)
        ids = {name: _identifier(fields, name) for name in verb.of}
        request = CallRequest(caller=caller, service=self._host, ids=ids, fields=await _fields(verb, fields, call.held))
        if not verb.is_inside:
            return await verb.work(call, request)
        async with using(self._host, caller, ids["sandbox"]) as use:
            return await verb.work(call, replace(request, use=use))

    def _verb(self, name: object) -> Verb:
        verb = self._verbs.get(name) if isinstance(name, str) else None
        if verb is None:
            shown = escape_name(str(name)[:64])
            raise Refused(
                422, "unknown-verb", f"verb: there is no {shown}", field="verb", remedy="see docs/service/wire.md"
            )
        return verb

    # To the client.

    async def _watch_client(self) -> None:
        """Ping a silent client. Raises TimeoutError if it does not answer."""
        loop, every_s, unanswered = asyncio.get_running_loop(), self._silence_s / LOOKS, 0
        while True:
            await asyncio.sleep(every_s)
            quiet_s = loop.time() - self._heard_at
            unanswered = 0 if quiet_s < every_s else unanswered
            if quiet_s < (every_s if self._calls else IDLE_S) * (unanswered + 1):
                continue
            if unanswered >= LOOKS - 2:  # counted pings: after a stalled event loop, received data is not read yet
                raise TimeoutError
            unanswered += 1
            async with asyncio.timeout(self._silence_s):
                await self.send_frame(wire.frame(wire.PING, 0))

    async def send_frame(self, frame: bytes, /) -> None:
        """Send a frame, at the pace of the client; drop it once the client has disconnected."""
        if not self._is_over:
            try:
                await self._socket.send(frame)
            except Disconnected:  # as `_receive` learns, too
                self._is_over = True


def silence_s(text: str | None) -> float:
    """Return the seconds of silence after which a client counts as gone: its own wish, within bounds."""
    try:
        requested_s = SILENCE_S if text is None else float(text)
    except ValueError:
        requested_s = SILENCE_S
    return min(max(requested_s, LEAST_SILENCE_S), MOST_SILENCE_S) if requested_s == requested_s else SILENCE_S


def _hello(version: str) -> str:
    bounds = {"frame": wire.MOST_DATA, "window": wire.WINDOW_BYTES, "calls": MOST_CALLS}
    bounds["streamed"] = Shares(MOST_SPOOLED).most_of_one
    bounds["tools"] = MOST_TOOLS
    return json.dumps({"hello": {"wire": SERVICE_WIRE, "version": version, "bounds": bounds}})


def _identifier(fields: dict[str, Any], name: str) -> str:
    identifier = fields.pop(name, None)
    if not isinstance(identifier, str) or not 0 < len(identifier) <= MOST_ID:
        raise Refused(422, "invalid-request", f"{name}: give the id of a {name}, as text", field=name)
    return identifier


async def _fields(verb: Verb, fields: dict[str, Any], size: int) -> object:
    """Return a call's validated fields; large ones are validated in a thread. Raises InvalidFields."""
    return await asyncio.to_thread(validated, verb.fields, fields) if size else validated(verb.fields, fields)


def _error(number: int, error: Exception) -> tuple[int, bytes]:
    details = problem_of(error)
    after = details.headers.get("Retry-After")
    problem = {**details.content, **({} if after is None else {"retryAfter": after})}
    return details.status, wire.json_frame(wire.CLOSE, number, error=problem)
