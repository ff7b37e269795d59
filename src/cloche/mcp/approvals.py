"""Approval by the human behind the client, through the protocol's elicitation.

Theory of operation: the questions are resolvers, which the protocol package answers as each revision defines: while the
call waits (up to 2025-11-25), or by having the client call again with the answer and a sealed state (from 2026-07-28
on). The answer goes to the toolbox's own gate, which decides: it counts for exactly the call and the rules that were
shown. A client without elicitation, a late answer and any other answer are a no.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Any

from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, Resolve
from mcp.server.request_state import AESGCMRequestStateCodec
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    ClientCapabilities,
    ElicitationCapability,
    FormElicitationCapability,
    MissingRequiredClientCapabilityErrorData,
)
from pydantic import BaseModel, Field

from cloche.agent.approval import ApprovalRequest, Decision, Risk
from cloche.agent.terminal import (
    changes_told,
    describe_rules,
    warnings_about,
    what_changes_are,
    where_it_runs,
)
from cloche.core.escape import escape
from cloche.core.record import dataclass, field

MOST_NAME_CHARS = 80


class Approval(BaseModel):
    """Answer for a CRITICAL call: it is asked every time."""

    approve: bool = Field(strict=True, title="Run it", description="Yes runs exactly what is shown, once.")


class RememberedApproval(Approval):
    """Answer for a HIGH call."""

    remember: bool = Field(
        default=False, strict=True, title="Remember", description="Do not ask again for the same call in this session."
    )


class Confirmation(BaseModel):
    """Answer for the confirmation of an approved CRITICAL call."""

    confirm: bool = Field(strict=True, title="Confirm", description="Yes, run it on the host itself.")


@dataclass(slots=True)
class Asking:
    """Hold one call while its approval is settled: its question, its client, and the answers so far.

    With `is_kept` the call is one of a session, where a yes can be remembered.
    """

    request: ApprovalRequest | None
    who: str
    is_kept: bool
    decisions: dict[bool, Decision] = field(default_factory=dict)  # by whether it is the confirmation


_ASKING: ContextVar[Asking] = ContextVar("cloche.mcp.asking")
_TOKEN: ContextVar[str | None] = ContextVar("cloche.mcp.token", default=None)


def begin(asking: Asking) -> None:
    """Name the call that the resolvers ask about, in this task and those it makes."""
    _ASKING.set(asking)


async def ask(context: Context[Any, Any]) -> Elicit[Any] | None:
    """Ask whether to run a call; None if it needs no approval."""
    asking = _ASKING.get()
    request = asking.request
    if request is None:
        return None
    require_elicitation(context, request)
    form = RememberedApproval if request.risk is Risk.HIGH and asking.is_kept else Approval
    return Elicit(question(request), form)


async def confirm(
    approval: Annotated[ElicitationResult[Approval], Resolve(ask)],
) -> Elicit[Confirmation] | None:
    """Ask once more about a CRITICAL call that was approved."""
    request = _ASKING.get().request
    if request is None or request.risk < Risk.CRITICAL or not _is_yes(approval, "approve"):
        return None
    return Elicit(question(request, is_confirmation=True), Confirmation)


def take_answers(approval: ElicitationResult[Any], confirmation: ElicitationResult[Any]) -> None:
    """Store the answers for `answered`."""
    asking = _ASKING.get()
    remember = isinstance(approval, AcceptedElicitation) and getattr(approval.data, "remember", False) is True
    asking.decisions[False] = _decision(approval, "approve", asking.who, is_remembered=remember)
    asking.decisions[True] = _decision(confirmation, "confirm", asking.who)


def take_refusal(reason: str, *, by: str) -> None:
    """Store a no."""
    asking = _ASKING.get()
    no = Decision(is_approved=False, by=by, reason=reason)
    asking.decisions.update({False: no, True: no})


async def answered(request: ApprovalRequest) -> Decision:
    """Be the approver of a toolbox: return the answer of the client's user about this very call, else no."""
    asking = _ASKING.get(None)
    shown = asking.request if asking is not None else None
    if asking is None or shown is None or shown.fingerprint != request.fingerprint:
        return Decision(is_approved=False, by="default", reason="the client's user was not asked about this call")
    decision = asking.decisions.get(request.is_confirmation)
    return decision or Decision(is_approved=False, by="default", reason="the client's user did not answer")


