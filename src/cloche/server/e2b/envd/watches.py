"""Watches of folders: `WatchDir` as a stream, and watchers that a client asks for their events, one after the other.

A watcher buffers nothing here: what is not asked for stays with its process inside, and beyond the kernel's bound the
watch ends with an error. The number of watches of a sandbox is bounded, a watcher that is not asked ends, and all end
with their sandbox and at a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from cloche.core.errors import ClocheError, SandboxFileError, TooManyWatches
from cloche.core.file_protocols import OpenWatch
from cloche.core.processes import FileChange
from cloche.records.ids import new_id

from ..calls import Call
from ..errors import Dropped, E2BError
from .connect import server_stream, unary
from .entries import as_entry, basic_user, enter_with_rights, file_error, printable
from .filesystem import SERVICE, Message, text_of

UNASKED_S = 3600.0  # after which a watcher ends
OLD_S = 60.0  # since the last request, from which on a watcher gives its place to another one
ASKED_S = 30.0  # for the events of a watcher
KEEPALIVE_S, LEAST_KEEPALIVE_S, MOST_KEEPALIVE_S = 50.0, 1.0, 55.0
MOST_TIMEOUT_S = 86_400.0
MOST_EVENTS = 50_000  # of requests that were given up
TOO_MANY = 429
LOST = "watcher error: changes came faster than they were read, and some are lost"
_KINDS: Mapping[str, str] = {
    "created": "EVENT_TYPE_CREATE", "written": "EVENT_TYPE_WRITE", "attributes": "EVENT_TYPE_CHMOD",
    "removed": "EVENT_TYPE_REMOVE", "over": "EVENT_TYPE_REMOVE", "moved": "EVENT_TYPE_RENAME",
}  # fmt: skip
_WITHOUT_ENTRY = (_KINDS["moved"], _KINDS["removed"])  # of the old name, at which there may be another file by now


def events_of(change: FileChange) -> Iterator[Message]:
    """Yield E2B's events for a change: a move is a rename of the old name, and a creation of the new one."""
    entry = {"entry": as_entry(change.entry)} if change.entry is not None else {}
    kind = _KINDS[change.kind]
    yield {"name": printable(change.path or "."), "type": kind, **({} if kind in _WITHOUT_ENTRY else entry)}
    if change.kind == "moved" and change.target:
        yield {"name": printable(change.target), "type": _KINDS["created"], **entry}


