"""A live session over a transport in memory: the clock, interrupts and results of cells, without an interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from cloche.backends.cell_outputs import Printed
from cloche.backends.saved_files import Changes
from cloche.backends.session import NOTHING, Session, SessionEnd, SessionLink, SessionTransport
from cloche.backends.session_languages import ONCE, ControlMessage, JsonCodec
from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.events import Displayed, Event, OutputChunk, Sink, Started, discard
from cloche.core.frames import MAX_FRAMES, FrameReader, encode
from cloche.core.limits import Limits
from cloche.core.result import FileRecord, KillCause, Observed, Result, Usage

CTRL_C: ControlMessage = ("interrupt", {})
BUNDLE = {"data": {"text/plain": "shown"}}


class InMemory:
    """Carry an interpreter that is a few lines here; see SessionTransport.

    A cell prints its code, and then does what the first word of it says. Whoever comes to `held_at` waits there for
    `released`.
    """

    slowness = 1.0

    def __init__(self, held_at: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.on_flood: Callable[[], None] = lambda: None
        self.link = SessionLink(JsonCodec(), self._flood)
        self.end: asyncio.Future[None] | None = loop.create_future()
        self.reader = FrameReader()
        self.held_at, self.reached, self.released = held_at, asyncio.Event(), asyncio.Event()
        self.asked: list[int] = []
        self.told: list[ControlMessage] = []
        self.kills: list[KillCause] = []
        self.closes, self.is_flooded_late = 0, False
        self.printed = bytearray()
        self.sink: Sink = discard
        self.observed: Observed | None = None
        self.running = (0, "")

    def _flood(self) -> None:
        self.on_flood()

    async def reach(self, name: str) -> None:
        if name == self.held_at:
            self.reached.set()
            await self.released.wait()

    async def prepare(self, code: str, *, was_signalled: bool) -> None:
        await self.reach("prepare")
        if code.startswith("refuse"):
            raise InvalidRequest("it cannot be prepared")

    def begin(self, sink: Sink) -> None:
        self.sink = sink
        if self.printed:
            sink(OutputChunk(stream="stdout", data=bytes(self.printed)))

    def send(self, data: bytes) -> Awaitable[None] | None:
        (frame,) = self.reader.feed(data)
        self.asked.append(frame["id"])
        if frame["id"] == NOTHING:
            self.answer(NOTHING)
        elif self.held_at == "send":
            return self._send_late(frame)
        else:
            self._take(frame)
        return None

    async def _send_late(self, frame: dict[str, Any]) -> None:
        await self.reach("send")
        self._take(frame)

    def _take(self, frame: dict[str, Any]) -> None:
        self.running = frame["id"], frame["code"].split(" ")[0]
        asyncio.get_running_loop().call_soon(self._run, frame["id"], frame["code"])

    def _run(self, number: int, code: str) -> None:
        self.print(code)
        match code.split(" "):
            case ["value", text]:
                self.answer(number, value=int(text))
            case ["show"]:
                self.link.receive(encode({"op": "display", **BUNDLE}))
                self.answer(number)
            case ["fail"]:
                self.answer(number, exit_code=1, error={"name": "ValueError", "message": "no", "traceback": "..."})
            case ["die"]:
                self.die(Observed(exit_code=3))
            case ["leave"]:
                self.die(Observed(exit_code=0))
            case ["close"]:
                self.link.lose("the interpreter has closed its link")
            case ["nonsense"]:
                self.link.receive(b"\0\0\0\2[]")
            case ["other"]:
                self.link.receive(encode({"op": "done", "id": number + 1}) + encode({"op": "whatever"}))
                self.link.receive(encode({"op": "done", "id": [1]}) + encode({"op": "done"}))
                self.answer(number, exit_code=1 << 70)
            case ["frames"]:
                self.link.receive(encode({"op": "x"}) * (MAX_FRAMES + 1))
            case ["flood"]:
                self._flood()
            case ["sleep" | "resist", *_]:
                pass
            case _:
                self.answer(number)

    def print(self, text: str) -> None:
        self.printed += text.encode()
        self.sink(OutputChunk(stream="stdout", data=text.encode()))

    def answer(self, number: int, **what: object) -> None:
        self.link.receive(encode({"op": "done", "id": number, "exit_code": 0, **what}))

    def die(self, observed: Observed) -> None:
        self.observed = observed
        if self.end is not None and not self.end.done():
            self.end.set_result(None)
        self.link.lose("the interpreter has ended")

    def collect(self, *, is_up_to_date: bool = False) -> Printed:
        assert not is_up_to_date  # as nothing is run by hand here
        if self.is_flooded_late:
            self._flood()
        printed, self.printed, self.sink = Printed(stdout=bytes(self.printed)), bytearray(), discard
        return printed

    def send_control(self, control: ControlMessage) -> None:
        self.told.append(control)
        number, code = self.running
        if control == CTRL_C and code not in ("resist", "close", "nonsense"):
            asyncio.get_running_loop().call_soon(lambda: self.answer(number, exit_code=130))

    def kill(self, cause: KillCause) -> None:
        self.kills.append(cause)
        self.die(Observed(signal=9, cause=cause))

    async def stop(self, cause: KillCause | None) -> None:
        await self.reach("stop")
        if self.end is not None and not self.end.done():
            self.kill(cause or KillCause.CANCELLED)

    async def observe_end(self, cause: KillCause | None) -> SessionEnd:
        await self.reach("observe_end")
        lost = "nobody knows" if self.observed is None else ""
        return SessionEnd(observed=self.observed or Observed(cause=cause), usage=Usage(peak_memory_bytes=7), lost=lost)

    def known_end(self) -> Observed | str:
        return self.observed or "its machine is gone"

    async def close(self) -> None:
        self.closes += 1
        await self.reach("close")
        self.die(self.observed or Observed(signal=9, cause=KillCause.CANCELLED))

    async def changes(self, _timeout_s: float) -> Changes:
        await self.reach("changes")
        return Changes(records=(FileRecord(path="f", size=1, sha256="0"),), skipped=2)

    def interrupts(self) -> int:
        """Return how often the interpreter was interrupted."""
        return self.told.count(CTRL_C)


def session_over(transport: InMemory) -> Session:
    """Return a session of it, as if it had been started."""
    carrier: SessionTransport = transport
    return Session(
        carrier, transport.changes, language="python", interrupt=ONCE, limits=Limits(),
        enforcement=Enforcement(level=Level.JAIL), notes={"backend": "memory", "start": "pooled"},
    )  # fmt: skip


def running(scenario: Callable[[InMemory, Session], Coroutine[Any, Any, None]], held_at: str = "") -> None:
    """Run a scenario, and see that no task of it is left."""

    async def main() -> None:
        transport = InMemory(held_at)
        await asyncio.wait_for(scenario(transport, session_over(transport)), 60)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    asyncio.run(main())


async def ran(session: Session, code: str, timeout_s: float = 60.0) -> Result:
    """Run a cell, and return what came of it."""
    return await session.run(code, timeout_s=timeout_s, sink=discard)


def test_a_cell_has_a_result() -> None:
    """Output, value, displays, errors and files of it, and of no other cell."""

    async def scenario(transport: InMemory, session: Session) -> None:
        transport.print("before it is ready")
        transport.link.receive(encode({"op": "ready", "runtime": "some 1"}))
        assert transport.end is not None
        await session.await_ready(transport.end)
        events: list[Event] = []
        one = await session.run("show", timeout_s=60, sink=events.append)
        assert (one.stdout, one.status, one.exit_code, one.value) == ("show", "ok", 0, None)
        assert [output.data for output in one.outputs] == [BUNDLE["data"]]
        assert [type(event) for event in events] == [Started, OutputChunk, Displayed]
        assert (one.files[0].path, one.meta["files_skipped"], one.meta["run"]) == ("f", 2, 1)
        transport.link.receive(encode({"op": "display", **BUNDLE}))  # by a thread, say, after the cell
        assert len(events) == 3
        other = await ran(session, "value 42")
        assert (other.stdout, other.value, other.outputs, other.meta["run"]) == ("value 42", 42, (), 2)
        kept = {"backend": "memory", "start": "pooled", "level": "jail", "state": "kept", "runtime": "python"}
        assert other.meta == other.meta | kept | {"versions": {"python": "some 1"}}
        failed = await ran(session, "fail")
        assert (failed.status, failed.exit_code) == ("error", 1)
        assert failed.meta["error"] == {"name": "ValueError", "message": "no"}
        assert transport.asked == [1, 2, 3]

    running(scenario)


@pytest.mark.parametrize("code", ["sleep", "resist"])
def test_a_cell_that_is_interrupted_keeps_the_state_unless_it_resists(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What resists is killed, with the session."""
    monkeypatch.setattr("cloche.backends.session.INTERRUPT_TIMEOUT_S", 0.1)

    async def scenario(transport: InMemory, session: Session) -> None:
        cell = asyncio.ensure_future(ran(session, code))
        await asyncio.sleep(0.01)
        await session.interrupt()
        result = await cell
        assert (result.status, transport.interrupts()) == ("signaled", 1)
        if code == "sleep":
            assert (result.exit_code, result.meta["state"], transport.kills) == (130, "kept", [])
            assert (await ran(session, "next")).stdout == "next"
            assert transport.asked == [1, NOTHING, 2]  # what was sent before that is none of the next cell's
            assert (await ran(session, "next")).ok
            assert transport.asked == [1, NOTHING, 2, 3]
        else:
            assert (result.exit_code, result.meta["state"]) == (137, "lost")
            assert transport.kills == [KillCause.CANCELLED]

    running(scenario)


