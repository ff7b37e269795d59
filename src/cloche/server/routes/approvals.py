"""`/api/approvals`: requests for approval, their decisions by a human, and waiting for a decision.

The key that made a request cannot decide about it. A decision and its audit event are written in the same transaction:
without the event there is no decision.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, StringConstraints
from sqlalchemy.orm import Session

from cloche.agent.approval import PATIENCE_S, ApprovalRequest, Decided, Decision, Risk, record_decision
from cloche.agent.queue import NotWaiting, QueueEntry, changes_since
from cloche.agent.terminal import choices
from cloche.audit.log import Audit, acting, audit_for
from cloche.core.errors import InvalidRequest, NotFound, RecordsFailed
from cloche.core.record import replace
from cloche.records import approvals as records
from cloche.wire.bodies import validated
from cloche.wire.callers import Caller
from cloche.wire.exec_options import WireModel
from cloche.wire.problems import Refused

from ..approvals import ApprovalChange, change_of
from ..auth import Approver, Runner, TheService, needs
from ..bodies import JsonRoute
from ..events import HEARTBEAT, as_sent
from ..problems import RESPONSES
from ..service import Service
from ..streams import HeldStream

router = APIRouter(prefix="/api/approvals", tags=["approvals"], route_class=JsonRoute)
OF_HOSTS = ("is_once", "is_for_folder")  # fields of a Decision that the page offers for hosts
MOST_BYTES = 256 << 10  # of a request with all its arguments
MOST_WAITING = 64  # requests of one key
MOST_WAIT_S = 60.0
HEARTBEAT_S = 15.0
EXPIRY_S = 0.02  # margin after the deadline, so that the request has expired
STREAM_S = 900.0  # then the client reconnects, which checks its key
MOST_CAUGHT_UP = 500

Onlooker = Annotated[Caller, needs("read", "approve")]
Asker = Annotated[Caller, needs("read", "approve", "run")]
Number = Annotated[int, Path(ge=1, lt=1 << 63)]
Wait = Annotated[float, Query(ge=0, le=MOST_WAIT_S, description="How many seconds to wait.")]


class NewApproval(WireModel):
    """A tool call that needs approval. `rules` describe the conditions of the call, such as `runs_on` and `policy`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "tool": "run_code", "risk": "high", "arguments": {"code": "print(1)"},
                    "rules": {"runs_on": "local"}, "patienceSeconds": 300,
                }
            ]
        }
    )  # fmt: skip

    tool: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    risk: Literal["low", "medium", "high", "critical"]
    arguments: dict[str, Any] = Field(default_factory=dict)
    rules: dict[str, Any] = Field(default_factory=dict)
    patience_seconds: Annotated[float, Field(gt=0, le=86_400)] = PATIENCE_S


class Word(WireModel):
    """A reason for a decision. With `remember`, the agent does not ask again for the same High call."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reason": "reviewed", "remember": False}]})

    reason: Annotated[str, StringConstraints(max_length=1_000)] = ""
    remember: bool = False


_NO_JSON: dict[str, Any] = {**RESPONSES[413], "description": "It is not JSON."}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": NewApproval.model_json_schema(ref_template="#/components/schemas/{model}")}
        },
    }
}


@router.post("", status_code=201, responses={**RESPONSES, 415: _NO_JSON}, openapi_extra=_BODY)
async def ask(request: Request, caller: Runner, service: TheService) -> Response:
    """Request approval for a tool call. `GET /api/approvals/{id}?wait=30` waits for the decision.

    A request that reaches its deadline is denied.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", "application/json"):
        raise Refused(415, "unsupported-media-type", "send application/json")
    body = await request.body()
    if len(body) > MOST_BYTES:
        raise Refused(413, "body-too-large", f"an approval has {MOST_BYTES} bytes at most, arguments included")
    new_approval = validated(NewApproval, await request.json())
    plain = ApprovalRequest(
        tool=new_approval.tool,
        risk=Risk[new_approval.risk.upper()],
        arguments=new_approval.arguments,
        rules=new_approval.rules,
    )
    last = await service.read(partial(records.last_of_tool, tool=new_approval.tool, project=caller.project))
    text = await asyncio.to_thread(_request_text, plain, last)
    new = records.NewRequest(
        project=caller.project, asked_by=caller.name, text=text, patience_s=new_approval.patience_seconds
    )
    entry = await service.write(partial(_add, new=new))
    service.approvals.nudge()
    return await _answer(entry, status=201, headers={"Location": f"/api/approvals/{entry.number}"})


def _request_text(request: ApprovalRequest, last: ApprovalRequest | None) -> str:
    """Return a request as stored, with the changes since the last one of its tool. Raises InvalidRequest."""
    try:
        json.dumps([dict(request.arguments), dict(request.rules)], allow_nan=False)
    except ValueError as error:  # NaN, infinity, or an integer of too many digits
        raise InvalidRequest(f"arguments, rules: this cannot be written as JSON: {error}") from error
    changes = changes_since(last, request) if last is not None else ""
    return records.request_text(replace(request, changes=changes))


