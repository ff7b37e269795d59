"""Bug reproductions: programs that show a bug, stored, and run in a sandbox any number of times.

Theory of operation: `queued` → `running` → `passed`, `failed` or `error`, and from these to `running` again. `start`
claims a reproduction in one transaction; a second claim fails. `finish` runs it and always stores its outcome. If the
process dies, the row stays `running` until `recover` finds that its worker is gone. The code comes from a model: a
caller may choose another backend, but never a level below the configured one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

from sqlalchemy import CursorResult, select, update

from cloche.config.options import SandboxOptions
from cloche.core.errors import ClocheError, Conflict, InvalidRequest, NotFound
from cloche.core.escape import escape, escape_name
from cloche.core.languages import language_named
from cloche.core.loops import finish as finished
from cloche.core.policy import parse_backend
from cloche.execution.prepare import level_kept, prepare
from cloche.execution.run import arun

from . import workers
from .database import Database
from .ids import check_id, new_id, now
from .lists import FEW_ITEMS, list_page
from .results import result_as_wire
from .tables import DEFAULT_PROJECT, Reproduction

KIND = "repro"
STATUSES = ("queued", "running", "passed", "failed", "error")
MOST_TITLE, MOST_DESCRIPTION, MOST_CODE, MOST_SESSION, MOST_EXIT_CODE = 200, 20_000, 1 << 20, 64, 255
GONE = "the process that ran it ended before the run did; run it again"
CANCELLED = "the run was cancelled"
_LONG = ("code", "result")  # left out of lists
_running: set[str] = set()  # those of this process


class Reproductions:
    """Manage the reproductions of a project. Calls block, except the coroutines.

    `worker` is the name stored with a run, by default that of this process.
    """

    def __init__(self, database: Database, *, project: str = DEFAULT_PROJECT, worker: str | None = None) -> None:
        self._database, self._project = database, project
        self._worker = worker or workers.own_worker()

    def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Store a reproduction from `title`, `description`, `language`, `code`, `sessionId` and `expect.exitCode`.

        Raises InvalidRequest, which names the field and its fault.
        """
        document = _checked(fields)
        session_id = document.pop("sessionId")
        row = Reproduction(
            id=new_id(KIND), project=self._project, created_at=now(), session_id=session_id, document=document,
            status="queued", worker=None,
        )  # fmt: skip
        with self._database.writing() as session:
            session.add(row)
        return _shown(row)

    def list(
        self,
        *,
        status: str | None = None,
        session_id: str | None = None,
        limit: int = FEW_ITEMS,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Return one page, the newest first, without code and results. Raises InvalidRequest."""
        if status is not None and status not in STATUSES:
            raise InvalidRequest(f"status: {escape_name(status[:80])!r} is not valid; use one of {', '.join(STATUSES)}")
        with self._database.reading() as session:
            return list_page(
                session, Reproduction, project=self._project, show=_listed, limit=limit, cursor=cursor, status=status,
                session_id=session_id,
            )  # fmt: skip

    def get(self, id: str) -> dict[str, Any]:  # noqa: A002 - as the record's own field
        """Return a whole reproduction. Raises NotFound."""
        with self._database.reading() as session:
            row = session.scalars(self._query(id)).first()
        if row is None:
            raise _not_found(id)
        return _shown(row)

    def delete(self, id: str) -> None:  # noqa: A002
        """Delete a reproduction. Raises NotFound, and Conflict for a running one."""
        with self._database.writing() as session:
            row = session.scalars(self._query(id)).first()
            if row is None:
                raise _not_found(id)
            if row.status == "running":
                raise Conflict(f"{id} is running; wait until it has ended, then delete it")
            session.delete(row)

    def start(self, id: str, backend: str | None = None) -> dict[str, Any]:  # noqa: A002
        """Claim a reproduction for this worker, and return it with status `running`; then `finish` it.

        Raises NotFound, InvalidRequest for an unknown backend, and Conflict for a running one.
        """
        name = None if backend is None else parse_backend(backend, name="backend")
        with self._database.writing() as session:
            # The database checks the condition: of two concurrent claims one updates no row.
            claim = update(Reproduction).where(
                Reproduction.id == _checked_id(id), Reproduction.project == self._project,
                Reproduction.status != "running",
            ).values(status="running", worker=self._worker)  # fmt: skip
            is_taken = cast("CursorResult[Any]", session.execute(claim)).rowcount == 1
            row = session.scalars(self._query(id)).first()
            if row is None:
                raise _not_found(id)
            if not is_taken:
                raise Conflict(f"{id} is running already; wait until it has ended")
            before = {key: value for key, value in row.document.items() if key not in _ENDINGS}
            row.document = {**before, "backend": name, "startedAt": now()}
            _running.add(id)
            return _shown(row)

    async def finish(self, id: str, options: SandboxOptions | None = None) -> dict[str, Any]:  # noqa: A002
        """Run a started reproduction, with the operator's settings and `options`, and return its outcome.

        A run that cannot be done gets status `error` with the reason. So does a cancelled one, which is killed.
        """
        try:
            record = await asyncio.to_thread(self.get, id)
            ending = await _run(record, options or {})
        except asyncio.CancelledError:
            await finished(asyncio.to_thread(self._end, id, {"error": CANCELLED}, "error"))
            raise
        except ClocheError as error:
            return await finished(asyncio.to_thread(self._end, id, {"error": escape(str(error))}, "error"))
        except BaseException as error:
            reason = f"unexpected {type(error).__name__}; this is a bug of Cloche; its log has the details"
            await finished(asyncio.to_thread(self._end, id, {"error": reason}, "error"))
            raise
        expected = record["expect"]["exitCode"]
        status = "passed" if ending["exitCode"] == expected else "failed"
        return await finished(asyncio.to_thread(self._end, id, {"result": ending}, status))

    def give_up(self, id: str, why: str) -> dict[str, Any]:  # noqa: A002
        """Store that a started reproduction was not run."""
        return self._end(id, {"error": why}, "error")

    async def run(
        self,
        id: str,  # noqa: A002
        backend: str | None = None,
        options: SandboxOptions | None = None,
    ) -> dict[str, Any]:
        """Start and finish a reproduction. Raises the errors of `start`."""
        starting = asyncio.ensure_future(asyncio.to_thread(self.start, id, backend))
        try:
            await finished(starting)
        except asyncio.CancelledError:
            if starting.exception() is None:  # it was claimed all the same
                await finished(asyncio.to_thread(self._end, id, {"error": CANCELLED}, "error"))
            raise
        return await self.finish(id, options)

    def recover(self, is_gone: Callable[[str], bool] = workers.is_gone) -> int:
        """Set the running reproductions of workers that are gone to `error`; return their number."""
        with self._database.writing() as session:
            query = select(Reproduction).where(Reproduction.project == self._project, Reproduction.status == "running")
            abandoned = [row for row in session.scalars(query) if self._is_left(row, is_gone)]
            for row in abandoned:
                row.status, row.document = "error", {**row.document, "endedAt": now(), "error": GONE}
        return len(abandoned)

    def _is_left(self, row: Reproduction, is_gone: Callable[[str], bool]) -> bool:
        if row.worker is None:
            return True
        if row.worker == self._worker:
            return row.id not in _running  # its end could not be written
        return is_gone(row.worker)

    def _end(self, id: str, ending: Mapping[str, Any], status: str) -> dict[str, Any]:  # noqa: A002
        _running.discard(id)
        with self._database.writing() as session:
            row = session.scalars(self._query(id)).first()
            if row is None:
                raise _not_found(id)
            row.status, row.document = status, {**row.document, **ending, "endedAt": now()}
            return _shown(row)

    def _query(self, id: str) -> Any:  # noqa: A002, ANN401 - SQLAlchemy's, of many parameters
        return select(Reproduction).where(Reproduction.id == _checked_id(id), Reproduction.project == self._project)


_ENDINGS = ("result", "error", "endedAt")


async def _run(record: Mapping[str, Any], options: SandboxOptions) -> dict[str, Any]:
    prepared = await asyncio.to_thread(prepare, **options)
    required = await asyncio.to_thread(level_kept, prepared)
    run_options: dict[str, Any] = {**options, "require": required, "trusted": None}
    if record["backend"] is not None:
        run_options |= {"backend": record["backend"], "runtime": None, "prefer": None}
    result = await arun(record["code"], language=record["language"], **cast("SandboxOptions", run_options))
    return await asyncio.to_thread(result_as_wire, result)


def _checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a new reproduction. Raises InvalidRequest."""
    known_fields = ("title", "description", "language", "code", "sessionId", "expect")
    unknown = [escape_name(str(key)[:80]) for key in fields if key not in known_fields]
    if unknown:
        raise InvalidRequest(f"unknown field {', '.join(unknown[:10])}; known fields: {', '.join(known_fields)}")
    return {
        "title": _text(fields, "title", MOST_TITLE, is_needed=True),
        "description": _text(fields, "description", MOST_DESCRIPTION),
        "language": _language(fields.get("language", "python")),
        "code": _text(fields, "code", MOST_CODE, is_needed=True),
        "sessionId": _text(fields, "sessionId", MOST_SESSION) or None,
        "expect": {"exitCode": _exit_code(fields.get("expect"))},
    }


def _text(fields: Mapping[str, Any], name: str, max_chars: int, *, is_needed: bool = False) -> str:
    value = fields.get(name)
    if value is None and not is_needed:
        return ""
    if not isinstance(value, str) or len(value) > max_chars or (is_needed and not value.strip()):
        raise InvalidRequest(f"{name}: must be text of {'1 to' if is_needed else 'at most'} {max_chars} characters")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidRequest(f"{name}: has lone surrogates, which text cannot have")
    if name == "sessionId" and "\0" in value:
        raise InvalidRequest(f"{name}: has a NUL character, which not every database can store")
    return value


def _language(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("language: must be the name of a language; `cloche languages` lists them")
    try:
        return language_named(value).name
    except InvalidRequest as error:
        raise InvalidRequest(f"language: {error}") from None


def _exit_code(expect: object) -> int:
    if expect is None:
        return 0
    if not isinstance(expect, Mapping) or set(expect) - {"exitCode"}:
        raise InvalidRequest("expect: must be a mapping with the single field exitCode")
    code = expect.get("exitCode", 0)
    if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= MOST_EXIT_CODE:
        raise InvalidRequest(f"expect.exitCode: must be a number from 0 to {MOST_EXIT_CODE}")
    return code


def _checked_id(id: str) -> str:  # noqa: A002
    return check_id(id, KIND)


def _not_found(id: str) -> NotFound:  # noqa: A002
    return NotFound(f"there is no reproduction {id}; list the reproductions to see their ids")


def _shown(row: Reproduction) -> dict[str, Any]:
    document = {"backend": None, "startedAt": None, "endedAt": None, "result": None, "error": None, **row.document}
    return {"id": row.id, "createdAt": row.created_at, "status": row.status, "sessionId": row.session_id, **document}


def _listed(row: Reproduction) -> dict[str, Any]:
    return {key: value for key, value in _shown(row).items() if key not in _LONG}
