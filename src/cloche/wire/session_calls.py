"""Sessions whose cells call functions of the client: a call of the wire carries them as long as the session lasts."""

from __future__ import annotations

from cloche.core.functions import offering

from .calls import Call, CallRequest
from .host_calls import OffersTools, Relay
from .problems import Refused
from .sessions import NewSession
from .sessions import open_session as open_usual
from .work import use_of


class WireSession(NewSession, OffersTools):
    """A session to open."""


async def open_session(_: Call, request: CallRequest) -> object:
    """Open a session. Its calls of the client's functions wait until the client carries them."""
    fields: WireSession = request.fields
    if not fields.tools:
        return await open_usual(use_of(request), fields)
    fields.check(use_of(request).sandbox)
    relay = Relay(fields.tools)
    with offering(relay):
        facts = await open_usual(use_of(request), fields)
    use_of(request).held.session(facts["id"]).relay = relay
    return facts


async def carry_calls(call: Call, request: CallRequest) -> object:
    """Carry a session's calls, until the session ends or this call is cancelled. Raises Refused (409) the next time."""
    relay = use_of(request).held.session(request.ids["session"]).relay
    if relay is None or relay.is_carried:
        raise Refused(409, "followed", "the calls of this session were carried already, or it was opened without tools")
    await relay.carry(call)
    return {}
