"""The other workers of this database: their addresses, and the clean-up after those that are gone.

Theory of operation: each worker stores the address at which others reach it: a Unix socket in a folder of its user, or
the TLS address given by the operator, with the exact certificate to trust. A worker of this host is gone when its
process is. A worker of another host is gone when its row is deleted, or its heartbeat number has not risen for a
minute. The runs of a worker that is gone are closed. Its sandboxes are taken over by the next worker of its host that
gets a request for them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from sqlalchemy.orm import Session

from cloche import hostfs
from cloche.config.state import state_file
from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import escape_name
from cloche.records import runs as run_records
from cloche.records import workers
from cloche.records.database import Database
from cloche.records.ids import new_id
from cloche.records.reproductions import Reproductions
from cloche.records.workers import WorkerFacts
from cloche.records.writer import Writer
from cloche.wire.problems import Refused

T = TypeVar("T")
MARK = "x-cloche-worker"
UNIX = "unix:"
LOOK_EVERY_S, SILENT_S = 5.0, 60.0
BACKLOG = 64
_OTHERS = 0o077
log = logging.getLogger("cloche.service")


class Listening:
    """Listen on a Unix socket in a private folder. Raises InvalidRequest without a home folder."""

    def __init__(self) -> None:
        folder = state_file("workers")
        if folder is None:
            raise InvalidRequest("workers have no place for their sockets, since this user has no home folder")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.path = os.path.join(folder, f"{new_id('w')[-16:]}.sock")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with reached(self.path) as path:
            self.socket.bind(path)
        self.socket.listen(BACKLOG)
        self.socket.setblocking(False)

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.socket.close()
        with suppress(OSError):
            os.unlink(self.path)


@contextmanager
def reached(path: str) -> Iterator[str]:
    """Yield a path that fits into a socket address (108 bytes, unix(7)), however long the given path is.

    Raises OSError, and InvalidRequest if other users can access the folder: callers' keys pass through its sockets.
    """
    folder, name = os.path.split(path)
    opened = hostfs.open_folder(folder)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise InvalidRequest(f"{escape_name(folder)} must be this user's alone: chmod 700")
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)


class Peers:
    """Track the other workers, and register this one."""

    def __init__(self, database: Database, writer: Writer, worker: str, *, clock: Callable[[], float] = time.monotonic):
        self._database, self._writer, self._worker, self._clock = database, writer, worker, clock
        self._known: dict[str, WorkerFacts] = {}
        self._risen: dict[str, tuple[int, float]] = {}  # the last heartbeat number of each, and when it was first seen
        self._address: tuple[str, str | None] | None = None
        self._key = ""

    async def join(self, address: str, certificate: str | None) -> None:
        """Store the address of this worker. Raises RecordsFailed."""
        self._address = address, certificate
        self._key = await self._writer.write(workers.shared_key)
        await self._writer.write(partial(workers.join, name=self._worker, address=address, certificate=certificate))

    async def leave(self) -> None:
        """Delete the row of this worker."""
        if self._address is not None:
            with suppress(ClocheError):
                await self._writer.write(partial(workers.leave, name=self._worker))

    async def tend(self) -> None:
        """Look for workers that are gone every `LOOK_EVERY_S`, and close their runs."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._note_alive()
                await self.refresh()
                await self.close_of_gone()
            except ClocheError as error:
                log.warning("the other workers cannot be listed: %s", error)

    async def _note_alive(self) -> None:
        """Increment the heartbeat of this worker, unless all workers share its host (SQLite)."""
        if self._address is None or self._database.is_sqlite:
            return
        if not await self._writer.write(partial(workers.note_alive, name=self._worker)):
            await self.join(*self._address)

    async def refresh(self) -> None:
        """Read the rows of all workers. Raises RecordsFailed."""
        serving = await asyncio.to_thread(self._read, workers.serving)
        now = self._clock()
        before, self._known = self._risen, {peer.name: peer for peer in serving}
        self._risen = {peer.name: (peer.beat, now) for peer in serving}
        for name, (beat, seen_at) in before.items():
            if name in self._risen and self._risen[name][0] == beat:
                self._risen[name] = beat, seen_at

    def is_gone(self, worker: str) -> bool:
        """Tell whether a worker has ended, according to the last `refresh`."""
        if worker == self._worker:
            return False
        if workers.is_here(worker):
            return workers.is_gone(worker)
        return worker not in self._known or self._clock() - self._risen[worker][1] > SILENT_S

    async def close_of_gone(self) -> None:
        """Close the runs of workers that are gone, and delete their rows. Raises RecordsFailed."""
        lost = await asyncio.to_thread(run_records.recover, self._database, self.is_gone)
        lost += await asyncio.to_thread(Reproductions(self._database).recover, self.is_gone)
        if lost:
            log.warning("%d runs were interrupted by the end of their worker; they are recorded as errors", lost)
        for ended in [peer for peer in self._known.values() if self.is_gone(peer.name)]:
            await self._writer.write(partial(workers.leave, name=ended.name))
            if workers.is_here(ended.name) and ended.address.startswith(UNIX):
                with suppress(OSError):
                    os.unlink(ended.address.removeprefix(UNIX))

    async def find(self, worker: str) -> WorkerFacts | None:
        """Return a worker's address, or that of a live worker of the same host; None without either."""
        await self.refresh()
        if worker in self._known and not self.is_gone(worker):
            return self._known[worker]
        beside = [peer for peer in self._known.values() if workers.are_together(peer.name, worker)]
        return next((peer for peer in beside if peer.name != self._worker and not self.is_gone(peer.name)), None)

    def check_mark(self, mark: str) -> None:
        """Raise Refused (403) unless `mark` is the shared key of this database."""
        if not self._key or not hmac.compare_digest(mark.encode(), self._key.encode()):
            raise Refused(403, "not-a-worker", f"{MARK} has no key of this database; leave the header out")

    def _read(self, work: Callable[[Session], T]) -> T:
        with self._database.reading() as session:
            return work(session)

    async def has_run(self, run_id: str) -> str | None:
        """Return the other live worker that has an unfinished run, else None. Raises RecordsFailed."""
        worker = await asyncio.to_thread(self._read, partial(run_records.unfinished_worker, run_id=run_id))
        if worker is None or worker == self._worker:
            return None
        await self.refresh()
        if not self.is_gone(worker):
            return worker
        await self.close_of_gone()
        return None

    @property
    def key(self) -> str:
        """Return the shared key that authenticates workers."""
        return self._key


def worker_gone(worker: str, why: str = "") -> Refused:
    """Return the error for a target whose worker cannot be reached."""
    reason = f" ({why})" if why else ""
    return Refused(
        503, "worker-gone",
        f"worker {worker}, which has this object, has ended or cannot be reached{reason}; if it has ended, its runs "
        "and sessions have ended, too",
        remedy="sandboxes continue: ask again when a worker of the same machine is running", headers={"Retry-After": "5"
        "5"},
    )  # fmt: skip