@asynccontextmanager
async def _watching(call: Call, body: Message) -> AsyncIterator[OpenWatch]:
    """Watch a folder for a block. Raises E2BError."""
    path, name = text_of(body, "path"), basic_user(call)
    options: dict[str, Any] = {
        "recursive": bool(body.get("recursive")), "describes": bool(body.get("includeEntry")),
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        use = await stack.enter_async_context(call.use())
        try:
            begin = partial(use.held.live.watch_path, path, is_exact=True, **options)
            watch: OpenWatch = await enter_with_rights(stack, name, lambda by: begin(by=by))
        except SandboxFileError as error:
            messages = {"not_found": f"path {error.path} not found", "user": f"invalid username: '{name}'"}
            raise file_error(error, messages.get(error.kind, "")) from error
        except TooManyWatches as error:
            raise E2BError(TOO_MANY, str(error)) from error
        if not watch.is_directory:
            raise E2BError(400, f"path {printable(_whole(watch, path))} not a directory")
        yield watch


def _whole(watch: OpenWatch, path: str) -> str:
    return f"{watch.folder.rstrip('/')}/{path.rstrip('/').rpartition('/')[2]}"


def seconds_of(call: Call) -> float:
    """Return how long a stream may last, by the header `Connect-Timeout-Ms`. Raises E2BError (400)."""
    text = call.request.headers.get("connect-timeout-ms")
    if text is None:
        return MOST_TIMEOUT_S
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise E2BError(400, "Connect-Timeout-Ms: give a number of milliseconds")
    return min(int(text) / 1000, MOST_TIMEOUT_S)


def keepalive_of(call: Call) -> float:
    """Return after how many seconds without a message one is sent, by the header `Keepalive-Ping-Interval`."""
    text = call.request.headers.get("keepalive-ping-interval", "")
    seconds = float(text) if text.isascii() and text.isdigit() and len(text) <= 6 else KEEPALIVE_S
    return min(max(seconds, LEAST_KEEPALIVE_S), MOST_KEEPALIVE_S)


async def watch_dir(call: Call, body: Message, stack: AsyncExitStack) -> AsyncGenerator[Message]:
    """Watch a folder; answer with its changes until the client goes."""
    ends_at = time.monotonic() + seconds_of(call)
    watch = await stack.enter_async_context(_watching(call, body))
    assert call.target is not None  # noqa: S101 - of a port
    cut = stack.enter_context(call.e2b.readers(call.target.sandbox_id).reading())
    return _stream(watch, cut, ends_at, keepalive_of(call))


async def _stream(
    watch: OpenWatch, cut: asyncio.Future[str], ends_at: float, keepalive_s: float
) -> AsyncGenerator[Message]:
    yield {"start": {}}
    changes = aiter(watch)
    reading: asyncio.Future[FileChange | None] = asyncio.ensure_future(_next(changes))
    try:
        while True:
            left_s = ends_at - time.monotonic()
            waited_for: list[asyncio.Future[Any]] = [reading, cut]
            await asyncio.wait(
                waited_for, timeout=max(0.0, min(left_s, keepalive_s)), return_when=asyncio.FIRST_COMPLETED
            )
            if cut.done():
                raise Dropped
            if reading.done():
                change, reading = reading.result(), asyncio.ensure_future(_next(changes))
                for event in _checked(change) if change is not None else ():
                    yield {"filesystem": event}
            elif time.monotonic() >= ends_at:
                raise E2BError(504, "the time of the watch is over")
            else:
                yield {"keepalive": {}}
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def _next(changes: AsyncIterator[FileChange]) -> FileChange | None:
    """Return the next change; never, once there can be none any more."""
    change = await anext(changes, None)
    if change is None:
        await asyncio.Event().wait()
    return change


def _checked(change: FileChange) -> Iterator[Message]:
    if change.kind == "lost":
        raise E2BError(500, LOST)
    return events_of(change)


class Watcher:
    """Hold a watch between the requests of its client."""

    def __init__(self, sandbox_id: str):
        self.sandbox_id, self.asked_at = sandbox_id, time.monotonic()
        self.begun: asyncio.Future[OpenWatch] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self._error: E2BError | None = None
        self._asking: asyncio.Task[list[Message]] | None = None  # of a request that was given up

    async def events(self) -> list[Message]:
        """Return the events since the last request. Those of a request that was given up come with the next one."""
        self.asked_at = time.monotonic()
        if self._error is not None:
            raise self._error
        asking = self._asking = asyncio.ensure_future(self._ask(self._asking))
        events = await asyncio.shield(asking)
        self._asking = None
        return events

    async def _ask(self, earlier: asyncio.Task[list[Message]] | None) -> list[Message]:
        watch = await self.begun
        async with asyncio.timeout(ASKED_S):
            events = await earlier if earlier is not None else []
            for change in await watch.so_far():
                if change.kind == "lost" or len(events) > MOST_EVENTS:
                    self._error = E2BError(500, LOST)
                    break
                events += events_of(change)
        return events

    async def close(self) -> None:
        """End the watch."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])


class Watchers:
    """Hold all watchers of this worker."""

    def __init__(self) -> None:
        self._watchers: dict[str, Watcher] = {}

    async def add(self, call: Call, body: Message) -> str:
        """Begin to watch; return the watcher's name. Raises E2BError."""
        try:
            return await self._add(call, body)
        except E2BError as error:
            if error.status != TOO_MANY or not await self._make_room(call):
                raise
            return await self._add(call, body)

    async def _add(self, call: Call, body: Message) -> str:
        assert call.target is not None  # noqa: S101 - of a port
        name, watcher = new_id("w").replace("_", ""), Watcher(call.target.sandbox_id)
        watcher.task = asyncio.ensure_future(self._hold(name, watcher, call, body))
        call.service.sandboxes.note_stream(watcher.task)
        try:
            await asyncio.shield(watcher.begun)
        except asyncio.CancelledError:
            watcher.task.cancel()
            raise
        return name

    async def _hold(self, name: str, watcher: Watcher, call: Call, body: Message) -> None:
        try:
            async with AsyncExitStack() as stack:
                watch = await stack.enter_async_context(_watching(call, body))
                cut = stack.enter_context(call.e2b.readers(watcher.sandbox_id).reading())
                self._watchers[name] = watcher
                watcher.begun.set_result(watch)
                while (left_s := watcher.asked_at + UNASKED_S - time.monotonic()) > 0 and not cut.done():
                    await asyncio.wait([cut], timeout=left_s)
        except Exception as error:
            if watcher.begun.done():
                raise
            watcher.begun.set_exception(error)
        finally:
            self._watchers.pop(name, None)
            watcher.begun.cancel()

    def find(self, call: Call, body: Message) -> tuple[str, Watcher]:
        """Return a watcher of the request's sandbox, and its name. Raises E2BError (404)."""
        name = text_of(body, "watcherId")
        watcher = self._watchers.get(name)
        if watcher is None or call.target is None or watcher.sandbox_id != call.target.sandbox_id:
            raise E2BError(404, f"watcher with id {name[:64]} not found")
        return name, watcher

    async def remove(self, call: Call, body: Message) -> None:
        """End a watcher. Raises E2BError (404)."""
        name, watcher = self.find(call, body)
        self._watchers.pop(name, None)
        await watcher.close()

    async def _make_room(self, call: Call) -> bool:
        """End the watcher of a sandbox that was not asked for the longest time; tell whether there was one."""
        assert call.target is not None  # noqa: S101 - of a port
        own = [watcher for watcher in self._watchers.values() if watcher.sandbox_id == call.target.sandbox_id]
        oldest = min(own, key=lambda watcher: watcher.asked_at, default=None)
        if oldest is None or time.monotonic() - oldest.asked_at < OLD_S:
            return False
        await oldest.close()
        return True


def watchers_of(call: Call) -> Watchers:
    """Return the watchers of this worker."""
    watchers: Watchers = call.e2b.parts.setdefault("watches", Watchers())
    return watchers


async def create_watcher(call: Call, body: Message) -> Message:
    """Begin to watch a folder for a client that asks for the events."""
    await call.facts_of_port()
    return {"watcherId": await watchers_of(call).add(call, body)}


async def get_watcher_events(call: Call, body: Message) -> Message:
    """Return the events since the last request."""
    await call.facts_of_port()
    _, watcher = watchers_of(call).find(call, body)
    try:
        return {"events": await watcher.events()}
    except (ClocheError, TimeoutError) as error:
        raise E2BError(500, f"watcher error: {printable(str(error))}") from error


async def remove_watcher(call: Call, body: Message) -> Message:
    """End a watcher."""
    await call.facts_of_port()
    await watchers_of(call).remove(call, body)
    return {}


ROWS = (
    server_stream(SERVICE, "WatchDir", watch_dir),
    unary(SERVICE, "CreateWatcher", create_watcher),
    unary(SERVICE, "GetWatcherEvents", get_watcher_events),
    unary(SERVICE, "RemoveWatcher", remove_watcher),
)
