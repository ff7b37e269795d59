"""Claims about the client's end of the wire, when what speaks from inside is hostile: a server made of bytes."""

import asyncio
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from cloche.backends import init_link, live_files, live_process
from cloche.backends.file_answers import read_rows
from cloche.backends.init_link import MOST_EVENTS, InitLink
from cloche.backends.live import LiveSandbox
from cloche.backends.live_process import LiveProcess
from cloche.core.errors import InvalidRequest, OutcomeUnknown, SandboxFileError
from cloche.core.events import OutputChunk
from cloche.core.limits import Limits
from cloche.core.processes import ProcessRequest
from cloche.init import wire

PATIENCE_S = 20.0
SHORT_S = 0.5  # that the loop may stand still
HELLO = wire.json_frame(wire.HELLO, 0, version=wire.VERSION)
STARTED = wire.json_frame(wire.EVENT, 1, event="started", id="1", pid=7)


class Sandbox(LiveSandbox):
    """Be a sandbox with a link that is there."""

    async def connected(self) -> InitLink:
        assert self.link is not None
        return self.link

    def environment(self, env: Any) -> dict[str, str]:
        return dict(env)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Sandbox, socket.socket]]:
    """Hold a sandbox, and the other end of its link; nothing is left when it is closed."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _, link = await asyncio.get_running_loop().create_connection(InitLink, sock=ours)
    sandbox = Sandbox(Limits())
    sandbox.link = link
    try:
        yield sandbox, theirs
    finally:
        link.close()
        theirs.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def say(theirs: socket.socket, data: bytes) -> None:
    """Send all, unless the link is closed meanwhile."""
    try:
        await asyncio.get_running_loop().sock_sendall(theirs, data)
    except OSError:
        pass


def run(attempt: Callable[[], Any]) -> None:
    """Run it with the bound that whoever hangs is found by."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await attempt()

    asyncio.run(bounded())


def frame(kind: int, body: bytes = b"", channel: int = 1) -> bytes:
    """Return a frame, with whatever body."""
    return wire.frame(kind, channel, body)


def data(size: int, stream: int = 1) -> bytes:
    """Return frames with so many bytes of a stream."""
    return b"".join(wire.data_frame(1, stream, bytes(min(size - at, 1 << 16))) for at in range(0, size, 1 << 16))


