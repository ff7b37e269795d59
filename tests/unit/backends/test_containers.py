"""What becomes of containers when things go wrong: nothing that was started is left, and no error sticks."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from cloche.backends.containers.container import (
    DONE,
    ENDED,
    MOST_BYTES,
    OUTPUT,
    SMALL_BYTES,
    STARTED,
    ByteReceiver,
    Container,
    ContainerLink,
    read_object,
)
from cloche.backends.containers.pool import ContainerPool
from cloche.backends.containers.program import Program, SessionProgram, python_session
from cloche.backends.containers.run import reported_end
from cloche.backends.containers.sandbox import SessionSandbox
from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.events import discard
from cloche.core.frames import encode
from cloche.core.languages import language_named
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.result import KillCause, Observed
from cloche.init import wire

REPORT = {"wait_status": 0, "wall_s": 0.1, "cpu_user_s": None, "cpu_system_s": None}
REQUEST = Request(argv=("true",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rootfs:
    """Say nothing in particular."""

    id: str = "1"
    name: str = "some"


class Pieces:
    """Carry what is given, and nothing back; see containers.frames.Wire."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def send(self, data: bytes) -> None:
        raise ConnectionError("nobody listens")

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        yield from ((OUTPUT, piece) for piece in self._pieces)

    def shutdown(self) -> None:
        """Do nothing: it has ended."""

    def close(self) -> None:
        """Do nothing: it has ended."""


class ScriptedInit:
    """Answer as the init of a container with one session; see containers.container.ContainerWire."""

    def __init__(self, receiver: ByteReceiver, may_end: threading.Event) -> None:
        self._receiver, self._may_end = receiver, may_end
        self._frames = wire.FrameBuffer()
        self.started = self.cells = self.interrupts = 0
        self._say(wire.json_frame(wire.HELLO, 0, version=wire.VERSION))

    def _say(self, *frames: bytes) -> None:
        self._receiver.take(b"".join(frames))

    def _answer(self, number: int, **frame: Any) -> None:
        self._say(wire.data_frame(number, wire.REPORT, encode(frame)))

    def send(self, data: bytes) -> None:
        """Start a session, take cells, have one interrupted, and end it when it may."""
        for kind, number, body in self._frames.feed(data):
            if kind == wire.OPEN and wire.read_object(body)["op"] == "start":
                self.started += 1
                self._say(wire.json_frame(wire.EVENT, number, event="started", id="1", pid=2))
                self._answer(number, op="ready")
            elif kind == wire.DATA:
                time.sleep(0.05)
                self.cells += 1
            elif kind == wire.ASK:
                self._obey(number, wire.read_object(body)["do"])

    def _obey(self, number: int, do: str) -> None:
        if do == "signal":
            self.interrupts += 1
            self._answer(number, op="done", id=1, exit_code=130)
        elif do == "kill":
            self._may_end.wait(30)
            end = wire.json_frame(wire.EVENT, number, event="exit", status=9, cause="")
            self._say(end, wire.json_frame(wire.CLOSE, number))

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        yield from ()

    def shutdown(self) -> None:
        """Do nothing: it has no process."""

    def close(self) -> None:
        """Do nothing: it has no process."""


