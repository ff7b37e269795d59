"""What a hostile guest sends in place of calls, to the part of the caller that serves them: bytes here, no jail."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cloche.core.guest_json import MAX_DEPTH
from cloche.functions import calls as calls_module
from cloche.functions.calls import CallRecord, GuestCalls, HostFunctions
from cloche.functions.tool import Tool, ToolLimits, read_tools
from cloche.init import wire
from tests.harness.loops import check_loop, in_loop


class Guest:
    """Be the guest's end in memory: what it sends, what it was answered, and whether it reads."""

    def __init__(self, *tools: Tool | Callable[..., Any], limits: ToolLimits | None = None, reads: bool = True) -> None:
        self.records: list[CallRecord] = []
        bound = read_tools(list(tools), limits)
        assert bound is not None
        self.reads, self.is_paused, self.unread, self.is_told = reads, False, 0, False
        self.answers: dict[int, dict[str, Any]] = {}
        self._read = wire.FrameBuffer(1 << 30)
        self._drained = asyncio.Event()
        self.calls = HostFunctions(bound, on_call=self.records.append).serve(self)

    @property
    def is_full(self) -> bool:
        """Tell whether much was not read."""
        return self.unread > 1 << 18

    def send(self, data: bytes) -> None:
        """Take an answer."""
        if not self.reads:
            self.unread += len(data)
            return
        for _, number, body in self._read.feed(data):
            if number:  # not the greeting
                self.answers[number] = json.loads(body)

    async def drain(self) -> None:
        """Wait for ever, if nothing is read."""
        if not self.reads:
            await self._drained.wait()

    def pause(self, is_paused: bool) -> None:
        """Remember whether the caller reads."""
        self.is_paused = is_paused

    def hang_up(self) -> None:
        """Hear that there are no answers any longer."""
        self.is_told = True

    def call(self, number: int, name: Any, /, **data: Any) -> None:
        """Send a call, as the guest's module does."""
        self.raw(number, json.dumps({"call": name, "data": data}).encode())

    def raw(self, number: int, body: bytes, kind: int = wire.OPEN) -> None:
        """Send a frame with any body."""
        self.calls.receive(wire.frame(kind, number, body))

    async def answer(self, number: int) -> dict[str, Any]:
        """Wait for an answer and return it."""
        while number not in self.answers:  # noqa: ASYNC110 - as a guest that looks
            await asyncio.sleep(0.001)
        return self.answers.pop(number)

    async def refusal(self, number: int) -> str:
        """Wait for a refusal and return its sentence."""
        error = (await self.answer(number))["error"]
        assert error["kind"] == "refused", error
        return str(error["message"])


def echo(value: Any) -> Any:
    """Return what came."""
    return value


def one(n: int, *, limit: int = 3) -> int:
    """Return a number."""
    return n + limit


class Held:
    """Measure the longest time that this loop was held by this process, whatever else the machine does."""

    def __init__(self) -> None:
        self.longest_s, self._loop, self._is_over = 0.0, asyncio.get_running_loop(), False
        self._last = time.perf_counter(), time.process_time()
        self._tick()

    def _tick(self) -> None:
        now = time.perf_counter(), time.process_time()
        held_s = min(after - before for after, before in zip(now, self._last, strict=True))
        self.longest_s, self._last = max(self.longest_s, held_s), now
        if not self._is_over:
            self._loop.call_later(0.001, self._tick)

    def end(self) -> float:
        """Return the longest time so far."""
        self._tick()
        self._is_over = True
        return self.longest_s


def naive(text: str) -> Any:
    """Read a call as a server without care would: the control of the attempts below."""
    return json.loads(text)


# What is in a call.


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_refused(text: str) -> None:
    """A naive reader passes NaN and infinities on to the function, where they break sums and comparisons."""
    assert not math.isfinite(naive(text))

    async def claim() -> None:
        guest = Guest(echo)
        guest.raw(1, b'{"call":"echo","data":{"value":%b}}' % text.encode())
        assert "not accepted" in await guest.refusal(1)

    in_loop(claim)


