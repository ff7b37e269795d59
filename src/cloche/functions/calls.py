"""The calls of one guest: cut out of its bytes, checked, run, answered.

Theory of operation: everything that arrives may be hostile. A frame is at most a call's own bound, and no more is read
while `MOST_WAITING` calls wait or the guest leaves answers unread; so a flood fills the guest's pipe and stops there. A
call is parsed when its turn comes, a large one in a thread; the parser bounds what holds the interpreter's lock. A
function that is not async runs in one of a few daemon threads. Answers are frames with the number of the call, which
the guest chose: it is a key of this link's own table and means nothing anywhere else. When the run ends all is
cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from cloche.core.errors import ApprovalDenied
from cloche.core.functions import CallTransport, OpenCalls
from cloche.core.guest_json import as_text, decode
from cloche.core.record import dataclass
from cloche.init import wire

from .annotations import Unfit
from .json_text import NotJson, as_json, is_small
from .threads import Threads
from .tool import BoundTool, Tools

log = logging.getLogger("cloche.tools")
MOST_WAITING, MOST_WAITING_BYTES = 1024, 4 << 20  # of calls that were received and do not run yet
MOST_REFUSED = 1000  # calls above a limit, after which nothing more is read
FRAMES_AT_ONCE = 64
CANCEL_TIMEOUT_S = 2.0  # for a cancelled function to clean up
MOST_PARTS = 20_000  # commas, lists and objects of a call, which are read at once
SMALL_BYTES = 1 << 13  # of a call that is parsed without a thread
MOST_MESSAGE_CHARS = 2000
FRAME_BYTES = 512  # of a call's frame, beside its arguments
_turn = threading.Lock()
Approve = Callable[[BoundTool, Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """Describe a call that has ended. `outcome` is ok, failed, refused, denied, timeout or cancelled."""

    name: str
    arguments: bytes
    result_bytes: int
    outcome: str
    message: str
    seconds: float


class Counts:
    """Count the calls of a run or a cell."""

    def __init__(self) -> None:
        self.calls = self.bytes = self.refused = 0
        self.outcomes: dict[str, int] = {}
        self.by_name: dict[str, int] = {}

    def note(self, record: CallRecord) -> None:
        self.outcomes[record.outcome] = self.outcomes.get(record.outcome, 0) + 1
        self.bytes += len(record.arguments) + record.result_bytes
        if record.name:
            self.by_name[record.name] = self.by_name.get(record.name, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of a result's meta."""
        return {"calls": self.calls, **self.outcomes, "bytes": self.bytes, "by_name": self.by_name}