def _add(session: Session, new: records.NewRequest) -> QueueEntry:
    if records.count_waiting(session, asked_by=new.asked_by) >= MOST_WAITING:
        raise Refused(
            429, "too-many-waiting", f"{MOST_WAITING} requests of this key are waiting already, the maximum",
            remedy="wait until some of them are decided", headers={"Retry-After": "10"},
        )  # fmt: skip
    return records.ask(session, new)


@router.get("", responses=RESPONSES)
async def approvals(
    caller: Onlooker,
    service: TheService,
    status: Annotated[Literal["waiting", "approved", "denied", "expired"] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
    wait: Wait = 0.0,
) -> Response:
    """List requests for approval, the newest first. With `wait`, the answer comes as soon as a request waits."""
    if wait and (status not in (None, "waiting") or cursor is not None):
        raise InvalidRequest("wait: it works for waiting requests only; leave status and cursor out")
    page = partial(
        records.list_approvals, project=caller.project, status="waiting" if wait else status, limit=limit, cursor=cursor
    )
    document = await service.read(page)
    if wait and not document["items"]:
        document = await _until(service, caller.project, None, wait, page, lambda document: bool(document["items"]))
    return await _as_json(document)


@router.get(
    "/events", response_class=HeldStream,
    responses={**RESPONSES, 200: {"description": "Events as they happen.", "content": {"text/event-stream": {}}}},
)  # fmt: skip
async def events(
    caller: Onlooker, service: TheService, last_event_id: Annotated[int | None, Header(ge=0, lt=1 << 63)] = None
) -> Response:
    """Follow requests for approval as server-sent events: `asked`, `confirm`, `decided`, `expired`.

    The stream begins with the waiting approvals or, with `Last-Event-ID`, with later changes. It ends after 15 minutes,
    and for a reader that falls behind (`dropped`). Resume with the last number.
    """
    return HeldStream(_stream(service, caller.project, last_event_id), media_type="text/event-stream")


@router.get("/{number}", responses=RESPONSES)
async def approval(number: Number, caller: Asker, service: TheService, wait: Wait = 0.0) -> Response:
    """Return one request for approval. With `wait`, the answer comes once it is decided.

    It has the tool, who asked, risk, rules, changes and expiry. A key with only scope run sees only its own requests.
    """
    look = partial(_find, number=number, caller=caller)
    entry = await service.read(look)
    if wait and entry.state == "waiting":
        until_s = min(wait, entry.expires_at - time.time() + EXPIRY_S)
        entry = await _until(
            service, caller.project, number, until_s, look, lambda approval: approval.state != "waiting"
        )
    return await _answer(entry)


@router.post("/{number}/approve", responses=RESPONSES)
async def approve(number: Number, caller: Approver, service: TheService, word: Word | None = None) -> Response:
    """Approve a request. A critical request then needs a confirmation."""
    return await _decide(service, caller, number, word, is_approved=True, is_confirming=False)


@router.post("/{number}/confirm", responses=RESPONSES)
async def confirm(number: Number, caller: Approver, service: TheService, word: Word | None = None) -> Response:
    """Confirm a critical request that was approved (`isConfirmation`)."""
    return await _decide(service, caller, number, word, is_approved=True, is_confirming=True)


@router.post("/{number}/deny", responses=RESPONSES)
async def deny(number: Number, caller: Approver, service: TheService, word: Word | None = None) -> Response:
    """Deny a request, before or instead of its confirmation."""
    return await _decide(service, caller, number, word, is_approved=False, is_confirming=False)


def _find(session: Session, *, number: int, caller: Caller) -> QueueEntry:
    """Return a request that a caller may see. Raises NotFound."""
    entry = records.find(session, number, project=caller.project)
    if not (caller.has("read") or caller.has("approve") or entry.asked_by == caller.name):
        raise NotFound(f"you have no approval {number}")
    return entry


async def _until(
    service: Service, project: str, number: int | None, wait_s: float, look: Callable[[Session], Any],
    is_enough: Callable[[Any], bool],
) -> Any:  # noqa: ANN401 - what `look` returns  # fmt: skip
    """Return the result of `look` once it is enough, or after `wait_s`."""
    until = time.monotonic() + wait_s
    async with service.approvals.follow(project, number) as follower:
        while not is_enough(answer := await service.read(look)) and not follower.is_over:
            await follower.next(until - time.monotonic())
            if time.monotonic() >= until:
                return await service.read(look)
    return answer


async def _decide(
    service: Service, caller: Caller, number: int, word: Word | None, *, is_approved: bool, is_confirming: bool
) -> Response:
    remark = word or Word()
    return await _answer(
        await decide(service, caller, number, remark, is_approved=is_approved, is_confirming=is_confirming)
    )


async def decide(
    service: Service, caller: Caller, number: int, remark: Word, *, is_approved: bool, is_confirming: bool,
    kinds: Mapping[str, bool] = MappingProxyType({}),
) -> QueueEntry:  # fmt: skip
    """Decide about a request, and return its new state; `kinds` are those of OF_HOSTS that hold.

    Raises Refused, NotFound, AuditFailed.
    """
    decision = Decision(
        is_approved=is_approved, by=caller.name, reason=remark.reason, is_remembered=remark.remember,
        is_once="is_once" in kinds, is_for_folder="is_for_folder" in kinds,
    )  # fmt: skip
    settings = await service.settings()
    entry = await asyncio.to_thread(
        _note, service, caller, number, decision, audit_for(settings), is_confirming=is_confirming,
        takes_two_people=settings.approvals_two_people,
    )  # fmt: skip
    service.approvals.nudge()
    return entry


def _note(
    service: Service, caller: Caller, number: int, decision: Decision, audit: Audit | None, *, is_confirming: bool,
    takes_two_people: bool,
) -> QueueEntry:  # fmt: skip
    """Store a decision and its audit event in one transaction. Raises Refused, NotFound, AuditFailed."""
    try:
        with service.database.writing() as session:
            entry = records.find(session, number, project=caller.project)
            _check(entry, caller, decision, is_confirming=is_confirming)
            if is_confirming and takes_two_people:
                _check_other_person(entry, decision)
            records.decide(session, entry, decision, is_confirming=is_confirming, address=caller.address)
            with acting(address=caller.address, approval=number, asked_by=entry.asked_by):
                record_decision(audit, Decided(request=entry.request, decision=decision))
            return records.find(session, number, project=caller.project)
    except NotWaiting as error:
        raise Refused(409, "not-waiting", str(error)) from error


def _check(entry: QueueEntry, caller: Caller, decision: Decision, *, is_confirming: bool) -> None:
    if caller.key_id is not None and caller.key_id == entry.asked_by:
        raise Refused(
            403, "own-request", "this key made the request, so it may not decide about it",
            remedy="another user must decide: with another key with scope approve, or the page",
        )  # fmt: skip
    if decision.is_remembered and (entry.request.risk is not Risk.HIGH or not decision.is_approved):
        raise Refused(
            422,
            "invalid-request",
            "remember: only an approval of a call of risk high can be remembered",
            field="remember",
        )
    possible = {field for field, *_ in choices(entry.request)}
    if wrong := [kind for kind in OF_HOSTS if getattr(decision, kind) and kind not in possible]:
        raise Refused(422, "invalid-request", f"{wrong[0]}: only for hosts of a sandbox with a name, or with a folder")
    if entry.state == "waiting" and decision.is_approved and entry.request.is_confirmation != is_confirming:
        how = "was approved, and must be confirmed" if entry.request.is_confirmation else "must be approved first"
        verb = "confirm" if entry.request.is_confirmation else "approve"
        raise Refused(
            409, "not-waiting", f"approval {entry.number} {how}", remedy=f"POST /api/approvals/{entry.number}/{verb}"
        )


def _check_other_person(entry: QueueEntry, decision: Decision) -> None:
    if entry.first_decision is not None and entry.first_decision.by == decision.by:
        raise Refused(
            403, "same-person", f"{decision.by} approved this call, so they may not confirm it",
            remedy="another user must confirm: with another key with scope approve (approvals.two_people asks for it)",
        )  # fmt: skip


async def _stream(service: Service, project: str, after: int | None) -> AsyncGenerator[str]:
    """Yield server-sent events: the waiting or changed approvals, then each change."""
    ends = time.monotonic() + STREAM_S
    try:
        async with service.approvals.follow(project) as follower:
            last_version, changes = await service.read(partial(_caught_up, project=project, after=after))
            while changes:
                for change in changes:
                    yield as_sent(change.name, change.data, change.version)
                last_version, changes = await service.read(partial(_caught_up, project=project, after=last_version))
            while not (follower.is_over or follower.is_behind) and time.monotonic() < ends:
                following = await follower.next(HEARTBEAT_S)
                if following is None:
                    yield HEARTBEAT
                elif following.version is None or following.version > last_version:
                    yield as_sent(following.name, following.data, following.version)
            if follower.is_behind:
                yield as_sent("dropped", "{}")
    except (Refused, RecordsFailed) as error:  # the answer has begun
        yield as_sent("error", json.dumps({"error": getattr(error, "detail", None) or str(error)}))


def _caught_up(session: Session, *, project: str, after: int | None) -> tuple[int, list[ApprovalChange]]:
    """Return the newest version and the changes up to it."""
    if after is None:
        newest, entries = (
            records.newest_version(session),
            records.waiting(session, limit=MOST_CAUGHT_UP, project=project),
        )
    else:
        newest, entries = records.changed_after(session, after, limit=MOST_CAUGHT_UP, project=project)
    return newest, [change_of(entry) for entry in entries]


async def _answer(entry: QueueEntry, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return await _as_json(records.as_wire(entry, is_whole=True), status=status, headers=headers)


async def _as_json(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401 - plain data
    """Return ASCII JSON: a lone surrogate, which an agent may have sent, cannot be encoded as UTF-8."""
    text = await asyncio.to_thread(json.dumps, content, default=str)
    return Response(text, status, headers, media_type="application/json")
