"""A throwaway sandbox at a service: a single run is one call; several runs share a workspace there."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from cloche.core.errors import InvalidRequest, NodeLost, OutcomeUnknown, SandboxFileError, SandboxFileTooLarge
from cloche.core.events import Cleared, Displayed, OutputChunk, Sink, Started
from cloche.core.frames import MAX_OUTPUTS
from cloche.core.functions import OffersFunctions
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.remote import RemoteAccount
from cloche.core.request import Request
from cloche.core.result import Result

from ..archive import Spool
from ..live_files import FILE_S
from ..remote.failures import Failure, RemoteUnavailable
from ..remote.quota import counter_for
from .connections import begin, begin_on, connected, outcome
from .fields import MOST_FILES, MOST_SENT, encoded_path, fits_call, path_fields, run_fields
from .files import incoming
from .host_calls import served, tool_fields
from .inputs import StreamedInputs, check_taken, send_inputs, streamed_fields
from .results import ResultReader, files_saver, read_output, read_records
from .wire import IN, OUT, Call, TakeEvent

OPEN_S = 120.0
MOST_MISSED = 1 << 53
GRACE_S = 60.0  # added to a run's time-out for queueing, start and files


class RunEvents:
    """Pass the events of a run to a sink; remember its id and the number of missed events."""

    def __init__(self, sink: Sink | None):
        self._sink = sink
        self.id, self.missed = "", 0

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        """Handle one event; malformed ones are dropped."""
        if name in ("run", "call"):
            self.id = str(data.get("id"))[:64]
        elif name == "missed" and type(data.get("events")) is int:
            self.missed = min(self.missed + max(0, data["events"]), MOST_MISSED)
        elif self._sink is not None:
            self._hand_on(self._sink, name, data)

    def _hand_on(self, sink: Sink, name: str, data: Mapping[str, Any]) -> None:
        if name == "started":
            sink(Started())
        elif name == "output" and data.get("stream") in ("stdout", "stderr"):
            sink(OutputChunk(stream=data["stream"], data=_content(data)))
        elif name == "display":
            try:
                output = read_output(data)
            except (KeyError, TypeError, ValueError, AttributeError):
                return
            index = data.get("replaces")
            is_place = type(index) is int and 0 <= index < MAX_OUTPUTS
            is_value = data.get("isValue") is True
            sink(Displayed(output=output, replaces=index if is_place else None, is_value=is_value))
        elif name == "cleared":
            sink(Cleared())

    def note(self, result: Result, notes: Mapping[str, Any]) -> Result:
        """Record the number of missed events, and notes of this side, in a result."""
        result.meta.update(notes)
        if self.missed:
            result.meta["events_missed"] = self.missed
        return result


def _content(data: Mapping[str, Any]) -> bytes:
    text, encoded = data.get("text"), data.get("base64")
    if isinstance(text, str):
        return text.encode("utf-8", "replace")
    try:
        return base64.b64decode(encoded) if isinstance(encoded, str) else b""
    except binascii.Error:
        return b""


AFTERWARDS = (Failure.SERVER, Failure.TIMEOUT, Failure.BAD_ANSWER)  # failures after the service received the code


async def run_outcome(
    call: Call,
    account: RemoteAccount,
    action: str,
    *,
    timeout_s: float,
    where: Callable[[], str],
    is_held: Callable[[], Awaitable[bool]] | None = None,
) -> dict[str, Any]:
    """Wait for the end of running code. If the caller is cancelled, the code is ended, and its end awaited.

    The wait is `timeout_s`, and is repeated while `is_held` is true: a pause stops the time-out, but not the sandbox's
    lifetime, which bounds the whole wait.
    """
    loop = asyncio.get_running_loop()
    ends = loop.time() + account.lifetime_s + timeout_s
    try:
        await asyncio.wait([call.closed], timeout=timeout_s)
        while not call.closed.done() and loop.time() < ends and is_held is not None and await is_held():
            await asyncio.wait([call.closed], timeout=timeout_s)
        return await outcome(call, account, action, timeout_s=0.0)
    except asyncio.CancelledError:
        call.cancel()
        await finish(asyncio.wait([call.closed], timeout=account.cancel_s))
        raise
    except RemoteUnavailable as error:
        if error.failure not in AFTERWARDS or error.retry_after_s is not None:
            raise
        raise OutcomeUnknown(f"{error} It may have run all the same. {where()}".rstrip()) from error
    except NodeLost:  # nothing of it is left to look at
        raise
    except OutcomeUnknown as error:
        if not call.closed.done():  # it was late and has been cancelled
            await asyncio.wait([call.closed], timeout=account.cancel_s)
        raise OutcomeUnknown(f"{error} {where()}".rstrip()) from error


@asynccontextmanager
async def counted_sandbox(account: RemoteAccount, lifetime_s: float) -> AsyncIterator[Callable[[str], None]]:
    """Count a sandbox during the body, which reports its id. Raises BackendUnavailable."""
    counter = counter_for(account)
    if counter is None:
        yield lambda _: None
        return
    ticket, names = await asyncio.to_thread(counter.open_sandbox, lifetime_s), list[str]()
    try:
        yield names.append
    except OutcomeUnknown:
        if names:
            await finish(asyncio.to_thread(ticket.close))
        raise  # without an id it may exist until its lifetime ends
    except BaseException:
        await finish(asyncio.to_thread(ticket.close if names else ticket.refund))
        raise
    await finish(asyncio.to_thread(ticket.close))


class ThrowawaySandbox(OffersFunctions):
    """Run in sandboxes of a service; see core.protocols.OpenSandbox.

    A single run is one call and has its own sandbox. Several runs share a workspace, which lives as long as a call over
    one connection: if this process dies, the service closes it.
    """

    def __init__(self, account: RemoteAccount, options: Mapping[str, Any], limits: Limits):
        self._account, self._options, self._limits = account, options, limits
        self._reader = ResultReader(account, limits)
        self._workspace: _Workspace | None = None
        self._stack = AsyncExitStack()
        self._is_single = False
        self._opening = asyncio.Lock()

    def expect_single_run(self) -> None:
        """Announce that the next run is the last one; see core.protocols.SupportsSingleRun."""
        self._is_single = True

    async def run(self, request: Request) -> Result:
        """Run code or a command."""
        return await self._run(request, None)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run, with events."""
        return await self._run(request, sink)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file of the workspace."""
        return await read_whole((await self._opened()).begin, self._account, "workspace.read", path, max_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file of the workspace."""
        await write_whole((await self._opened()).begin, self._account, "workspace.write", path, data)

    async def close(self) -> None:
        """Close the workspace, if one was opened."""
        await self._stack.aclose()

    async def _opened(self) -> _Workspace:
        async with self._opening:
            if self._workspace is None:
                lifetime_s = self._account.lifetime_s
                note = await self._stack.enter_async_context(counted_sandbox(self._account, lifetime_s))
                workspace = await _open_workspace(self._account, self._options)
                self._stack.push_async_callback(workspace.close)
                note(workspace.id)
                self._workspace = workspace
        return self._workspace

    async def _run(self, request: Request, sink: Sink | None) -> Result:
        inputs: StreamedInputs | None = None
        if fits_call(request):
            fields = run_fields(request, request.files)
        else:
            inputs, fields = streamed_fields(request)
        fields = {**fields, "returnFiles": True, **({"stream": True} if sink else {})}
        timeout_s = request.timeout_s or self._limits.timeout_s
        if not self._is_single or self._workspace is not None:
            _check_for_workspace(inputs)
            workspace = await self._opened()
            return await self._finished("workspace.run", fields, inputs, timeout_s, sink, workspace.begin)
        async with counted_sandbox(self._account, timeout_s + GRACE_S) as note:
            begin_here = functools.partial(begin, self._account)
            fields = {**self._options, **fields}
            result = await self._finished("code.exec", fields, inputs, timeout_s, sink, begin_here)
            note(result.meta["remote"]["sandbox"])
            return result

    async def _finished(
        self,
        verb: str,
        fields: Mapping[str, Any],
        inputs: StreamedInputs | None,
        timeout_s: float,
        sink: Sink | None,
        begin_here: Begin,
    ) -> Result:
        """Run by one call, and return its result with the files received before it."""
        if inputs is not None:
            check_taken(inputs, (await connected(self._account)).most_streamed, self._account)
        events, files, functions = RunEvents(sink), _ReceivedFiles(self._limits.disk_bytes), self.functions
        fields = {**fields, **await tool_fields(functions, self._account)}
        call = await begin_here(verb, fields, on_event=events.take)
        async with served(call, functions) as notes:
            files.follow(call)
            if inputs is not None:
                await self._send(call, inputs)
            answer = await run_outcome(
                call, self._account, "code ran", timeout_s=timeout_s + GRACE_S, where=lambda: self._where(events.id),
                is_held=files.have_grown,
            )  # fmt: skip
        return events.note(self._result(answer, files.spool, is_kept=files.is_kept), notes())

    async def _send(self, call: Call, inputs: StreamedInputs) -> None:
        """Send files and input; if that fails or is cancelled, the call is ended, and its end awaited."""
        try:
            await send_inputs(call, inputs, self._account)
        except BaseException:
            call.cancel()
            await finish(asyncio.wait([call.closed], timeout=self._account.cancel_s))
            raise

    def _where(self, run_id: str) -> str:
        if not run_id:
            return f"Runs of the service are listed at {self._account.host}/api/runs."
        return f"It is run {run_id}: look at {self._account.host}/api/runs/{run_id}."

    def _result(self, answer: Mapping[str, Any], spool: Spool, *, is_kept: bool) -> Result:
        try:
            records = read_records(answer.get("files"))
            if is_kept:
                return self._reader.read(answer, files=records, save=files_saver(spool, records))
        except (KeyError, TypeError, ValueError) as error:
            raise self._reader.wrong() from error
        result = self._reader.read(answer)
        result.meta["files_partial"] = "bytes"
        return result