def test_a_lone_surrogate_is_refused() -> None:
    """A naive reader makes a string of it that no file, log or database takes."""
    with pytest.raises(UnicodeEncodeError):
        naive('"\\ud800"').encode()

    async def claim() -> None:
        guest = Guest(echo)
        guest.raw(1, b'{"call":"echo","data":{"value":"\\ud800"}}')
        assert "surrogate" in await guest.refusal(1)

    in_loop(claim)


def test_nested_arguments_are_refused() -> None:
    """A naive reader passes on a value that the next function to walk it cannot: it exceeds the recursion limit."""
    deep = "[" * 900 + "]" * 900
    assert naive(deep)

    async def claim() -> None:
        guest = Guest(echo)
        guest.raw(1, b'{"call":"echo","data":{"value":%b}}' % deep.encode())
        assert "nested too deeply" in await guest.refusal(1)
        guest.raw(2, b'{"call":"echo","data":{"value":%b}}' % (b"[" * 200_000))
        assert "not accepted" in await guest.refusal(2)

    in_loop(claim)


def test_a_long_integer_is_refused() -> None:
    """Reading an integer takes time with the square of its digits."""
    assert len("9" * 5000) > 4300

    async def claim() -> None:
        guest = Guest(echo)
        guest.raw(1, b'{"call":"echo","data":{"value":%b}}' % (b"9" * 100_000))
        assert "not accepted" in await guest.refusal(1)

    in_loop(claim)


