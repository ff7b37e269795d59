"""From the fields of a run to its place in the queue."""

from __future__ import annotations

from collections.abc import Mapping

from cloche.core.errors import PolicyDenied
from cloche.core.events import Sink
from cloche.core.result import Result
from cloche.execution.run import arun

from .callers import Caller
from .exec_options import ExecRequest
from .host import SandboxHost
from .queue import RunOrder


async def make_order(
    service: SandboxHost,
    caller: Caller,
    exec_request: ExecRequest,
    *,
    size: int,
    files: Mapping[str, bytes] | None = None,
) -> RunOrder:
    """Return the order of a run, checked against the caller's permissions. `files` are those of a form.

    Raises PolicyDenied, InvalidRequest.
    """
    try:
        options = await service.allowed_options(caller, exec_request.options())
    except PolicyDenied as error:
        await service.note_refusal(error, what="run", language=exec_request.language, code=exec_request.code)
        raise
    arguments = await exec_request.run_arguments()
    if files:
        arguments["files"] = {**(arguments["files"] or {}), **files}

    async def start(sink: Sink | None) -> Result:
        return await arun(**arguments, on_event=sink, **options)

    return RunOrder(
        project=caller.project, api_key=caller.key_id, session_id=exec_request.session_id, start=start, size=size,
        amounts=options, summary={"sessionId": exec_request.session_id, "language": exec_request.language},
        returns_files=exec_request.return_files,
        asked=exec_request.stored_fields() if service.keeps_runs else None,
    )  # fmt: skip
