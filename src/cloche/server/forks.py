"""Forks of a sandbox: new ones that begin with its files. Each is opened or fails on its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from cloche.core.record import dataclass
from cloche.execution.sandbox import AsyncSandbox
from cloche.records.sandboxes import SandboxFacts
from cloche.wire.callers import Caller
from cloche.wire.held import Terms

from .service import Service

MOST_FORKS = 20  # of one request


@dataclass(frozen=True, slots=True, kw_only=True)
class Forking:
    """Hold how many sandboxes to open, and the options, times and document of each."""

    count: int
    options: Mapping[str, Any]
    terms: Terms
    document: Mapping[str, Any]


async def forked(
    service: Service, sandbox: AsyncSandbox, caller: Caller, forking: Forking
) -> list[SandboxFacts | Exception]:
    """Save the files of a sandbox once, and open sandboxes with them; return each one's row or error.

    Raises SandboxFileError, Conflict if they cannot be saved.
    """
    async with with_files_of(service, sandbox) as archive:
        create = partial(
            service.sandboxes.create, project=caller.project, api_key=caller.key_id, terms=forking.terms,
            document=forking.document, options={**forking.options, "snapshot": archive}, files=None,
        )  # fmt: skip
        opening = await asyncio.gather(*(create() for _ in range(forking.count)), return_exceptions=True)
    for row in opening:
        if not isinstance(row, Exception | SandboxFacts):
            raise row
    return [row for row in opening if isinstance(row, Exception | SandboxFacts)]


@asynccontextmanager
async def with_files_of(service: Service, sandbox: AsyncSandbox) -> AsyncIterator[str]:
    """Yield the path of an archive of a sandbox's files, for the body. Raises SandboxFileError."""
    path = await service.templates.reserve()
    try:
        await sandbox.snapshot(path)
        yield path
    finally:
        with suppress(FileNotFoundError):
            await asyncio.to_thread(os.unlink, path)
