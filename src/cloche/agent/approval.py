"""Approval of a tool's call: risks, requests, decisions, automatic approvers, and the gate that asks.

Theory of operation: `Risk` orders actions by their effect. LOW and MEDIUM pass. HIGH needs one approval, which may be
remembered for the same code under the same rules. CRITICAL needs an approval and a confirmation, on every call; it is
never remembered, and no automatic approver allows it. An approver is an async function from a request to a decision. An
approver that fails or does not answer in time has said no.
"""

from __future__ import annotations

import asyncio
import difflib
import enum
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cloche.audit.chain import sha256_of
from cloche.audit.log import Audit
from cloche.audit.recording import is_traced
from cloche.blocking.calls import in_own_thread
from cloche.core.errors import ApprovalDenied, InvalidRequest
from cloche.core.policy import Policy
from cloche.core.record import dataclass, field, replace

PATIENCE_S = 300.0
ON_HOST = "the host"  # what `runs_on` of the rules says where there is no sandbox
CANCEL_TIMEOUT_S = 2.0  # for a cancelled approver to clean up
_CODE = ("code", "command")  # the arguments of tools that are run
MOST_COMPARED_LINES = 2_000  # comparing takes time with the square of it
log = logging.getLogger("cloche.agent")


class Risk(enum.IntEnum):
    """Order actions by their effect; from HIGH on, a human decides."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRequest:
    """Ask for one call of a tool. `arguments` are the model's; `rules` are those that will hold, as plain data.

    `changes` is a unified diff: of the changes to the host's folder, else of arguments and rules against the last
    request for this tool, empty the first time. With `is_confirmation` the same call was approved a moment ago and
    needs a second yes.
    """

    tool: str
    risk: Risk
    arguments: Mapping[str, Any]
    rules: Mapping[str, Any] = field(default_factory=dict)
    changes: str = ""
    is_confirmation: bool = False

    @classmethod
    def of_host(
        cls, host: str, port: int, *, policy: Policy, runs_on: str, sandbox: str = "", folder: str = ""
    ) -> ApprovalRequest:
        """Return the request about a host without a rule; for the `sandbox` with a name, if it has one.

        For later sandboxes in a `folder`, too, if the decision `is_for_folder`.
        """
        rules = {"network": policy.network, "network_allow": policy.network_allow}
        return cls(
            tool="network", risk=Risk.HIGH,
            arguments={
                "host": host, "port": port, **({"sandbox": sandbox} if sandbox else {}),
                **({"folder": folder} if folder else {}),
            },
            rules={"runs_on": runs_on, "policy": rules},
        )  # fmt: skip

    @property
    def call(self) -> str:
        """Return the request in short: code, a command, or a host."""
        shown = self.arguments.get("code", self.arguments.get("command"))
        if shown is None and "host" in self.arguments:
            of = f" for sandbox {self.arguments['sandbox']}" if "sandbox" in self.arguments else ""
            shown = f"{self.arguments['host']}:{self.arguments.get('port')}{of}"
        return "" if shown is None else str(shown)

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the call and its rules, in hex; a remembered approval holds for this value only."""
        data = {"tool": self.tool, "risk": int(self.risk), "arguments": dict(self.arguments), "rules": dict(self.rules)}
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Say yes or no. `by` names who; with `is_remembered` the same HIGH call is not asked for again.

    With `is_for_folder` a host is not asked about again in the folder that the request names, also not later; with
    `is_once` it is asked about again at the next connection.
    """

    is_approved: bool
    by: str
    reason: str = ""
    is_remembered: bool = False
    is_for_folder: bool = False
    is_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Say that an approval is waited for."""

    request: ApprovalRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Hold a decision; `was_remembered` says that the approver was not called this time."""

    request: ApprovalRequest
    decision: Decision
    was_remembered: bool = False


ApprovalEvent = Asked | Decided
Approver = Callable[[ApprovalRequest], Awaitable[Decision]]


async def deny(request: ApprovalRequest) -> Decision:
    """Say no to everything: the default without an approver."""
    return Decision(
        is_approved=False, by="default", reason=f"there is no approver for {request.risk} tools; pass approve="
    )


def auto(up_to: Risk | str = Risk.HIGH) -> Approver:
    """Return an approver that says yes up to a risk. Raises InvalidRequest for CRITICAL: that takes a human."""
    highest = _read_risk(up_to)
    if highest >= Risk.CRITICAL:
        raise InvalidRequest(
            "critical calls are never approved automatically; name a human: AskTerminal(), a callback, or a queue"
        )

    async def decide(request: ApprovalRequest) -> Decision:
        if request.risk <= highest:
            return Decision(is_approved=True, by=f"auto({highest})")
        return Decision(is_approved=False, by=f"auto({highest})", reason=f"{request.risk} is above {highest}")

    return decide


def callback(function: Callable[[ApprovalRequest], bool | Decision | Awaitable[bool | Decision]]) -> Approver:
    """Return an approver that calls a function, async or not; it returns a bool or a Decision.

    A function that is not async runs in a separate thread, so that waiting for a human blocks nothing else.
    """

    async def decide(request: ApprovalRequest) -> Decision:
        if inspect.iscoroutinefunction(function):
            answer = await function(request)
        else:
            answer = await in_own_thread(function, request)
            answer = await answer if inspect.isawaitable(answer) else answer
        return answer if isinstance(answer, Decision) else Decision(is_approved=answer is True, by="callback")

    return decide


def check_patience(patience_s: object) -> float:
    """Return the time to wait for an answer, in seconds. Raises InvalidRequest for an invalid time."""
    if isinstance(patience_s, int | float) and not isinstance(patience_s, bool) and 0 < patience_s < math.inf:
        return float(patience_s)
    raise InvalidRequest(f"patience_s: {patience_s!r} is not a time to wait for an answer; give seconds, such as 300")


def _read_risk(value: Risk | str) -> Risk:
    if isinstance(value, Risk):
        return value
    try:
        return Risk[value.upper()]
    except (KeyError, AttributeError):
        known_names = ", ".join(map(str, Risk))
        raise InvalidRequest(f"unknown risk {value!r}; known: {known_names}") from None


class Gate:
    """Let approved calls through. `patience_s` is the time to wait for each answer."""

    def __init__(
        self,
        approver: Approver = deny,
        *,
        patience_s: float = PATIENCE_S,
        on_event: Callable[[ApprovalEvent], None] = lambda _: None,
    ):
        if not callable(approver):
            raise InvalidRequest(f"approve: {approver!r} cannot be asked; give auto(...) or callback(...), say")
        self._approver, self._patience_s, self._on_event = approver, check_patience(patience_s), on_event
        self._remembered: dict[str, Decision] = {}
        self._last: dict[str, ApprovalRequest] = {}

    def would_ask(self, request: ApprovalRequest) -> ApprovalRequest | None:
        """Return the approver's request for a call, None if the call needs no approval; nothing is stored."""
        remembered = self._remembered.get(request.fingerprint) if request.risk is Risk.HIGH else None
        if request.risk < Risk.HIGH or remembered is not None:
            return None
        return replace(request, changes=request.changes or changes_between(self._last.get(request.tool), request))

    async def approve(self, request: ApprovalRequest) -> Decision | None:
        """Return the decision that lets a call through, None where none is needed. Raises ApprovalDenied."""
        if request.risk < Risk.HIGH:
            return None
        request = replace(request, changes=self._changes(request))
        fingerprint = request.fingerprint  # of what will run, whatever is done to the request meanwhile
        remembered = self._remembered.get(fingerprint)
        if remembered is not None and request.risk is Risk.HIGH:
            self._on_event(Decided(request=request, decision=remembered, was_remembered=True))
            return remembered
        decision = await self._ask(request)
        if request.risk is Risk.CRITICAL:
            decision = await self._ask(replace(request, is_confirmation=True))
        elif decision.is_remembered is True:
            self._remembered[fingerprint] = decision
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
        asking = asyncio.ensure_future(self._call_approver(request))
        try:
            await asyncio.wait({asking}, timeout=self._patience_s)
            if asking.done():
                return _decision_of(asking)
        finally:
            await _cancel(asking)
        return Decision(is_approved=False, by="time-out", reason=f"no answer within {self._patience_s:g} s")

    async def _call_approver(self, request: ApprovalRequest) -> object:
        return await self._approver(request)

    def _changes(self, request: ApprovalRequest) -> str:
        before, self._last[request.tool] = self._last.get(request.tool), request
        return request.changes or changes_between(before, request)


