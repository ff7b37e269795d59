"""The caller's functions for a run or a sandbox: read, offered to what was opened, and recorded call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from cloche.audit.chain import sha256_of
from cloche.core.enforcement import Level
from cloche.core.errors import AuditFailed, BackendUnavailable, InvalidRequest
from cloche.core.functions import OfferedFunctions, functions_of_client
from cloche.core.languages import language_named
from cloche.core.protocols import OpenSandbox, SupportsLive

from .prepare import Prepared

if TYPE_CHECKING:
    from cloche.agent.approval import Approver
    from cloche.audit.log import Audit
    from cloche.functions.calls import Approve, CallRecord
    from cloche.functions.tool import BoundTool, Tool, ToolLimits, Tools

    from .freezing import Freezing

PYTHON = "python"
LANGUAGES = (PYTHON, "javascript", "bash")
ToolsArgument = Mapping[str, "Callable[..., Any] | Tool"] | Sequence["Callable[..., Any] | Tool"]


def functions_for(
    tools: object,
    limits: ToolLimits | None,
    approve: Approver | None,
    prepared: Prepared,
    language: str | None = PYTHON,
) -> OfferedFunctions | None:
    """Return the functions that `tools` names, for this backend; None for none. `approve` decides about risky calls.

    In a service they are those of its client. Raises InvalidRequest, and BackendUnavailable for a backend whose guests
    cannot call them.
    """
    of_client = functions_of_client()
    if not tools and of_client is None:
        return None
    from cloche.functions.calls import HostFunctions  # needed by some runs only
    from cloche.functions.tool import read_tools

    bound = read_tools(tools, limits)
    if bound is None and of_client is None:
        return None
    if not guests_that_call(prepared):
        raise BackendUnavailable(
            f"tools: programs on backend {prepared.backend.name!r} cannot call functions of the caller.",
            remedy='Use backend "local", "docker" or "cloche", or leave tools out.',
        )
    if language is None or language_named(language).name not in LANGUAGES:
        raise InvalidRequest(
            f"tools: programs in {', '.join(LANGUAGES)} can call functions of the caller, not "
            f"{language or 'commands'}; leave tools out, or write the program in one of these"
        )
    if bound is None:
        return of_client
    freezing = None if approve is None else _freezing(bound, approve, prepared)
    return HostFunctions(
        bound, on_call=_recorder(prepared.audit), approve=_asker(bound, freezing or approve, prepared),
        freeze=None if freezing is None else freezing.freeze,
    )  # fmt: skip


def guests_that_call(prepared: Prepared) -> str:
    """Return `all`, `live` (those of live sandboxes alone) or nothing, as the backend says of itself."""
    return str(getattr(prepared.backend, "serves_functions", ""))


def opening_with(functions: OfferedFunctions | None, prepared: Prepared) -> AbstractAsyncContextManager[OpenSandbox]:
    """Return the context manager that opens the sandbox of one run."""
    backend = prepared.backend
    if runs_live(functions, prepared) and isinstance(backend, SupportsLive):
        return backend.open_live(prepared.policy, prepared.limits)
    return backend.open(prepared.policy, prepared.limits)


def runs_live(functions: OfferedFunctions | None, prepared: Prepared) -> bool:
    """Tell whether one run has a live sandbox: where only those serve functions, and to be paused for an approver."""
    return functions is not None and (
        guests_that_call(prepared) == "live" or getattr(functions, "freeze", None) is not None
    )


def offer(opened: OpenSandbox, functions: OfferedFunctions | None) -> None:
    """Offer functions, if there are any, to all that runs in an open sandbox. Raises BackendUnavailable."""
    if functions is None:
        return
    check_offers(opened)(functions)
    if (freeze := getattr(functions, "freeze", None)) is not None:
        freeze(opened)


def check_offers(opened: OpenSandbox) -> Callable[[OfferedFunctions], None]:
    """Return what offers functions to an open sandbox. Raises BackendUnavailable if its guests cannot call any."""
    offer_functions = getattr(opened, "offer_functions", None)  # a protocol's `isinstance` costs a warm run a percent
    if offer_functions is None:
        raise BackendUnavailable(
            "tools: programs in this kind of sandbox cannot call functions of the caller.",
            remedy="Open a live one, without live=False, or leave tools out.",
        )
    return offer_functions  # type: ignore[no-any-return]


def _freezing(tools: Tools, approver: Approver, prepared: Prepared) -> Freezing | None:
    """Return the approver of risky calls that pauses the sandbox; None where there is no such call, or no pause."""
    backend, level = prepared.backend, prepared.policy.level
    is_risky = any(tool.risk in ("high", "critical") for tool in tools.by_name.values())
    if not is_risky or not isinstance(backend, SupportsLive) or (level is not None and level < Level.CONFINED):
        return None
    if backend.capabilities().not_live:
        return None
    from .freezing import Freezing

    return Freezing(approver)


def _asker(tools: Tools, approve: Approver | None, prepared: Prepared) -> Approve | None:
    """Return a function that lets approved calls through; None where no tool is risky."""
    if approve is None and all(tool.risk in ("low", "medium") for tool in tools.by_name.values()):
        return None
    from cloche.agent.approval import ApprovalRequest, Gate, Risk, deny, record_decision

    gate = Gate(
        approve or deny,
        patience_s=tools.limits.approval_s,
        on_event=lambda event: record_decision(prepared.audit, event),
    )
    rules = {"runs_on": prepared.backend.name}

    async def ask(tool: BoundTool, arguments: Mapping[str, Any]) -> None:
        risk = Risk[tool.risk.upper()]
        await gate.approve(ApprovalRequest(tool=tool.name, risk=risk, arguments=arguments, rules=rules))

    return ask


def _recorder(audit: Audit | None) -> Callable[[CallRecord], None]:
    if audit is None:
        return lambda _: None
    from cloche.audit.redaction import Redactor

    redactor = Redactor({})

    def record(call: CallRecord) -> None:
        try:
            stored = audit.store("code", call.arguments, redactor)
        except AuditFailed:
            stored = None  # the event says that it is missing
        audit.note(
            "tool_call", redactor=redactor, tool=call.name, status=call.outcome, reason=call.message or None,
            argument_bytes=len(call.arguments), arguments_sha256=sha256_of(call.arguments),
            arguments_artifact_sha256=stored, result_bytes=call.result_bytes, duration_s=round(call.seconds, 6),
        )  # fmt: skip

    return record
