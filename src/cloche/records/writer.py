"""Writes of an event loop: concurrent requests share one transaction.

Theory of operation: a thread writes, since a write may wait for another process or the disk. However, handing a row to
a thread and being woken takes longer than SQLite needs for that row. Therefore the loop itself writes small rows
(`Statements`), all those of one turn together, as long as it does not have to wait: if another process is writing, or
anything fails, the transaction is abandoned at once and the thread takes over. The thread also takes over all writes
for a while when the loop was delayed once, and from time to time for a checkpoint: the commit that finds a long WAL
copies it into the database (sqlite.org/wal.html). Only the thread's connection checkpoints automatically; the loop's
never does.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.orm import Session

from .database import Database
from .statements import Statements, run_by

T = TypeVar("T")
MOST_TOGETHER = 64  # writes in one transaction
MOST_SMALL = 64 << 10  # bytes that the loop writes in one transaction
MOST_OF_LOOP = 200  # the loop's transactions until the thread's next one; the WAL then has about 1,000 pages
SLOW_S, THREAD_ALONE_S = 0.02, 2.0
Work = Callable[[Session], T]
_Request = tuple[Work[Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]
_Outcome = tuple[_Request, Any, Exception | None]


class Writer:
    """Write for one event loop. Requests that arrive during a commit share the next transaction.

    So many small writes cost one commit. Each request of a failed transaction is retried alone, so that it cannot fail
    the others.
    """

    def __init__(self, database: Database):
        self._database = database
        self._waiting: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._in_thread = 0  # requests passed to the thread and not yet written
        self._soon: list[_Request] = []  # requests that the loop writes at its next turn
        self._size = 0  # of that, in bytes
        self._small: sqlite3.Connection | None = None  # of the loop
        self._left, self._thread_until = MOST_OF_LOOP, 0.0
        self._driver: PoolProxiedConnection | None = None  # of the thread
        self._thread = threading.Thread(target=self._run, name="cloche-records", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction; return its result once it is committed. Raises RecordsFailed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        request = (work, loop, future)
        if self._is_for_loop(work):
            self._soon.append(request)
            if len(self._soon) == 1:
                loop.call_soon(self._write_soon)
        else:
            self._hand_over(request)
        return await future

    def close(self) -> None:
        """Write all pending requests, then end."""
        self._hand_over()
        self._waiting.put(None)
        self._thread.join()
        if self._small is not None:
            self._small.close()
            self._small = None

    # In the loop.

    def _is_for_loop(self, work: Work[Any]) -> bool:
        """Tell whether the loop may write something. Never before earlier requests are written."""
        if self._in_thread or self._left <= 0 or not self._database.is_sqlite or not isinstance(work, Statements):
            return False
        self._size += work.size
        return self._size <= MOST_SMALL and time.monotonic() >= self._thread_until

    def _hand_over(self, *requests: _Request) -> None:
        """Pass requests to the thread, after those that the loop was about to write."""
        batch, self._soon, self._size = [*self._soon, *requests], [], 0
        if self._left <= 0:  # once for a checkpoint, then to restart the WAL, which syncs, too
            self._left = -1 if self._left == 0 else MOST_OF_LOOP
        self._in_thread += len(batch)
        for request in batch:
            self._waiting.put(request)

    def _write_soon(self) -> None:
        if not self._soon:  # the thread has taken them
            return
        begun = time.monotonic()
        try:
            run_by(self._connection(), [work for work, _, _ in self._soon if isinstance(work, Statements)])
        except Exception:  # the thread waits for the lock, or reports the error
            self._hand_over()
        else:
            written, self._soon, self._size = self._soon, [], 0
            self._left -= 1
            _end([(request, None, None) for request in written])
        if time.monotonic() - begun > SLOW_S:
            self._thread_until = time.monotonic() + THREAD_ALONE_S

    def _connection(self) -> sqlite3.Connection:
        if self._small is None:
            pooled = self._database.engine.raw_connection()
            connection = cast("sqlite3.Connection", pooled.driver_connection)
            pooled.detach()
            connection.execute("PRAGMA busy_timeout=0")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            self._small = connection
        return self._small

    def _settle(self, ended: list[_Outcome]) -> None:
        self._in_thread -= len(ended)
        _end(ended)

    # In the thread.

    def _run(self) -> None:
        while (batch := self._batch()) is not None:
            try:
                results = self._do([work for work, _, _ in batch])
            except Exception as error:
                if len(batch) == 1:
                    self._tell([(batch[0], None, error)])
                    continue
                for request in batch:
                    self._alone(request)
            else:
                self._tell([(request, result, None) for request, result in zip(batch, results, strict=True)])
        if self._driver is not None:
            self._driver.close()

    def _batch(self) -> list[_Request] | None:
        request = self._waiting.get()
        if request is None:
            return None
        batch = [request]
        while len(batch) < MOST_TOGETHER and not self._waiting.empty():
            following = self._waiting.get()
            if following is None:
                self._waiting.put(None)  # the end, for the next call
                break
            batch.append(following)
        return batch

    def _do(self, batch: list[Work[Any]]) -> list[Any]:
        statements = [work for work in batch if isinstance(work, Statements)]
        if len(statements) < len(batch) or not self._database.is_sqlite:
            with self._database.writing() as session:
                return [work(session) for work in batch]
        if self._driver is None:
            self._driver = self._database.engine.raw_connection()
        self._database.write_by(cast("sqlite3.Connection", self._driver.driver_connection), statements)
        return [None] * len(batch)

    def _alone(self, request: _Request) -> None:
        try:
            (result,) = self._do([request[0]])
        except Exception as error:
            self._tell([(request, None, error)])
        else:
            self._tell([(request, result, None)])

    def _tell(self, ended: list[_Outcome]) -> None:
        """Report outcomes to the waiting coroutines, with one wake-up of each event loop."""
        for loop in {request[1] for request, _, _ in ended}:
            with suppress(RuntimeError):  # the event loop is closed: no coroutine waits
                loop.call_soon_threadsafe(self._settle, [outcome for outcome in ended if outcome[0][1] is loop])


def _end(ended: list[_Outcome]) -> None:
    for (_, _, future), result, error in ended:
        if future.done():  # the waiting coroutine was cancelled
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
