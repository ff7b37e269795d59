"""The event loop of a session: the running loop for a cell's own code, and tasks that go on between cells.

Theory of operation: there is one loop, made at its first use. It runs while a cell awaits, and while the session waits
for its next request: the link is one more descriptor of the loop, which stops it. During a cell that does not await the
loop is stopped, and no loop is running, so that libraries that run one themselves work. Only code of the cells
themselves, recognised by its global namespace, sees the session's loop in that time. This module never loads `asyncio`:
its functions are redirected here when a program has loaded it.
"""

from __future__ import annotations

import os
import select
import sys
import time

from .pretty import report, without_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_thread: Any = __import__("_thread")

# What is called for the loop that runs; `get_event_loop` also returns one that a program has set.
FUNCTIONS = ("all_tasks", "create_task", "current_task", "ensure_future", "gather", "get_running_loop", "shield")
OF_THE_LOOP = ("asyncio.base_events", "asyncio.events", "asyncio.selector_events", "asyncio.unix_events", "selectors")
MOST_NAMES = 20
OWN_DESCRIPTORS = 1  # by which other threads wake it
THREADS_S = 1.0  # for all idle threads of the loop's own executor to end


class Tasks:
    """Hold the loop of the session whose cells run in `namespace` and come on `link`.

    `pid` is the process that the session runs in: a child that a cell has forked has no part in the loop.
    """

    def __init__(self, link: int, namespace: dict[str, Any]) -> None:
        self.pid, self._link, self._namespace = os.getpid(), link, namespace
        self._thread = _thread.get_ident()
        self.loop: Any = None
        self._asyncio: Any = None  # once a program has loaded it
        self._is_waiting = False
        self._left_running: Any = None  # a loop that a library left as the running one, such as Playwright's

    def lead(self, asyncio: Any) -> None:
        """Have the functions of the package `asyncio` find the session's loop, when a cell's own code calls them."""
        if not hasattr(asyncio, "_set_running_loop"):  # a program's own module of that name
            return
        self._asyncio = asyncio
        for name in FUNCTIONS:
            _replace(asyncio, name, self._in_loop)
        _replace(asyncio, "get_event_loop", self._current)

    def _in_loop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        running, run = self._asyncio._get_running_loop, self._asyncio._set_running_loop

        def call(*args: Any, **kwargs: Any) -> Any:
            before = running()
            if not self._is_for_session(before, sys._getframe(1)):
                return original(*args, **kwargs)
            try:
                run(self.open())
                return original(*args, **kwargs)
            finally:
                run(before)

        return call

    def _current(self, original: Callable[..., Any]) -> Callable[..., Any]:
        running = self._asyncio._get_running_loop

        def get_event_loop() -> Any:
            if not self._is_for_session(running(), sys._getframe(1)):
                return original()
            import warnings

            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of one that is made here, and becomes the session's
                    loop = original() if self._left_running is None else self.open()
            except RuntimeError:  # `asyncio.run` leaves none
                loop = self.open()
                self._asyncio.set_event_loop(loop)
            if not self.is_open:
                self.loop = loop
            return loop

        return get_event_loop

    def _is_for_session(self, running: Any, frame: FrameType) -> bool:
        """Tell whether a cell's own code calls at `frame`, in the main thread, without a running loop around it."""
        return (
            (running is None or running is self._left_running)
            and frame.f_globals is self._namespace
            and _thread.get_ident() == self._thread
            and os.getpid() == self.pid
        )

    @property
    def is_open(self) -> bool:
        """Tell whether there is a loop."""
        return self.loop is not None and not self.loop.is_closed()

    def open(self) -> Any:
        """Return the loop; if it does not exist, make it and set it as the current one."""
        if not self.is_open:
            import asyncio

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop

    def run(self, coroutine: Any) -> Any:
        """Run a cell's coroutine to its end; one that is interrupted is cancelled, and may clean up."""
        loop = self.open()
        task = loop.create_task(coroutine)
        try:
            return self._alone(lambda: loop.run_until_complete(task))
        except BaseException:
            if not task.done():
                task.cancel()
                try:
                    self._alone(lambda: loop.run_until_complete(task))
                except BaseException as error:
                    del error
            raise

    def _alone(self, work: Callable[[], Any]) -> Any:
        """Run the loop, even if a library has left another one set as running; that is restored afterwards."""
        import asyncio

        outer_loop, self._left_running = asyncio._get_running_loop(), None
        asyncio._set_running_loop(None)
        try:
            return work()
        finally:
            asyncio._set_running_loop(outer_loop)
            self._left_running = outer_loop

    def has_work(self) -> bool:
        """Tell whether something may happen in the loop: by a task, a callback, a descriptor, or another thread.

        It is called after each cell, and notes which loop that has left as the running one: not the session's, where an
        interrupt came in between.
        """
        if self._asyncio is not None:
            self._left_running = self._asyncio._get_running_loop()
            if self._left_running is self.loop is not None:
                self._asyncio._set_running_loop(None)
                self._left_running = None
        if not self.is_open:
            return False
        loop = self.loop
        selector = getattr(loop, "_selector", None)
        if selector is None:  # a loop that is not asyncio's own
            return True
        is_ahead = loop._ready or loop._scheduled or len(selector.get_map()) > OWN_DESCRIPTORS
        return bool(is_ahead or _thread._count() or self._waiting())

    def _waiting(self) -> list[Any]:
        """Return the tasks that have not ended."""
        import asyncio

        return [task for task in asyncio.all_tasks(self.loop) if not task.done()]

    def wait(self) -> None:
        """Run the loop until something is on the link. Returns at once where there is no loop, or it cannot run."""
        while self.is_open and os.getpid() == self.pid:
            try:
                self._alone(self._run_until_readable)
            except (KeyboardInterrupt, SystemExit) as error:  # which end their task, and no session
                _report(error)
            except BaseException as error:
                _report(error)
                return
            if has_come(self._link):
                return

    def _run_until_readable(self) -> None:
        loop = self.loop

        def stop() -> None:
            loop.remove_reader(self._link)  # before it is called once more, which would stop the next use of some loops
            loop.stop()

        loop.add_reader(self._link, stop)
        try:
            self._is_waiting = True
            loop.run_forever()
        finally:
            self._is_waiting = False
            loop.remove_reader(self._link)

    def is_in_callback(self, frame: FrameType | None) -> bool:
        """Tell whether a task or a callback runs at `frame` while the link is waited for, and not the loop itself."""
        if not self._is_waiting:
            return False
        wait = self._run_until_readable.__code__
        while frame is not None and frame.f_code is not wait:
            if frame.f_globals.get("__name__") not in OF_THE_LOOP:
                return True
            frame = frame.f_back
        return False

    def close(self) -> None:
        """Close the loop, which is made again when it is needed. Raises RuntimeError that names the tasks that wait.

        It holds descriptors, and so can be in no clone.
        """
        if not self.is_open:
            return
        waiting = self._waiting()
        if waiting:
            names = [_name(task) for task in waiting[:MOST_NAMES]]
            more = f" and {len(waiting) - MOST_NAMES} more" if len(waiting) > MOST_NAMES else ""
            s = "s" if len(waiting) > 1 else ""
            raise RuntimeError(
                f"{len(waiting)} task{s} that wait{'' if s else 's'} in the background: {', '.join(names)}{more}; "
                "await or cancel them first"
            )
        threads = getattr(getattr(self.loop, "_default_executor", None), "_threads", ())
        self.loop.close()  # generators that are open go on in the next one
        until = time.monotonic() + THREADS_S
        for thread in list(threads):
            thread.join(max(0.0, until - time.monotonic()))


def has_come(link: int) -> bool:
    """Tell whether there is something on the link; not by the object that may be waiting, which is for one call."""
    glance = select.poll()
    glance.register(link, select.POLLIN)
    return bool(glance.poll(0))


def _replace(module: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function by `wrap` of it, with its name and documentation."""
    replaced = getattr(module, name)
    original = getattr(replaced, "__wrapped__", replaced)  # ours, of another session in this process
    ours: Any = wrap(original)
    ours.__wrapped__ = original
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(ours, attribute, getattr(original, attribute))
    setattr(module, name, ours)


def _report(error: BaseException) -> None:
    """Print a task's exception, without our own frames for a later print."""
    try:
        report(error)
        error.__traceback__ = without_ours(error.__traceback__)
    except BaseException as another:  # of the program's own streams, say
        del another


def _name(task: Any) -> str:
    """Return a task's name, in characters that do nothing to a terminal."""
    try:
        coroutine = task.get_coro()
        name = f"{task.get_name()} ({getattr(coroutine, '__qualname__', type(coroutine).__name__)})"[:200]
    except Exception:  # a task of a kind of the program's own
        name = type(task).__name__
    return "".join(character if character.isprintable() else "?" for character in name)
