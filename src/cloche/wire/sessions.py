"""Sessions of a sandbox: interpreters that keep their state between cells, checkpoints and forks.

A session belongs to this process. It ends with the process or the sandbox.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints

from cloche.core.events import Sink
from cloche.core.result import Result
from cloche.execution.sandbox import MOST_FORKS

from .exec_options import Amount, WireModel, Word
from .sandboxes import allowed_timeout
from .uses import Use


class NewSession(WireModel):
    """A session to open. With checkpoints it has a separate sandbox with a copy of the workspace."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"language": "python", "checkpoints": True}]})

    language: Word = "python"
    env: dict[Word, str] | None = None
    idle_timeout: Amount | None = None
    checkpoints: bool = False
    timeout: Amount | None = None


class Cell(WireModel):
    """A cell to run."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"code": "x = 1"}]})

    code: str
    timeout: Amount | None = None
    collect: list[Word] | None = Field(default=None, max_length=64)
    env: dict[Word, str] | None = None
    cwd: Word | None = None
    notebook: bool = False


class Checkpoint(WireModel):
    """A checkpoint's name."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]


class Forks(WireModel):
    """How many forks to make."""

    count: Annotated[int, Field(ge=1, le=MOST_FORKS)] = 1


async def cell_work(use: Use, session_id: str, cell: Cell) -> Callable[[Sink], Awaitable[Result]]:
    """Return a function that runs a cell. Raises NotFound, PolicyDenied."""
    held, timeout = use.held.session(session_id), await allowed_timeout(use, cell.timeout)

    async def work(sink: Sink) -> Result:
        return await held.session.run(
            cell.code, timeout=timeout, collect=cell.collect, on_event=sink, env=cell.env, cwd=cell.cwd,
            notebook=cell.notebook,
        )  # fmt: skip

    return work


async def open_session(use: Use, body: NewSession) -> dict[str, Any]:
    """Open a session."""
    with use.held.room(is_apart=body.checkpoints):
        session = await use.sandbox.session(
            body.language, env=body.env, idle_timeout=body.idle_timeout, checkpoints=body.checkpoints,
            timeout=body.timeout,
        )  # fmt: skip
        return use.held.add_session(session, has_checkpoints=body.checkpoints).as_dict()


async def sessions(use: Use) -> dict[str, Any]:
    """List this worker's sessions in the sandbox."""
    return {"items": [session.as_dict() for session in use.held.sessions.values()], "nextCursor": None}


async def look(use: Use, session_id: str) -> dict[str, Any]:
    """Return one session."""
    return use.held.session(session_id).as_dict()


async def interrupt(use: Use, session_id: str) -> dict[str, Any]:
    """Interrupt the running cell, as Ctrl-C does."""
    held = use.held.session(session_id)
    await held.session.interrupt()
    return held.as_dict()


async def checkpoint(use: Use, session_id: str, body: Checkpoint) -> dict[str, Any]:
    """Save memory and workspace under a name. A failed checkpoint is an error and loses nothing."""
    held = use.held.session(session_id)
    await held.session.checkpoint(body.name)
    return held.as_dict()


async def rollback(use: Use, session_id: str, body: Checkpoint) -> dict[str, Any]:
    """Restore a checkpoint."""
    held = use.held.session(session_id)
    await held.session.rollback(body.name)
    return held.as_dict()


async def fork(use: Use, session_id: str, body: Forks) -> dict[str, Any]:
    """Return new sessions with a copy of this one's memory and workspace, each in a separate sandbox."""
    held = use.held.session(session_id)
    with use.held.room(body.count, is_apart=True):
        forks = await held.session.fork(body.count)
        sessions = [use.held.add_session(fork, has_checkpoints=True, parent=held.id) for fork in forks]
    return {"items": [session.as_dict() for session in sessions], "nextCursor": None}


async def close(use: Use, session_id: str) -> dict[str, Any]:
    """End a session and everything that it started; the sandbox stays."""
    held = use.held.session(session_id)
    await held.session.close()
    use.held.sessions.pop(session_id, None)
    return held.as_dict()