def test_the_time_to_obey_an_interrupt_is_not_that_of_the_next_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that was interrupted and has answered leaves no clock behind that kills the one after it."""
    monkeypatch.setattr("cloche.backends.session.INTERRUPT_TIMEOUT_S", 0.1)

    async def scenario(transport: InMemory, session: Session) -> None:
        assert (await ran(session, "sleep", 0.01)).status == "timeout"
        following = asyncio.ensure_future(ran(session, "sleep"))
        await asyncio.sleep(0.2)
        assert (transport.interrupts(), transport.kills) == (1, [])
        await session.interrupt()
        assert (await following).meta["state"] == "kept"

    running(scenario)


def test_an_interrupt_without_a_cell_does_nothing() -> None:
    """Neither before the first one, whose number is none yet, nor after one, nor after the end."""

    async def scenario(transport: InMemory, session: Session) -> None:
        await session.interrupt()
        assert (await ran(session, "first")).ok
        await session.interrupt()
        assert (await ran(session, "second")).ok
        assert (transport.interrupts(), transport.asked) == (0, [1, 2])
        await session.close()
        await session.interrupt()
        assert transport.interrupts() == 0

    running(scenario)


@pytest.mark.parametrize("held_at", ["prepare", "send"])
def test_an_interrupt_waits_until_its_cell_was_sent(held_at: str) -> None:
    """Else the interpreter would hear it before the cell, and run that."""

    async def scenario(transport: InMemory, session: Session) -> None:
        cell = asyncio.ensure_future(ran(session, "sleep"))
        await transport.reached.wait()
        await session.interrupt()
        await asyncio.sleep(0.01)
        assert transport.interrupts() == 0
        transport.released.set()
        assert ((await cell).status, transport.interrupts()) == ("signaled", 1)

    running(scenario, held_at)


@pytest.mark.parametrize(("code", "state", "kills"), [("sleep", "kept", []), ("resist", "lost", [KillCause.TIMEOUT])])
def test_a_cell_over_its_time_is_interrupted(
    code: str, state: str, kills: list[KillCause], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And killed if it resists; its result says time-out in both cases."""
    monkeypatch.setattr("cloche.backends.session.INTERRUPT_TIMEOUT_S", 0.1)

    async def scenario(transport: InMemory, session: Session) -> None:
        result = await ran(session, code, 0.05)
        assert (result.status, result.exit_code, result.timed_out, result.meta["state"]) == (
            "timeout",
            -1,
            True,
            state,
        )
        assert (result.stdout, "timed out" in result.stderr.lower()) == (code, True)
        assert (transport.interrupts(), transport.kills) == (1, kills)
        assert ("pace", {"is_busy": True}) in transport.told
        assert session.is_alive is (state == "kept")
        assert session.why_ended == ("" if session.is_alive else "timeout, exit code -1")

    running(scenario)


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "why"),
    [
        ("die", "error", 3, "error, exit code 3"),
        ("leave", "error", 0, "error, exit code 0"),  # in the middle of a cell, also with 0
        ("close", "signaled", 137, "signaled, exit code 137"),  # its link is gone, so it is killed
    ],
)
def test_an_interpreter_that_ends_in_a_cell_ends_the_session(code: str, status: str, exit_code: int, why: str) -> None:
    """The cell has a result all the same, with what it printed; the next one is refused, and says why."""

    async def scenario(_: InMemory, session: Session) -> None:
        result = await ran(session, code)
        assert (result.status, result.exit_code, result.stdout) == (status, exit_code, code)
        assert (result.meta["state"], result.usage.peak_memory_bytes) == ("lost", 7)
        assert (session.is_alive, session.has_ended, session.why_ended) == (False, True, why)
        with pytest.raises(InvalidRequest, match=rf"has ended \({why}\); restart it"):
            await ran(session, "next")

    running(scenario)


