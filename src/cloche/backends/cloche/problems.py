"""Problems of the wire as our errors: the cause and the remedy, in the service's words, bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cloche.core.errors import (
    ApprovalDenied,
    BackendUnavailable,
    ClocheError,
    InvalidRequest,
    NodeLost,
    OutcomeUnknown,
    PolicyDenied,
    SandboxFileError,
    StartFailed,
)
from cloche.core.remote import LeasedPlace, RemoteAccount

from ..file_answers import FILE_ERRORS
from ..remote.failures import Failure, by_status, remote_error, scrub
from .wire import CallRefused, LinkLost

_FILES = {
    "file-not-found": "not_found", "file-too-large": "too_large", "file-refused": "permission", "file-exists": "exists",
    "file-error": "other", "incomplete-body": "other", "body-too-large": "too_large",
}  # fmt: skip
_INVALID = (
    "invalid-request", "bad-request", "unknown-verb", "not-waiting", "followed", "not-read", "body-too-large",
    "sandbox-starting",
)  # fmt: skip
_SIMPLE: Mapping[str, Callable[[str], ClocheError]] = {
    **dict.fromkeys(_INVALID, InvalidRequest), "policy-denied": PolicyDenied, "approval-denied": ApprovalDenied,
    "start-failed": StartFailed, "outcome-unknown": OutcomeUnknown,
}  # fmt: skip
_FAILURES = {
    "not-authenticated": Failure.UNAUTHORIZED, "scope-missing": Failure.FORBIDDEN, "not-found": Failure.NOT_FOUND,
    "sandbox-ended": Failure.NOT_FOUND,
}  # fmt: skip


def error_of(refused: CallRefused, account: RemoteAccount, *, path: str | None = None, why: str = "") -> Exception:
    """Return the error for a problem. `path` is the file of the call, if there is one, `why` a fleet's reason."""
    problem, kind = refused.problem, _kind(refused)
    detail, remedy = _text(problem, "detail", account), _text(problem, "remedy", account)
    message = f"{detail}; {remedy}" if remedy else detail
    by = f"the service at {account.host}: {message}"
    if path is not None and kind in _FILES:
        file_kind = problem.get("kind")
        file_kind = file_kind if isinstance(file_kind, str) and len(file_kind) <= 40 else _FILES[kind]
        return FILE_ERRORS.get(file_kind, SandboxFileError)(detail, path=path, kind=file_kind)
    if kind == "connection-refused":
        return ConnectionRefusedError(detail)
    if kind in _SIMPLE:
        return _SIMPLE[kind](by)
    if kind == "lease-over" and account.place is not None:
        return node_lost(account.place, why or message)
    if kind == "backend-unavailable":
        return BackendUnavailable(f"the service at {account.host}: {detail.rstrip('.')}.", remedy=remedy)
    if kind == "cancelled":
        return OutcomeUnknown(
            f"the service at {account.host} has cancelled this: {message}; check its state before you retry"
        )
    status = problem.get("status")
    status = status if type(status) is int and 400 <= status < 600 else None
    failure = _FAILURES.get(kind) or (by_status(status) if status is not None else Failure.BAD_ANSWER)
    return remote_error(
        account.provider, failure, detail=message, status=status, retry_after_s=_seconds(problem.get("retryAfter")),
        account=account,
    )  # fmt: skip


def is_lease_over(refused: CallRefused) -> bool:
    """Tell whether a node has refused a call because its lease is over."""
    return _kind(refused) == "lease-over"


def _kind(refused: CallRefused) -> str:
    return str(refused.problem.get("type"))[-80:].rpartition("/")[2]


def node_lost(place: LeasedPlace, why: str) -> NodeLost:
    """Return the error for a lease that is over, with its reason."""
    return NodeLost(
        f"backend {place.engine!r}: node {place.node} or lease {place.lease} on it is lost, with its sandboxes, "
        f"processes and files: {why}. What was under way may have run; open another sandbox.",
        node=place.node,
        lease=place.lease,
    )


def _text(problem: Mapping[str, Any], name: str, account: RemoteAccount) -> str:
    text = problem.get(name)
    return scrub(text, account) if isinstance(text, str) else ""


def _seconds(value: object) -> float | None:
    text = str(value)
    return float(text) if len(text) <= 5 and text.isdecimal() else None


def lost(error: LinkLost, account: RemoteAccount, action: str, where: str = "", *, why: str = "") -> OutcomeUnknown:
    """Return the error for a connection lost after a call was sent; `where` says where to look, `why` is a fleet's."""
    detail = scrub(error.detail, account)
    if account.place is not None:
        reason = why or f"the connection to it was lost ({detail})"
        return node_lost(account.place, f"{reason} while {action}")
    look = f" {where}" if where else ""
    return OutcomeUnknown(
        f"backend {account.provider!r}: the connection to {account.host} was lost ({detail}) while {action}, "
        f"which may or may not have been done.{look} Check before you repeat it."
    )


def late(account: RemoteAccount, action: str, where: str = "") -> OutcomeUnknown:
    """Return the error for an answer that did not arrive in time."""
    look = f" {where}" if where else ""
    return OutcomeUnknown(
        f"backend {account.provider!r}: {account.host} did not report in time how {action} ended.{look}"
    )
