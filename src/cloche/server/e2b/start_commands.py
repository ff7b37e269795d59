"""The start command of a template: it runs in each of its sandboxes, which are handed out when it is ready."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from cloche.core.record import replace
from cloche.execution.processes import AsyncProcess
from cloche.execution.sandbox import AsyncSandbox

from .calls import Call
from .errors import E2BError
from .new_sandbox import environment
from .templates import Template

READY_S, CHECK_S, AGAIN_S = 60.0, 120.0, 0.1  # until it is ready; for one check; between two of them
IS_PAUSE = re.compile(r"\s*sleep [0-9.]+\s*").fullmatch  # a check that only waits, which the SDK adds to Dockerfiles
SETTLE_S = 0.5  # how long a start command without a check must live
SHELL = ("/bin/bash", "-l", "-c")
MOST_SHOWN = 2_000  # characters of its output in an error


async def make_ready(call: Call, template: Template, own: Mapping[str, Any], row: str, sandbox: AsyncSandbox) -> None:
    """Run the start command of a new sandbox, if its template has one. Raises E2BError (500).

    `own` is what its row, with the id `row`, has of E2B's.
    """
    if template.row is not None:
        await call.service.templates.note_spawn(template.row)
    if template.ready is not None and IS_PAUSE(template.ready) is not None:  # the build has waited
        template = replace(template, ready=None)
    if template.start is not None or template.ready is not None:
        await start_and_wait(sandbox, template, environment(row, own))


async def start_and_wait(
    sandbox: AsyncSandbox, template: Template, env: Mapping[str, str], *, ready_s: float = READY_S
) -> None:
    """Start a template's command, and return when its check succeeds. Raises E2BError (500)."""
    process: AsyncProcess | None = None
    if template.start is not None:
        process = await sandbox.start(
            [*SHELL, template.start], cwd=template.workdir, env=env, user=template.user, keep=True
        )
    try:
        async with asyncio.timeout(ready_s):
            await _until_ready(sandbox, template, env, process)
    except TimeoutError:
        raise E2BError(500, f"the template is not ready after {ready_s:g} s: {template.ready}") from None


async def _until_ready(
    sandbox: AsyncSandbox, template: Template, env: Mapping[str, str], process: AsyncProcess | None
) -> None:
    if template.ready is None:
        await asyncio.sleep(SETTLE_S)
        await _check_started(sandbox, process)
        return
    while True:
        checked = await sandbox.exec(
            [*SHELL, template.ready], cwd=template.workdir, env=env, user=template.user, timeout=CHECK_S
        )
        if checked.ok:
            return
        await _check_started(sandbox, process)
        await asyncio.sleep(AGAIN_S)


async def _check_started(sandbox: AsyncSandbox, process: AsyncProcess | None) -> None:
    """Raise E2BError if the start command has failed already."""
    if process is None:
        return
    rows = {row.id: row for row in await sandbox.processes()}
    row = rows.get(process.id)
    if row is not None and row.exit_code not in (None, 0):
        out, err = await sandbox.logs(process.id)
        text = (out + err).decode(errors="replace")[-MOST_SHOWN:]
        raise E2BError(500, f"the start command of the template ended with {row.exit_code}: {text}")