NAMES: list[Any] = ["__class__", "__globals__", "tool", "one.__globals__", "", "One", 5, None, ["one"], {}]
UNKNOWN: list[dict[str, Any]] = [
    {"n": 1, "__class__": 2},
    {"n": 1, "self": 2},
    {"n": 1, "timeout_s": 2},
    {"limit": 1},
    {},
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reaches_nothing_but_the_tools(name: Any) -> None:
    """A server that looks names up as attributes hands out its own internals."""
    assert getattr(Guest, "__class__", None) is type

    async def claim() -> None:
        guest = Guest(one)
        guest.call(1, name, n=1)
        assert await guest.refusal(1)
        assert guest.records[0].name == ""

    in_loop(claim)


@pytest.mark.parametrize("data", UNKNOWN)
def test_only_the_parameters_of_the_function_are_filled(data: dict[str, Any]) -> None:
    """A missing argument, and one that the function has not, are refused by name before the function runs."""

    async def claim() -> None:
        guest = Guest(one)
        guest.call(1, "one", **data)
        assert "one " in await guest.refusal(1)

    in_loop(claim)


@pytest.mark.parametrize("value", ["5", 5.5, None, [5], True])
def test_an_argument_of_another_type_is_refused(value: Any) -> None:
    """A function that trusts its annotation would compute with text, or take true for 1."""

    async def claim() -> None:
        guest = Guest(one)
        guest.call(1, "one", n=value)
        assert (await guest.refusal(1)).startswith("n must be an integer")

    in_loop(claim)


def test_an_approver_is_shown_every_argument() -> None:
    """The name under which it is shown those by position is no name of another one, which it would replace."""

    async def claim() -> None:
        guest = Guest(Tool(lambda *paths, **named: [paths, named], name="remove"))
        guest.raw(1, b'{"call":"remove","data":{"*":"home"},"more":["draft"]}')
        assert "'*'" in await guest.refusal(1)

    in_loop(claim)


# Frames.


@pytest.mark.parametrize(
    "data",
    [
        wire.HEADER.pack(1 << 30, 1, wire.OPEN),  # a call of 1 GiB
        wire.HEADER.pack(0, 1, 99),
        wire.frame(wire.HELLO, 0, b"{}"),
        wire.frame(wire.OPEN, 0, b"{}"),
        wire.frame(wire.DATA, 1, b"{}"),
        wire.frame(wire.OPEN, 7, b'{"call":"wait","data":{}}') * 2,  # one number twice
    ],
)
def test_a_broken_protocol_ends_the_calls(data: bytes) -> None:
    """Nothing is read or sent after it, whatever else comes, and running calls are cancelled."""

    async def claim() -> None:
        async def wait() -> None:
            await asyncio.sleep(60)

        guest = Guest(wait, one)
        guest.calls.receive(data)
        guest.call(9, "one", n=1)
        await asyncio.sleep(0.01)
        assert guest.is_paused
        assert guest.is_told
        assert 9 not in guest.answers
        await guest.calls.close()

    in_loop(claim)


def test_a_forged_number_of_an_answer_means_nothing_to_another_guest() -> None:
    """Numbers are keys of one link: a guest can neither cancel nor receive the call of another."""

    async def claim() -> None:
        go = asyncio.Event()

        async def wait() -> str:
            await go.wait()
            return "mine"

        victim, attacker = Guest(wait), Guest(wait)
        victim.call(5, "wait")
        await asyncio.sleep(0)
        for number in range(1, 20):
            attacker.raw(number, b"", wire.CLOSE)
        attacker.raw(5, b'{"value":"forged"}', wire.CLOSE)
        go.set()
        assert await victim.answer(5) == {"value": "mine"}
        assert not attacker.answers

    in_loop(claim)


def test_half_a_message_waits_without_cost() -> None:
    """The rest may never come; what came is at most one call's bytes."""

    async def claim() -> float:
        held, guest = Held(), Guest(one)
        frame = wire.frame(wire.OPEN, 1, json.dumps({"call": "one", "data": {"n": 1}}).encode())
        for byte in frame[:-1]:
            guest.calls.receive(bytes((byte,)))
        assert not guest.answers
        guest.calls.receive(frame[-1:])
        assert await guest.answer(1) == {"value": 4}
        return held.end()

    check_loop(claim)


# Numbers and sizes.


def test_a_flood_of_calls_stops_at_the_guest() -> None:
    """No more is read while many calls wait, and the loop goes on meanwhile."""

    async def claim() -> float:
        guest = Guest(one, limits=ToolLimits(calls=1000))
        held, frame = Held(), wire.frame(wire.OPEN, 0, b"{}")
        number = 0
        for _ in range(60):
            while not guest.is_paused and number < 100_000:
                pieces = [wire.frame(wire.OPEN, number + index, b"{}") for index in range(1, 65536 // len(frame))]
                number += len(pieces)
                guest.calls.receive(b"".join(pieces))
                assert len(guest.calls._waiting) <= calls_module.MOST_WAITING
            await asyncio.sleep(0.001)
        assert len(guest.records) <= calls_module.MOST_REFUSED + 20
        return held.end()

    check_loop(claim)


def test_large_calls_that_wait_stop_at_the_guest() -> None:
    """No more is read while the calls that wait are large together: a thousand of a mebibyte would be a gibibyte."""

    async def claim() -> None:
        async def wait(text: str) -> None:
            await asyncio.sleep(60)

        guest, number = Guest(wait, limits=ToolLimits(at_once=1)), 0
        while not guest.is_paused and number < 200:
            number += 1
            guest.call(number, "wait", text="x" * 500_000)
            await asyncio.sleep(0)
        assert sum(map(len, guest.calls._waiting.values())) < calls_module.MOST_WAITING_BYTES + 600_000
        await guest.calls.close()

    in_loop(claim)


def test_a_guest_that_never_reads_is_not_written_for() -> None:
    """Answers that are not read stop further calls: without that, each call would leave its answer in memory."""

    async def claim() -> None:
        async def large() -> str:
            return "x" * 200_000

        guest = Guest(large, reads=False)
        for number in range(1, 500):
            guest.call(number, "large")
        await asyncio.sleep(0.2)
        assert guest.unread < 20 * 200_000
        assert guest.is_paused
        await guest.calls.close()

    in_loop(claim)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: "x" * (1 << 28), "bytes"),
        (lambda: [["x" * (1 << 20)] * 1024], "bytes"),  # a gibibyte as JSON, and a mebibyte in memory
        (lambda: [0] * 10_000_000, "items"),
        (lambda: float("nan"), "nan"),
        (lambda: {"inner": [float("inf")]}, "inf"),
        (object, "object"),
        (lambda: {1: 2}, "no text"),
        (lambda: {1, 2}, "set"),
    ],
)
def test_a_result_that_cannot_be_sent_is_refused_in_time(make: Callable[[], Any], why: str) -> None:
    """A naive writer takes all of a gibibyte, and the loop with it; here nothing of it is written."""
    value = make()

    async def claim() -> float:
        async def give() -> Any:
            return value

        guest, held = Guest(give), Held()
        guest.call(1, "give")
        assert why in await guest.refusal(1)
        return held.end()

    check_loop(claim)


