"""Sandboxes that are opened without a `with` block, from `open` to `close`, and the interpreter of a session.

Theory of operation: a backend's context manager must be exited by the task that entered it. So `open` starts a task,
held by `Holder`, which enters the sandbox and waits for `close`. When the event loop ends as with `asyncio.run`, that
task is cancelled and exits the context. At the interpreter's end an atexit handler asks it to close.

No object that lives as long as an open sandbox may refer to the caller's object, since that would keep it from being
collected. So the task has a twin with the same attributes, and the sandbox's exit stack has a session's
`SessionInterpreter`, not the session. `__del__` may run in any thread, between any two instructions: it only signals
the loop, and warns. In a forked child it does nothing. The sessions of a sandbox in a `with` block end with the block.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from cloche.core.errors import InvalidRequest
from cloche.core.loops import check_event_loop, finish
from cloche.core.protocols import OpenSession

from .live import LiveOperations

Waiting = Callable[[], Coroutine[Any, Any, None]]
ALREADY_OPEN = "this sandbox is already open; make another one"
EXIT_S = 5.0  # for closing all sandboxes at the interpreter's end
REMEDY = "call close(), or use it in a with block"

_open: set[Holder] = set()  # asyncio keeps only weak references to tasks (docs of asyncio.create_task)


class Holder:
    """Hold a sandbox open in one task. `run_at_exit` runs a coroutine function in a loop that is not the caller's."""

    def __init__(self, sandbox: HeldOperations, *, run_at_exit: Callable[[Waiting], None] | None = None) -> None:
        self._sandbox = sandbox._twin()
        self._pid, self._run_at_exit = os.getpid(), run_at_exit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Open the sandbox. Raises InvalidRequest if it is open already, and the errors of opening."""
        self._sandbox._check_not_open()
        self._sandbox._holder = self
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()
        self._task = asyncio.create_task(self._hold_open(opened))
        try:
            await asyncio.wait([opened, self._task], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await self.abandon()
            raise
        if not opened.done():
            await self._task  # raises the errors of opening

    async def close(self) -> None:
        """Close the sandbox and wait until it is closed, even if cancelled. Raises the errors of closing."""
        await self.abandon()
        if self._task is not None and not self._task.cancelled():
            self._task.result()

    async def abandon(self) -> None:
        """Close the sandbox in any state, without raising its errors."""
        self._closing.set()
        if self._task is not None:
            await finish(asyncio.wait([self._task]))

    def is_of_this_process(self) -> bool:
        """Tell whether this process created the task. A forked child has neither task nor loop, so it has nothing to
        close.
        """
        return self._pid == os.getpid()

    def tell(self) -> bool:
        """Ask the task to close, from any thread; return False if there is no task, or its loop is closed."""
        if self._loop is None or not self.is_of_this_process():
            return False
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._closing.set)
            return True
        _open.discard(self)  # freeing the task closes its descriptors, which ends the sandbox
        return False

    def wait_at_exit(self, deadline: float) -> None:
        """Wait at the interpreter's end until the task has closed the sandbox."""
        if self._run_at_exit is not None:
            self._run_at_exit(lambda: self._closed(deadline))
        elif self._loop is not None and self._loop.is_running():  # in another thread
            asyncio.run_coroutine_threadsafe(self._closed(deadline), self._loop).result(EXIT_S)
        elif self._loop is not None:
            self._loop.run_until_complete(self._closed(deadline))

    async def _closed(self, deadline: float) -> None:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=max(0.0, deadline - time.monotonic()))

    async def _hold_open(self, opened: asyncio.Future[None]) -> None:
        _open.add(self)
        try:
            await self._sandbox._open_here()
            try:
                opened.set_result(None)
                await self._closing.wait()
            except GeneratorExit:  # the loop was closed, so nothing can be awaited
                raise
            except BaseException as error:
                await self._sandbox._close_here(type(error), error, error.__traceback__)
                raise
            await self._sandbox._close_here()
        finally:
            _open.discard(self)
            self._sandbox._holder = None


