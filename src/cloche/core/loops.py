"""Waiting in asyncio: for work that must finish despite cancellation, for the first of several, for a task.

Some event loops run nothing but one blocking call (`mark_single_call_loop`): blocking one of them delays no other work.
A coroutine in them starts without a task (see `blocking.loops`) and becomes one when it first waits; `become_task`
makes it one earlier.
"""

from __future__ import annotations

import asyncio
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from .errors import InvalidRequest
from .events import Event, Sink
from .result import Result

T = TypeVar("T")

_single_call_loops: weakref.WeakSet[AbstractEventLoop] = weakref.WeakSet()


def check_event_loop() -> None:
    """Raise InvalidRequest where no event loop of asyncio runs: a coroutine of Cloche is awaited in another loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidRequest(
            "Cloche's coroutines need a running asyncio event loop, and there is none here. In trio, call a blocking "
            "function "
            "in a thread: await trio.to_thread.run_sync(cloche.run, code); or use trio-asyncio"
        ) from None


def mark_single_call_loop(loop: AbstractEventLoop) -> None:
    """Note that this loop runs only one call at a time."""
    _single_call_loops.add(loop)


def is_single_call_loop(loop: AbstractEventLoop) -> bool:
    """Tell whether this loop runs only one call at a time."""
    return loop in _single_call_loops


async def become_task() -> None:
    """Go on as a task, which time-outs, groups and others' code ask for; a coroutine that is one goes on at once."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


async def finish(work: Awaitable[T]) -> T:
    """Wait until `work` is done, however often the waiting is cancelled; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody else will ask for it
        raise cancelled
    return task.result()


async def until_readable(fd: int) -> None:
    """Wait until there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _set_done, readable)
    try:
        await readable
    finally:
        loop.remove_reader(fd)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def any_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cheaper than `asyncio.wait`, which every cell would pay for."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not woken.done():
            woken.set_result(None)

    for future in futures:
        future.add_done_callback(wake)
    try:
        await woken
    finally:
        for future in futures:
            future.remove_done_callback(wake)


async def with_sink(run: Callable[[Sink], Coroutine[Any, Any, Result]], sink: Sink) -> Result:
    """Run and hand events to `sink`. If it raises, that ends the run and is raised once all is killed."""
    failures: list[BaseException] = []
    running: set[asyncio.Task[Result]] = set()  # empty at the end: `guarded` may live longer, and keeps no result

    def guarded(event: Event) -> None:
        try:
            if not failures:
                sink(event)
        except BaseException as error:  # a sink is the caller's code: nothing it raises may end up in the backend
            failures.append(error)
            for task in running:
                task.cancel()

    running.add(asyncio.ensure_future(run(guarded)))
    try:
        result = await next(iter(running))
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if failures and not (current and current.cancelling()):
            raise failures[0] from None
        raise
    finally:
        running.clear()
    if failures:
        raise failures[0]
    return result
