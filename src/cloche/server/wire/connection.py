"""One wire: reads frames, begins calls and ends them, and says how each ended.

Reading never waits for a call: what comes is handed to its call at once, within its window. The end of the connection
cancels its calls. Each call is checked anew: the key, its scope, the sandbox by the key's project.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from cloche import __version__
from cloche.core.escape import escape_name
from cloche.core.record import replace
from cloche.core.remote import LEAST_SILENCE_S, SILENCE_S

from ..auth import find_caller
from ..bodies import validated
from ..log import log_access
from ..observe import CALLER, NO_ROUTE
from ..problems import Refused, response_to
from ..sandbox_use import using
from ..service import Service
from ..sockets import GOING_AWAY, BadMessage, carry, read_object
from . import frames
from .calls import Asked, Call
from .verbs import VERBS, Verb

SILENCE_HEADER = "cloche-silence"
MOST_SILENCE_S = 300.0
LOOKS = 5  # at whether anything has come, in the time after which a silent client with calls is gone
IDLE_S = 20.0  # between two of them at a client without calls
MOST_ID = 256


class Wire:
    """Serve one client over a web socket that was accepted."""

    def __init__(self, websocket: WebSocket, service: Service):
        self._websocket, self._service = websocket, service
        self._calls: dict[int, Call] = {}
        self._heard_at = asyncio.get_running_loop().time()
        self._silence_s = _silence_of(websocket)
        self._is_over = False

    async def serve(self) -> None:
        """Serve until the client goes, or may no more."""
        await self._send_text(_hello())
        try:
            await carry(self._websocket, self._receive(), self._watch_client(), scope=None)
        finally:
            self._is_over = True
            await self._end_calls()

    async def _end_calls(self) -> None:
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for call in self._calls.values():
            call.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # What comes.

    async def _receive(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", GOING_AWAY))
            self._heard_at = asyncio.get_running_loop().time()
            if (frame := message.get("bytes")) is not None:
                self._take(frame)
            else:
                await self._obey(read_object(message["text"]))

    def _take(self, frame: bytes) -> None:
        number, channel, kind, data = frames.read_frame(frame)
        call = self._calls.get(number)
        if call is None:  # it has just ended
            return
        if kind == frames.CREDIT:
            call.outgoing[channel].credit(*frames.GRANT.unpack(data))
        elif kind == frames.DATA:
            call.incoming[channel].take(data)
        else:
            call.incoming[channel].end()

    async def _obey(self, said: dict[str, Any]) -> None:
        if "verb" in said:
            await self._begin(said)
        elif said.keys() == {"cancel"}:
            call = self._calls.get(said["cancel"]) if isinstance(said["cancel"], int) else None
            if call is not None:
                call.cancel()
        elif said.keys() == {"ping"}:
            await self._send_text(json.dumps({"pong": said["ping"]}))
        elif said.keys() != {"pong"}:
            raise BadMessage("send call and verb, or cancel, or ping, or pong")

    async def _begin(self, said: dict[str, Any]) -> None:
        number = said.pop("call", None)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= frames.MOST_NUMBER:
            raise BadMessage(f"call: give a number from 1 to {frames.MOST_NUMBER}")
        if number in self._calls:
            raise BadMessage(f"call: {number} goes on already; use another number")
        call = Call(number, NO_ROUTE, self._send, self._send_text)
        if len(self._calls) >= frames.MOST_CALLS:
            error = Refused(429, "too-many-calls", f"{frames.MOST_CALLS} calls go on over this connection")
            await self._send_text(_error(number, error)[1])
            return
        self._calls[number] = call
        call.task = asyncio.ensure_future(self._carry_out(call, said))
        await asyncio.sleep(0)  # a task that is cancelled before its first step says nothing

    # What is done.

    async def _carry_out(self, call: Call, said: dict[str, Any]) -> None:
        """Do what is asked, and send the one frame that ends the call."""
        begun, status = asyncio.get_running_loop().time(), 200
        try:
            last = await call.prepared(await self._answer(call, said))
        except asyncio.CancelledError:  # by the client, or with the connection, where nobody is told
            status, last = _error(call.number, Refused(409, "cancelled", "the call was cancelled"))
        except Exception as error:  # told, and logged where nobody expected it
            if call.verb in VERBS and VERBS[call.verb].scope != "read":
                await self._service.note_refusal(error, what=f"WIRE {call.verb}")
            status, last = _error(call.number, error)
        finally:
            self._service.wire.held.give_back(call.whose, call.held)
            self._calls.pop(call.number, None)
        self._note(call.verb, status, asyncio.get_running_loop().time() - begun)
        await self._send_text(last)

    def _note(self, verb: str, status: int, seconds: float) -> None:
        """Leave for the operator what a request leaves."""
        self._service.metrics.request_ended("WIRE", verb, status, seconds)
        key = self._websocket.scope.get(CALLER)
        log_access("call", verb=verb, status=status, seconds=round(seconds, 6), key=key)

    async def _answer(self, call: Call, said: dict[str, Any]) -> object:
        caller = await find_caller(self._websocket)
        call.whose = caller.key_id
        verb = _verb(said["verb"])
        call.verb = said.pop("verb")
        caller.require(verb.scope)
        if "fieldsOn" in said:
            if said != {"fieldsOn": frames.JSON}:
                raise Refused(
                    422, "invalid-request", f"fieldsOn: it is {frames.JSON}, and stands alone", field="fieldsOn"
                )
            said = await call.read_fields(self._service)
        ids = {name: _identifier(said, name) for name in verb.of}
        asked = Asked(caller=caller, service=self._service, ids=ids, fields=await _fields(verb, said, call.held))
        if not verb.is_inside:
            return _plain(await verb.work(call, asked))
        async with using(self._service, caller, ids["sandbox"]) as use:
            return _plain(await verb.work(call, replace(asked, use=use)))

    # What goes.

    async def _watch_client(self) -> None:
        """Ask the client from time to time whether it is there. Raises TimeoutError where nothing comes from it."""
        loop, every_s, unanswered = asyncio.get_running_loop(), self._silence_s / LOOKS, 0
        while True:
            await asyncio.sleep(every_s)
            quiet_s = loop.time() - self._heard_at
            unanswered = 0 if quiet_s < every_s else unanswered
            if quiet_s < (every_s if self._calls else IDLE_S) * (unanswered + 1):
                continue
            if unanswered >= LOOKS - 2:  # counted: where the loop stood still, what came has not been read yet
                raise TimeoutError
            unanswered += 1
            async with asyncio.timeout(self._silence_s):
                await self._send_text('{"ping": true}')

    async def _send(self, frame: bytes) -> None:
        if not self._is_over:
            await self._websocket.send_bytes(frame)

    async def _send_text(self, text: str) -> None:
        if not self._is_over:
            await self._websocket.send_text(text)


def _silence_of(websocket: WebSocket) -> float:
    """Return after how many seconds a client from which nothing came is gone, as it asks, within bounds."""
    try:
        asked = float(websocket.headers.get(SILENCE_HEADER, SILENCE_S))
    except ValueError:
        asked = SILENCE_S
    return min(max(asked, LEAST_SILENCE_S), MOST_SILENCE_S) if asked == asked else SILENCE_S


def _hello() -> str:
    bounds = {"frame": frames.MOST_DATA, "window": frames.WINDOW, "calls": frames.MOST_CALLS}
    return json.dumps({"hello": {"wire": frames.VERSION, "version": __version__, "bounds": bounds}})


def _verb(name: object) -> Verb:
    found = VERBS.get(name) if isinstance(name, str) else None
    if found is None:
        shown = escape_name(str(name)[:64])
        raise Refused(
            422, "unknown-verb", f"verb: there is no {shown}", field="verb", remedy="see docs/service/wire.md"
        )
    return found


def _identifier(said: dict[str, Any], name: str) -> str:
    found = said.pop(name, None)
    if not isinstance(found, str) or not 0 < len(found) <= MOST_ID:
        raise Refused(422, "invalid-request", f"{name}: give the id of a {name}, as text", field=name)
    return found


async def _fields(verb: Verb, said: dict[str, Any], size: int) -> object:
    """Return a call's fields, checked; many of them in a thread. Raises RequestValidationError."""
    return await asyncio.to_thread(validated, verb.fields, said) if size else validated(verb.fields, said)


def _plain(answer: object) -> object:
    """Return what a route's own function has answered, as JSON or what becomes it."""
    return bytes(answer.body).decode() if isinstance(answer, Response) else answer


def _error(number: int, error: Exception) -> tuple[int, str]:
    """Return the status and the frame of a call that failed."""
    response = response_to(error)
    after = response.headers.get("retry-after")
    problem = {**json.loads(bytes(response.body)), **({} if after is None else {"retryAfter": after})}
    return response.status_code, json.dumps({"call": number, "error": problem})
