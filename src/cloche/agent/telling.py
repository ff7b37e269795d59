"""What is told of a tool's calls: decisions in the audit log, a span for each call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cloche.core.errors import AuditFailed
from cloche.runtime.audit import Audit, sha256_of
from cloche.runtime.recording import is_traced

from .approval import ApprovalEvent, Decided
from .catalog import Tool

_CODE = ("code", "command")  # the arguments of tools that are run
log = logging.getLogger("cloche.agent")


def record_decision(audit: Audit | None, event: ApprovalEvent) -> None:
    """Record a decision, and who it was. Raises AuditFailed, so that nothing follows from it."""
    if not isinstance(event, Decided):
        return
    request, decision = event.request, event.decision
    is_approved = decision.is_approved is True
    if is_traced():
        from cloche.runtime.telemetry import decision_event

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


def told_model(error: AuditFailed) -> str:
    """Return what a model is told; where the log is concerns the operator."""
    log.critical("%s", error)
    return "AuditFailed: the operator's audit log cannot be written, so nothing was run. Tell the operator."


@contextmanager
def traced_call(tool: Tool, call: str) -> Iterator[Callable[[str], None]]:
    """Trace a call where spans are collected; the kind of its error is told to the function that this gives."""
    if not is_traced():
        yield _ignore
        return
    from cloche.runtime.telemetry import tool_span

    with tool_span(tool.name, tool.description, call) as failed:
        yield failed


def _ignore(error: str) -> None:
    pass
