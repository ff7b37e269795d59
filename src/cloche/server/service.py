"""What one worker of the service holds: the database, who asks, the queue of runs, settings that were stored.

`opened` brings it up and ends it: what is running gets some time to end, and then is cancelled and noted as such.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from cloche.config.keys import SandboxOptions, Settings
from cloche.config.settings import load_settings
from cloche.config.sources import use_stored_settings
from cloche.core.errors import ClocheError, InvalidRequest
from cloche.records import runs as run_records
from cloche.records.database import Database, Writer
from cloche.records.keys import note_use
from cloche.records.settings import StoredSettings, read_stored, store, stored_version

from .identities import Identities
from .metrics import Metrics
from .runs import RunQueue

T = TypeVar("T")
DRAIN_S = 30.0
NOTE_USE_EVERY_S = 30.0
log = logging.getLogger("cloche.service")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceRoot:
    """Name a host folder that the API may read, or write too."""

    path: str
    is_writable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Hold what the command line says of the service. `options` are what every run gets unless it says otherwise."""

    options: SandboxOptions = field(default_factory=SandboxOptions)
    roots: tuple[WorkspaceRoot, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    is_secure: bool = False
    queue_limit: int = 256
    queue_deadline_s: float = 30.0
    drain_s: float = DRAIN_S


class Service:
    """Hold it all; made by `opened`."""

    def __init__(self, database: Database, options: ServiceOptions):
        self.database, self.options = database, options
        self.identities = Identities(database)
        self.writer = Writer(database)
        self.worker = run_records.Worker(database)
        self.runs = RunQueue(
            self.writer, self.worker.name, queue_limit=options.queue_limit, deadline_s=options.queue_deadline_s
        )
        self.metrics = Metrics()
        self.is_draining = False
        self._stored_version = -1

    async def read(self, work: Callable[[Session], T]) -> T:
        """Do some reading in a thread. Raises RecordsFailed."""
        return await asyncio.to_thread(self._read, work)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Do some writing in the thread that writes; return once it is committed. Raises RecordsFailed."""
        return await self.writer.write(work)

    async def settings(self) -> Settings:
        """Return the settings that hold for runs now; another worker's change counts from the next request on."""
        version = await self._stored_settings_version()
        if version != self._stored_version:
            self._use(await self.read(read_stored))
        return load_settings(dict(self.options.options))

    async def _stored_settings_version(self) -> int:
        """Read it where this waits for nobody, as readers of SQLite's WAL do not; else in a thread."""
        if self.database.is_sqlite:
            return self._read(stored_version)
        return await asyncio.to_thread(self._read, stored_version)

    async def change_settings(self, values: Mapping[str, Any], *, by: str) -> Settings:
        """Store values by keyword, None to go back to the files; return what holds then. Raises InvalidRequest.

        What would leave no settings that can be read is not stored.
        """
        before = await self.read(read_stored)
        together = {name: value for name, value in {**before.values, **values}.items() if value is not None}
        try:
            use_stored_settings(together)
            load_settings(dict(self.options.options))
        except ClocheError:
            use_stored_settings(before.values)
            raise
        await self.write(partial(store, values=values, by=by))
        return await self.settings()

    def _use(self, stored: StoredSettings) -> None:
        try:
            use_stored_settings(stored.values)
        except InvalidRequest:  # of another version; what it cannot read must not loosen anything
            log.exception("stored settings cannot be read")
            raise
        self._stored_version = stored.version

    def run_options(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords of a run: the service's, overridden by the run's own."""
        return {**self.options.options, **own}

    def _read(self, work: Callable[[Session], T]) -> T:
        with self.database.reading() as session:
            return work(session)

    async def note_use_of_keys(self) -> None:
        """Note from time to time which keys were used; an interruption costs the last times."""
        while True:
            await asyncio.sleep(NOTE_USE_EVERY_S)
            used, self.identities.used = self.identities.used, set()
            if used:
                with suppress(ClocheError):  # said where it matters: at the next request
                    await self.write(partial(note_use, key_ids=used))


@asynccontextmanager
async def opened(location: str | None, options: ServiceOptions) -> AsyncIterator[Service]:
    """Open the database, close what earlier workers left running, and hold the service. Raises ClocheError."""
    database = await asyncio.to_thread(Database, location)
    service = Service(database, options)
    noting = asyncio.ensure_future(service.note_use_of_keys())
    try:
        lost = await asyncio.to_thread(run_records.recover, database, service.worker)
        if lost:
            log.warning("%d runs had not ended when an earlier worker did; they are noted as errors", lost)
        yield service
    finally:
        noting.cancel()
        await asyncio.wait([noting])
        service.is_draining = True
        await service.runs.drain(options.drain_s)
        await asyncio.to_thread(service.writer.close)
        service.worker.close()
        await asyncio.to_thread(database.close)
