"""Sessions whose cells call functions of the client: a call of the wire carries them as long as the session lasts."""

from __future__ import annotations

from contextlib import nullcontext

from cloche.core.functions import offering

from .calls import Call, CallRequest
from .host_calls import OffersTools, Relay
from .problems import Refused
from .sessions import NewSession
from .sessions import fork as fork_plainly
from .sessions import open_session as open_usual
from .work import run_cell as run_plain_cell
from .work import use_of


class WireSession(NewSession, OffersTools):
    """A session to open."""


async def open_session(_: Call, request: CallRequest) -> object:
    """Open a session. Its calls of the client's functions wait until the client carries them."""
    fields: WireSession = request.fields
    if not fields.tools:
        return await open_usual(use_of(request), fields)
    fields.check(use_of(request).sandbox)
    await fields.record(request)
    relay = Relay(fields.tools)
    with offering(relay):
        facts = await open_usual(use_of(request), fields)
    use_of(request).held.session(facts["id"]).relay = relay
    return facts


async def carry_calls(call: Call, request: CallRequest) -> object:
    """Carry a session's calls, until its guest ends or changes, or this call is cancelled. Raises Refused (409)."""
    relay = use_of(request).held.session(request.ids["session"]).relay
    if relay is None:
        raise Refused(409, "followed", "this session was opened without tools")
    await relay.carry(call)
    return {}


async def run_cell(call: Call, request: CallRequest) -> object:
    """Run a cell, whose calls of the client's functions are those of its session."""
    relay = use_of(request).held.session(request.ids["session"]).relay
    with offering(relay) if relay is not None else nullcontext():
        return await run_plain_cell(call, request)


async def fork(_: Call, request: CallRequest) -> object:
    """Fork a session. Forks of one with tools have them, too."""
    use, fields = use_of(request), request.fields
    relay = use.held.session(request.ids["session"]).relay
    facts = await fork_plainly(use, request.ids["session"], fields)
    if relay is not None:
        for row in facts["items"]:
            use.held.session(row["id"]).relay = Relay(relay.names)
    return facts
