"""`POST /run_code` and `POST /run_jupyter`, as SandboxFusion's callers send them (`cloche serve --sandbox-fusion`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cloche.config.settings import load_settings
from cloche.core.errors import BackendUnavailable, InvalidRequest, LanguageUnavailable, PolicyDenied, StartFailed
from cloche.core.events import Sink
from cloche.core.record import dataclass
from cloche.core.result import Result
from cloche.records.results import as_json, result_as_wire
from cloche.records.statements import Encoded
from cloche.wire.bodies import validated
from cloche.wire.callers import Caller
from cloche.wire.exec_options import MOST_KEPT_CHARS
from cloche.wire.problems import Refused
from cloche.wire.queue import RunOrder

from ..auth import Runner, TheService
from ..bodies import JsonRoute
from ..events import wait_or_cancel
from ..sandbox_fusion import (
    DEFAULTS,
    NOT_FOUND,
    NOT_RUN,
    PING,
    RUN_CODE,
    RUN_JUPYTER,
    CodeRequest,
    FusionAnswer,
    JupyterRequest,
    is_allowed,
    is_compiled,
    language_of,
    limits_of,
    refused,
    why_no_language,
)
from ..sandbox_fusion_runs import input_files, run_cells, run_code
from ..service import Service

router = APIRouter(tags=["SandboxFusion"], route_class=JsonRoute)
FEW_BYTES = 64 << 10  # encoded on the event loop, and not counted
KEPT_CHARS = 2_048  # of each stream, in the record of a run
LOOK_EVERY_S = 0.1  # whether the queue has room
BUSY = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionWork:
    """Describe the work of one request. `start` does it; `most_wait_s` is how long it may wait for its turn."""

    language: str
    start: Callable[[], Awaitable[FusionAnswer]]
    most_wait_s: float
    asked: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@router.post(RUN_CODE)
async def code(request: Request, caller: Runner, service: TheService) -> Response:
    """Run a program. The answer is 200 for all that a program can do, and 504 if nothing ran for lack of room."""
    return await _answered(request, caller, service, _code_work)


@router.post(RUN_JUPYTER)
async def jupyter(request: Request, caller: Runner, service: TheService) -> Response:
    """Run cells in one interpreter, with their rich outputs."""
    return await _answered(request, caller, service, _jupyter_work)


@router.get(PING)
async def ping() -> str:
    """Tell that the service answers. No key is needed."""
    return "pong"


async def _answered(
    request: Request, caller: Caller, service: Service, read: Callable[[Service, object], Awaitable[FusionWork | bytes]]
) -> Response:
    begun = asyncio.get_running_loop().time()
    try:
        size = len(await request.body())
        work = await read(service, await request.json())
        if isinstance(work, bytes):
            return _json(work)
        return await _run(request, caller, service, work, size=size, begun=begun)
    except (LanguageUnavailable, InvalidRequest, PolicyDenied) as error:
        exit_code = NOT_FOUND if isinstance(error, LanguageUnavailable) else NOT_RUN
        return _json(refused(str(error), exit_code, has_cells=read is _jupyter_work))
    except (BackendUnavailable, StartFailed) as error:
        raise _no_room(f"no sandbox could be started: {error}") from error
    except Refused as error:
        if error.status_code != BUSY:
            raise
        raise _no_room(str(error.detail)) from error


def _no_room(why: str) -> Refused:
    return Refused(504, "busy", why, remedy="try again", headers={"Retry-After": "1"})


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


async def fusion_options(service: Service) -> dict[str, Any]:
    """Return the options of this mode's runs: the service's, and the mode's own where the operator set none."""
    await service.use_stored()
    origins = load_settings(dict(service.options.options)).origins
    return {**service.options.options, **{key: value for key, value in DEFAULTS.items() if origins[key] == "default"}}


async def _code_work(service: Service, data: object) -> FusionWork | bytes:
    fields = validated(CodeRequest, data)
    options = await fusion_options(service)
    settings = load_settings(options)
    language = language_of(fields.language)
    if language is None or not is_allowed(language, settings.policy.languages):
        return refused(why_no_language(fields.language, settings.policy.languages), NOT_FOUND)
    seconds = {"run_timeout": fields.run_timeout}
    if is_compiled(language):
        seconds["compile_timeout"] = fields.compile_timeout
    limits = limits_of(settings, memory_mb=fields.memory_limit_MB, seconds=seconds)
    files = await input_files(fields)
    options = {**options, "memory": limits.memory_bytes}
    left_out = [name for name in ("files", "stdin") if getattr(fields, name)]
    return FusionWork(
        language=language.name,
        start=lambda: run_code(fields, language, files, options, limits.seconds),  # type: ignore[arg-type]
        most_wait_s=fields.most_wait_s(is_compiled=is_compiled(language)),
        asked=_asked(fields.code, language.name, limits.seconds["run_timeout"], left_out),
        notes=limits.notes,
    )