def test_a_result_that_holds_itself_is_refused() -> None:
    """A naive writer exceeds the recursion limit."""
    inner: list[Any] = []
    inner.append(inner)
    with pytest.raises((ValueError, RecursionError)):
        json.dumps(inner)

    async def claim() -> None:
        guest = Guest(Tool(lambda: inner, name="give"))
        guest.call(1, "give")
        assert f"more than {MAX_DEPTH} deep" in await guest.refusal(1)

    in_loop(claim)


SHAPES = {
    "commas": b"[" + b"0," * 400_000 + b"0]",
    "lists": b"[" + b"[]," * 300_000 + b"[]]",
    "members": b"{" + b",".join(b'"%d":0' % n for n in range(90_000)) + b"}",
    "floats": b"[" + b"1.2345678901234567," * 50_000 + b"0]",
    "escapes": b'"' + b"\\u00e9" * 150_000 + b'"',
    "text": b'"' + b"x" * 900_000 + b'"',
    "quotes": b"[" + b'"",' * 300_000 + b"0]",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_of_the_largest_size_does_not_hold_the_loop(shape: str) -> None:
    """Whatever a mebibyte of JSON is made of, others' work goes on while it is read."""

    async def claim() -> float:
        guest = Guest(echo)
        guest.call(1, "echo", value=1)
        await guest.answer(1)
        held = Held()
        for number in range(2, 6):
            guest.raw(number, b'{"call":"echo","data":{"value":%b}}' % SHAPES[shape])
            await asyncio.sleep(0)
        for number in range(2, 6):
            await guest.answer(number)
        return held.end()

    check_loop(claim)


def test_each_limit_is_a_sentence_with_the_keyword_that_raises_it() -> None:
    """The number of calls and their bytes have their own."""

    async def claim() -> None:
        guest = Guest(echo, limits=ToolLimits(calls=2))
        for number in (1, 2, 3):
            guest.call(number, "echo", value=number)
        assert "tool_limits: calls" in await guest.refusal(3)
        guest = Guest(echo, limits=ToolLimits(total_bytes=100))
        guest.call(1, "echo", value="x" * 200)
        await guest.answer(1)
        guest.call(2, "echo", value=1)
        assert "tool_limits: total_bytes" in await guest.refusal(2)

    in_loop(claim)


def test_a_guest_after_another_one_of_its_session_has_what_that_one_left() -> None:
    """A service that ends a guest and brings the next one gets no limit anew."""

    async def claim() -> None:
        limits = ToolLimits(calls=2)
        first, second = Guest(echo, limits=limits), Guest(echo, limits=limits)
        for number in (1, 2):
            first.call(number, "echo", value=number)
            await first.answer(number)
        second.calls.follow(first.calls)
        second.call(1, "echo", value=1)
        assert "tool_limits: calls" in await second.refusal(1)
        assert second.calls.notes()["tools"]["by_name"] == {"echo": 2}
        second.calls.renew()
        second.call(2, "echo", value=2)
        assert await second.answer(2) == {"value": 2}

    in_loop(claim)


# Functions.


def test_an_error_comes_as_its_message_alone() -> None:
    """Neither the traceback nor the place of the caller's code gets to the guest."""

    async def claim() -> None:
        def fail() -> None:
            raise KeyError("no such row")

        guest = Guest(fail)
        guest.call(1, "fail")
        assert await guest.answer(1) == {"error": {"kind": "KeyError", "message": "'no such row'"}}

    in_loop(claim)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()])
