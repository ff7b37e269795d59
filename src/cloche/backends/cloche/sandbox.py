"""A throwaway sandbox at a service: a single run is one call; for several there is one that lives, and is ended."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cloche.core.errors import ClocheError, OutcomeUnknown, SandboxFileTooLarge
from cloche.core.events import Displayed, OutputChunk, Sink, Started
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.remote import RemoteAccount
from cloche.core.request import InputFile, Request
from cloche.core.result import Result

from ..archive import Spool
from ..remote.quota import counter_for
from .connections import begin, outcome
from .fields import fits_call, option_fields, run_fields
from .results import ResultReader, kept, read_output, read_records
from .wire import CANCEL_S, OUT, Call

GRACE_S = 60.0  # beyond a run's time-out: for its turn at the service, its start, and its files


class RunEvents:
    """Hand the events of a run to a sink; remember its id, and how many events were missed."""

    def __init__(self, sink: Sink | None):
        self._sink = sink
        self.id, self.missed = "", 0

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        """Take one; what makes no sense is dropped."""
        if name in ("run", "call"):
            self.id = str(data.get("id"))[:64]
        elif name == "missed" and type(data.get("events")) is int:
            self.missed += data["events"]
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
            sink(Displayed(output=output))

    def note(self, result: Result) -> Result:
        """Say in a result what was missed."""
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


async def run_outcome(
    call: Call, account: RemoteAccount, what: str, *, timeout_s: float | None, where: Callable[[], str]
) -> dict[str, Any]:
    """Wait for the end of code that runs; who stops to wait has it ended, and waits for that."""
    try:
        return await outcome(call, account, what, timeout_s=timeout_s)
    except asyncio.CancelledError:
        await finish(asyncio.wait([call.ended], timeout=CANCEL_S))
        raise
    except OutcomeUnknown as error:
        if not call.ended.done():  # it was late, and is cancelled
            await asyncio.wait([call.ended], timeout=CANCEL_S)
        raise OutcomeUnknown(f"{error} {where()}".rstrip()) from error


@asynccontextmanager
async def counted_run(account: RemoteAccount, seconds: float) -> AsyncIterator[list[float]]:
    """Count a run of so many seconds at most; the body adds what it took to the list. Raises BackendUnavailable."""
    counter, took = counter_for(account), list[float]()
    if counter is None:
        yield took
        return
    ticket = await asyncio.to_thread(counter.begin_run, seconds)
    try:
        yield took
    except OutcomeUnknown:
        raise  # it may have run, for as long as it may
    except ClocheError:
        await finish(asyncio.to_thread(ticket.refund))
        raise
    if took:
        await asyncio.to_thread(ticket.settle, took[0])


@asynccontextmanager
async def counted_sandbox(account: RemoteAccount, lifetime_s: float) -> AsyncIterator[Callable[[str], None]]:
    """Count a sandbox for the body, which says its id. Raises BackendUnavailable."""
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
        raise  # without a name it may be there until its lifetime ends
    except BaseException:
        await finish(asyncio.to_thread(ticket.close if names else ticket.refund))
        raise
    await finish(asyncio.to_thread(ticket.close))


class ThrowawaySandbox:
    """Run in sandboxes of a service; see core.protocols.OpenSandbox."""

    def __init__(
        self,
        account: RemoteAccount,
        policy: Policy,
        limits: Limits,
        open_live: Callable[[], Any],
        stack: AsyncExitStack,
    ):
        self._account, self._policy, self._limits = account, policy, limits
        self._options = option_fields(policy, limits)
        self._reader = ResultReader(account, limits)
        self._open_live, self._stack = open_live, stack
        self._live: Any = None
        self._is_single = False
        self._turns = asyncio.Lock()

    def expect_single_run(self) -> None:
        """Say that the next run is the last one; see core.protocols.SupportsSingleRun."""
        self._is_single = True

    async def run(self, request: Request) -> Result:
        """Run code or a command."""
        return await self._run(request, None)

    async def run_streaming(self, request: Request, sink: Sink) -> Result:
        """Run, with events."""
        return await self._run(request, sink)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file of the workspace."""
        found: bytes = await (await self._living()).read_file(path, max_bytes=max_bytes)
        return found

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file of the workspace."""
        await (await self._living()).write_file(path, data)

    async def write_files(self, files: Sequence[InputFile]) -> None:
        """Write several."""
        await (await self._living()).write_files(files)

    async def _living(self) -> Any:  # noqa: ANN401 - a RemoteSandbox, whose module imports this one
        async with self._turns:
            if self._live is None:
                self._live = await self._stack.enter_async_context(self._open_live())
        return self._live

    async def _run(self, request: Request, sink: Sink | None) -> Result:
        if self._is_single and self._live is None and fits_call(request):
            return await self._run_apart(request, sink)
        live = await self._living()
        request = dataclasses.replace(request, collect=("**",))
        result: Result = await (live.run(request) if sink is None else live.run_streaming(request, sink))
        result.meta.pop("files_shared", None)
        return result

    async def _run_apart(self, request: Request, sink: Sink | None) -> Result:
        """Run in a sandbox of its own, by one call."""
        timeout_s = request.timeout_s or self._limits.timeout_s
        fields = {**self._options, **run_fields(request, request.files), "returnFiles": True}
        if sink is not None:
            fields["stream"] = True
        async with (
            counted_sandbox(self._account, timeout_s + GRACE_S) as note,
            counted_run(self._account, timeout_s) as took,
        ):
            events, spool = RunEvents(sink), Spool(self._limits.disk_bytes)
            call = await begin(self._account, "code.exec", fields, on_event=events.take)
            is_kept = True

            def take(channel: int, data: bytes) -> None:
                nonlocal is_kept
                if channel == OUT and is_kept:
                    try:
                        spool.add(data)
                    except (ValueError, OSError):
                        is_kept = False
                call.grant(channel, len(data))

            call.on_data = take
            said = await run_outcome(
                call, self._account, "code ran", timeout_s=timeout_s + GRACE_S, where=lambda: self._where(events.id)
            )
            result = events.note(self._result(said, spool, is_kept=is_kept))
            took.append(result.duration)
            note(events.id)
            return result

    def _where(self, run_id: str) -> str:
        if not run_id:
            return f"Runs of the service are listed at {self._account.url}/api/runs."
        return f"It is run {run_id}: look at {self._account.url}/api/runs/{run_id}."

    def _result(self, said: Mapping[str, Any], spool: Spool, *, is_kept: bool) -> Result:
        try:
            records = read_records(said.get("files"))
            if is_kept:
                return self._reader.read(said, files=records, save=kept(spool, records))
        except (KeyError, TypeError, ValueError) as error:
            raise self._reader.wrong() from error
        result = self._reader.read(said)
        result.meta["files_partial"] = "bytes"
        return result


def too_large(path: str, max_bytes: int) -> SandboxFileTooLarge:
    """Return the error for a file that is more than its reader wants."""
    return SandboxFileTooLarge(f"{path}: it has more than {max_bytes} bytes", path=path, kind="too_large")
