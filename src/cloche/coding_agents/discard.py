"""Discard the changes of a sandbox after they have been saved to an archive."""

from __future__ import annotations

import asyncio
import os
import time

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.execution.sandbox import AsyncSandbox

from .places import agents_folder


async def save_and_discard(sandbox: AsyncSandbox, diff_id: str, saved: str | None = None) -> tuple[str, int]:
    """Save exactly the changes with this id, then undo all; return the archive's path and how many were undone.

    `saved` is the folder for the archive, by default that of the agent. Raises the errors of `save_changes` and
    `discard`, and InvalidRequest if there are further changes by then: nothing is discarded that was not saved.
    """
    folder = saved or f"{agents_folder()}/{sandbox.name or 'unnamed'}/saved"
    await asyncio.to_thread(os.makedirs, folder, 0o700, exist_ok=True)
    target = f"{folder}/{_archive_name()}"
    await sandbox.save_changes(target, diff_id)
    diff = await sandbox.diff()
    if diff.id != diff_id:
        raise InvalidRequest(
            "nothing was discarded, since the sandbox goes on and has changed meanwhile; what it had changed before is "
            f"saved in {escape_name(target)}"
        )
    return target, len(await sandbox._discard_of(diff))


def _archive_name() -> str:
    return time.strftime(f"discarded-%Y%m%d-%H%M%S-{os.urandom(2).hex()}.tar", time.gmtime())