# What an honest init never says, after its greeting and the beginning of a process.
BREAKS = {
    "a frame that is too long": struct.pack(">IIB", wire.MOST_BODY + 1, 1, wire.EVENT),
    "a frame of no kind": frame(99),
    "a frame that only clients send": frame(wire.ASK, b"{}"),
    "data exceeds the window": data(wire.WINDOW_BYTES + 1),
    "a stream that no operation has": wire.data_frame(1, wire.STREAMS, b"x"),
    "a piece of nothing": frame(wire.DATA),
    "an end of nothing": frame(wire.END),
    "a window that is none": frame(wire.WINDOW, b"x"),
    "a window for data that was not sent": wire.grant_frame(1, 0, 1),
    "events without end": wire.json_frame(wire.EVENT, 1, event="x") * (MOST_EVENTS + 1),
    "no JSON": frame(wire.EVENT, b"x"),
    "JSON that is not an object": frame(wire.EVENT, b"[]"),
    "numbers that are none": frame(wire.EVENT, b'{"status": NaN}'),
    "a long number": frame(wire.EVENT, b'{"status": 1' + b"0" * 5000 + b"}"),
    "a deep object": frame(wire.EVENT, b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "an object of many parts": frame(wire.EVENT, b'{"a": [' + b"1," * 100_000 + b"1]}"),
    "an object that is too long": frame(wire.EVENT, b'{"a": "' + b"x" * (1 << 20) + b'"}'),
    "another greeting": HELLO,
    "channels that are closed, without end": frame(wire.END, b"\1", channel=9) * 2000,
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_the_protocol_ends_the_link(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with all that waits for it, and without a moment in which the loop stands still."""
    monkeypatch.setattr(init_link, "MOST_STRAYS", 1000)

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, HELLO + STARTED)
            process = await sandbox.start_process(ProcessRequest(argv=("x",)))
            began, longest = monotonic(), 0.0
            saying = asyncio.create_task(say(theirs, BREAKS[name]))
            assert sandbox.link is not None
            while not sandbox.link.lost.done():
                longest, began = max(longest, monotonic() - began), monotonic()
                await asyncio.sleep(0.001)
            await saying
            assert "broke the protocol" in sandbox.link.lost.result()
            assert longest < SHORT_S
            with pytest.raises(OutcomeUnknown):
                await process.wait()
            with pytest.raises(OutcomeUnknown):
                await sandbox.list_processes()

    run(attempt)


def test_of_changes_of_a_life_that_nobody_reads_the_last_one_is_kept() -> None:
    """A client that pauses and resumes faster than its service notes it does not lose the sandbox."""

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            numbers = range(MOST_EVENTS * 4)
            await say(theirs, HELLO + wire.json_frame(wire.EVENT, 1, number=-1))
            infos = sandbox.life_events()
            assert await anext(infos) == {"number": -1}
            await say(theirs, b"".join(wire.json_frame(wire.EVENT, 1, number=number) for number in numbers))
            while (await anext(infos))["number"] != numbers[-1]:
                pass

    run(attempt)


@pytest.mark.parametrize("hello", [b'{"version": 2}', b"{}", b'{"version": []}'])
def test_another_version_is_no_sandbox(hello: bytes) -> None:
    """Who greets otherwise, or with what is no version, is closed."""

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, frame(wire.HELLO, hello, channel=0))
            assert sandbox.link is not None
            assert "version" in await sandbox.link.lost

    run(attempt)


def test_small_pieces_are_not_answered_one_by_one() -> None:
    """Who sends bytes one by one, and reads nothing, fills no memory with what is granted back."""

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, HELLO + STARTED)
            left, arrived = wire.GRANTED_AT_ONCE, asyncio.Event()

            def take(event: object) -> None:
                nonlocal left
                left -= isinstance(event, OutputChunk)
                if not left:
                    arrived.set()

            await sandbox.start_process(ProcessRequest(argv=("x",)), take)
            await say(theirs, wire.data_frame(1, 1, b"x") * wire.GRANTED_AT_ONCE)
            await arrived.wait()
            received = theirs.recv(1 << 20)
            assert received.count(struct.pack(">IIB", wire.GRANT.size, 1, wire.WINDOW)) == 1

    run(attempt)


def test_who_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question, and a start, come back with an error when nothing comes of them."""
    monkeypatch.setattr(init_link, "ANSWER_S", 0.05)
    monkeypatch.setattr(live_process, "START_S", 0.05)

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, HELLO)
            with pytest.raises(OutcomeUnknown):
                await sandbox.list_ports()
            with pytest.raises(OutcomeUnknown):
                await sandbox.start_process(ProcessRequest(argv=("x",)))

    run(attempt)


@pytest.mark.parametrize("frames", ["strays", "closes", "pieces"])
def test_small_frames_do_not_hold_the_loop(frames: str) -> None:
    """Of the smallest frames, however many come at once, only so many are handled before others have their turn."""
    smallest = {
        "strays": frame(wire.END, b"\1", channel=9), "closes": frame(wire.CLOSE, b"{}", channel=9),
        "pieces": wire.data_frame(1, 1, b"x"),
    }[frames]  # fmt: skip
    count = 8000

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, HELLO + STARTED)
            await sandbox.start_process(ProcessRequest(argv=("x",)), lambda _: None)
            link, turns, handled, most = sandbox.link, 0, 0, 0
            assert link is not None
            take = link._turns._take

            def counted(*arguments: Any) -> None:
                nonlocal handled
                handled += 1
                take(*arguments)

            link._turns._take = counted
            link.data_received(smallest * count)  # in one piece, as a transport may hand it on
            while handled < count:
                turns, before = turns + 1, handled
                await asyncio.sleep(0)
                most = max(most, handled - before)
            assert most <= wire.MOST_AT_ONCE
            assert turns >= count // wire.MOST_AT_ONCE

    run(attempt)


def test_what_came_before_the_end_is_handled_first() -> None:
    """A connection that closes behind many frames loses none of them, and what comes after a wrong one is dropped."""

    async def attempt(last: bytes, why: str, counted: int) -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, HELLO + STARTED)
            came = 0

            def count(event: object) -> None:
                nonlocal came
                came += isinstance(event, OutputChunk)

            await sandbox.start_process(ProcessRequest(argv=("x",)), count)
            await say(theirs, wire.data_frame(1, 1, b"x") * 3000 + last)
            theirs.shutdown(socket.SHUT_RDWR)
            assert sandbox.link is not None
            assert why in await sandbox.link.lost
            assert came >= counted

    run(lambda: attempt(b"", "closed from inside", 3000))
    run(lambda: attempt(frame(99) + wire.data_frame(1, 1, b"x") * 3000, "broke the protocol", 2560))


STRANGE = [None, True, -1, 1e17, 10**300, "x" * 1000, [], {}, [[1]], {"a": {}}]