def test_an_end_between_two_cells_is_known_without_asking() -> None:
    """Or said in words where nobody knows."""

    async def scenario(transport: InMemory, session: Session) -> None:
        transport.link.lose("the container is gone")
        with pytest.raises(InvalidRequest, match=r"has ended \(its machine is gone\); restart it"):
            await ran(session, "next")
        assert not session.has_ended
        transport.die(Observed(exit_code=4))
        assert (session.why_ended, session.has_ended) == ("error, exit code 4", True)

    running(scenario)


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [("nonsense", "signaled", "an invalid message"), ("frames", "output_limit", "more than one cell may send")],
)
def test_a_frame_that_cannot_be_ends_the_session(code: str, status: str, why: str) -> None:
    """It is killed, and nothing more is read of it."""

    async def scenario(transport: InMemory, session: Session) -> None:
        result = await ran(session, code)
        assert (result.status, result.meta["state"], result.stdout) == (status, "lost", code)
        assert why in result.meta["refused"]
        assert len(transport.kills) == 1

    running(scenario)


def test_frames_that_are_not_known_change_nothing() -> None:
    """Answers to what was never asked, and numbers that are none."""

    async def scenario(_: InMemory, session: Session) -> None:
        result = await ran(session, "other")
        assert (result.status, result.exit_code, result.meta["state"]) == ("error", 1, "kept")
        assert (await ran(session, "next")).ok

    running(scenario)


