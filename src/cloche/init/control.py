"""A channel to a process whose output another client reads, or none: its input, signals, the size of its terminal."""

from __future__ import annotations

from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .process import Process, ProcessOwner

MOST_UNREAD = 1 << 20  # bytes of a process's input, of all clients
QUESTIONS = ("signal", "resize", "kill")


class Control:
    """Be such a channel. It leaves the process as it is when it is closed."""

    def __init__(self, owner: ProcessOwner, number: int, process: Process):
        self.owner, self.number, self.process = owner, number, process
        self.owed = 0  # bytes of input that the process has not read

    def ask(self, body: dict[str, Any]) -> None:
        if body.get("do") in QUESTIONS:
            self.process.ask(body)

    def take(self, stream: int, data: memoryview) -> None:
        self.owed += len(data)
        if stream != wire.STDIN or self.owed > wire.WINDOW_BYTES:
            raise wire.WireError("data exceeds the window")
        incoming = self.process.incoming.get(stream)
        if incoming is None or incoming.fd < 0:
            self.owner.close(self.number, kind="closed", message="its standard input is closed")
        elif incoming.held + len(data) > MOST_UNREAD:
            self.owner.close(self.number, kind="full", message=f"it has not read {incoming.held} bytes of its input")
        else:
            incoming.feeders.add(self)
            incoming.add(bytes(data))

    def settle(self) -> None:
        """Grant what the process has read, or will never read."""
        owed, self.owed = self.owed, 0
        self.process.loop.send(wire.grant_frame(self.number, wire.STDIN, owed))

    def take_end(self, stream: int) -> None:
        self.process.take_end(stream)

    def grant(self, stream: int, count: int) -> None: ...

    def leave(self) -> None:
        for incoming in self.process.incoming.values():
            incoming.feeders.discard(self)
