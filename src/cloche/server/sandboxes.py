"""Sandboxes of the service: their rows, the attachments of this worker, and their end.

Theory of operation: each sandbox is kept by a keeper, a separate process, under a name derived from the sandbox's id.
It outlives this worker, and any worker of the host finds it by its row and the keeper's registry. A worker attaches
when a request needs the sandbox (`held`), stays attached while anything uses it, and detaches a minute later. Running
commands and sessions belong to one attachment and end with the worker. Every few seconds the rows are compared with the
registry: a sandbox that is no longer in it has ended. At the same time each keeper is notified that a service exists. A
keeper without clients that has not been notified for `keep_s` ends its sandbox, even if the service has crashed.

Other sandboxes have no keeper: their worker holds them (`held.py`), and they end with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Any

from cloche.config.options import SandboxOptions
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, OutcomeUnknown
from cloche.core.letter_case import camel
from cloche.core.record import dataclass
from cloche.core.request import InputFile
from cloche.execution.prepare import prepare
from cloche.execution.sandbox import AsyncSandbox
from cloche.execution.spares import SparePool
from cloche.keeper import registry
from cloche.keeper.attach import Owner, owned_by, visit
from cloche.keeper.life import KEEPS_FILES
from cloche.records import sandboxes as records
from cloche.records.database import Database
from cloche.records.ids import new_id
from cloche.records.sandboxes import ENDED, RUNNING, STARTING, RequestKey, SandboxFacts
from cloche.records.workers import is_gone, is_here
from cloche.records.writer import Writer
from cloche.wire.asking import ask_nobody
from cloche.wire.attachments import Attachment, sandbox_name
from cloche.wire.callers import BROWSER, Caller
from cloche.wire.held import Terms, as_info, held_attachment, needs_worker, open_held, until_over
from cloche.wire.problems import Refused

from . import keepers
from .sandbox_lives import Lives, values_of
from .sandbox_rows import Room, begin_once

BUILD_LABEL = "build"  # of the sandbox of a build, whose id is the value
UNUSED_S = 60.0  # how long a worker stays attached to an unused one
JUST_S = 1.0  # so recently used: a request is about to use it
LOOK_EVERY_S = 10.0
KEEP_S = 600.0  # how long sandboxes live without a service of their database
KEPT_S = 365 * 24 * 3600.0  # and without a client: their lifetime bounds that, and the service
LEAST_S = 1.0  # with which a keeper begins
END_S, CLOSE_S = 15.0, 6.0  # for a sandbox to end, and for detaching
SETTLE_S, AGAIN_S = 2.0, 0.05  # for a name to come free after its sandbox has ended
Record = Callable[..., Awaitable[None]]  # takes a kind, and the fields of an event
log = logging.getLogger("cloche.service")


class Sandboxes:
    """Manage the attachments of this worker, and find all other sandboxes. `options` are the service's own.

    Sandboxes live on for `keep_s` without a service of the database. `record` writes an audit event before an action,
    `note` after it.
    """

    def __init__(
        self, database: Database, writer: Writer, worker: str, options: SandboxOptions, *, record: Record,
        note: Record, keep_s: float = KEEP_S, room: Room | None = None, spares: int = 0,
    ):  # fmt: skip
        self._database, self._writer, self._worker, self._options = database, writer, worker, options
        self._record, self._note, self._keep_s = record, note, keep_s
        self._there: list[registry.Found] = []  # of this host, at the last comparison
        self._ending: set[str] = set()  # by a request
        self._open: dict[str, asyncio.Task[Attachment]] = {}
        self._ours: dict[str, str | None] = {}  # those of this worker, with the worker it took them over from
        self._room = room or Room()
        self._spares = SparePool(spares)
        self.lives = Lives(writer)
        self._held: dict[str, _Held] = {}  # those that this worker holds
        self._starting = asyncio.Semaphore(4)
        self._streams: set[asyncio.Task[Any]] = set()
        self._following: set[asyncio.Task[None]] = set()
        self._comparison: asyncio.Task[None] | None = None  # the last that has begun, and the one after it
        self._next_comparison: asyncio.Task[None] | None = None
        self.listings = asyncio.Semaphore(2)  # of folders; one may have megabytes of names

    # All sandboxes.

    async def create(
        self, *, project: str, api_key: str | None, terms: Terms, document: Mapping[str, Any],
        options: Mapping[str, Any], files: Mapping[str, bytes | InputFile] | None, key: RequestKey | None = None,
        begin: Callable[[str, AsyncSandbox], Awaitable[None]] | None = None,
    ) -> SandboxFacts:  # fmt: skip
        """Open a sandbox; return it once it runs, and its row and audit event are written.

        A keeper holds it where its backend has names and `terms` no lease; otherwise this worker. With `key` the same
        request opens one sandbox. `begin` does with it what is to be done before anybody has it; its errors end it.
        Raises Refused (409, 429), see `sandbox_rows`; ClocheError.
        """
        with self._spares.used():
            return await self._create(project, api_key, terms, document, options, files, key, begin)

    async def _create(
        self, project: str, api_key: str | None, terms: Terms, document: Mapping[str, Any],
        options: Mapping[str, Any], files: Mapping[str, bytes | InputFile] | None, key: RequestKey | None,
        begin: Callable[[str, AsyncSandbox], Awaitable[None]] | None,
    ) -> SandboxFacts:  # fmt: skip
        sandbox_id = new_id("sb")
        is_held = await asyncio.to_thread(needs_worker, options, terms)
        document = {**document, "heldBy": records.WORKER if is_held else records.KEEPER}
        row = {
            "id": sandbox_id, "project": project, "name": sandbox_name(sandbox_id), "worker": self._worker,
            "api_key": api_key,
        }  # fmt: skip
        if (earlier := await begin_once(self._writer, self._read, self._room, row, document, key)) is not None:
            return earlier
        try:
            async with self._starting:
                if is_held:
                    sandbox = await open_held(options, files, terms)
                else:
                    sandbox = await self._open_kept(sandbox_id, api_key, terms, options, files, document)
        except BaseException:
            await self._writer.write(partial(records.forget, sandbox_id=sandbox_id))
            raise
        attachment = (
            held_attachment(sandbox_id, sandbox, terms) if is_held else Attachment(id=sandbox_id, sandbox=sandbox)
        )
        ask_nobody(sandbox)
        self._open[sandbox_id] = asyncio.ensure_future(_ready(attachment))
        if is_held:
            attending = asyncio.ensure_future(self._attend(attachment, project, terms))
            self._held[sandbox_id] = _Held(terms=terms, project=project, attending=attending)
        full_document = {**document, "backend": sandbox.backend, "network": sandbox.policy.network}
        full_document["limits"] = {camel(limit): value for limit, value in sandbox.limits.as_dict().items()}
        full_document |= values_of({"left_s": terms.lifetime_s, "at_end": terms.at_end}, time.time())[1]
        try:
            if begin is not None:
                await begin(sandbox_id, sandbox)
            await self._record("sandbox", what="opened", sandbox=sandbox_id)
            await self._writer.write(
                partial(records.note, sandbox_id=sandbox_id, status=RUNNING, document=full_document)
            )
            facts = await self.look(sandbox_id, project)
            # Unless it has begun just now, and with this time.
            if is_held or begin is not None or terms.lifetime_s < LEAST_S:
                await self.lives.change(facts, "lifetime", attachment, left_s=terms.lifetime_s)
                facts = await self.look(sandbox_id, project)
            self._follow(attachment, facts)
        except BaseException:
            await self._take_back(sandbox_id, is_held=is_held)
            raise
        return facts

    async def _open_kept(
        self, sandbox_id: str, api_key: str | None, terms: Terms, options: Mapping[str, Any],
        files: Mapping[str, bytes | InputFile] | None, document: Mapping[str, Any],
    ) -> AsyncSandbox:  # fmt: skip
        """Open a sandbox and hand it over to a keeper. Raises ClocheError."""
        making = partial(
            AsyncSandbox, name=sandbox_name(sandbox_id), keep=KEPT_S, lifetime=max(LEAST_S, terms.lifetime_s),
            idle=terms.idle_s, at_end=terms.at_end, files=files, **options,
        )  # fmt: skip
        with self._owning(sandbox_id, api_key, document.get("labels")):
            sandbox = await asyncio.to_thread(making)
            await sandbox.__aenter__()
        return sandbox

    async def prepare(self, options: Mapping[str, Any]) -> None:
        """Open spare sandboxes with these options, before the first is asked for. Raises ClocheError."""
        own: Any = dict(options)
        self._spares.prepare(await asyncio.to_thread(lambda: prepare(**own)))

    async def _take_back(self, sandbox_id: str, *, is_held: bool) -> None:
        """End a sandbox whose opening could not be finished, or recorded. It leaves no row."""
        if is_held:
            await self._end_held(sandbox_id)
        else:
            await asyncio.to_thread(keepers.end, sandbox_name(sandbox_id))
            await self._let_go(sandbox_id)
        await self._writer.write(partial(records.forget, sandbox_id=sandbox_id))

    async def _attend(self, attachment: Attachment, project: str, terms: Terms) -> None:
        """End a held sandbox when its time is over, and record it."""
        facts = await self.look(attachment.id, project)
        pausing = partial(self.lives.change, facts, "pause", attachment, memory=terms.at_end != KEEPS_FILES)
        why = await until_over(attachment, terms, pausing)
        self._ending.add(attachment.id)
        await self._end_held(attachment.id)  # also if the database fails
        try:
            await self.end(attachment.id, project, why=why)
        except ClocheError as error:
            log.warning("the end of sandbox %s could not be recorded: %s", attachment.id, error)

    @asynccontextmanager
    async def adopted(self, sandbox_id: str, caller: Caller, document: Mapping[str, Any]) -> AsyncIterator[None]:
        """Register the sandbox that the body opens under the name of its id. `document` is read when the body ends.

        Raises Refused (429) for too many.
        """
        name = sandbox_name(sandbox_id)
        row = {
            "id": sandbox_id, "project": caller.project, "name": name, "worker": self._worker, "api_key": caller.key_id
        }  # fmt: skip
        await begin_once(self._writer, self._read, self._room, row, document, None)
        try:
            with self._owning(sandbox_id, caller.key_id):
                yield
        except BaseException:
            await self._writer.write(partial(records.forget, sandbox_id=sandbox_id))
            raise
        try:
            await self._record("sandbox", what="opened", sandbox=sandbox_id)
        except BaseException:
            await asyncio.to_thread(keepers.end, name)
            await self._writer.write(partial(records.forget, sandbox_id=sandbox_id))
            raise
        await self._writer.write(partial(records.note, sandbox_id=sandbox_id, status=RUNNING, document=document))

    def _owning(
        self, sandbox_id: str, api_key: str | None, labels: Mapping[str, str] | None = None
    ) -> AbstractContextManager[None]:
        """Store the owner in the keepers' registry, for the sandbox that the body opens."""
        about = {"service": self._database.name, "sandbox": sandbox_id, "key": api_key or BROWSER}
        about |= {"labels": ", ".join(f"{name}={value}" for name, value in labels.items())} if labels else {}
        return owned_by(Owner(about=about, absent_s=self._keep_s))

    async def look(self, sandbox_id: str, project: str) -> SandboxFacts:
        """Return the row of a sandbox. Raises NotFound."""
        work = partial(records.find, sandbox_id=sandbox_id, project=project)
        if self._database.is_sqlite:  # one row by its key, which no writer holds up: 0.1 ms, less than a thread's turn
            facts: SandboxFacts = self._read(work)
            return facts
        return await asyncio.to_thread(self._read, work)

    async def describe(self, sandbox_id: str, project: str) -> dict[str, Any]:
        """Return the row and the keeper's state in the wire's format. Raises NotFound."""
        facts = await self.look(sandbox_id, project)
        if facts.status in (STARTING, ENDED):
            return facts.as_dict()
        if facts.is_held_by_worker:
            return await self._describe_held(facts)
        try:
            info = await asyncio.to_thread(lambda: visit(registry.find(facts.name), "info", timeout_s=keepers.INFO_S))
        except InvalidRequest:
            return (await self._note_ended(facts)).as_dict()
        except OutcomeUnknown:  # the keeper is busy, or about to end
            return facts.as_dict()
        state = records.PAUSED if info.get("is_paused") else RUNNING
        return {
            **facts.as_dict(), "state": state, "ageSeconds": info.get("age_s"), "secondsLeft": info.get("left_s"),
            "clients": info.get("clients"), "atEnd": info.get("at_end"),
        }  # fmt: skip

    async def _describe_held(self, facts: SandboxFacts) -> dict[str, Any]:
        held, task = self._held.get(facts.id), self._open.get(facts.id)
        if held is not None and task is not None:
            return {**facts.as_dict(), **as_info(await task)}
        is_over = await asyncio.to_thread(self._is_held_no_more, facts)
        return (await self._note_ended(facts) if is_over else facts).as_dict()

    def _is_held_no_more(self, facts: SandboxFacts) -> bool:
        """Tell whether the worker of a held sandbox does not have it any more. Blocks."""
        return facts.id not in self._open if facts.worker == self._worker else is_gone(facts.worker)

    async def end(self, sandbox_id: str, project: str, *, why: str = "asked for") -> SandboxFacts:
        """End a sandbox and everything in it. An ended one is returned unchanged. Raises NotFound."""
        facts = await self.look(sandbox_id, project)
        if facts.status == ENDED:
            return facts
        if facts.is_held_by_worker:
            await asyncio.to_thread(self._check_held_here, facts)
        self._ending.add(sandbox_id)
        try:
            if facts.is_held_by_worker:
                await self._end_held(sandbox_id)
            else:
                await asyncio.to_thread(keepers.end, facts.name)
            await self._note_ended(facts)
            await self._note("sandbox", what="ended", sandbox=sandbox_id, reason=why, owner=facts.api_key)
        finally:
            self._ending.discard(sandbox_id)
        await self._let_go(sandbox_id)
        return await self.look(sandbox_id, project)

    async def _end_held(self, sandbox_id: str) -> None:
        """End a sandbox of this worker. Several calls end it once, and each waits until nothing of it is left."""
        held = self._held.get(sandbox_id)
        if held is None:
            return
        if held.ending is None:
            held.ending = asyncio.ensure_future(self._let_go(sandbox_id, timeout_s=END_S))
        await asyncio.shield(held.ending)
        self._held.pop(sandbox_id, None)
        if held.attending is not asyncio.current_task():
            held.attending.cancel()

    def _check_held_here(self, facts: SandboxFacts) -> None:
        """Raise Refused (409) for a sandbox that another living worker holds. Blocks."""
        if facts.worker != self._worker and not (is_here(facts.worker) and is_gone(facts.worker)):
            raise Refused(
                409, "sandbox-elsewhere", f"sandbox {facts.id} is held by worker {facts.worker} itself",
                remedy="connect to the service that opened it",
            )  # fmt: skip

    async def elsewhere(self, sandbox_id: str) -> str | None:
        """Return the other worker that has a sandbox; None for this worker, which takes over from one that is gone."""
        if sandbox_id in self._ours:
            return None
        row = await asyncio.to_thread(self._read, partial(records.worker_of, sandbox_id=sandbox_id))
        if row is None or (row[1] in (STARTING, ENDED) and is_here(row[0])):
            return None
        worker, status = row
        if worker != self._worker and is_here(worker) and await asyncio.to_thread(is_gone, worker):
            await self._writer.write(partial(records.take_over, sandbox_id=sandbox_id, of=worker, by=self._worker))
            now = await asyncio.to_thread(self._read, partial(records.worker_of, sandbox_id=sandbox_id))
            if now is None or now[0] != self._worker:
                return None if now is None else now[0]
            self._ours[sandbox_id] = worker
            return None
        if worker != self._worker:
            return None if status == ENDED else worker
        self._ours[sandbox_id] = None
        return None

    async def note(self, sandbox_id: str, status: str) -> None:
        """Store the status of a sandbox."""
        await self._writer.write(partial(records.note, sandbox_id=sandbox_id, status=status))

    async def change(self, held: Attachment, op: str, **order: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
        """Change the life of a sandbox that this worker is attached to; see `Lives.change`."""
        facts = await asyncio.to_thread(self._read, partial(records.find_any, sandbox_id=held.id))
        return await self.lives.change(facts, op, held, **order)

    async def change_life(self, facts: SandboxFacts, op: str, **order: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
        """Change the life of a sandbox without attaching to it. Raises Refused (409) if it has ended, ClocheError."""
        try:
            return await self.lives.change(facts, op, self._attachment_of(facts.id), **order)
        except (InvalidRequest, OutcomeUnknown) as error:
            if await self._has_ended(facts):
                raise _ended(facts) from error
            raise

    async def is_alive(self, facts: SandboxFacts) -> bool:
        """Tell whether a sandbox has not ended, and is not being ended, by this worker's knowledge or its name's."""
        if facts.status == ENDED or facts.id in self._ending:
            return False
        attachment = self._attachment_of(facts.id)
        if facts.is_held_by_worker or (attachment is not None and not attachment.is_lost):
            return attachment is None or not attachment.is_lost
        if attachment is not None and not await self._has_ended(facts):  # its connection broke alone
            await self._let_go(facts.id)
        return await asyncio.to_thread(keepers.is_there, facts.name)

    def _attachment_of(self, sandbox_id: str) -> Attachment | None:
        task = self._open.get(sandbox_id)
        is_open = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and is_open else None

    def _follow(self, attachment: Attachment, facts: SandboxFacts) -> None:
        """Follow the life of a sandbox with a keeper while this worker is attached to it."""
        if not attachment.is_held:
            task = asyncio.ensure_future(self.lives.follow(attachment, facts))
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    async def compare(self) -> None:
        """Compare the rows with the keepers' registry, and record the sandboxes that have ended.

        Calls at the same time share one comparison, which begins after all of them.
        """
        if self._next_comparison is None:
            self._next_comparison = asyncio.ensure_future(self._compare_after(self._comparison))
        await asyncio.shield(self._next_comparison)

    async def _compare_after(self, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        self._comparison, self._next_comparison = self._next_comparison, None
        await self._compare()

    async def _compare(self) -> None:
        rows = [row for row in await asyncio.to_thread(self._read, records.living) if is_here(row.worker)]
        found = await asyncio.to_thread(registry.found)
        kept_names, ours = {keeper.name for keeper in found}, {row.name for row in rows}
        self._there = [keeper for keeper in found if keeper.name in ours]
        for facts in rows:
            is_abandoned = facts.status == STARTING and await asyncio.to_thread(is_gone, facts.worker)
            if facts.is_held_by_worker and not is_abandoned:
                if facts.status != STARTING and await asyncio.to_thread(self._is_held_no_more, facts):
                    await self._note_ended(facts)
            elif facts.name not in kept_names and (facts.status != STARTING or is_abandoned):
                await self._note_ended(facts)
                await self._let_go(facts.id)
            elif facts.name in kept_names and is_abandoned:
                await self.note(facts.id, RUNNING)

    async def _note_ended(self, facts: SandboxFacts) -> SandboxFacts:
        """Record that a sandbox has ended.

        If no request of this worker ended it, an audit event names its owner, and neither a caller nor an address.
        """
        is_news = await self._writer.write(partial(records.end, sandbox_id=facts.id))
        if is_news and facts.id not in self._ending:
            no_caller = {"key": None, "address": None}
            await self._note(
                "sandbox", what="ended", sandbox=facts.id, reason="found ended", owner=facts.api_key, **no_caller
            )
        self._ours.pop(facts.id, None)
        self.lives.tell(facts.id, ENDED)
        return await self.look(facts.id, facts.project)

    def _read(self, work: Any) -> Any:  # noqa: ANN401 - what the work returns
        with self._database.reading() as session:
            return work(session)

    # Attachments of this worker.

    @asynccontextmanager
    async def held(self, sandbox_id: str, project: str) -> AsyncIterator[Attachment]:
        """Yield the attachment to a sandbox. Raises NotFound, Refused (409) for an ended one, ClocheError."""
        async with self.held_as(await self.look(sandbox_id, project)) as attachment:
            yield attachment

    @asynccontextmanager
    async def held_as(self, facts: SandboxFacts) -> AsyncIterator[Attachment]:
        """Yield the attachment to a sandbox whose row was just read. Raises Refused, ClocheError, as `held` does."""
        if facts.status == ENDED:
            raise _ended(facts)
        if facts.status == STARTING:
            raise Refused(409, "sandbox-starting", f"sandbox {facts.id} is being opened; try again in a moment")
        if not is_here(facts.worker):
            raise Refused(
                409, "sandbox-elsewhere", f"sandbox {facts.id} is on the machine of worker {facts.worker}",
                remedy="connect to the service of that machine",
            )  # fmt: skip
        if facts.is_held_by_worker:
            await asyncio.to_thread(self._check_held_here, facts)
        attachment = await self._attached(facts)
        attachment.users += 1
        try:
            yield attachment
        except OutcomeUnknown as error:
            if attachment.is_lost and await self._has_ended(facts):
                raise _ended(facts) from error
            raise
        finally:
            attachment.users -= 1
            attachment.used_at = time.monotonic()

    async def _attached(self, facts: SandboxFacts) -> Attachment:
        task = self._open.get(facts.id)
        if facts.is_held_by_worker and (task is None or (task.done() and task.result().is_lost)):
            if task is None:  # otherwise `_attend` is about to end it
                await self._note_ended(facts)
            raise _ended(facts)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            if not task.result().is_lost:
                return task.result()
            await self._let_go(facts.id)
            task = self._open.get(facts.id)
        if task is None:
            await self._make_room()
            task = self._open[facts.id] = asyncio.ensure_future(self._attach(facts))
            task.add_done_callback(partial(self._forget_failed, facts.id))
        try:
            return await asyncio.shield(task)
        except (InvalidRequest, BackendUnavailable) as error:
            if await self._has_ended(facts):
                raise _ended(facts) from error
            raise

    def _forget_failed(self, sandbox_id: str, task: asyncio.Task[Attachment]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._open.get(sandbox_id) is task:
            del self._open[sandbox_id]

    async def _attach(self, facts: SandboxFacts) -> Attachment:
        sandbox = await asyncio.to_thread(keepers.come_back, facts.name, self._options)
        await sandbox.__aenter__()
        ask_nobody(sandbox)
        attachment = Attachment(id=facts.id, sandbox=sandbox, previous_worker=self._ours.get(facts.id))
        self._follow(attachment, facts)
        return attachment

    async def _has_ended(self, facts: SandboxFacts) -> bool:
        """Tell whether the sandbox has ended: its name has come free. Records the end."""
        until = time.monotonic() + SETTLE_S
        while await asyncio.to_thread(keepers.is_there, facts.name):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(AGAIN_S)
        await self._let_go(facts.id)
        await self._note_ended(facts)
        return True

    async def _make_room(self) -> None:
        """Detach from the sandbox unused for longest, if this worker is at its limit. Raises Refused (503)."""
        if len(self._open) - len(self._held) < self._room.most_attached:
            return
        before = time.monotonic() - JUST_S
        unused = [
            attachment for attachment in self._attachments() if attachment.is_unused and attachment.used_at < before
        ]
        if not unused:
            raise Refused(
                503, "busy", f"this worker uses {len(self._open)} sandboxes at once", remedy="try again in 5 s",
                headers={"Retry-After": "5"},
            )  # fmt: skip
        await self._let_go(min(unused, key=lambda attachment: attachment.used_at).id)

    def _attachments(self) -> list[Attachment]:
        finished = [task for task in self._open.values() if task.done() and not task.cancelled()]
        return [task.result() for task in finished if task.exception() is None]

    async def _let_go(self, sandbox_id: str, *, timeout_s: float = CLOSE_S) -> None:
        """Detach from a sandbox, which lives on; end one that this worker holds."""
        task = self._open.pop(sandbox_id, None)
        if task is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await (await task).close()
        except (ClocheError, TimeoutError) as error:
            log.warning("sandbox %s was not detached properly: %s", sandbox_id, error)

    async def tend(self) -> None:
        """Every few seconds, compare rows with the registry, delete old rows, detach from unused sandboxes."""
        while True:
            try:
                await self.compare()
                await self._writer.write(records.forget_ended)
            except ClocheError as error:
                log.warning("live sandboxes cannot be listed: %s", error)
            await self._own()
            await self._spares.tend()
            before = time.monotonic() - UNUSED_S
            for attachment in self._attachments():
                if attachment.is_unused and attachment.used_at < before:
                    await self._let_go(attachment.id)
            await asyncio.sleep(min(LOOK_EVERY_S, self._keep_s / 4))

    async def _own(self) -> None:
        """Tell keepers that a service exists, and note what they answer."""
        infos = await asyncio.to_thread(keepers.own, self._there, self._keep_s)
        rows = {row.name: row for row in await asyncio.to_thread(self._read, records.living)}
        await self.lives.compare(rows, infos)

    # The end.

    def note_stream(self, task: asyncio.Task[Any]) -> None:
        """Register an endless stream, such as a watch. It is cancelled when the service begins to stop."""
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    def end_streams(self) -> None:
        """Cancel the registered streams."""
        for task in self._streams:
            task.cancel()

    async def close(self) -> None:
        """Detach from all sandboxes, which live on without this worker's commands and sessions; end the held ones."""
        await self._spares.close()
        await asyncio.gather(*(self._end_with_service(sandbox_id) for sandbox_id in list(self._held)))
        await asyncio.gather(*(self._let_go(sandbox_id) for sandbox_id in list(self._open)))

    async def _end_with_service(self, sandbox_id: str) -> None:
        try:
            await self.end(sandbox_id, self._held[sandbox_id].project, why="the service ended")
        except ClocheError as error:  # the next worker finds that this one is gone
            log.warning("the end of sandbox %s could not be recorded: %s", sandbox_id, error)

    async def end_builds(self, build_ids: Collection[str]) -> None:
        """End the sandboxes of builds that have failed with their worker. Raises RecordsFailed."""
        rows = await asyncio.to_thread(self._read, records.living) if build_ids else []
        of_builds = [row for row in rows if row.document.get("labels", {}).get(BUILD_LABEL) in build_ids]
        for row in of_builds:
            await self.end(row.id, row.project, why="its build has failed")

    async def end_all(self) -> None:
        """End the sandboxes of this worker, and of workers of this host that are gone. Raises RecordsFailed."""
        rows = [row for row in await asyncio.to_thread(self._read, records.living) if is_here(row.worker)]
        ours = [row for row in rows if row.worker == self._worker or is_gone(row.worker)]
        await asyncio.gather(*(self.end(row.id, row.project, why="the service ended") for row in ours))


@dataclass(slots=True, kw_only=True)
class _Held:
    """A sandbox that this worker holds: its times, the task that ends it in time, and its end once it has begun."""

    terms: Terms
    project: str
    attending: asyncio.Task[None]
    ending: asyncio.Task[None] | None = None


async def _ready(attachment: Attachment) -> Attachment:
    return attachment


def _ended(facts: SandboxFacts) -> Refused:
    return Refused(
        409, "sandbox-ended", f"sandbox {facts.id} has ended", remedy="open another one: POST /api/sandboxes"
    )
