"""What a session answers passes init after all that it has printed, whoever is slow."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cloche.init import wire
from cloche.init.loop import Loop
from cloche.init.process import Process

PRINTED_BYTES, ANSWERS = wire.WINDOW_BYTES + 30_000, 20  # the rest of each fits a pipe
CHANNEL = 1


class Held:
    """Be the host of a process that is the test itself, which holds its ends, and the owner of its channel."""

    pid = 0

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self.mark: Held = self

    def fork(self, _order: dict[str, Any], streams: dict[int, int]) -> Held:
        self.ends = {number: os.dup(fd) for number, fd in streams.items()}
        return self

    def close(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def served() -> Iterator[tuple[Held, socket.socket]]:
    """Yield who holds the ends of a session, and the client's connection."""
    ours, theirs = socket.socketpair()
    frames, host = wire.FrameBuffer(), Held()

    def receive(data: bytes) -> None:
        for _, _, body in frames.feed(data):
            process.grant(*wire.read_grant(body))

    loop = Loop(theirs.fileno(), receive)
    streams = [wire.STDOUT, wire.STDERR, wire.REPORT, wire.REQUESTS]
    process = Process(loop, host, CHANNEL, "1", {"streams": streams}, host)  # type: ignore[arg-type]
    serving = threading.Thread(target=loop.serve)
    serving.start()
    yield host, ours
    ours.close()
    serving.join()
    theirs.close()
    for reading in process.outgoing.values():
        reading.close()
    for writing in process.incoming.values():
        writing.close()


def test_answers_come_after_what_was_printed(served: tuple[Held, socket.socket]) -> None:
    """Also where the client takes no more of the output for a while, and the answer could pass it."""
    host, connection = served
    taken = threading.Semaphore()

    def work() -> None:
        with contextlib.suppress(OSError):  # of a test that has failed
            for number in range(ANSWERS):
                taken.acquire()
                for stream, data in ((wire.STDOUT, b"x" * PRINTED_BYTES), (wire.REPORT, b"%d" % number)):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(host.ends[stream], view) :]
        for fd in host.ends.values():
            os.close(fd)

    working = threading.Thread(target=work, daemon=True)
    working.start()
    frames, printed, ungranted, answers = wire.FrameBuffer(), 0, 0, 0
    while answers < ANSWERS:
        for kind, _, body in frames.feed(connection.recv(1 << 18)):
            if kind != wire.DATA:
                continue
            stream, data = wire.read_data(body)
            if stream == wire.REPORT:
                answers += 1
                assert printed == answers * PRINTED_BYTES
                taken.release()
                connection.sendall(wire.grant_frame(CHANNEL, stream, len(data)))
                continue
            printed, ungranted = printed + len(data), ungranted + len(data)
            if ungranted == wire.WINDOW_BYTES:
                connection.sendall(wire.grant_frame(CHANNEL, stream, ungranted))
                ungranted = 0
    working.join()
