"""Who says yes: a human, or rules that a human made. Whatever is not said yes to in time is a no.

Theory of operation: LOW and MEDIUM pass. HIGH is asked for once, and may be remembered for the same code under the same
rules. CRITICAL is asked for and then asked for once more, on every call; nothing remembers it, and no automatic
approver says yes to it. An approver is an async function from a request to a decision; that it fails is a no.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cloche.core.errors import ApprovalDenied, InvalidRequest

from .risk import Risk

PATIENCE_S = 300.0

log = logging.getLogger("cloche.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRequest:
    """Ask for one call of a tool. `arguments` are the model's; `rules` say what will hold, as plain data.

    `changes` is a unified diff against what this tool was asked to do last, empty the first time. With
    `is_confirmation` the same call was approved a moment ago and is asked for again.
    """

    tool: str
    risk: Risk
    arguments: Mapping[str, Any]
    rules: Mapping[str, Any] = field(default_factory=dict)
    changes: str = ""
    is_confirmation: bool = False

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the call and its rules, in hex: what is remembered is this and nothing like it."""
        told = {"tool": self.tool, "risk": int(self.risk), "arguments": self.arguments, "rules": self.rules}
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Say yes or no. `by` names who; with `is_remembered` the same HIGH call is not asked for again."""

    is_approved: bool
    by: str
    reason: str = ""
    is_remembered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Say that an approval is waited for."""

    request: ApprovalRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Say what was decided; `was_remembered` that nobody was asked this time."""

    request: ApprovalRequest
    decision: Decision
    was_remembered: bool = False


ApprovalEvent = Asked | Decided
Approver = Callable[[ApprovalRequest], Awaitable[Decision]]


async def deny(request: ApprovalRequest) -> Decision:
    """Say no to everything: what holds where nobody was named."""
    return Decision(
        is_approved=False, by="default", reason=f"nobody was named who may approve {request.risk} tools; pass approve="
    )


def auto(up_to: Risk | str = Risk.HIGH) -> Approver:
    """Return an approver that says yes up to a risk. Raises InvalidRequest for CRITICAL: that takes a human."""
    most = _read_risk(up_to)
    if most >= Risk.CRITICAL:
        raise InvalidRequest("critical calls are never approved automatically; name a human: ask_terminal, or a queue")

    async def decide(request: ApprovalRequest) -> Decision:
        if request.risk <= most:
            return Decision(is_approved=True, by=f"auto({most})")
        return Decision(is_approved=False, by=f"auto({most})", reason=f"{request.risk} is above {most}")

    return decide


def callback(function: Callable[[ApprovalRequest], bool | Decision | Awaitable[bool | Decision]]) -> Approver:
    """Return an approver that asks a function of yours, async or not; it returns a bool or a Decision.

    One that is not async runs in a thread, so that waiting for a human stops nothing else.
    """

    async def decide(request: ApprovalRequest) -> Decision:
        if inspect.iscoroutinefunction(function):
            said = await function(request)
        else:
            said = await asyncio.to_thread(function, request)
            said = await said if inspect.isawaitable(said) else said
        return said if isinstance(said, Decision) else Decision(is_approved=said is True, by="callback")

    return decide


def _read_risk(value: Risk | str) -> Risk:
    if isinstance(value, Risk):
        return value
    try:
        return Risk[value.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(map(str, Risk))
        raise InvalidRequest(f"unknown risk {value!r}; known: {known}") from None


class Gate:
    """Let calls through that somebody has said yes to. `patience_s` is how long each answer is waited for."""

    def __init__(
        self,
        approver: Approver = deny,
        *,
        patience_s: float = PATIENCE_S,
        on_event: Callable[[ApprovalEvent], None] = lambda _: None,
    ):
        self._approver, self._patience_s, self._on_event = approver, patience_s, on_event
        self._remembered: dict[str, Decision] = {}
        self._last: dict[str, str] = {}

    async def pass_through(self, request: ApprovalRequest) -> Decision | None:
        """Return the decision that lets a call through, None where none is needed. Raises ApprovalDenied."""
        if request.risk < Risk.HIGH:
            return None
        request = replace(request, changes=self._changes(request))
        known = self._remembered.get(request.fingerprint)
        if known is not None and request.risk is Risk.HIGH:
            self._on_event(Decided(request=request, decision=known, was_remembered=True))
            return known
        decision = await self._ask(request)
        if request.risk is Risk.CRITICAL:
            decision = await self._ask(replace(request, is_confirmation=True))
        elif decision.is_remembered:
            self._remembered[request.fingerprint] = decision
        return decision

    async def _ask(self, request: ApprovalRequest) -> Decision:
        self._on_event(Asked(request=request))
        decision = await self._decision(request)
        self._on_event(Decided(request=request, decision=decision))
        if decision.is_approved is not True:
            why = f": {decision.reason}" if decision.reason else ""
            raise ApprovalDenied(f"{request.tool} was not approved by {decision.by}{why}")
        return decision

    async def _decision(self, request: ApprovalRequest) -> Decision:
        try:
            return await asyncio.wait_for(self._approver(request), self._patience_s)
        except TimeoutError:
            return Decision(is_approved=False, by="time-out", reason=f"no answer within {self._patience_s:g} s")
        except Exception as error:
            log.warning("an approver failed, which is a no: %s", error, exc_info=error)
            return Decision(is_approved=False, by="error", reason=f"the approver failed: {type(error).__name__}")

    def _changes(self, request: ApprovalRequest) -> str:
        now = "\n".join(f"{name}: {value}" for name, value in request.arguments.items())
        before, self._last[request.tool] = self._last.get(request.tool, ""), now
        if not before or before == now:
            return ""
        lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="")
        return "\n".join(lines)