async def _jupyter_work(service: Service, data: object) -> FusionWork | bytes:
    fields = validated(JupyterRequest, data)
    options = await fusion_options(service)
    settings = load_settings(options)
    python = language_of("python" if fields.kernel == "python3" else fields.kernel)
    if python is None or python.name != "python" or not is_allowed(python, settings.policy.languages):
        why = f"kernel {fields.kernel!r} is not there; this service has python3"
        return refused(why, NOT_FOUND, has_cells=True)
    limits = limits_of(settings, memory_mb=None, seconds={"total_timeout": fields.total_timeout})
    files, total_s = await input_files(fields), limits.seconds["total_timeout"]
    return FusionWork(
        language="python",
        start=lambda: run_cells(fields, files, options, total_s),  # type: ignore[arg-type]
        most_wait_s=service.options.queue_deadline_s,
        asked=_asked("\n\n".join(fields.cells), "python", total_s, ["files"] if files else []),
        notes=limits.notes,
    )


def _asked(code: str, language: str, timeout_s: float, left_out: list[str]) -> dict[str, Any]:
    kept = {"code": code} if len(code) <= MOST_KEPT_CHARS else {}
    left = [*left_out, *([] if kept else ["code"])]
    return {**kept, "language": language, "timeout": timeout_s, **({"leftOut": left} if left else {})}


async def _run(
    request: Request, caller: Caller, service: Service, work: FusionWork, *, size: int, begun: float
) -> Response:
    """Queue the work and return its answer. Raises Refused: 503 if it found no place in time; then nothing ran."""
    runs, ends, held = service.runs, begun + work.most_wait_s, _Held(service=service)

    async def start(_sink: Sink | None) -> Result:
        held.answer = await work.start()
        held.answer.notes[:0] = work.notes
        await held.take()
        return held.answer.deciding

    order = RunOrder(
        project=caller.project, api_key=caller.key_id, session_id=None, start=start, size=size,
        summary={"sessionId": None, "language": work.language}, has_events=False, noted_beside=True, asked=work.asked,
        encode=held.encode, ends_waiting=ends,
    )  # fmt: skip
    try:
        while not runs.has_room(order) and not runs.is_closed and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(LOOK_EVERY_S)
            if await request.is_disconnected():
                raise Refused(499, "cancelled", "the client went away")
        await wait_or_cancel(request, await runs.submit(order))
    except BaseException:
        held.give_back()
        raise
    return _HeldResponse(held)


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """Hold one answer, and its share of the memory for all answers until it is sent."""

    service: Service
    answer: FusionAnswer | None = None
    data: bytes = b""
    share: int = 0

    async def take(self) -> None:
        """Wait until there is memory for a large answer. The run keeps its place meanwhile."""
        assert self.answer is not None  # noqa: S101 - set before
        if (size := self.answer.size) > FEW_BYTES:
            await self.service.answers.take(size)
            self.share = size

    def give_back(self) -> None:
        """Give the share back."""
        self.service.answers.give_back(self.share)
        self.share = 0

    async def encode(self, run_id: str, result: Result) -> tuple[str, Encoded]:
        """Encode the answer, and return the record of the run, which has the begin of its output alone."""
        assert self.answer is not None  # noqa: S101 - set before
        if self.share:
            self.data = await asyncio.to_thread(self.answer.encode)
        else:
            self.data = self.answer.encode()
        self.answer = None  # the bytes are all that is sent
        return "", Encoded(_record(run_id, result))


def _record(run_id: str, result: Result) -> str:
    document = {"id": run_id, **result_as_wire(result)}
    for name in ("stdout", "stderr"):
        document["truncated"] = document["truncated"] or len(document[name]) > KEPT_CHARS
        document[name] = document[name][:KEPT_CHARS]
    return as_json({**document, "outputs": [], "files": []})


class _HeldResponse(Response):
    """A response that gives its memory back once it is sent, or its client is gone."""

    def __init__(self, held: _Held):
        super().__init__(held.data, media_type="application/json")
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.give_back()