def test_a_flood_is_interrupted_in_a_cell_and_killed_between_two() -> None:
    """Nobody is there to be told of what comes between two cells."""

    async def scenario(transport: InMemory, session: Session) -> None:
        result = await ran(session, "flood")
        assert (result.status, result.meta["state"], result.enforcement.hits) == ("output_limit", "kept", {"output": 1})
        assert (await ran(session, "next")).ok
        transport.on_flood()
        assert (transport.kills, session.is_alive) == ([KillCause.OUTPUT_LIMIT], False)
        assert session.why_ended == "output_limit, exit code 137"

    running(scenario)


def test_a_flood_that_is_read_after_the_answer_is_that_of_the_cell() -> None:
    """It is in the pipe when the cell says that it is done; who says too much between two cells is killed."""

    async def scenario(transport: InMemory, session: Session) -> None:
        transport.is_flooded_late = True
        result = await ran(session, "value 1")
        assert (result.status, session.is_alive) == ("output_limit", False)

    running(scenario)


def test_two_cells_at_once_take_turns() -> None:
    """Each has its own output and answer, and an interrupt is for the one that runs."""

    async def scenario(transport: InMemory, session: Session) -> None:
        first, second = asyncio.ensure_future(ran(session, "sleep")), asyncio.ensure_future(ran(session, "value 2"))
        await asyncio.sleep(0.02)
        assert transport.asked == [1]
        await session.interrupt()
        assert [(one.stdout, one.status, one.value) for one in (await first, await second)] == [
            ("sleep", "signaled", None),
            ("value 2", "ok", 2),
        ]

    running(scenario)