def test_answers_of_any_shape_are_answers_or_errors_of_ours() -> None:
    """Lists of processes and ports, ends, and failures: nothing raises what is not an error of Cloche's."""

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, HELLO)
            number = 0
            for one in STRANGE:
                number += 1
                row = dict.fromkeys(("id", "pid", "command", "status", "cause", "started_s", "port", "address"), one)
                body = {"event": "processes", "processes": [row, one], "ports": [row, one]}
                for ask in (sandbox.list_processes, sandbox.list_ports):
                    answer = wire.json_frame(wire.EVENT, number, **body) + wire.json_frame(wire.CLOSE, number)
                    asking = asyncio.create_task(ask())
                    await asyncio.sleep(0)
                    await say(theirs, answer)
                    await asking
                    number += 1
                started = {"event": "started", "id": one, "pid": one}
                starting = asyncio.create_task(sandbox.start_process(ProcessRequest(argv=("x",))))
                await asyncio.sleep(0)
                await say(theirs, wire.json_frame(wire.EVENT, number, **started))
                process = await starting
                ended = {"event": "exit", **dict.fromkeys(("status", "cause", "dropped"), one)}
                usage = dict.fromkeys(("wall_s", "user_s", "most_kib"), one)
                await say(
                    theirs,
                    wire.json_frame(wire.EVENT, number, **ended, usage=usage) + wire.json_frame(wire.CLOSE, number),
                )
                await process.result()

    run(attempt)


LINE = b'{"name": "x", "type": "file", "size": 1, "mode": 1, "mtime": 1, "uid": 1, "gid": 1}\n'
LISTS = {
    "empty lines": b"\n" * (32 << 20), "one line": b"[" * (32 << 20), "many entries": LINE * 200_000,
    "no time": LINE.replace(b'"mtime": 1', b'"mtime": NaN'), "no end": LINE.replace(b'"mtime": 1', b'"mtime": 1e999'),
}  # fmt: skip


@pytest.mark.parametrize("rows", LISTS.values(), ids=LISTS)
def test_a_list_of_files_is_read_within_bounds(rows: bytes) -> None:
    """Lines by the million, one without end, and what no JSON could say on are refused, and are not in memory twice."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SandboxFileError):
        list(read_rows(rows, "x"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 96 << 10


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation on files whose content or answer never ends takes no more memory than was asked for, or time."""
    monkeypatch.setattr(live_files, "FILE_S", 0.3)

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            await say(theirs, HELLO)
            reading = asyncio.create_task(sandbox.read_path("x", max_bytes=100))
            flood = asyncio.create_task(endless(theirs))
            with pytest.raises((SandboxFileError, TimeoutError, OutcomeUnknown)):
                await reading
            flood.cancel()
            await asyncio.wait([flood])

    run(attempt)


def started(process: LiveProcess | None) -> LiveProcess:
    """Return it, which was started before."""
    assert process is not None
    return process


async def endless(theirs: socket.socket) -> None:
    """Send what is granted, on two streams, for ever."""
    loop = asyncio.get_running_loop()
    granted, frames = wire.WINDOW_BYTES * 2, wire.FrameBuffer()
    while True:
        while granted >= 2 << 16:
            await loop.sock_sendall(theirs, data(1 << 16, 1) + data(1 << 16, 3))
            granted -= 2 << 16
        for kind, _, body in frames.feed(await loop.sock_recv(theirs, 1 << 16)):
            granted += wire.read_grant(body)[1] if kind == wire.WINDOW else 0


@pytest.mark.parametrize("moment", ["starting", "waiting", "writing", "reading", "asking", "connecting", "listing"])
def test_cancelling_leaves_nothing(moment: str) -> None:
    """Whatever is cancelled while a sandbox says nothing leaves no task, no channel and no descriptor."""

    async def attempt() -> None:
        async with linked() as (sandbox, theirs):
            before = len(os.listdir("/proc/self/fd"))
            await say(theirs, HELLO)
            process = None
            if moment in ("waiting", "writing"):
                await say(theirs, STARTED)
                process = await sandbox.start_process(ProcessRequest(argv=("x",)))
            assert sandbox.link is not None
            acts = {
                "starting": lambda: sandbox.start_process(ProcessRequest(argv=("x",))),
                "waiting": lambda: started(process).wait(),
                "writing": lambda: started(process).write(bytes(1 << 20)),
                "reading": lambda: sandbox.read_path("x", max_bytes=10),
                "asking": sandbox.list_processes,
                "connecting": lambda: sandbox.connect(80),
                "listing": lambda: sandbox.list_path("x"),
            }
            act = asyncio.create_task(acts[moment]())
            for _ in range(5):
                await asyncio.sleep(0)
            act.cancel()
            await asyncio.wait([act])
            assert act.cancelled()
            if process is not None:
                process.detach()
                with pytest.raises(InvalidRequest):
                    await process.wait()
            await asyncio.sleep(0)
            assert not sandbox.link.channels
            assert len(os.listdir("/proc/self/fd")) == before

    run(attempt)
