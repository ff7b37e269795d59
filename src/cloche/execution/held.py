"""What is open without a block: a sandbox from `open` to `close`, and the interpreter of a session.

Theory of operation: the contexts of a backend are left by the task that entered them. So a task of its own, the
`Holder`'s, enters a sandbox that was opened by `open`, and waits until it shall leave it. Where the event loop ends as
`asyncio.run` ends it, that task is cancelled, and leaves. At the end of the interpreter it is told to.

Nothing that lives as long as an open sandbox may refer to the object that its caller has, which would never be
collected: the task has a twin of that object, with the same attributes, and the sandbox's stack has a session's
`SessionInterpreter`, not the session. The collector may call `__del__` in any thread, between any two instructions: it tells
the loop, and warns. In a forked child it does nothing. Sessions of a sandbox that a block has end with the block.
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
EXIT_S = 5.0  # for all that is open at the end of the interpreter
REMEDY = "call close(), or use it in a with block"

_open: set[Holder] = set()  # a loop has its tasks weakly: one that nobody else has would be lost


class Holder:
    """Hold a sandbox open in one task; `run_at_exit` runs what is awaited in a loop that is not the caller's own."""

    def __init__(self, sandbox: HeldOperations, *, run_at_exit: Callable[[Waiting], None] | None = None) -> None:
        self._sandbox = sandbox._twin()
        self._pid, self._run_at_exit = os.getpid(), run_at_exit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Open the sandbox. Raises InvalidRequest where it is open, and what opening it raises."""
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
            await self._task  # raises what the opening raised

    async def close(self) -> None:
        """Close it, and wait until that is done, also when cancelled. Raises what closing it raised."""
        await self.abandon()
        if self._task is not None and not self._task.cancelled():
            self._task.result()

    async def abandon(self) -> None:
        """Close, in whatever state it is, and leave what went wrong to somebody else."""
        self._closing.set()
        if self._task is not None:
            await finish(asyncio.wait([self._task]))

    def is_of_this_process(self) -> bool:
        """Tell whether the task is here: a forked child has neither it nor its loop, and nothing to close."""
        return self._pid == os.getpid()

    def tell(self) -> bool:
        """Tell the task to close, from whatever thread; False where there is none, or none that can do it any more."""
        if self._loop is None or not self.is_of_this_process():
            return False
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._closing.set)
            return True
        _open.discard(self)  # without whom all is freed that the task has: closed descriptors end the sandbox
        return False

    def wait_at_exit(self, deadline: float) -> None:
        """Wait until the task that was told has closed, at the interpreter's end."""
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
            except GeneratorExit:  # the loop was closed, and nothing can be awaited any more
                raise
            except BaseException as error:
                await self._sandbox._close_here(type(error), error, error.__traceback__)
                raise
            await self._sandbox._close_here()
        finally:
            _open.discard(self)
            self._sandbox._holder = None


class HeldOperations(LiveOperations):
    """Open a sandbox, with a block or without."""

    _holder: Holder | None = None  # while it is open, or opening, by `open`
    _in_block = False  # which has its sessions, too

    async def open(self) -> Self:
        """Open it without a block, and return it: in a notebook, or for an object that has a sandbox.

        `close` ends it. So does the end of the event loop, as `asyncio.run` ends it, and that of the interpreter; and
        the collection of this object, with a ResourceWarning. Its sessions keep it, its processes do not.

        Raises InvalidRequest where it is open, and what entering the block raises.
        """
        check_event_loop()
        await Holder(self).open()
        return self

    async def close(self) -> None:
        """Do at once what leaving the block does, also in the block; one that is closed stays so."""
        self._in_block = False
        if self._holder is not None:
            await self._holder.close()
        elif self._opened is not None:
            await self._close_here()

    async def __aenter__(self) -> Self:
        check_event_loop()
        if self._in_block or self._holder is None:
            await self._open_here()
        self._in_block = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_block = False
        if self._holder is None:
            await self._close_here(kind, error, trace)
        else:
            await self._holder.close()

    def __del__(self) -> None:
        if self._holder is not None and self._holder.is_of_this_process():
            self._holder.tell()
            _warn(f"a sandbox of backend {self.backend!r}", self)

    @abstractmethod
    async def _open_here(self) -> None:
        """Open it in this task."""

    @abstractmethod
    async def _close_here(self, *raised: Any) -> None:  # noqa: ANN401 - as __aexit__ has it
        """Close it, in the task that opened it, with what was raised in the block."""

    def _check_not_open(self) -> None:
        if self._opened is not None or self._holder is not None:
            raise InvalidRequest(ALREADY_OPEN)

    def _twin(self) -> Self:
        """Return another object with the very same attributes, for whoever must not keep this one."""
        twin = object.__new__(type(self))
        twin.__dict__ = self.__dict__
        return twin


class SessionInterpreter:
    """Hold the interpreter of a session, with the sandbox of its own, if any, that is closed after it."""

    def __init__(self, opened: OpenSession, close_sandbox: Callable[[], Awaitable[None]] | None) -> None:
        self.opened, self._close_sandbox = opened, close_sandbox
        self.is_closed = False  # for good
        self.expiry: asyncio.TimerHandle | None = None
        self._pid, self._loop = os.getpid(), asyncio.get_running_loop()
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def look_again_in(self, seconds: float, check: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Have the session, if there still is one, look whether it was idle for too long."""
        self.expiry = self._loop.call_later(seconds, _call, check)

    async def end(self) -> None:
        """End it; another one may take its place."""
        if self.expiry is not None:
            self.expiry.cancel()
        await self.opened.close()

    def end_soon(self) -> None:
        """End it, in a task; whoever closes it waits for that."""
        self._ending = asyncio.ensure_future(self.end())

    async def close(self) -> None:
        """End it for good, and wait until that is done, also when cancelled."""
        await finish(self._close_soon())

    async def _close(self) -> None:
        if self._ending is not None:
            await asyncio.wait([self._ending])
        await self.end()
        if self._close_sandbox is not None:
            await self._close_sandbox()

    def let_go(self, session: object) -> None:
        """Close it where nobody has the session any more, from whatever thread this is, and warn."""
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
    text = f"{subject} was not closed, and is ended now; {REMEDY}"
    warnings.warn(text, ResourceWarning, source=source, stacklevel=stacklevel)


def close_left() -> None:
    """Close at the interpreter's end what is open, all at once."""
    deadline = time.monotonic() + EXIT_S
    for holder in [candidate for candidate in tuple(_open) if candidate.tell()]:
        with contextlib.suppress(Exception):  # there is nobody left to tell
            holder.wait_at_exit(deadline)


atexit.register(close_left)
