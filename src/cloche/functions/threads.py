"""Daemon threads for functions that block: a bounded number, used again, and waited for by nobody at the exit."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

IDLE_S = 10.0


class Threads:
    """Run functions in at most `most` threads at once; further ones wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = self._idle = 0

    def run(self, function: Callable[[], Any], context: contextvars.Context) -> asyncio.Future[Any]:
        """Return the future of `function`'s value, on the running loop. Cancelling it abandons the value."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        waiting = [function]  # nothing once it is cancelled, as no thread may be free for long
        future.add_done_callback(lambda _: waiting.clear())

        def settle(value: Any, error: BaseException | None) -> None:  # noqa: ANN401
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def work() -> None:
            value, failure = None, None
            if future.cancelled() or not (taken := waiting[:]):
                return
            try:
                value = context.copy().run(*taken)
            except BaseException as error:  # SystemExit or StopIteration would not pass through a future
                failure = _told(error)
            try:
                loop.call_soon_threadsafe(settle, value, failure)
            except RuntimeError:
                pass  # the loop was closed meanwhile

        self._work.put(work)
        self._have_thread()
        return future

    def _have_thread(self) -> None:
        with self._lock:
            if self._work.qsize() <= self._idle or self._count >= self._most:
                return
            self._count += 1
        threading.Thread(target=self._serve, name="cloche-tool", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                work = self._work.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    self._idle -= 1
                    if self._work.empty():
                        self._count -= 1
                        return
                continue
            with self._lock:
                self._idle -= 1
            work()


def _told(error: BaseException) -> Exception:
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"it raised {type(error).__name__}: {error}")
