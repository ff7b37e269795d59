"""What is asked of a session and what it answers: frames on one link, and its streams, whatever carries them.

Everything that comes from the other end is the guest's word: bounded, checked for its shape, and believed in nothing
that matters. Kinds that are not known are left out; what does not even parse ends the session.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cloche.core.decoding import TooMuch
from cloche.core.errors import InvalidRequest
from cloche.core.events import Displayed, Sink, Stream, discard
from cloche.core.frames import FrameReader, encode
from cloche.core.result import Output
from cloche.core.told import MAX_SHOWN, read_output

MIB = 1024 * 1024
MAX_SHOWN_BYTES = 32 * MIB  # of one run
MAX_HEARD_BYTES = 64 * MIB  # from the beginning of one run to that of the next: all that may be shown, and a value


class Codec(Protocol):
    """Turn requests into bytes, and bytes into frames."""

    def encode_run(self, request_id: int, code: str, /) -> bytes: ...
    def feed(self, data: bytes) -> list[dict[str, Any]]: ...
    def renew(self) -> None: ...


class JsonCodec:
    """Speak frames of JSON in both directions."""

    def __init__(self) -> None:
        self._reader = FrameReader()

    def encode_run(self, request_id: int, code: str) -> bytes:
        return encode({"op": "run", "id": request_id, "code": code})

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        return self._reader.feed(data)

    def renew(self) -> None:
        self._reader.renew()


@dataclass(slots=True)
class Heard:
    """Collect what is heard of one run."""

    sink: Sink = discard
    outputs: list[Output] = field(default_factory=list)
    shown_bytes: int = 0
    is_cut: bool = False

    def add(self, frame: Mapping[str, Any]) -> None:
        """Take a bundle, while there is room."""
        if self.is_cut:
            return
        output = read_output(frame)
        if output is None:
            return
        self.shown_bytes += sum(len(mime) + len(content) for mime, content in output.data.items())
        if self.shown_bytes > MAX_SHOWN_BYTES or len(self.outputs) >= MAX_SHOWN:
            self.is_cut = True
            return
        self.outputs.append(output)
        self.sink(Displayed(output=output))


class Exchange(ABC):
    """Hold the caller's side of a session's link and streams. Use from one event loop, and close in any case.

    `ready` holds the interpreter's first word, `lost` why nothing more will be heard.
    """

    def __init__(self, codec: Codec, on_flood: Callable[[], None]):
        self._loop = asyncio.get_running_loop()
        self._codec, self.on_flood = codec, on_flood
        self._heard, self._heard_bytes = Heard(), 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.refused = ""  # why it is not listened to any more, where it was the interpreter's doing
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.lost: asyncio.Future[str] = self._loop.create_future()

    def begin(self, sink: Sink) -> Heard:
        """Begin to hear of a new run; output that came since the last one belongs to it."""
        self._heard, self._heard_bytes = Heard(sink=sink), 0
        self._codec.renew()
        self._hand_on_to(sink)
        return self._heard

    def ask(self, request_id: int, code: str) -> tuple[asyncio.Future[dict[str, Any]], Awaitable[None] | None]:
        """Send a cell; return what will hold its answer, and what to wait for where not all could be sent at once.

        Raises InvalidRequest for what cannot be sent.
        """
        try:
            data = self._codec.encode_run(request_id, code)
        except ValueError as error:
            raise InvalidRequest(f"code: {error}") from error
        return self._ask(request_id, data)

    def _ask(self, request_id: int, data: bytes) -> tuple[asyncio.Future[dict[str, Any]], Awaitable[None] | None]:
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[request_id] = answer
        return answer, self._send(data)

    def wait_briefly(self, answer: asyncio.Future[dict[str, Any]], seconds: float) -> bool:
        """Wait for an answer without leaving this coroutine, where its loop can do that; tell whether it is there."""
        wait = getattr(self._loop, "wait_briefly", None)
        if wait is not None:
            wait(seconds, answer, self.lost)
        return answer.done()

    def renew(self) -> None:
        """Begin anew: what comes from now on belongs to the next run."""
        self._heard, self._heard_bytes = Heard(), 0
        self._codec.renew()
        self._renew_streams()

    @abstractmethod
    def _send(self, data: bytes) -> Awaitable[None] | None:
        """Send all of it, or return what is to be waited for until all is sent; what is gone is lost, and no error."""

    @abstractmethod
    def _hand_on_to(self, sink: Sink) -> None:
        """Hand output on as it comes, and first what has come since the last run."""

    @abstractmethod
    def _renew_streams(self) -> None:
        """Keep nothing of the output so far."""

    @abstractmethod
    def kept(self, stream: Stream) -> bytes:
        """Return what is kept of a stream since it was renewed."""

    @property
    @abstractmethod
    def is_truncated(self) -> bool:
        """Tell whether something of the output was left out."""

    @abstractmethod
    def catch_up(self) -> None:
        """Take what was said before the last answer."""

    @abstractmethod
    async def drain(self, patience_s: float) -> None:
        """Take what is left, when nobody is left to say more."""

    def _hear(self, data: bytes) -> None:
        """Take what came on the link."""
        self._heard_bytes += len(data)
        try:
            if self._heard_bytes > MAX_HEARD_BYTES:
                raise TooMuch(f"there are more than {MAX_HEARD_BYTES} bytes")
            for frame in self._codec.feed(data):
                self._take(frame)
        except TooMuch as error:
            self.refused = f"the interpreter said more than is read of one cell: {error}"
            self._lose(self.refused)
            self.on_flood()
        except (ValueError, RecursionError) as error:
            self.refused = f"the interpreter said what nobody understands: {error}"
            self._lose(self.refused)

    def _take(self, frame: dict[str, Any]) -> None:
        kind = frame.get("op")
        if kind == "ready" and not self.ready.done():
            self.ready.set_result(frame)
        elif kind == "display":
            self._heard.add(frame)
        elif kind == "cut":
            self._heard.is_cut = True
        elif kind == "done":
            request_id = frame.get("id")
            answer = self._answers.pop(request_id, None) if isinstance(request_id, int) else None
            if answer is not None and not answer.done():
                answer.set_result(frame)

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
