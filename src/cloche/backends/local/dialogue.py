"""What a session says and hears: frames on its link, and its output streams, one run after the other.

Everything that comes from the other end is the guest's word: bounded, checked for its shape, and believed in nothing
that matters. Kinds that are not known are left out; what does not even parse ends the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cloche.core.errors import InvalidRequest
from cloche.core.events import Displayed, OutputChunk, Sink, Stream, discard
from cloche.core.frames import FrameReader, encode
from cloche.core.limits import Limits
from cloche.core.result import Output
from cloche.core.told import MAX_SHOWN, read_output
from cloche.jail.syscalls import FORK_FLAGS

from .streams import StreamReader

__all__ = ["Codec", "Dialogue", "Heard", "JsonCodec", "read_output"]

MIB = 1024 * 1024
MAX_FRAME_BYTES = 16 * MIB
MAX_SHOWN_BYTES = 32 * MIB  # of one run
MAX_HEARD_BYTES = 80 * MIB  # from the beginning of one run to that of the next: all that may be shown, and a value
CHUNK_BYTES = 1 << 18


class Codec(Protocol):
    """Turn requests into bytes, and bytes into frames."""

    def encode_run(self, request_id: int, code: str, /) -> bytes: ...
    def feed(self, data: bytes) -> list[dict[str, Any]]: ...


class JsonCodec:
    """Speak frames of JSON in both directions."""

    def __init__(self) -> None:
        self._reader = FrameReader(MAX_FRAME_BYTES)

    def encode_run(self, request_id: int, code: str) -> bytes:
        return encode({"op": "run", "id": request_id, "code": code})

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        return self._reader.feed(data)


@dataclass(slots=True)
class Heard:
    """Collect what is heard of one run."""

    sink: Sink = discard
    outputs: list[Output] = field(default_factory=list)
    shown_bytes: int = 0
    is_cut: bool = False

    def add(self, frame: Mapping[str, Any]) -> None:
        """Take a bundle, while there is room."""
        output = read_output(frame)
        if output is None:
            return
        self.shown_bytes += sum(len(mime) + len(content) for mime, content in output.data.items())
        if self.shown_bytes > MAX_SHOWN_BYTES or len(self.outputs) >= MAX_SHOWN:
            self.is_cut = True
            return
        self.outputs.append(output)
        self.sink(Displayed(output=output))


class Dialogue:
    """Hold the caller's ends of a session's link and streams. Use from one event loop, and close in any case."""

    def __init__(self, limits: Limits, codec: Codec, on_flood: Callable[[], None]):
        self._loop = asyncio.get_running_loop()
        self._codec, self.on_flood = codec, on_flood
        self._heard, self._heard_bytes = Heard(), 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._link, self._theirs = socket.socketpair()
        self._link.setblocking(False)
        self._guest: list[int] = []
        self._readers: dict[Stream, StreamReader] = {}
        self.born: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.wait_status: int | None = None
        self.lost: asyncio.Future[str] = self._loop.create_future()
        try:
            self._guest.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            for stream in ("stdout", "stderr"):
                self._readers[stream] = self._new_reader(limits)
        except BaseException:
            self.close()
            raise
        self._loop.add_reader(self._link.fileno(), self._listen)

    def _new_reader(self, limits: Limits) -> StreamReader:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        self._guest.append(theirs)
        reader = StreamReader(
            ours,
            limit=limits.output_bytes,
            flood_limit=limits.flood_bytes,
            on_chunk=lambda _: None,
            on_flood=lambda: self.on_flood(),  # noqa: PLW0108 - a clone's is put in place later
        )
        reader.listen()
        return reader

    def guest_ends(self) -> list[int]:
        """Return the guest's ends: standard input, output, error, and the link."""
        return [*self._guest, self._theirs.fileno()]

    def close_guest_ends(self) -> None:
        """Let go of the guest's ends."""
        while self._guest:
            os.close(self._guest.pop())
        self._theirs.close()

    def begin(self, sink: Sink) -> Heard:
        """Begin to hear of a new run; output that came since the last one belongs to it."""
        self._heard, self._heard_bytes = Heard(sink=sink), 0
        for stream, reader in self._readers.items():
            reader.hand_on_to(_hand_on(stream, sink))
        return self._heard

    def holds(self) -> list[str]:
        """Name the guest's ends as the kernel names them to whoever looks which descriptors a process has."""
        stdout, stderr = self._guest[1:]
        return [_name(self._theirs.fileno(), "socket"), _name(stdout, "pipe"), _name(stderr, "pipe")]

    async def ask_for_clone(self, request_id: int, other: Dialogue) -> asyncio.Future[dict[str, Any]]:
        """Ask the interpreter to clone itself; the clone takes the guest's ends of `other`."""
        answer = await self._ask(request_id, encode({"op": "fork", "id": request_id, "flags": FORK_FLAGS}))
        _, stdout, stderr = other._guest
        with contextlib.suppress(OSError):  # it is gone, and the answer's future knows
            socket.send_fds(self._link, [b"f"], [other._theirs.fileno(), stdout, stderr])
        return answer

    def go(self, *, is_fork: bool) -> None:
        """Let a clone go on that has a home by now; it will say that it is ready."""
        with contextlib.suppress(OSError):
            self._link.send(encode({"op": "go", "is_fork": is_fork}))

    async def ask(self, request_id: int, code: str) -> asyncio.Future[dict[str, Any]]:
        """Send a cell; the future that is returned holds its answer. Raises InvalidRequest for what cannot be sent."""
        try:
            data = self._codec.encode_run(request_id, code)
        except ValueError as error:
            raise InvalidRequest(f"code: {error}") from error
        return await self._ask(request_id, data)

    async def _ask(self, request_id: int, data: bytes) -> asyncio.Future[dict[str, Any]]:
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[request_id] = answer
        try:
            sent = self._link.send(data) if len(data) < CHUNK_BYTES else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(f"the link is gone: {error}")
            return answer
        if sent < len(data):
            try:
                await self._loop.sock_sendall(self._link, memoryview(data)[sent:])
            except OSError as error:
                self._lose(f"the link is gone: {error}")
            except asyncio.CancelledError:
                self._lose("a cell was sent in part")
                raise
        return answer

    def kept(self, stream: Stream) -> bytes:
        return self._readers[stream].output.kept()

    @property
    def is_truncated(self) -> bool:
        return any(reader.output.is_truncated for reader in self._readers.values())

    def catch_up(self) -> None:
        """Read what is in the pipes now."""
        for reader in self._readers.values():
            reader.finish()

    def renew(self) -> None:
        """Begin anew: what comes from now on belongs to the next run."""
        self._heard, self._heard_bytes = Heard(), 0
        for reader in self._readers.values():
            reader.renew()

    async def drain(self, patience_s: float) -> None:
        """Read to the end of the streams, when nobody is left to write."""
        self.close_guest_ends()
        endings = [reader.ended for reader in self._readers.values() if not reader.finish()]
        if endings:
            await asyncio.wait(endings, timeout=patience_s)

    def close(self) -> None:
        self.close_guest_ends()
        self._lose("the session was closed")
        for reader in self._readers.values():
            reader.close()

    def end(self, reason: str) -> None:
        """Hear what was said at last: the interpreter has ended, though somebody may still hold its end of the link."""
        while not self.lost.done() and self._listen():
            pass
        if not self.lost.done():
            self._lose(reason)

    def _listen(self) -> bool:
        """Take what has come; tell whether anything had."""
        try:
            data = self._link.recv(CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(f"the link is gone: {error}")
            return False
        if not data:
            self._lose("the interpreter has closed its link")
            return False
        self._heard_bytes += len(data)
        if self._heard_bytes > MAX_HEARD_BYTES:
            self._lose("the interpreter said more than anybody listens to")
            self.on_flood()
            return False
        try:
            for frame in self._codec.feed(data):
                self._take(frame)
        except (ValueError, RecursionError) as error:
            self._lose(f"the interpreter said what nobody understands: {error}")
        return True

    def _take(self, frame: dict[str, Any]) -> None:
        kind = frame.get("op")
        if kind == "ready" and not self.ready.done():
            self.ready.set_result(frame)
        elif kind == "born" and not self.born.done():
            self.born.set_result(frame)
        elif kind == "gone" and isinstance(frame.get("wait_status"), int):
            self.wait_status = frame["wait_status"] & 0xFFFF
        elif kind == "display":
            self._heard.add(frame)
        elif kind == "done":
            request_id = frame.get("id")
            answer = self._answers.pop(request_id, None) if isinstance(request_id, int) else None
            if answer is not None and not answer.done():
                answer.set_result(frame)

    def _lose(self, reason: str) -> None:
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._link.close()
        if not self.lost.done():
            self.lost.set_result(reason)


def _name(fd: int, kind: str) -> str:
    return f"{kind}:[{os.fstat(fd).st_ino}]"


def _hand_on(stream: Stream, sink: Sink) -> Callable[[bytes], None]:
    if sink is discard:
        return lambda _: None
    return lambda data: sink(OutputChunk(stream=stream, data=data))