class Scripted(Container[Rootfs]):
    """Do what a container does, without a process; and remember what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rootfs = Rootfs()
        self.is_released = False
        self.init: ScriptedInit | None = None
        self.is_stubborn, self.killed_at = False, 0.0
        self.gone, self.may_end = threading.Event(), threading.Event()
        self.report: Mapping[str, Any] = REPORT

    def connect(self, pieces: Sequence[bytes]) -> None:
        """Hear these pieces from a link, then its end."""
        self._link = ContainerLink(Pieces(pieces), self._receive, self._lose)

    def _open(self, make_boot: Callable[[], bytes], receiver: ByteReceiver | None) -> None:
        """Be there."""

    def _abandon(self) -> None:
        """Leave nothing."""

    def kill(self) -> None:
        self._lose()

    def end_by_guest(self) -> Observed | None:
        return None

    def release(self) -> None:
        self.is_released = True
        self._lose()

    def argv(self) -> Sequence[str]:
        return ("container",)

    def order(self, order: Mapping[str, Any], *_: bytes) -> None:
        """Run what is wanted in no time."""
        self._receive(STARTED, b"")
        if self.is_stubborn:
            return
        self._end()
        self._receive(DONE, b"{}")

    def kill_guest(self) -> None:
        """Take a moment, as all do."""
        self.killed_at = time.monotonic()
        if self.is_stubborn:
            self._receive(ENDED, json.dumps({**REPORT, "wait_status": 9, "cause": "asked"}).encode())
            self._receive(DONE, b"{}")
            return
        timer = threading.Timer(0.05, self._end_when_it_may)
        timer.daemon = True
        timer.start()

    def hand_over(self, receiver: ByteReceiver, settings: Mapping[str, Any]) -> None:
        self.init = ScriptedInit(receiver, self.may_end)

    @property
    def wire(self) -> ScriptedInit:
        assert self.init is not None
        return self.init

    def _end_when_it_may(self) -> None:
        self.may_end.wait(30)
        self._end()

    def _end(self) -> None:
        body = json.dumps(self.report).encode()
        if self.report is REPORT:
            self._receive(ENDED, body)
        else:
            self.connect([ENDED + len(body).to_bytes(4, "big") + body])

    def _lose(self) -> None:
        super()._lose()
        self.gone.set()


class Sandbox(SessionSandbox[Rootfs, Scripted]):
    """Make scripted containers; `obstacle` is called before each, with its number."""

    def __init__(self, obstacle: Callable[[int], object] = lambda _: None, *, warm: bool = True):
        super().__init__(
            policy=Policy(warm=warm), limits=Limits(), enforcement=Enforcement(level=Level.JAIL, controls={})
        )
        self.made: list[Scripted] = []
        self._obstacle = obstacle
        self.are_stubborn = False
        self.may_end = threading.Event()
        self.may_end.set()
        self.report: Mapping[str, Any] = REPORT
        self.kind: type[Scripted] = Scripted

    def _find_rootfs(self, request: Request | None) -> Rootfs:
        return Rootfs()

    def _find_session_rootfs(self, language: str) -> Rootfs:
        return Rootfs()

    def _build_program(self, request: Request, rootfs: Rootfs) -> Program:
        return Program(commands=(request.argv,), env={}, files=())

    def _build_session_program(self, language: str, env: Mapping[str, str], rootfs: Rootfs) -> SessionProgram:
        return python_session(language_named(language), env)

    def _make(self, rootfs: Rootfs, after: Scripted | None) -> Scripted:
        self._obstacle(len(self.made))
        self.made.append(self.kind())
        self.made[-1].is_stubborn, self.made[-1].report = self.are_stubborn, self.report
        self.made[-1].may_end = self.may_end
        return self.made[-1]

    def _kind(self, rootfs: Rootfs) -> tuple[object, ...]:
        return "scripted", id(self), rootfs

    def _release(self, container: Scripted, *, with_workspace: bool = False) -> None:
        container.release()

    def _notes(self, container: Scripted) -> dict[str, Any]:
        return {}

    def left(self) -> list[int]:
        """Return the numbers of those that nobody let go."""
        return [number for number, one in enumerate(self.made) if not one.is_released]


async def cancelled(work: Coroutine[Any, Any, object], afterwards: Callable[[], object] = lambda: None) -> None:
    """Begin some work, cancel it a moment later, and do something else before it has ended."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    task.cancel()
    afterwards()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_end_of_a_sandbox_that_is_cancelled_ends_it_all_the_same() -> None:
    """While the next container still comes up, as with a time-out around a block that ends."""

    async def main() -> list[int]:
        going_on = threading.Event()
        sandbox = Sandbox(lambda number: going_on.wait(30) if number else None)
        await sandbox.run(REQUEST)
        await cancelled(sandbox.close(), going_on.set)
        return sandbox.left()

    assert asyncio.run(main()) == []