class Refused(Exception):
    """Hold why a call was not made, as the guest reads it."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class HostFunctions:
    """Serve the tools of one sandbox to any number of guests. `on_call` gets each call that has ended.

    `freeze` gets the open sandbox that has to stand still while `approve` waits for somebody.
    """

    def __init__(
        self, tools: Tools, *, on_call: Callable[[CallRecord], None] = lambda _: None, approve: Approve | None = None,
        freeze: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        self.tools, self.on_call, self.approve, self.freeze = tools, on_call, approve, freeze
        self.threads = Threads(tools.limits.at_once)
        self.context = contextvars.copy_context()
        self.greeting = wire.json_frame(wire.HELLO, 0, **tools.greeting())

    @property
    def names(self) -> tuple[str, ...]:
        """Return what they are called."""
        return tuple(self.tools.by_name)

    def serve(self, transport: CallTransport) -> GuestCalls:
        """Serve one guest, on the running loop."""
        return GuestCalls(self, transport)


class GuestCalls:
    """Serve the calls of one guest. Use from one event loop; `end` it in any case."""

    def __init__(self, functions: HostFunctions, transport: CallTransport) -> None:
        self._functions, self._transport, self._limits = functions, transport, functions.tools.limits
        self._loop = asyncio.get_running_loop()
        self._buffer = wire.FrameBuffer(self._limits.call_bytes + FRAME_BYTES, wire.CLOSE)
        self._waiting: dict[int, bytes] = {}  # in the order of their arrival
        self._waiting_bytes = 0
        self._running: dict[int, asyncio.Task[None]] = {}
        self._is_paused = self._is_over = self._has_more = False
        self.counts = Counts()
        transport.send(functions.greeting)

    @property
    def is_running(self) -> bool:
        """Tell whether a function runs, also one that was cancelled and cleans up."""
        return bool(self._running)

    def renew(self) -> None:
        """Count anew, for the next cell."""
        self.counts = Counts()

    def follow(self, earlier: OpenCalls) -> None:
        """Count on where an earlier guest of the same session has ended: a service may end one as often as it likes."""
        if isinstance(earlier, GuestCalls):
            self.counts = earlier.counts

    def notes(self) -> dict[str, Any]:
        """Return the entry for a result's meta."""
        return {"tools": self.counts.as_dict()}

    def receive(self, data: bytes) -> None:
        """Take bytes of the guest."""
        if not self._is_over:
            self._take(data)

    def end(self) -> None:
        """Cancel all calls; nothing more is sent."""
        self._is_over = True
        self._waiting.clear()
        for task in list(self._running.values()):
            _cancel(task)

    async def close(self) -> None:
        """End, and wait a moment for the cancelled functions."""
        self.end()
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=CANCEL_TIMEOUT_S)

    def resume(self) -> None:
        """Go on, as the transport is full no more."""
        if not self._is_over:
            self._start_next()
            self._loop.call_soon(self._go_on)
            self._pace()

    @property
    def _room(self) -> int:
        """Return how many calls may be read now."""
        if self._waiting_bytes >= MOST_WAITING_BYTES:
            return 0
        return max(0, min(MOST_WAITING - len(self._waiting), FRAMES_AT_ONCE))

    def _take(self, data: bytes = b"") -> None:
        room = self._room
        try:
            frames = self._buffer.feed(data, room)
            for kind, number, body in frames:
                self._take_frame(kind, number, body)
        except ValueError as error:
            self._break(error)
            return
        self._has_more = len(frames) == room
        self._start_next()
        if self._has_more and self._room:
            self._loop.call_soon(self._go_on)
        self._pace()

    def _go_on(self) -> None:
        if self._has_more and not self._is_over and self._room:
            self._take()

    def _pace(self) -> None:
        """Read only while what was read has been taken, and the answers are."""
        is_paused = self._has_more or self._transport.is_full
        if is_paused != self._is_paused and not self._is_over:
            self._is_paused = is_paused
            self._transport.pause(is_paused)

    def _break(self, error: ValueError) -> None:
        log.warning("a guest broke the protocol of its calls, which are served no more: %s", error)
        self.end()
        self._transport.pause(True)
        self._transport.hang_up()

    def _take_frame(self, kind: int, number: int, body: bytes) -> None:
        if kind == wire.CLOSE:
            self._withdraw(number)
            if number in self._running:
                _cancel(self._running[number])
            return
        if kind != wire.OPEN or number == 0 or number in self._running or number in self._waiting:
            raise wire.WireError(f"a frame of kind {kind} with the number {number}")
        self._waiting[number] = body
        self._waiting_bytes += len(body)

    def _withdraw(self, number: int) -> bytes:
        """Return the body of a call that waits no longer; an empty one for none."""
        body = self._waiting.pop(number, b"")
        self._waiting_bytes -= len(body)
        return body

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < self._limits.at_once and not self._transport.is_full:
            number = next(iter(self._waiting))
            call = self._serve(number, self._withdraw(number))
            task = self._running[number] = self._loop.create_task(call, context=self._functions.context.copy())
            task.add_done_callback(partial(self._note_end, number))

    def _note_end(self, number: int, task: asyncio.Task[None]) -> None:
        self._running.pop(number, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call of a tool could not be served: %s", error, exc_info=error)
        self.resume()

    async def _serve(self, number: int, body: bytes) -> None:
        started, name, outcome, message, result = time.monotonic(), "", "ok", "", b""
        try:
            tool, arguments, keywords, shown = await self._read(body)
            name = tool.name
            await self._ask(tool, shown)
            result = await self._run(tool, arguments, keywords)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Refused as error:
            outcome, message = error.kind, str(error)
        except Exception as error:
            outcome, message = "failed", _message(error)
            kind = type(error).__name__
            if not self._is_over:
                self._send(number, _error(kind, message))
        else:
            if not self._is_over:
                self._send(number, b'{"value":' + result + b"}")
        finally:
            self._note(CallRecord(
                name=name, arguments=body, result_bytes=len(result), outcome=outcome, message=message,
                seconds=time.monotonic() - started,
            ))  # fmt: skip
        if outcome not in ("ok", "failed") and not self._is_over:
            self._send(number, _error(outcome, message))
            self._count_refused()
        if self._transport.is_full and not self._is_over:
            await self._transport.drain()

    def _count_refused(self) -> None:
        self.counts.refused += 1
        if self.counts.refused >= MOST_REFUSED:
            self._break(ValueError(f"{MOST_REFUSED} of its calls were refused"))

    def _note(self, record: CallRecord) -> None:
        self.counts.note(record)
        self._functions.on_call(record)

    def _send(self, number: int, body: bytes) -> None:
        self._transport.send(wire.frame(wire.CLOSE, number, body))

    async def _read(self, body: bytes) -> tuple[BoundTool, list[Any], dict[str, Any], dict[str, Any]]:
        """Return the tool of a call and its checked arguments. Raises Refused."""
        self.counts.calls += 1
        limits, counts = self._limits, self.counts
        if counts.calls > limits.calls:
            raise Refused("refused", f"this run has made {limits.calls} calls, which is its limit (tool_limits: calls)")
        if counts.bytes > limits.total_bytes:
            raise Refused(
                "refused", f"the calls of this run have passed {limits.total_bytes} bytes (tool_limits: total_bytes)"
            )
        if len(body) <= SMALL_BYTES:
            return self._check(body)
        return await self._in_thread(partial(_in_turn, partial(self._check, body)))  # type: ignore[no-any-return]

    def _in_thread(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        return self._functions.threads.run(function, self._functions.context)

    def _check(self, body: bytes) -> tuple[BoundTool, list[Any], dict[str, Any], dict[str, Any]]:
        try:
            message = decode(as_text(body), MOST_PARTS)[0]
        except ValueError as error:
            raise Refused("refused", f"the arguments are not accepted: {error}"[:MOST_MESSAGE_CHARS]) from None
        name = message.get("call") if isinstance(message, dict) else None
        data, more = (message.get("data", {}), message.get("more", [])) if isinstance(message, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(data, dict) or not isinstance(more, list):
            raise Refused("refused", "a call is an object with `call`, a name, and `data`, arguments by name")
        tool = self._functions.tools.by_name.get(name)
        if "*" in data:  # the name by which an approver is shown `more`
            raise Refused("refused", "no argument is called '*'")
        if tool is None:
            known = ", ".join(self._functions.tools.by_name)
            raise Refused("refused", f"there is no function {name[:100]!r} here; there is: {known}")
        try:
            shown = copy.deepcopy({**data, "*": more} if more else data) if self._functions.approve is not None else {}
            return (tool, *tool.arguments(data, more), shown)
        except Unfit as error:
            raise Refused("refused", str(error)[:MOST_MESSAGE_CHARS]) from None

    async def _ask(self, tool: BoundTool, arguments: Mapping[str, Any]) -> None:
        """Wait for the approver, if there is one. Raises Refused without a yes."""
        if self._functions.approve is None:
            return
        try:
            await self._functions.approve(tool, arguments)
        except ApprovalDenied as error:
            raise Refused("denied", str(error)[:MOST_MESSAGE_CHARS]) from None

    async def _run(self, tool: BoundTool, arguments: list[Any], keywords: dict[str, Any]) -> bytes:
        """Call the function and return its result as JSON. Raises Refused, and what the function raises."""
        limit = asyncio.timeout(tool.timeout_s)
        try:
            async with limit:
                return await (self._await(tool, arguments, keywords) if tool.is_async else self._in_thread(
                    partial(self._call, tool, arguments, keywords)
                ))  # fmt: skip
        except TimeoutError:
            if not limit.expired():
                raise
            raise Refused("timeout", f"{tool.name} did not end within {tool.timeout_s:g} s; ask for less") from None

    def _call(self, tool: BoundTool, arguments: list[Any], keywords: dict[str, Any]) -> Any:  # noqa: ANN401
        value = tool.tool.function(*arguments, **keywords)
        if inspect.isawaitable(value):
            raise TypeError(f"{tool.name} is not async but returned an awaitable; make it `async def`")
        return self._as_json(tool, value) if is_small(value) else _in_turn(partial(self._as_json, tool, value))

    async def _await(self, tool: BoundTool, arguments: list[Any], keywords: dict[str, Any]) -> bytes:
        value = await tool.tool.function(*arguments, **keywords)
        if is_small(value):
            return self._as_json(tool, value)
        write = partial(self._as_json, tool, value)
        return await self._in_thread(partial(_in_turn, write))  # type: ignore[no-any-return]

    def _as_json(self, tool: BoundTool, value: Any) -> bytes:  # noqa: ANN401
        try:
            return as_json(value, self._limits.call_bytes)
        except NotJson as error:
            raise Refused("refused", f"the result of {tool.name} cannot be sent: {error}") from None


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a call once: a guest that cancels it again must not interrupt what its function does at its end."""
    if not task.cancelling():
        task.cancel()


def _in_turn(work: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Read or write large JSON: one thread at a time, as each holds the interpreter's lock for a while."""
    with _turn:
        return work()


def _message(error: BaseException) -> str:
    try:
        return str(error)[:MOST_MESSAGE_CHARS]
    except Exception:  # of the error's own __str__, which is the caller's code
        return f"<{type(error).__name__} that cannot be put into words>"


def _error(kind: str, message: str) -> bytes:
    return as_json({"error": {"kind": kind, "message": message}}, 1 << 20)
