"""Who listens is told while others are served, however many they are."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest

from cloche.init import ports, wire
from cloche.init.loop import Loop, now

SERVERS, PIECES = 200, 6  # of four KiB, at least


class Owner:
    """Hold the channel of the list, and end the loop with it."""

    host: Any = None

    def __init__(self, loop: Loop):
        self.loop = loop

    def close(self, channel: int, **error: Any) -> None:
        self.loop.send(wire.json_frame(wire.CLOSE, channel, **error))
        self.loop.stop()


def test_who_listens_is_read_piece_by_piece_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the loop reads for a moment alone: the kernel's table costs the square of the servers in it."""
    monkeypatch.setattr(ports, "TURN_S", 0.0)
    turns = 0
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(SERVERS)]
        loop = Loop(theirs.fileno(), lambda _: None)

        def take_turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_at("other", now(), take_turn)

        take_turn()
        ports.Listing(Owner(loop), 1)
        serving = threading.Thread(target=loop.serve)
        serving.start()
        frames, found = wire.FrameBuffer(), []
        while not found or found[-1][0] != wire.CLOSE:
            found += [(kind, bytes(body)) for kind, _, body in frames.feed(ours.recv(1 << 20))]
        serving.join()
        wanted = {(one.getsockname()[1], "127.0.0.1") for one in servers}
    told = {(row["port"], row["address"]) for row in wire.read_object(found[0][1])["ports"]}
    assert wanted <= told
    assert turns > PIECES
    ours.close()
    theirs.close()
