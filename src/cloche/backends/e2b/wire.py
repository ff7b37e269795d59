"""The streams of a process at E2B, as bytes.

Theory of operation: the sandbox's agent, `envd`, starts the first process on behalf of the package's process client.
That client handles bytes; the package's commands handle text. The output of the process is one long answer with
keepalive messages. Its input is sent as a sequence of requests: while one is in flight, later data is collected for the
next.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cloche.core.errors import BackendUnavailable
from cloche.core.suppressed import suppress_logged

from ..containers.container import OUTPUT
from ..containers.program import IMAGE_PATH
from ..remote.failures import Failure
from .sdk import ANSWER_S, END_S, Provider, call

log = logging.getLogger("cloche.remote")
STALL_S = 60.0
KEEPALIVES = 3  # expected within `silence_s`, after which a silent stream counts as lost
MOST_UNSENT, PIECE_BYTES = 4 << 20, 1 << 20
ERROR = 2


class ProcessWire:
    """Carry the streams of a process at E2B; see containers.container.ContainerWire. Created in the loop of `call`."""

    def __init__(self, provider: Provider, client: Any, events: Any, pid: int):
        self._provider, self._client, self._events, self._pid = provider, client, events, pid
        self._turn = threading.Condition()
        self._unsent = bytearray()
        self._error: BaseException | None = None
        self._has_failed = asyncio.Event()
        self._is_sending = self._is_shut_down = self._is_closed = False

    @classmethod
    async def opened(
        cls, provider: Provider, client: Any, arguments: Sequence[str], user: str, *, sends: bool
    ) -> ProcessWire:
        """Start a process and return its streams."""
        messages = provider.package.messages
        process = messages.ProcessConfig(cmd=arguments[0], args=list(arguments[1:]), envs={"PATH": IMAGE_PATH}, cwd="/")
        headers = {"Keepalive-Ping-Interval": str(max(1, int(provider.account.silence_s / KEEPALIVES)))}
        if user:
            headers["Authorization"] = f"Basic {base64.b64encode(f'{user}:'.encode()).decode()}"
        events = client.start(messages.StartRequest(process=process, stdin=sends), headers=headers)
        try:
            kind, first = _event(await anext(events))
            if kind != "start":
                raise provider.failure(Failure.BAD_ANSWER, detail="the first message of a process is not its start")
            return cls(provider, client, events, int(first.pid))
        except StopAsyncIteration:
            raise provider.failure(Failure.BAD_ANSWER, detail="a process has not started") from None
        except BaseException:
            await events.aclose()
            raise

    def send(self, data: bytes) -> None:
        """Queue `data` for sending. Raises OSError if the process has ended or has read nothing for `STALL_S`."""
        with self._turn:
            if not self._turn.wait_for(lambda: len(self._unsent) < MOST_UNSENT or self._error, STALL_S):
                raise TimeoutError("a process at E2B does not read its input")
            if self._error is not None or self._is_shut_down:
                raise ConnectionError(str(self._error) if self._error else "its input was ended")
            self._unsent += data
            begins, self._is_sending = not self._is_sending, True
        if begins:
            asyncio.run_coroutine_threadsafe(self._send_all(), call.loop())

    async def _send_all(self) -> None:
        """Send queued data until the queue is empty."""
        try:
            while piece := self._next():
                await asyncio.wait_for(self._send_piece(piece), STALL_S)
        except Exception as error:
            self.fail(self._provider.explain(error))

    def _next(self) -> bytes:
        with self._turn:
            piece = bytes(self._unsent[:PIECE_BYTES])
            del self._unsent[:PIECE_BYTES]
            self._is_sending = bool(piece)
            self._turn.notify_all()
            return piece

    async def _send_piece(self, piece: bytes) -> None:
        messages, oneof = self._provider.package.messages, self._provider.package.protobuf.Oneof
        stdin = messages.ProcessInput(input=oneof("stdin", piece))
        await self._client.send_input(
            messages.SendInputRequest(process=self._selector(), input=stdin), timeout_ms=round(STALL_S * 1000)
        )

    def fail(self, error: BaseException) -> None:
        """Stop sending and receiving because of `error`. The first error is kept."""
        with self._turn:
            self._error = self._error or error
            self._is_sending = False
            self._unsent.clear()
            self._turn.notify_all()
        call.loop().call_soon_threadsafe(self._has_failed.set)

    def _selector(self) -> Any:
        package = self._provider.package
        return package.messages.ProcessSelector(selector=package.protobuf.Oneof("pid", self._pid))

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the output of the process until it ends. Raises OSError."""
        while True:
            try:
                kind, event = call(self._next_event, self._provider.account.silence_s)
            except Exception as error:
                reason = self._provider.explain(error)
                self.fail(reason)
                raise ConnectionError(str(reason)) from error
            if kind == "end":
                self.fail(ConnectionError("the process has ended"))
                return
            if kind == "data" and event.output is not None:
                stream, piece = event.output.field, bytes(event.output.value)
                if piece:
                    yield OUTPUT if stream == "stdout" else ERROR, piece

    async def _next_event(self) -> tuple[str, Any]:
        """Wait for the next message of the process, or raise the error passed to `fail`."""
        coming = asyncio.ensure_future(anext(self._events))
        failing = asyncio.ensure_future(self._has_failed.wait())
        try:
            await asyncio.wait((coming, failing), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise self._error or ConnectionError("it was closed")
            return _event(coming.result())
        except StopAsyncIteration:
            raise self._provider.failure(Failure.BAD_ANSWER, detail="a process did not report its end") from None
        finally:
            for task in (coming, failing):
                task.cancel()
            await asyncio.gather(coming, failing, return_exceptions=True)

    def shutdown(self) -> None:
        """Close standard input; the process then exits by itself.

        If data is still being sent, the process is killed.
        """
        with self._turn:
            is_first, self._is_shut_down = not self._is_shut_down, True
            is_sending = self._is_sending
        if is_first and self._error is None:
            if is_sending:  # nobody reads its output any more
                self.kill()
                return
            request = self._provider.package.messages.CloseStdinRequest(process=self._selector())
            self._tell(lambda: self._client.close_stdin(request, timeout_ms=round(END_S * 1000)))

    def kill(self) -> None:
        """Kill the process, and with it its container. Raises OSError."""
        package = self._provider.package
        request = package.messages.SendSignalRequest(process=self._selector(), signal=package.messages.Signal.SIGKILL)
        self._tell(lambda: self._client.send_signal(request, timeout_ms=round(END_S * 1000)))

    def _tell(self, make: Callable[[], Any]) -> None:
        try:
            self._provider.ask(make, END_S)
        except BackendUnavailable as error:
            if getattr(error, "failure", None) is not Failure.NOT_FOUND:  # NOT_FOUND: it has ended
                raise ConnectionError(str(error)) from error

    def close(self) -> None:
        """Kill the process unless it has ended, and close its stream."""
        with self._turn:
            is_first, self._is_closed = not self._is_closed, True
            has_ended = self._error is not None
        self.fail(ConnectionError("it was closed"))
        if is_first:
            if not has_ended:
                with suppress_logged(log, "a process at E2B may be left until its sandbox ends", OSError):
                    self.kill()
            with suppress_logged(log, "a stream of E2B's package did not close; its machine ends by itself", Exception):
                call(self._events.aclose, ANSWER_S)


def _event(message: Any) -> tuple[str, Any]:
    """Return kind and content of a message about a process."""
    event = message.event.event if message.event is not None else None
    return (str(event.field), event.value) if event is not None else ("", None)