def _is_yes(outcome: ElicitationResult[Any], name: str) -> bool:
    return isinstance(outcome, AcceptedElicitation) and getattr(outcome.data, name, None) is True


def _decision(outcome: ElicitationResult[Any], name: str, client: str, *, is_remembered: bool = False) -> Decision:
    if _is_yes(outcome, name):
        return Decision(is_approved=True, by=client, is_remembered=is_remembered)
    reason = "the answer was no" if outcome.action == "accept" else f"the answer was {outcome.action}"
    return Decision(is_approved=False, by=client, reason=reason)


def user_of(context: Context[Any, Any]) -> str:
    """Name the client, by its own statement: quoted and cut."""
    client = context.session.client_params
    name = client.client_info.name if client is not None else ""
    return f"the user of {escape(name)[:MOST_NAME_CHARS]!r}" if name else "the client's user"


def require_elicitation(context: Context[Any, Any], request: ApprovalRequest) -> None:
    """Raise the protocol's own error when a client cannot ask its user."""
    capabilities = context.client_capabilities
    elicitation = capabilities.elicitation if capabilities is not None else None
    if elicitation is not None and (elicitation.form is not None or elicitation.url is None):
        return
    needed = ClientCapabilities(elicitation=ElicitationCapability(form=FormElicitationCapability()))
    data = MissingRequiredClientCapabilityErrorData(required_capabilities=needed)
    raise MCPError(
        code=MISSING_REQUIRED_CLIENT_CAPABILITY,
        message=f"{request.tool} was not approved: it is a {request.risk} tool, and this client cannot ask its user "
        "(it has no form elicitation). Use a client that can, or have the operator choose who approves "
        "(`cloche mcp --approve`).",
        data=data.model_dump(by_alias=True, mode="json", exclude_none=True),
    )


def question(request: ApprovalRequest, *, is_confirmation: bool = False) -> str:
    """Return the question for the user: the whole call with nothing hidden, and the rules."""
    asks = "Confirm once more:" if is_confirmation else "Approve"
    sections = [f"{asks} {request.tool} ({request.risk}, on {escape(where_it_runs(request))})?"]
    for name, value in request.arguments.items():
        if name in ("code", "command"):
            sections.append(_fenced(escape(str(value)), _language(request.arguments, name)))
            sections += [line for line in (warnings_about(str(value)).rstrip("\n"),) if line]
        else:
            sections.append(f"{name}: {escape(str(value))}")
    if rules := describe_rules(request):
        sections.append(f"rules: {escape(rules)}")
    if changes := changes_told(request):
        sections.append(_fenced("\n".join(map(escape, changes)), "text"))
    if request.changes:
        sections.append(f"{what_changes_are(request).capitalize()}:\n" + _fenced(escape(request.changes), "diff"))
    return "\n".join(sections)


def _language(arguments: Mapping[str, Any], name: str) -> str:
    return str(arguments.get("language", "bash" if name == "command" else "python"))


def _fenced(text: str, language: str) -> str:
    """Return text in a fence that it cannot close: a client may show the question as Markdown."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


class NotedStates(AESGCMRequestStateCodec):
    """Seal states as the protocol package does, and remember which one the request at hand came with."""

    def unseal(self, token: str) -> bytes:
        payload = super().unseal(token)
        _TOKEN.set(token)
        return payload


class Spent:
    """Remember used states: an answer is good for one call, not for its repetition.

    `ttl_s` is how long a state is valid, in seconds; older ones are forgotten.
    """

    def __init__(self, ttl_s: float):
        self._ttl_s = ttl_s
        self._until: dict[bytes, float] = {}

    def spend(self, now: float | None = None) -> bool:
        """Use up the state of the request at hand, which has one; False when it was used before."""
        token = _TOKEN.get()
        if token is None:
            return False
        moment = time.monotonic() if now is None else now
        self._until = {key: until for key, until in self._until.items() if until > moment}
        key = hashlib.sha256(token.encode()).digest()
        if key in self._until:
            return False
        self._until[key] = moment + self._ttl_s
        return True