class HeldOperations(LiveOperations):
    """Open a sandbox with or without a `with` block."""

    _holder: Holder | None = None  # set while it is open, or opening, by `open`
    _in_block = False  # the block also ends the sessions

    async def open(self) -> Self:
        """Open the sandbox without a `with` block, and return it: for notebooks, and for objects that own a sandbox.

        `close` ends it. It also ends with the event loop (as `asyncio.run` ends it) and with the interpreter, and when
        this object is collected, with a ResourceWarning. Its sessions keep it alive, its processes do not.

        Raises InvalidRequest if it is open already, and the errors of entering the block.
        """
        check_event_loop()
        await Holder(self).open()
        return self

    async def close(self) -> None:
        """Close the sandbox now, as the end of a `with` block does. Closing it again does nothing."""
        try:
            if self._holder is not None:
                await self._holder.close()
            elif self._opened is not None:
                await self._close_here()
        finally:
            self._in_block = False  # until then the block ends the sessions, also those collected meanwhile

    async def __aenter__(self) -> Self:
        check_event_loop()
        if self._in_block or self._holder is None:
            await self._open_here()
        self._in_block = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._holder is None:
                await self._close_here(kind, error, trace)
            else:
                await self._holder.close()
        finally:
            self._in_block = False

    def __del__(self) -> None:
        if self._holder is not None and self._holder.is_of_this_process():
            self._holder.tell()
            _warn(f"a sandbox of backend {self.backend!r}", self)

    @abstractmethod
    async def _open_here(self) -> None:
        """Open the sandbox in this task."""

    @abstractmethod
    async def _close_here(self, *raised: Any) -> None:  # noqa: ANN401 - the arguments of __aexit__
        """Close the sandbox, in the task that opened it, with the exception from the block."""

    def _check_not_open(self) -> None:
        if self._opened is not None or self._holder is not None:
            raise InvalidRequest(ALREADY_OPEN)

    def _twin(self) -> Self:
        """Return another object with the same `__dict__`, for holders that must not keep this one alive."""
        twin = object.__new__(type(self))
        twin.__dict__ = self.__dict__
        return twin


class SessionInterpreter:
    """The interpreter of a session, and the separate sandbox, if any, that is closed after it."""

    def __init__(self, opened: OpenSession, close_sandbox: Callable[[], Awaitable[None]] | None) -> None:
        self.opened, self._close_sandbox = opened, close_sandbox
        self.is_closed = False  # finally; `end` leaves it False
        self.expiry: asyncio.TimerHandle | None = None
        self._pid, self._loop = os.getpid(), asyncio.get_running_loop()
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def look_again_in(self, seconds: float, check: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Schedule the session's idle check, if the session still exists by then."""
        self.expiry = self._loop.call_later(seconds, _call, check)

    async def end(self) -> None:
        """End the interpreter; another one may replace it."""
        if self.expiry is not None:
            self.expiry.cancel()
        await self.opened.close()

    def end_soon(self) -> None:
        """End the interpreter in a task, which `close` waits for."""
        self._ending = asyncio.ensure_future(self.end())

    async def close(self) -> None:
        """End the interpreter for good, and wait until it has ended, even if cancelled."""
        await finish(self._close_soon())

    async def _close(self) -> None:
        if self._ending is not None:
            await asyncio.wait([self._ending])
        await self.end()
        if self._close_sandbox is not None:
            await self._close_sandbox()

    def let_go(self, session: object) -> None:
        """Close the interpreter of a collected session, from any thread, and warn."""
        if self.is_closed or self._pid != os.getpid():
            return
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._close_soon)
        _warn("a session", session, stacklevel=4)

    def _close_soon(self) -> asyncio.Task[None]:
        self.is_closed = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        return self._closing


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    check = method()
    if check is not None:
        check()


def _warn(subject: str, source: object, *, stacklevel: int = 3) -> None:
    text = f"{subject} was not closed, and is being closed now; {REMEDY}"
    warnings.warn(text, ResourceWarning, source=source, stacklevel=stacklevel)


def close_left() -> None:
    """Close all open sandboxes at the interpreter's end, concurrently."""
    deadline = time.monotonic() + EXIT_S
    for holder in [candidate for candidate in tuple(_open) if candidate.tell()]:
        with contextlib.suppress(Exception):  # no caller can handle an error at exit
            holder.wait_at_exit(deadline)


atexit.register(close_left)
