"""Snapshots of sandboxes and templates: their rows, and the archives of their files, one for each build.

The archives lie in the folder `templates` beside the database, on the machine of the worker that wrote them. One is
written under another name, synced and renamed, before its row is `ready`; a row goes before its archive.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from cloche.core.errors import Conflict, NotFound
from cloche.core.limits import format_size
from cloche.execution.sandbox import AsyncSandbox
from cloche.records import templates as records
from cloche.records.database import Database
from cloche.records.templates import BuildFacts, TemplateFacts
from cloche.records.workers import is_gone, is_here
from cloche.records.writer import Writer
from cloche.wire.problems import Refused

T = TypeVar("T")
MOST_BYTES = 20 << 30  # of a project
UNNAMED_S = 3_600.0  # how long an archive without a row stays: another worker may be using it
FOLDER, SUFFIX, UNFINISHED = "templates", ".tar", ".cloche"  # as `hostfs` names what is being written
log = logging.getLogger("cloche.service")


class Templates:
    """Save and find templates and snapshots. `most_bytes` bounds the archives of a project."""

    def __init__(self, database: Database, writer: Writer, worker: str, *, most_bytes: int = MOST_BYTES):
        self._database, self._writer, self._worker, self._most_bytes = database, writer, worker, most_bytes
        self.folder = os.path.join(database.folder, FOLDER)
        self._saving = asyncio.Semaphore(2)  # archives at once

    async def snapshot(
        self, sandbox: AsyncSandbox, *, project: str, api_key: str | None, name: str | None,
        document: Mapping[str, Any], build: Mapping[str, Any], tags: Sequence[str] = (),
    ) -> tuple[TemplateFacts, BuildFacts]:  # fmt: skip
        """Save the files of a sandbox as a snapshot; one of the same name gets them as its newest.

        Raises InvalidRequest, Conflict, SandboxFileError, RecordsFailed.
        """
        if name is not None:
            records.check_name(name)
        beginning = partial(
            records.begin, project=project, api_key=api_key, kind=records.SNAPSHOT, name=name, worker=self._worker,
            document=document, build=build, tags=tags,
        )  # fmt: skip
        template, begun = await self._writer.write(beginning)
        try:
            await self.save(sandbox, begun, project=project)
        except BaseException as error:
            failed = partial(_fail, template_id=template.id, build_id=begun.id, why=str(error))
            await asyncio.shield(asyncio.ensure_future(self._writer.write(failed)))
            raise
        return template, await self.build_of(template.id, begun.id)

    async def save(self, sandbox: AsyncSandbox, build: BuildFacts, *, project: str) -> None:
        """Write the archive of a build, and make it ready. Raises as `snapshot` does."""
        await self.make_ready(build, archive_bytes=await self.write_archive(sandbox, build, project=project))

    async def write_archive(self, sandbox: AsyncSandbox, build: BuildFacts, *, project: str) -> int:
        """Write the archive of a build, and return its bytes. Raises Conflict without room, SandboxFileError."""
        room = self._most_bytes - await self.read(partial(records.total_size, project=project))
        if room <= 0:
            raise Conflict(
                f"the snapshots and templates of this project have {format_size(self._most_bytes)}, the most there may "
                "be; delete one"
            )
        async with self._saving:
            await asyncio.to_thread(os.makedirs, self.folder, 0o700, exist_ok=True)
            saved = await sandbox.snapshot(self.path(build.id), max_bytes=min(room, sandbox.limits.disk_bytes))
        return saved.size

    async def make_ready(self, build: BuildFacts, *, archive_bytes: int, **more: Any) -> None:  # noqa: ANN401 - JSON
        """Make a build ready whose archive is there, with `more` in its document. Raises Conflict for a deleted one."""
        ready = partial(records.note_build, build_id=build.id, status=records.READY, size=archive_bytes, **more)
        if not await self._writer.write(ready):
            await self.remove_archives([build.id])
            raise Conflict("it was deleted while it was written")
        superseding = partial(records.supersede, template_id=build.template_id)
        await self.remove_archives(await self._writer.write(superseding))

    async def reserve(self) -> str:
        """Return a new path in the folder; its archive is removed with those without a row, unless its caller does."""
        await asyncio.to_thread(os.makedirs, self.folder, 0o700, exist_ok=True)
        return self.path(f"fork-{os.urandom(8).hex()}")

    def path(self, build_id: str) -> str:
        """Return the path of a build's archive."""
        return os.path.join(self.folder, build_id + SUFFIX)

    async def find(self, reference: str, tag: str, project: str) -> tuple[TemplateFacts, BuildFacts]:
        """Return a template by id or name, and the build of a tag. Raises NotFound."""
        return await self.read(partial(records.find_build, reference=reference, tag=tag, project=project))

    async def build_of(self, template_id: str, build_id: str) -> BuildFacts:
        """Return a build of a template. Raises NotFound."""
        return await self.read(partial(records.build_of, template_id=template_id, build_id=build_id))

    async def archive(self, build: BuildFacts) -> str:
        """Return the path of a build's archive. Raises Refused (409) if another machine has it, NotFound."""
        if not is_here(build.worker):
            raise Refused(
                409, "sandbox-elsewhere", f"the files of this snapshot are on the machine of worker {build.worker}",
                remedy="connect to the service of that machine",
            )  # fmt: skip
        path = self.path(build.id)
        if not build.size or not await asyncio.to_thread(os.path.exists, path):
            raise NotFound("the files of this snapshot are gone; make another one")
        return path

    async def note_spawn(self, template_id: str) -> None:
        """Count a sandbox that began from a template."""
        await self._writer.write(partial(records.note_spawn, template_id=template_id))

    async def remove(self, template_id: str) -> None:
        """Remove a template with its builds and their archives. Sandboxes that began from it live on."""
        await self.remove_archives(await self._writer.write(partial(records.remove, template_id=template_id)))

    async def remove_archives(self, builds: Iterable[str]) -> None:
        """Remove archives of builds whose rows are gone, or need them no more."""
        await asyncio.to_thread(_unlink, [self.path(build) for build in builds])

    async def tidy(self) -> list[str]:
        """Record that builds of workers that are gone have failed, and remove archives without a row.

        Returns the ids of these builds, whose sandboxes may live on.
        """
        failed_ids: list[str] = []
        for build in await self.read(records.unfinished_builds):
            if is_here(build.worker) and await asyncio.to_thread(is_gone, build.worker):
                why = "the service ended meanwhile"
                failed = partial(_fail, template_id=build.template_id, build_id=build.id, why=why)
                await self._writer.write(failed)
                await self.remove_archives([build.id])
                failed_ids.append(build.id)
        await asyncio.to_thread(self._remove_unnamed)
        return failed_ids

    def _remove_unnamed(self) -> None:
        with suppress(FileNotFoundError):
            found = [name for name in os.listdir(self.folder) if name.endswith((SUFFIX, UNFINISHED))]
            with self._database.reading() as session:
                named = records.all_builds(session)
            unnamed = [os.path.join(self.folder, name) for name in found if name.removesuffix(SUFFIX) not in named]
            before = time.time() - UNNAMED_S
            _unlink([path for path in unnamed if os.path.getmtime(path) < before])

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run a read in a thread. Raises RecordsFailed."""
        return await asyncio.to_thread(self._read, work)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run a write transaction. Raises RecordsFailed."""
        return await self._writer.write(work)

    def _read(self, work: Callable[[Session], T]) -> T:
        with self._database.reading() as session:
            return work(session)


def _fail(session: Session, template_id: str, build_id: str, why: str) -> None:
    """Store that a build has failed; a snapshot that has no other build goes."""
    records.note_build(session, build_id, records.ERROR, reason={"message": why[:2_000]})
    template = records.find_any(session, template_id)
    if template is not None and template.kind == records.SNAPSHOT and not records.tags_of(session, template_id):
        records.remove(session, template_id)


def _unlink(paths: Sequence[str]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