def _check_for_workspace(inputs: StreamedInputs | None) -> None:
    if inputs is not None and inputs.files:
        raise InvalidRequest(
            f"files have more than {MOST_SENT} bytes, or are more than {MOST_FILES}, which backend 'cloche' sends only "
            "with a single run; write them into a live sandbox"
        )


class _ReceivedFiles:
    """Receive the contents of a result's files into a spool, up to the disk limit; more is dropped."""

    def __init__(self, max_bytes: int):
        self.spool, self.is_kept, self._most = Spool(max_bytes), True, max_bytes
        self._seen = 0

    def follow(self, call: Call) -> None:
        """Take the content of a call."""

        def take(channel: int, data: bytes) -> None:
            if channel == OUT and self.is_kept:
                self._add(data)
            call.grant(channel, len(data))

        call.on_data = take

    def _add(self, data: bytes) -> None:
        try:
            self.is_kept = self.spool.size + len(data) <= self._most
            if self.is_kept:
                self.spool.add(data)
        except (ValueError, OSError):  # a full disk
            self.is_kept = False
        if not self.is_kept:
            self.spool.file.close()

    async def have_grown(self) -> bool:
        """Tell whether content was kept since the last call of this, so that waiting goes on."""
        seen, self._seen = self._seen, self.spool.size
        return self.is_kept and self._seen > seen


