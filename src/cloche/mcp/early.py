"""Answer a client's first messages before the protocol package is imported, which takes most of a second.

Theory of operation: `initialize`, then `notifications/initialized`, `ping` and `tools/list` are answered from `table`,
as long as they are in the form that clients send them. The first other message ends this, and the package's server
takes over: it gets the handshake again, and its answer to that is dropped, as the client has one already. Its import
begins in a thread when the tools have been listed, since a call follows soon.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from cloche.core.record import dataclass

from .table import about

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from mcp.shared._stream_protocols import WriteStream
    from mcp.shared.message import SessionMessage

INITIALIZE, INITIALIZED = "initialize", "notifications/initialized"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """Hold what the package's server reads, and the id of the request whose answer the client has, or None."""

    lines: Iterator[str]
    answered: int | str | None


class EarlyAnswers:
    """Answer one client. `tools` are the rows of `tools/list`."""

    def __init__(self, tools: list[dict[str, Any]]):
        self._tools = tools
        self.handshake: list[str] = []
        self.answered: int | str | None = None
        self.has_listed = False

    def answer(self, line: str) -> str | None:
        """Return the line to send, empty for none; None for a message that is for the package."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict) or message.pop("jsonrpc", None) != "2.0":
            return None
        method, params = message.pop("method", None), message.pop("params", None)
        number = message.pop("id", None)
        if message or not self._is_in_order(method, has_number=type(number) in (int, str)):
            return None
        result = self._result(method, params)
        if result is None:
            return None
        if method in (INITIALIZE, INITIALIZED):
            self.handshake.append(line)
        if method == INITIALIZE:
            self.answered = number
        if method == INITIALIZED:
            return ""
        return json.dumps(
            {"jsonrpc": "2.0", "id": number, "result": result}, separators=(",", ":"), ensure_ascii=False
        )  # fmt: skip

    def _is_in_order(self, method: object, *, has_number: bool) -> bool:
        """Return whether a method is one of the known ones, at its place in the handshake."""
        if method == INITIALIZE:
            return has_number and not self.handshake
        if method == INITIALIZED:
            return not has_number and len(self.handshake) == 1
        return has_number and method in ("ping", "tools/list") and bool(self.handshake)

    def _result(self, method: object, params: object) -> dict[str, Any] | None:
        if method == INITIALIZE:
            version = _greeted_version(params)
            return None if version is None else about(version)
        if params not in (None, {}):
            return None
        if method == "tools/list":
            self.has_listed = True
            return {"tools": self._tools}
        return {}


def _greeted_version(params: object) -> str | None:
    """Return the revision that a client asks for in `initialize`; None if the parameters are not of the usual form."""
    if not isinstance(params, dict) or not isinstance(params.get("capabilities"), dict):
        return None
    client, version = params.get("clientInfo"), params.get("protocolVersion")
    if not isinstance(client, dict) or not all(isinstance(client.get(name), str) for name in ("name", "version")):
        return None
    return version if isinstance(version, str) else None


def serve_early(
    lines: Iterator[str], out: int, tools: list[dict[str, Any]], load: Callable[[], object]
) -> HandedOver | None:
    """Answer until a message is for the package, and return what it has to read; None if the client leaves first.

    `load` imports the package. A signal ends the process with the usual exit code.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    answers, loading = EarlyAnswers(tools), threading.Thread(target=load, name="cloche-mcp-load", daemon=True)
    for line in lines:
        answer = answers.answer(line)
        if answer is None:
            if loading.ident is not None:
                loading.join()  # two threads must not import modules that import each other
            return HandedOver(lines=chain(answers.handshake, (line,), lines), answered=answers.answered)
        if answer and not _send(out, f"{answer}\n".encode()):
            return None
        if answers.has_listed and loading.ident is None:
            loading.start()
    return None


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _send(out: int, data: bytes) -> bool:
    """Write everything; return False if the client reads no more."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(out, left) :]
    except BrokenPipeError:
        return False
    return True


class WithoutAnswer:
    """Pass the package's messages on, but the first answer to the request `number`."""

    def __init__(self, stream: WriteStream[SessionMessage], number: int | str | None):
        self._stream, self._number = stream, number

    async def send(self, item: SessionMessage, /) -> None:
        """Send a message, or drop it."""
        message: Any = item.message
        if self._number is not None and not hasattr(message, "method") and message.id == self._number:
            self._number = None
        else:
            await self._stream.send(item)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    async def __aenter__(self) -> WithoutAnswer:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, trace)