def test_what_would_end_a_loop_is_an_error_of_the_call(error: BaseException) -> None:
    """A function's `sys.exit` ends neither the caller nor the run."""

    async def claim() -> None:
        def leave() -> None:
            raise error

        guest = Guest(leave, one)
        guest.call(1, "leave")
        assert "error" in await guest.answer(1)
        guest.call(2, "one", n=1)
        assert await guest.answer(2) == {"value": 4}

    in_loop(claim)


def test_a_call_ends_with_its_own_time_and_with_the_run() -> None:
    """A slow function is refused in time; what runs at the end of the run is cancelled."""

    async def claim() -> None:
        ends: list[str] = []

        async def wait() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        guest = Guest(Tool(wait, name="short", timeout_s=0.05), Tool(wait, name="long"))
        guest.call(1, "short")
        assert (await guest.answer(1))["error"]["kind"] == "timeout"
        guest.call(2, "long")
        await asyncio.sleep(0.01)
        guest.raw(2, b"", wire.CLOSE)  # as a cancelled task inside does
        await asyncio.sleep(0.01)
        guest.call(3, "long")
        await asyncio.sleep(0.01)
        await guest.calls.close()
        assert ends == ["cancelled"] * 3
        assert [record.outcome for record in guest.records] == ["timeout", "cancelled", "cancelled"]

    in_loop(claim)


def test_a_function_is_cancelled_once() -> None:
    """Neither a guest that cancels it again, nor the end of the run, interrupts what it does at its end."""

    async def claim() -> None:
        ends: list[str] = []

        async def wait() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                ends.append("rolled back")

        guest = Guest(wait)
        guest.call(1, "wait")
        await asyncio.sleep(0)
        for _ in range(3):
            guest.raw(1, b"", wire.CLOSE)
            await asyncio.sleep(0)
        guest.calls.end()
        await guest.calls.close()
        assert ends == ["rolled back"]

    in_loop(claim)


def test_a_cancelled_call_that_waits_for_a_thread_is_forgotten() -> None:
    """A guest that makes calls and cancels them leaves no arguments in memory while all threads are busy."""

    async def claim() -> None:
        go, texts = threading.Event(), []

        class Text(str):
            __slots__ = ("__weakref__",)

        def block(text: Any) -> None:
            go.wait()

        def kept() -> list[object]:
            gc.collect()
            return [text for text in texts if text() is not None]

        def read(value: Any) -> Any:
            texts.append(weakref.ref(made := Text(value)))
            return made

        guest = Guest(Tool(block), limits=ToolLimits(at_once=1))
        guest.calls._functions.tools.by_name["block"]._checks["text"] = lambda value, _: read(value)
        for number in range(1, 9):
            guest.call(number, "block", text="x" * 100)
            await asyncio.sleep(0.01)
            guest.raw(number, b"", wire.CLOSE)
            await asyncio.sleep(0.01)
        assert len(texts) == 8
        assert len(kept()) == 1
        go.set()

    in_loop(claim)


def test_functions_that_block_have_a_bounded_number_of_threads() -> None:
    """`at_once` of them run, each in a thread, and the loop is free."""

    async def claim() -> float:
        running, most, lock = [0], [0], threading.Lock()

        def block() -> None:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.02)
            with lock:
                running[0] -= 1

        guest, held = Guest(block, limits=ToolLimits(at_once=4)), Held()
        for number in range(1, 17):
            guest.call(number, "block")
        for number in range(1, 17):
            await guest.answer(number)
        assert most[0] == 4
        return held.end()

    check_loop(claim)


def test_calls_without_end_leave_nothing_in_memory() -> None:
    """A call that has ended leaves counts alone."""

    async def claim() -> None:
        guest: GuestCalls
        guest = Guest(one).calls
        assert isinstance(guest, GuestCalls)
        for number in range(1, 1001):
            guest.receive(wire.frame(wire.OPEN, number, b'{"call":"one","data":{"n":1}}'))
            while guest._running or guest._waiting:  # noqa: ASYNC110 - of each call by itself
                await asyncio.sleep(0)
        assert guest.counts.calls == 1000
        assert guest.counts.outcomes == {"ok": 1000}

    in_loop(claim)
