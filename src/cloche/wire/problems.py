"""Errors as problem details (RFC 9457): a stable type, the fault, the field, and a remedy.

Values that a caller sent are not repeated, since they may be secrets; names and short words in messages are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from cloche.core import errors
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field

TYPE = "https://cloche.dev/problems/"  # an identifier, not a page (RFC 9457, 3.1.1)
log = logging.getLogger("cloche.service")

# The first matching class gives the status and the last part of the type.
_CLASSES: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.NotFound, 404, "not-found"),
    (errors.SandboxFileNotFound, 404, "file-not-found"),
    (errors.SandboxFileTooLarge, 413, "file-too-large"),
    (errors.SandboxFileRefused, 403, "file-refused"),
    (errors.SandboxFileExists, 409, "file-exists"),
    (errors.SandboxFileError, 409, "file-error"),
    (errors.PolicyDenied, 403, "policy-denied"),
    (errors.ApprovalDenied, 403, "approval-denied"),
    (errors.WorkspaceConflict, 409, "workspace-conflict"),
    (errors.Conflict, 409, "conflict"),
    (errors.InvalidRequest, 422, "invalid-request"),
    (errors.BackendUnavailable, 503, "backend-unavailable"),
    (errors.StartFailed, 503, "start-failed"),
    (errors.WorkspaceFailed, 503, "workspace-failed"),
    (errors.AuditFailed, 503, "audit-failed"),
    (errors.RecordsFailed, 503, "records-failed"),
    (errors.OutcomeUnknown, 502, "outcome-unknown"),
)
_OF_FIELDS = (errors.InvalidRequest, errors.PolicyDenied)
_MOST_FAULTS = 10
_UNKNOWN = "there is no such field"
_NO_FIELD = {
    "tools": "functions of the caller are called over an open connection, which a request has not: use Cloche's own "
    'client, backend "cloche"'
}
# Prefix of error messages, before a colon -> field of the wire. Models add theirs.
FIELDS: dict[str, str] = {
    name: name for name in ("cursor", "limit", "status", "state", "label", "wait", "path", "pathBase64", "manifest")
}
_FIELD = re.compile(r"(\w+)((?:\.\w+|\[\d+\])*)(?:, \w+)?: ")


class Refused(Exception):
    """An error with problem details."""

    def __init__(
        self, status: int, kind: str, detail: str, *, remedy: str | None = None, field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(detail)
        self.status_code, self.detail, self.headers = status, detail, dict(headers or {})
        self.kind, self.remedy, self.field = kind, remedy, field


class InvalidFields(Exception):
    """Report fields that a model refuses; `faults` are those of pydantic."""

    def __init__(self, faults: Sequence[Mapping[str, Any]]):
        super().__init__(f"{len(faults)} fields are wrong")
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDetails:
    """Hold the problem of an error: its status, its members, and the headers of its response."""

    status: int
    content: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def problem(
    status: int, kind: str, detail: str, *, remedy: str | None = None, field: str | None = None,
    headers: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None,
) -> ProblemDetails:  # fmt: skip
    """Return a problem. `more` has the extra members of this type."""
    content: dict[str, Any] = {"type": TYPE + kind, "title": kind.replace("-", " ").capitalize(), "status": status}
    shown = detail.encode("utf-8", "backslashreplace").decode()  # a guest's path may be no UTF-8
    content |= {"detail": shown, "field": field, "remedy": remedy, **(more or {})}
    return ProblemDetails(status=status, content=content, headers=dict(headers or {}))


def status_of(error: BaseException) -> int:
    """Return the HTTP status of any error."""
    if isinstance(error, Refused):
        return error.status_code
    statuses = (status for kind, status, _ in _CLASSES if isinstance(error, kind))
    return 422 if isinstance(error, InvalidFields) else next(statuses, 500)


def problem_of(error: Exception) -> ProblemDetails:
    """Return the problem of any error. An unexpected one is not described."""
    if isinstance(error, Refused):
        return problem(
            error.status_code, error.kind, error.detail, remedy=error.remedy, field=error.field, headers=error.headers
        )
    if isinstance(error, InvalidFields):
        return problem_of_faults(error.faults)
    for kind, status, name in _CLASSES:
        if isinstance(error, kind):
            headers = {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
            reason, remedy = getattr(error, "reason", None) or str(error), getattr(error, "remedy", None) or None
            reason, field = _field_of(reason) if isinstance(error, _OF_FIELDS) else (reason, None)
            more = {"kind": error.kind} if isinstance(error, errors.SandboxFileError) and error.kind else {}
            return problem(status, name, reason, remedy=remedy, field=field, headers=headers, more=more)
    if not isinstance(error, errors.ClocheError):
        log.error("an unexpected error", exc_info=error)
    return problem(
        500, "internal-error", "an internal error of Cloche; it is not known whether anything ran",
        remedy="see the service's log, and report this as a bug",
    )  # fmt: skip


def problem_of_faults(faults: Sequence[Mapping[str, Any]]) -> ProblemDetails:
    """Return the problem of a model's faults, whose locations begin with the part of the request."""
    rows = [_fault(fault) for fault in faults[:_MOST_FAULTS]]
    return problem(422, "invalid-request", "; ".join(f"{field}: {why}" for field, why in rows), field=rows[0][0])


def _field_of(text: str) -> tuple[str, str | None]:
    """Return a message and its field, both with the wire's name instead of the library's."""
    match = _FIELD.match(text)
    if match is None or (name := FIELDS.get(match[1])) is None:
        return text, None
    return f"{name}{text[match.end(1) :]}", f"{name}{match[2]}"


def _fault(fault: Mapping[str, Any]) -> tuple[str, str]:
    """Return the location and the message of a validation error, without the value."""
    names = [str(name) for name in fault["loc"][1:]]  # after body, query, path or header
    why = _NO_FIELD.get(".".join(names), _UNKNOWN) if fault["type"] == "extra_forbidden" else str(fault["msg"])
    if fault["type"] == "value_error":
        why = str(fault["ctx"]["error"])
    return escape_name(".".join(names)[:200]) or "body", why