def test_the_end_of_sessions_that_is_cancelled_ends_them_all() -> None:
    """Not only the one that was being waited for, and the containers of runs too."""

    async def main() -> list[int]:
        sandbox = Sandbox(warm=False)
        await sandbox.run(REQUEST)
        for _ in range(2):
            await sandbox.open_session("python", {})
        sandbox.may_end.clear()
        await cancelled(sandbox.close(), sandbox.may_end.set)
        return sandbox.left()

    assert asyncio.run(main()) == []


def test_what_comes_up_after_the_end_is_let_go() -> None:
    """A run that waits for its container when its sandbox is closed does not begin."""

    async def main() -> list[int]:
        closed = threading.Event()
        sandbox = Sandbox(lambda _: closed.wait(60))
        running = asyncio.create_task(sandbox.run(REQUEST))
        await asyncio.sleep(0.01)
        await sandbox.close()
        closed.set()
        with pytest.raises(InvalidRequest, match="closed"):
            await running
        return sandbox.left()

    assert asyncio.run(main()) == []


def test_no_error_between_two_runs_sticks(caplog: pytest.LogCaptureFixture) -> None:
    """What keeps the next container from being made ready is noted, and the next run tries again."""

    def stumble(number: int) -> None:
        if number == 1 and not stumbled:
            stumbled.append(number)
            raise OSError("no room for now")

    async def main() -> list[str]:
        sandbox = Sandbox(stumble)
        found = [(await sandbox.run(REQUEST)).status for _ in range(2)]
        await sandbox.close()
        assert sandbox.left() == []
        return [str(status) for status in found]

    stumbled: list[int] = []
    with caplog.at_level(logging.DEBUG, "cloche.containers"):
        assert asyncio.run(main()) == ["ok", "ok"]
    assert "no room for now" in caplog.text


def test_a_cell_that_is_cancelled_on_its_way_is_interrupted() -> None:
    """It comes in whole all the same, and would run for ever with nobody to wait for it; the session goes on."""

    async def main() -> tuple[int, bool]:
        sandbox = Sandbox(warm=False)
        session = await sandbox.open_session("python", {})
        running = session.run("#" * SMALL_BYTES, timeout_s=60, sink=discard)
        await cancelled(running)
        init = sandbox.made[0].init
        assert init is not None
        found = init.interrupts, session.is_alive
        await sandbox.close()
        return found

    interrupts, is_alive = asyncio.run(main())
    assert interrupts >= 1  # a second one comes half a second later
    assert is_alive


def test_a_session_that_is_cancelled_while_it_starts_does_not_run_on() -> None:
    """Its container may be the only one that has the files, and is kept for them, with nothing running in it."""
    is_starting, may_start = threading.Event(), threading.Event()

    class Held(Scripted):
        def hand_over(self, receiver: ByteReceiver, settings: Mapping[str, Any]) -> None:
            is_starting.set()
            may_start.wait(30)
            super().hand_over(receiver, settings)

    async def main() -> tuple[int, list[int]]:
        sandbox = Sandbox(warm=False)
        sandbox.kind = Held
        opening = asyncio.create_task(sandbox.open_session("python", {}))
        await asyncio.to_thread(is_starting.wait, 30)
        opening.cancel()
        may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        init = sandbox.made[0].init
        assert init is not None
        assert not sandbox.made[0].is_released
        await sandbox.close()
        return init.started, sandbox.left()

    assert asyncio.run(main()) == (0, [])


@pytest.mark.parametrize(
    "change",
    [
        {"wait_status": "0"},
        {"wait_status": 1 << 40},
        {"wait_status": None},
        {"wall_s": None},
        {"wall_s": float("inf")},
        {"wall_s": float("nan")},
        {"cpu_user_s": 1 << 60},
        {"oom_kills": "many"},
        {"pids_hits": {"a": 1}},
    ],
)
def test_an_end_that_cannot_be_is_that_of_the_container(change: dict[str, Any]) -> None:
    """What the first process says is as much the guest's word as anything, should the guest have got hold of it."""

    async def main() -> None:
        sandbox = Sandbox(warm=False)
        sandbox.report = {**REPORT, **change}
        try:
            await sandbox.run(REQUEST)
        finally:
            await sandbox.close()

    with pytest.raises(OutcomeUnknown, match=r"cannot be|is not JSON"):
        asyncio.run(main())


