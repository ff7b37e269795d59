"""A session over the wire to a live sandbox, whose end the test holds: no interpreter is there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cloche.backends.init_link import InitLink
from cloche.backends.live_files import LiveFiles
from cloche.backends.live_session import LiveProgram, LiveSession, LiveTransport, open_live_session
from cloche.backends.session import MAX_RECEIVED_BYTES
from cloche.backends.session_languages import ONCE, JsonCodec
from cloche.core.enforcement import Enforcement, Level
from cloche.core.events import discard
from cloche.core.frames import MAX_FRAMES, encode
from cloche.core.limits import Limits
from cloche.core.result import Result
from cloche.init import wire

PROGRAM = LiveProgram(language="python", order={"python": {}}, new_codec=JsonCodec, interrupt=ONCE)
SIGINT, SIGKILL = 2, 9
LONG = "x" * (2 * wire.MOST_DATA)


class Inside:
    """Be the init of a sandbox with one session, frame by frame."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection, self.frames = connection, wire.FrameBuffer()
        self.come: deque[tuple[int, bytes]] = deque()
        self.channel = 0

    async def send(self, *frames: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, b"".join(frames))

    async def next(self, kind: int) -> bytes:
        """Return the body of the next frame of a kind, and drop those before it."""
        while True:
            while self.come:
                found, body = self.come.popleft()
                if found == kind:
                    return body
            data = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 18)
            assert data
            for found, channel, body in self.frames.feed(data):
                self.channel = channel or self.channel
                self.come.append((found, body))

    def sent(self) -> list[tuple[int, bytes]]:
        """Return what has been sent by now."""
        with contextlib.suppress(BlockingIOError):
            self.come += [(kind, body) for kind, _, body in self.frames.feed(self.connection.recv(1 << 18))]
        return [*self.come]

    async def asked(self) -> dict[str, Any]:
        """Return what is asked of the session next, but for how closely it shall be watched."""
        while True:
            asked = wire.read_object(await self.next(wire.ASK))
            if asked["do"] != "rest":
                return asked

    async def say(self, **frame: Any) -> None:
        """Say something as the interpreter."""
        await self.send(wire.data_frame(self.channel, wire.REPORT, encode(frame)))

    async def end(self, status: int) -> None:
        """Report the end of the interpreter."""
        await self.send(
            wire.json_frame(wire.EVENT, self.channel, event="exit", status=status, cause=""),
            wire.json_frame(wire.CLOSE, self.channel),
        )


def try_session(attempt: Callable[[LiveSession, Inside], Coroutine[Any, Any, None]]) -> None:
    """Open a session with a sandbox that the attempt plays."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        inside = Inside(theirs)
        _, link = await asyncio.get_running_loop().create_connection(InitLink, sock=ours)
        opening = asyncio.ensure_future(
            open_live_session(
                LiveFiles(), link, PROGRAM, Limits(),
                enforcement=Enforcement(level=Level.JAIL, controls={}), notes={},
            )
        )  # fmt: skip
        await inside.next(wire.OPEN)
        await inside.send(wire.json_frame(wire.EVENT, inside.channel, event="started", id="1", pid=2))
        await inside.say(op="ready", runtime="none")
        await attempt(await opening, inside)
        link.close()
        theirs.close()

    asyncio.run(run())


def start(session: LiveSession, code: str) -> asyncio.Future[Result]:
    """Start a cell."""
    return asyncio.ensure_future(session.run(code, timeout_s=60, sink=discard))


def test_a_signal_waits_for_the_cell_that_it_is_for() -> None:
    """A cell that is passed on in pieces is interrupted when the interpreter has been given the last of it."""

    async def attempt(session: LiveSession, inside: Inside) -> None:
        running = start(session, LONG)
        sent, wanted = 0, len(JsonCodec().encode_run(1, LONG))
        while sent < wanted:
            sent += len(await inside.next(wire.DATA)) - 1
        await session.interrupt()
        assert not any(kind == wire.ASK and b"signal" in body for kind, body in inside.sent())
        await inside.send(wire.grant_frame(inside.channel, wire.REQUESTS, sent))
        assert await inside.asked() == {"do": "signal", "number": SIGINT, "to": "group"}
        await inside.say(op="done", id=1, exit_code=1)
        assert (await running).exit_code == 130

    try_session(attempt)


def test_an_interpreter_that_closes_its_answers_is_killed() -> None:
    """Nobody could use it any more; what it printed is in the result."""

    async def attempt(session: LiveSession, inside: Inside) -> None:
        running = start(session, "1")
        await inside.next(wire.DATA)
        await inside.send(
            wire.data_frame(inside.channel, wire.STDOUT, b"last"),
            wire.frame(wire.END, inside.channel, bytes((wire.REPORT,))),
        )
        assert (await inside.asked())["do"] == "kill"
        await inside.end(SIGKILL)
        result = await running
        assert (result.stdout, result.exit_code, result.meta["state"]) == ("last", 137, "lost")

    try_session(attempt)


def test_a_cell_of_a_sandbox_that_is_gone_says_so() -> None:
    """Its result is that of a session that was lost."""

    async def attempt(session: LiveSession, inside: Inside) -> None:
        running = start(session, "1")
        await inside.next(wire.DATA)
        inside.connection.shutdown(socket.SHUT_RDWR)
        result = await running
        assert result.meta["state"] == "lost"
        assert "the sandbox has ended" in result.meta["lost"]

    try_session(attempt)


@pytest.mark.parametrize(
    ("frames", "why", "is_flood"),
    [
        ([b"\xff" * 100], "is longer than", True),
        ([b"\0\0\0\2[]"], "an invalid message", False),
        (
            [encode({"op": "x", "a": "y" * 9_000_000})] * (MAX_RECEIVED_BYTES // 9_000_000 + 3),
            "more than one cell may send",
            True,
        ),
        ([encode({"op": "x"}) * (MAX_FRAMES + 1)], "more than one cell may send", True),
    ],
    ids=["long", "list", "bytes", "frames"],
)
def test_what_a_guest_says_is_bounded(frames: list[bytes], why: str, *, is_flood: bool) -> None:
    """Nonsense, or too much of anything, ends the session, whose processes init alone can say to have ended."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        _, link = await asyncio.get_running_loop().create_connection(InitLink, sock=ours)
        transport, floods = LiveTransport(link.open("start"), Limits(), JsonCodec()), []
        transport.on_flood = lambda: floods.append(True)
        for frame in frames:
            transport._take(wire.REPORT, memoryview(frame))
        assert why in transport.link.lost.result()
        assert bool(floods) is is_flood
        link.close()
        theirs.close()

    asyncio.run(run())