def test_a_closed_session_is_not_used_again() -> None:
    """It is closed once, however often and by however many that is asked."""

    async def scenario(transport: InMemory, session: Session) -> None:
        assert (await ran(session, "first")).ok
        await asyncio.gather(session.close(), session.close())
        await session.close()
        assert (transport.closes, session.is_closed, session.has_ended, session.is_alive) == (1, True, True, False)
        with pytest.raises(InvalidRequest, match="has ended"):
            await ran(session, "next")

    running(scenario)


def test_a_session_that_is_closed_in_a_cell_ends_that() -> None:
    """Whoever waits for the cell has a result, and who waits for its turn is refused."""

    async def scenario(transport: InMemory, session: Session) -> None:
        cell, other = asyncio.ensure_future(ran(session, "resist")), asyncio.ensure_future(ran(session, "next"))
        await asyncio.sleep(0.01)
        await session.close()
        assert ((await cell).status, (await cell).meta["state"]) == ("signaled", "lost")
        with pytest.raises(InvalidRequest, match="has ended"):
            await other
        assert (transport.asked, transport.closes) == ([1], 1)

    running(scenario)


def test_an_end_that_is_cancelled_is_waited_for() -> None:
    """Who cancels it knows afterwards that all is gone."""

    async def scenario(transport: InMemory, session: Session) -> None:
        closing = asyncio.ensure_future(session.close())
        await transport.reached.wait()
        for _ in range(3):
            closing.cancel()
            await asyncio.sleep(0)
        assert not closing.done()
        transport.released.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert session.has_ended

    running(scenario, "close")


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("held_at", "code", "lives"),
    [
        ("prepare", "sleep", True),
        ("send", "sleep", True),
        ("", "sleep", True),
        ("changes", "value 1", True),
        ("stop", "close", False),
        ("observe_end", "die", False),
    ],
)
def test_a_cell_can_be_cancelled_anywhere(held_at: str, code: str, times: int, *, lives: bool) -> None:
    """Once or again and again: it does not go on, and the next one has nothing of it."""

    async def scenario(transport: InMemory, session: Session) -> None:
        cell = asyncio.ensure_future(ran(session, code))
        await (transport.reached.wait() if held_at else asyncio.sleep(0.02))
        for _ in range(times):
            cell.cancel()
            await asyncio.sleep(0)
        transport.released.set()
        with pytest.raises(asyncio.CancelledError):
            await cell
        transport.held_at = ""
        assert session.is_alive is lives
        if lives:
            assert transport.interrupts() == (held_at in ("send", ""))
            after = await ran(session, "value 5")
            assert (after.stdout, after.value) == ("value 5", 5)
        else:
            with pytest.raises(InvalidRequest, match="has ended"):
                await ran(session, "next")

    running(scenario, held_at)


def test_what_cannot_be_sent_or_prepared_is_no_cell() -> None:
    """The session goes on as before."""

    async def scenario(transport: InMemory, session: Session) -> None:
        with pytest.raises(InvalidRequest, match="cannot be prepared"):
            await ran(session, "refuse")
        assert (transport.asked, (await ran(session, "next")).ok) == ([2], True)

    running(scenario)


def test_a_session_that_does_not_begin_says_what_it_printed() -> None:
    """Or what its end holds, where that says more."""

    async def scenario(transport: InMemory, session: Session) -> None:
        transport.die(Observed(exit_code=1))
        assert transport.end is not None
        with pytest.raises(StartFailed, match="the python session did not start"):
            await session.await_ready(transport.end)
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(StartFailed("there is no room", step="session"))
        with pytest.raises(StartFailed, match="there is no room"):
            await session.await_ready(failed)

    running(scenario)
