"""The state of one worker: database, identities, the queue of runs, stored settings.

`opened` starts and stops it. When it stops, running work gets `drain_s` to end, then is cancelled and recorded as such.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from cloche.agent.catalog import DEFAULT_TIER, risk_of, tools_of
from cloche.audit.log import Audit, audit_for
from cloche.audit.recording import note_denial
from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.settings import load_settings
from cloche.config.sources import use_stored_settings
from cloche.core.errors import AuditFailed, ClocheError, InvalidRequest
from cloche.core.record import dataclass, field
from cloche.execution.prepare import prepare
from cloche.records import approvals
from cloche.records import runs as run_records
from cloche.records.database import Database
from cloche.records.debugging import read_switches
from cloche.records.keys import note_use
from cloche.records.settings import StoredSettings, read_stored, store, stored_version
from cloche.records.workers import own_worker
from cloche.records.writer import Writer
from cloche.wire.allowed import allowed_options
from cloche.wire.callers import Caller
from cloche.wire.load import WireLoad
from cloche.wire.problems import Refused, status_of
from cloche.wire.queue import RunQueue
from cloche.wire.shares import Budget

from .approvals import ApprovalWatch
from .debugging import Debugging
from .identities import Identities
from .metrics import Metrics
from .peers import Peers
from .run_rows import StoredRuns
from .sandbox_rows import MOST_LIVING, Room
from .sandbox_templates import MOST_BYTES as MOST_TEMPLATE_BYTES
from .sandbox_templates import Templates
from .sandboxes import KEEP_S, Sandboxes
from .secrets import ServiceSecrets, own_key

T = TypeVar("T")
DRAIN_S = 30.0
LOGINS_EVERY_S = 10.0  # between two events for refused logins
NOTE_USE_EVERY_S, FORGET_EVERY_S = 30.0, 3_600.0
KEEP_RUNS_S = 30 * 86_400.0
THREADS = 48  # for reading the database and other short work
MEASURE_S = 10.0  # for measuring the host at the start: a daemon may not answer
MOST_ANSWERS = 256 << 20  # bytes of large answers to SandboxFusion's callers that are not sent yet
FILES_AT_ONCE, MOST_FILES_WAITING = 4, 32  # jobs with host folders; each may take a minute
REVIEWS_AT_ONCE = 2
REFUSALS = frozenset({403, 429, 503})  # statuses of refusals that are recorded
MOST_PENDING = 200  # approvals, in the record of a workspace
log = logging.getLogger("cloche.service")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceRoot:
    """Name a host folder that the API may read, and write if `is_writable`."""

    path: str
    is_writable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Hold the service's options from the command line. `options` are the defaults of every run."""

    options: SandboxOptions = field(default_factory=SandboxOptions)
    roots: tuple[WorkspaceRoot, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    is_secure: bool = False
    queue_limit: int = 256
    queue_deadline_s: float = 30.0
    drain_s: float = DRAIN_S
    keep_runs_s: float = KEEP_RUNS_S
    keep_sandboxes_s: float = KEEP_S
    ends_sandboxes: bool = False
    most_sandboxes: int = MOST_LIVING
    spare_sandboxes: int = 0
    is_debugging: bool = False
    has_sandbox_fusion: bool = False
    has_agents: bool = False
    secrets_from: str = ""
    secrets_key: str = ""
    makes_secrets_key: bool = False
    snapshots_bytes: int = MOST_TEMPLATE_BYTES


class Service:
    """Hold the state of a worker. `opened` creates it."""

    keeps_runs = True

    def __init__(self, database: Database, options: ServiceOptions):
        self.database, self.options = database, options
        self.debugging, self.metrics = Debugging(is_all=options.is_debugging), Metrics()
        database.on_failure = self.metrics.database_failed
        self.identities = Identities(database)
        self.writer = Writer(database)
        self.worker = own_worker()
        self.runs = RunQueue(
            StoredRuns(self.writer, self.worker), queue_limit=options.queue_limit, deadline_s=options.queue_deadline_s,
            observer=self.metrics, note_refusal=self.note_refusal,
        )  # fmt: skip
        self.sandboxes = Sandboxes(
            database, self.writer, self.worker, options.options, record=self.record, note=self.note,
            keep_s=options.keep_sandboxes_s, room=Room(most=options.most_sandboxes), spares=options.spare_sandboxes,
        )  # fmt: skip
        self.templates = Templates(database, self.writer, self.worker, most_bytes=options.snapshots_bytes)
        key = options.secrets_key or (own_key(database.folder) if options.makes_secrets_key else "")
        self.secret_store = ServiceSecrets(database, folder=options.secrets_from, key=key)
        self.peers = Peers(database, self.writer, self.worker)
        self.approvals = ApprovalWatch(self.read)
        self.wire = WireLoad()
        self._files, self._files_waiting = ThreadPoolExecutor(FILES_AT_ONCE, "cloche-files"), 0
        self.answers = Budget(MOST_ANSWERS)
        self.reviews = asyncio.Semaphore(REVIEWS_AT_ONCE)  # of agents' changes, on the page
        self.changing = asyncio.Lock()  # settings
        self.is_draining = False
        self.room: asyncio.Future[int | None] | None = None  # an attempt to write for `/ready`
        self._background: set[asyncio.Task[None]] = set()
        self._stored_version = -1
        self._refused_logins, self._refused_at = 0, -LOGINS_EVERY_S

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run a read in a thread. Raises RecordsFailed."""
        return await asyncio.to_thread(self._read, work)

    async def with_files(self, work: Callable[[], T]) -> T:
        """Run long work with host folders in a separate small thread pool, so that other requests do not wait for it.

        Raises Refused (503) if the pool's queue is full.
        """
        if self._files_waiting >= MOST_FILES_WAITING:
            raise Refused(503, "busy", "too many requests are working with host folders", headers={"Retry-After": "5"})
        self._files_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._files, copy_context().run, work)
        finally:
            self._files_waiting -= 1

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a write transaction; return once it is committed. Raises RecordsFailed."""
        return await self.writer.write(work)

    async def settings(self) -> Settings:
        """Return the current settings for runs. A change by another worker applies from the next request on."""
        await self.use_stored()
        return load_settings(dict(self.options.options))

    async def use_stored(self) -> None:
        """Apply the stored settings from now on."""
        version = await self._stored_settings_version()
        if version != self._stored_version:
            self._use(await self.read(read_stored))

    async def _stored_settings_version(self) -> int:
        """Return the version of the stored settings.

        SQLite is read on the event loop, since readers of its WAL never wait for writers; other databases in a thread.
        """
        if self.database.is_sqlite:
            return stored_version(self.database)
        return await asyncio.to_thread(stored_version, self.database)

    async def change_settings(self, values: Mapping[str, Any], *, by: str) -> Settings:
        """Store settings by keyword, None to reset one to the files; return the new settings. Raises InvalidRequest.

        A change that leads to unreadable settings is not stored.
        """
        before = await self.read(read_stored)
        together = {name: value for name, value in {**before.values, **values}.items() if value is not None}
        try:
            use_stored_settings(together)
            load_settings(dict(self.options.options))
            await self.write(partial(store, values=values, by=by))
        except ClocheError:
            use_stored_settings(before.values)
            raise
        return await self.settings()

    async def audit(self) -> Audit | None:
        """Return the audit log, None if it is off."""
        return audit_for(await self.settings())

    async def record(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Write an event with the caller to the audit log, if it is on. Raises AuditFailed."""
        if (audit := await self.audit()) is not None:
            await asyncio.to_thread(audit.record, kind, **fields)

    async def note(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Write an audit event after the fact. A failure is only logged."""
        if (audit := await self.audit()) is not None:
            await asyncio.to_thread(audit.note, kind, **fields)

    async def note_refused_login(self, address: str) -> None:
        """Record failed logins, at most one event every `LOGINS_EVERY_S`, since anyone can attempt them."""
        self._refused_logins += 1
        if time.monotonic() - self._refused_at >= LOGINS_EVERY_S:
            count, self._refused_logins, self._refused_at = self._refused_logins, 0, time.monotonic()
            await self.note("login", what="refused", address=address, count=count)

    async def note_refusal(self, error: BaseException, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Record that a caller was refused (`REFUSALS`); other errors are not recorded. Raises nothing.

        The last known settings are used, since the database may be the cause.
        """
        status = status_of(error)
        if status in REFUSALS and not isinstance(error, AuditFailed):
            with suppress(ClocheError):
                if (audit := audit_for(load_settings(dict(self.options.options)))) is not None:
                    reason = error.detail if isinstance(error, Refused) else str(error)
                    work = partial(note_denial, audit, error, reason=reason, by="service", http=status, **fields)
                    await asyncio.to_thread(work)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background. It is cancelled when the service stops."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._note_background)

    def _note_background(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work in the background failed", exc_info=error)

    async def end_background(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for background work, then cancel it."""
        if self._background:
            _, unfinished = await asyncio.wait(set(self._background), timeout=timeout_s)
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished)

    async def tool_state(self, project: str) -> dict[str, Any]:
        """Return the offered tools with their risks, and the pending approvals."""
        settings = await self.settings()
        tools = tools_of(settings.tier or DEFAULT_TIER)
        offered = [{"name": tool.name, "risk": str(risk_of(tool, is_on_host=False))} for tool in tools]
        waiting = await self.read(partial(approvals.waiting, limit=MOST_PENDING, project=project))
        return {
            "offered": offered,
            "pendingApprovals": [approvals.as_wire(entry) for entry in waiting],
            "remembered": [],
        }

    def close_files(self) -> None:
        """Close the pool for host folders without waiting. Each of its jobs has a deadline."""
        self._files.shutdown(wait=False, cancel_futures=True)

    def _use(self, stored: StoredSettings) -> None:
        try:
            use_stored_settings(stored.values)
        except InvalidRequest:  # of another version: unreadable settings must not loosen anything
            log.exception("stored settings cannot be read")
            raise
        self._stored_version = stored.version

    @property
    def own_options(self) -> SandboxOptions:
        """Return the options of every run, which a request's override."""
        return self.options.options

    async def allowed_options(self, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sandbox's options, checked against the caller's permissions. Raises PolicyDenied, InvalidRequest."""
        return await allowed_options(self, caller, own)

    def _read(self, work: Callable[[Session], T]) -> T:
        with self.database.reading() as session:
            return work(session)

    def begin_draining(self) -> None:
        """Refuse new work and end waiting clients, as the service stops."""
        self.is_draining = True
        self.approvals.close()
        self.sandboxes.end_streams()

    async def forget_old_runs(self) -> None:
        """Delete records of runs beyond their retention, now and every `FORGET_EVERY_S`."""
        forget = partial(run_records.forget_old, retention_s=self.options.keep_runs_s)
        while True:
            with suppress(ClocheError):  # the next request reports it
                if count := await self.write(forget):
                    log.info("the records of %d runs are kept no longer", count)
            await asyncio.sleep(FORGET_EVERY_S)

    async def note_uses(self) -> None:
        """Store which keys and secrets were used, every `NOTE_USE_EVERY_S`. A crash loses the last interval."""
        while True:
            await asyncio.sleep(NOTE_USE_EVERY_S)
            used, self.identities.used = self.identities.used, set()
            with suppress(ClocheError):  # the next request reports it
                if used:
                    await self.write(partial(note_use, key_ids=used))
                await self.secret_store.note_uses(self.write)


def _measure(options: SandboxOptions) -> None:
    """Measure this host's capabilities in advance, since the first request would wait seconds for it."""
    prepare(**options).backend.capabilities()


def _made(database: Database, options: ServiceOptions) -> Service:
    try:
        service = Service(database, options)
        service.secret_store.check()
    except BaseException:
        database.close()
        raise
    return service


@asynccontextmanager
async def opened(location: str | None, options: ServiceOptions) -> AsyncIterator[Service]:
    """Open the database, close the runs that earlier workers left, and yield the service. Raises ClocheError."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "cloche-service"))
    database = await asyncio.to_thread(Database, location)
    service = await asyncio.to_thread(_made, database, options)
    beside = [
        asyncio.ensure_future(service.note_uses()),
        asyncio.ensure_future(service.debugging.follow(partial(service.read, read_switches))),
        asyncio.ensure_future(service.sandboxes.tend()),
        asyncio.ensure_future(service.forget_old_runs()),
        asyncio.ensure_future(service.peers.tend()),
    ]
    try:
        await service.peers.refresh()
        await service.peers.close_of_gone()
        await service.sandboxes.end_builds(await service.templates.tidy())
        with suppress(ClocheError, OSError, TimeoutError):  # the first run reports it
            async with asyncio.timeout(MEASURE_S):
                await asyncio.to_thread(_measure, options.options)
        yield service
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        service.begin_draining()
        await asyncio.gather(service.runs.drain(options.drain_s), service.end_background(options.drain_s))
        if options.ends_sandboxes:
            with suppress(ClocheError):  # they end without a service, only later
                await service.sandboxes.end_all()
        await service.sandboxes.close()
        await service.peers.leave()
        service.close_files()
        await asyncio.to_thread(service.writer.close)
        await asyncio.to_thread(database.close)