class Begin(Protocol):
    """Begin a call, over any connection or over a certain one."""

    async def __call__(self, verb: str, fields: Mapping[str, Any], *, on_event: TakeEvent | None = None) -> Call: ...


class _Workspace:
    """A workspace, kept by a call. It is reachable only over that call's connection."""

    def __init__(self, account: RemoteAccount, call: Call, opened: asyncio.Future[str]):
        self._account, self._call = account, call
        self.id = opened.result()

    async def begin(self, verb: str, fields: Mapping[str, Any], *, on_event: TakeEvent | None = None) -> Call:
        """Begin a call about the workspace. Raises BackendUnavailable if it has ended."""
        if self._call.closed.done():
            await outcome(self._call, self._account, "a workspace was kept", timeout_s=0.0)
        fields = {"workspace": self.id, **fields}
        return await begin_on(self._call.connection, self._account, verb, fields, on_event=on_event)

    async def close(self) -> None:
        """Close the workspace and wait until that is done."""
        self._call.cancel()
        await finish(asyncio.wait([self._call.closed], timeout=self._account.cancel_s))


async def _open_workspace(account: RemoteAccount, options: Mapping[str, Any]) -> _Workspace:
    opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def hear(name: str, data: Mapping[str, Any]) -> None:
        if name == "opened" and not opened.done():
            opened.set_result(str(data.get("id"))[:64])

    call = await begin(account, "workspace.open", options, on_event=hear)
    try:
        await asyncio.wait([opened, call.closed], timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        call.cancel()
        raise
    if not opened.done():
        await outcome(call, account, "a workspace was opened", timeout_s=0.0)
        raise OutcomeUnknown(f"{account.host} ended a workspace at once; nothing has run")
    return _Workspace(account, call, opened)


async def read_whole(begin_here: Begin, account: RemoteAccount, verb: str, path: str, max_bytes: int) -> bytes:
    """Return a file's content. Raises SandboxFileError."""
    call = await begin_here(verb, {**_as_it_stands(path), "most": max(0, max_bytes)})
    stream, size, pieces = incoming(call, OUT), 0, list[bytes]()
    async with in_time(call, path):
        while (piece := await stream.read()) and size <= max_bytes:
            size += len(piece)
            pieces.append(piece)
        if size > max_bytes:
            raise SandboxFileTooLarge(f"{path}: it has more than {max_bytes} bytes", path=path, kind="too_large")
        await outcome(call, account, "a file was read", timeout_s=FILE_S, path=path)
    return b"".join(pieces)


@asynccontextmanager
async def in_time(call: Call, path: str) -> AsyncIterator[None]:
    """Bound the time of a file operation; its call ends with the body. Raises SandboxFileError."""
    try:
        async with asyncio.timeout(FILE_S):
            yield
    except TimeoutError as error:
        raise SandboxFileError(f"{path}: not finished within {FILE_S:g} s", path=path, kind="timeout") from error
    finally:
        call.cancel()


async def write_whole(begin_here: Begin, account: RemoteAccount, verb: str, path: str, data: bytes) -> None:
    """Write a file, which the service buffers until it is complete. Raises SandboxFileError."""
    call = await begin_here(verb, _as_it_stands(path))
    async with in_time(call, path):
        await call.send(IN, data)
        call.end(IN)
        await outcome(call, account, "a file was written", timeout_s=FILE_S, path=path)


def _as_it_stands(path: str) -> dict[str, str]:
    """Return the field of a path that the service interprets relative to a workspace. Raises InvalidRequest."""
    fields = path_fields(path)  # raises for an invalid path
    return {"path": path} if "path" in fields else encoded_path(path)