def changes_between(before: ApprovalRequest | None, now: ApprovalRequest) -> str:
    """Return a unified diff of two calls' arguments and rules, empty where nothing changed or nothing was before."""
    if before is None:
        return ""
    old, new = _lines_of(before), _lines_of(now)
    if old == new:
        return ""
    if max(len(old), len(new)) > MOST_COMPARED_LINES:
        return f"(more than {MOST_COMPARED_LINES} lines: not compared)"
    return "\n".join(difflib.unified_diff(old, new, "before", "now", lineterm=""))


def _lines_of(request: ApprovalRequest) -> list[str]:
    """Return a call as lines of text, the arguments before the rules."""
    texts = [f"{name}: {value}" for name, value in request.arguments.items()]
    for name, rule in request.rules.items():
        entries = {f"{name}.{key}": value for key, value in rule.items()} if isinstance(rule, Mapping) else {name: rule}
        texts += [f"{key}: {_format_value(value)}" for key, value in entries.items()]
    return [line for text in texts for line in text.splitlines()]


def _format_value(value: object) -> str:
    """Return a rule's value as text, the same before and after a round trip through JSON."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _decision_of(asking: asyncio.Future[object]) -> Decision:
    """Return an approver's decision; a failure, a cancellation, or anything but a Decision is a no."""
    if asking.cancelled():
        return Decision(is_approved=False, by="error", reason="the approver was cancelled")
    if error := asking.exception():
        log.warning("an approver failed, which is a no: %s", error, exc_info=error)
        return Decision(is_approved=False, by="error", reason=f"the approver failed: {type(error).__name__}")
    answer = asking.result()
    if not isinstance(answer, Decision):
        kind = type(answer).__name__
        log.warning("an approver returned a %s instead of a Decision, which is a no; callback(...) takes a bool", kind)
        return Decision(is_approved=False, by="error", reason=f"the approver returned no Decision but a {kind}")
    return answer


async def _cancel(asking: asyncio.Future[object]) -> None:
    """Cancel an approver, and wait a moment for it; its answer no longer counts."""
    if asking.done():
        return
    asking.cancel()
    asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio reports it as forgotten
    await asyncio.wait({asking}, timeout=CANCEL_TIMEOUT_S)


def record_decision(audit: Audit | None, event: ApprovalEvent) -> None:
    """Record a decision, and who it was. Raises AuditFailed, so that nothing follows from it."""
    if not isinstance(event, Decided):
        return
    request, decision = event.request, event.decision
    is_approved = decision.is_approved is True
    if is_traced():
        from cloche.audit.telemetry import decision_event

        decision_event("cloche.approval", is_approved=is_approved, by=str(decision.by), risk=str(request.risk))
    if audit is None:
        return
    code = next((text for name in _CODE if isinstance(text := request.arguments.get(name), str)), None)
    audit.record(
        "approval" if is_approved else "denial",
        tool=request.tool,
        risk=str(request.risk),
        by=decision.by,
        reason=decision.reason or None,
        code_sha256=None if code is None else sha256_of(code),
        request_sha256=request.fingerprint,
        is_confirmation=request.is_confirmation,
        was_remembered=event.was_remembered,
    )
