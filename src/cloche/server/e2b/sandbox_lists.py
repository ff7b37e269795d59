"""Lists of sandboxes, in both versions. Filters come first, then the order by time and id, then the page.

A page's token is the time and id of its last sandbox, so pages stay right while sandboxes come and go.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from urllib.parse import unquote_plus

from starlette.responses import JSONResponse, Response

from cloche.core.record import dataclass, field
from cloche.records import sandboxes as records
from cloche.records.ids import moment
from cloche.records.sandboxes import SandboxFacts
from cloche.wire.callers import Caller

from . import states
from .calls import Call, Row, is_own
from .errors import E2BError
from .sandboxes import as_listed

MOST_ITEMS = 100  # of one page
LISTED = (states.RUNNING, states.PAUSED)
Position = tuple[str, str]  # the time of a sandbox, and its row's id


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Hold which sandboxes are listed, in which order, and after which position."""

    states: Sequence[str] = LISTED
    metadata: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    started_after: str | None = None
    is_ascending: bool = False
    limit: int = MOST_ITEMS
    after: Position | None = None

    def has(self, facts: SandboxFacts) -> bool:
        """Tell whether a sandbox is one of the list."""
        own = facts.document["e2b"]
        return (
            states.state_of(facts) in self.states
            and self.metadata.items() <= own["metadata"].items()
            and self.template in (None, own["templateID"], own["alias"])
            and (self.started_after is None or facts.created_at >= self.started_after)
        )


def page_of(rows: Sequence[SandboxFacts], query: Query) -> tuple[list[SandboxFacts], str | None]:
    """Return one page, and the token of the next one if there is more."""
    listed = sorted(filter(query.has, rows), key=_position, reverse=not query.is_ascending)
    if query.after is not None:
        after = query.after
        listed = [
            facts for facts in listed if (_position(facts) > after if query.is_ascending else _position(facts) < after)
        ]
    page = listed[: query.limit]
    return page, token_of(page[-1]) if len(listed) > len(page) else None


def _position(facts: SandboxFacts) -> Position:
    return facts.created_at, facts.id


def token_of(facts: SandboxFacts) -> str:
    """Return the token of the page after a sandbox."""
    return base64.urlsafe_b64encode("__".join(_position(facts)).encode()).decode()


def read_token(text: str) -> Position:
    """Return the position of a token. Raises E2BError."""
    try:
        started_at, separator, row = base64.urlsafe_b64decode(text.encode("ascii")).decode("ascii").partition("__")
        _read_time(started_at)
    except ValueError as error:
        raise E2BError(400, "nextToken: this is not a token of a list") from error
    if not separator:
        raise E2BError(400, "nextToken: this is not a token of a list")
    return started_at, row


def _read_time(text: str) -> str:
    """Return a time in the format of records. Raises ValueError."""
    time = datetime.fromisoformat(text.replace(" ", "+"))  # a plus sign that a client did not encode
    return moment((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp())


def read_metadata(text: str) -> dict[str, str]:
    """Return the metadata of a filter, whose names and values are encoded twice beyond the query. Raises E2BError."""
    pairs = [pair.split("=") for pair in unquote_plus(text).split("&")]
    if any(len(pair) != 2 for pair in pairs):
        raise E2BError(400, "metadata: give names and values as name=value, joined by &, each percent-encoded")
    return {unquote_plus(name): unquote_plus(value) for name, value in pairs}


def read_query(given: Mapping[str, str]) -> Query:
    """Return the parameters of a list. Raises E2BError."""
    wanted = [state for state in given.get("state", "").split(",") if state] or list(LISTED)
    if not set(wanted) <= set(LISTED):
        raise E2BError(400, f"state: give some of {', '.join(LISTED)}, separated by commas")
    order, limit = given.get("order", "desc"), given.get("limit", str(MOST_ITEMS))
    if order not in ("asc", "desc"):
        raise E2BError(400, "order: give asc or desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST_ITEMS):
        raise E2BError(400, f"limit: give a number from 1 to {MOST_ITEMS}")
    try:
        started_after = _read_time(given["startedAfter"]) if given.get("startedAfter") else None
    except (ValueError, OverflowError) as error:
        raise E2BError(400, "startedAfter: give a time such as 2026-01-31T12:00:00Z") from error
    return Query(
        states=wanted, metadata=read_metadata(given["metadata"]) if given.get("metadata") else {},
        template=given.get("template") or None, started_after=started_after, is_ascending=order == "asc",
        limit=int(limit), after=read_token(given["nextToken"]) if given.get("nextToken") else None,
    )  # fmt: skip


async def own_sandboxes(call: Call, caller: Caller) -> list[SandboxFacts]:
    """Return the sandboxes of a caller that run or are paused."""
    await call.service.sandboxes.compare()
    rows = await call.service.read(partial(records.living_of, project=caller.project))
    return [facts for facts in rows if "e2b" in facts.document and is_own(caller, facts)]


async def list_running(call: Call) -> Response:
    """List the running sandboxes, the newest first, as version 1 does."""
    caller = await call.caller("read")
    query = read_query({"state": states.RUNNING, "metadata": call.request.query_params.get("metadata", "")})
    listed = sorted(filter(query.has, await own_sandboxes(call, caller)), key=_position, reverse=True)
    return JSONResponse([as_listed(facts) for facts in listed])


async def list_page(call: Call) -> Response:
    """List the sandboxes, one page at a time."""
    caller = await call.caller("read")
    query = read_query(call.request.query_params)
    rows = await own_sandboxes(call, caller)
    page, token = page_of(rows, query)
    headers = {"x-total-running": str(sum(states.state_of(facts) == states.RUNNING for facts in rows))}
    headers |= {} if token is None else {"x-next-token": token}
    return JSONResponse([as_listed(facts) for facts in page], headers=headers)


ROWS = (
    Row(method="GET", path="/sandboxes", handler=list_running),
    Row(method="GET", path="/v2/sandboxes", handler=list_page),
)