@pytest.mark.parametrize("body", [b"[" * 200_000, b"[1]", b"{", b"\xff"], ids=["deep", "a list", "cut", "no text"])
def test_a_first_word_that_nobody_understands_ends_the_container(body: bytes) -> None:
    """It is lost, and said to be, in the thread that reads."""
    container = Scripted()
    container.connect([b"H" + len(body).to_bytes(4, "big") + body])
    assert container.gone.wait(30)
    assert (container.is_lost, container.last_output() != "") == (True, True)


@pytest.mark.parametrize(
    ("ours", "its", "counts"),
    [
        (None, "out_of_memory", KillCause.OUT_OF_MEMORY),
        (KillCause.OUTPUT_LIMIT, "out_of_memory", KillCause.OUT_OF_MEMORY),
        (KillCause.OUT_OF_MEMORY, "timeout", KillCause.TIMEOUT),
        (KillCause.TIMEOUT, "out_of_memory", KillCause.TIMEOUT),
        (KillCause.CANCELLED, "", KillCause.CANCELLED),
        (None, "", None),
    ],
)
def test_who_is_killed_twice_has_the_status_that_goes_before(
    ours: KillCause | None, its: str, counts: KillCause | None
) -> None:
    """We may kill it for one thing and the first process for another, neither knowing of the other."""
    assert reported_end({**REPORT, "wait_status": 9, "cause": its}, ours).observed.cause is counts


@pytest.mark.parametrize(
    ("change", "status"), [({}, "ok"), ({"wall_s": 0.3}, "timeout"), ({"wait_status": 9, "cause": "asked"}, "timeout")]
)
def test_an_end_in_time_is_none_by_time_out_for_who_hears_it_late(change: dict[str, Any], status: str) -> None:
    """The caller's loop is held until the clock has run out: what the first process reports of the end counts."""

    async def main() -> str:
        sandbox = Sandbox(warm=False)
        sandbox.report = {**REPORT, **change} if change else REPORT
        request = Request(argv=("true",), timeout_s=0.2)
        found = await sandbox.run_streaming(request, lambda _: time.sleep(0.4))
        await sandbox.close()
        return str(found.status)

    assert asyncio.run(main()) == status


def test_a_kill_waits_for_no_other_work() -> None:
    """Where others keep every thread of the loop's busy, a time-out is kept all the same."""

    async def main() -> tuple[str, float]:
        over = threading.Event()
        sandbox = Sandbox(warm=False)
        sandbox.are_stubborn = True

        def keep_busy(_: object) -> None:
            for _ in range(64):
                asyncio.get_running_loop().run_in_executor(None, over.wait, 60)

        async def go_on() -> None:
            while time.monotonic() - started < 30 and not (sandbox.made and sandbox.made[0].killed_at):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            over.set()

        started = time.monotonic()
        going_on = asyncio.create_task(go_on())
        status = (await sandbox.run_streaming(Request(argv=("true",), timeout_s=0.1), keep_busy)).status
        await going_on
        await sandbox.close()
        return str(status), sandbox.made[0].killed_at - started

    status, after_s = asyncio.run(main())
    assert (status, after_s < 20) == ("timeout", True)


def test_a_container_that_could_not_be_made_ready_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever kept it from coming up: the pool ends at once, and the next container may wait there."""

    def stumble() -> Scripted:
        raise OSError("no room for now")

    pool = ContainerPool()
    pool.refill("kind", stumble)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 30
    assert "no warm container: no room for now" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * 200 + b"[]]}",
        b'{"a":"' + b"x" * MOST_BYTES + b'"}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":NaN}',
        b"[" * 10_000,
        b"[]",
    ],
    ids=["parts", "long", "digits", "NaN", "deep", "list"],
)
def test_a_first_process_is_heard_within_bounds(body: bytes) -> None:
    """A guest that could write to its container's link does not keep the caller with what it says there."""
    with pytest.raises(ValueError):
        read_object(body)
