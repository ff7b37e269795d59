"""Errors as problem details (RFC 9457): a stable type, the fault, the field, and a remedy.

Values that a caller sent are not repeated, since they may be secrets; names and short words in messages are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cloche.core import errors
from cloche.core.escape import escape_name

TYPE = "https://cloche.dev/problems/"  # an identifier, not a page (RFC 9457, 3.1.1)
MEDIA_TYPE = "application/problem+json"
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
# Prefix of error messages, before a colon -> field of the wire. Models add theirs.
FIELDS: dict[str, str] = {
    name: name for name in ("cursor", "limit", "status", "state", "label", "wait", "path", "pathBase64", "manifest")
}
_FIELD = re.compile(r"(\w+)((?:\.\w+|\[\d+\])*)(?:, \w+)?: ")


class Problem(BaseModel):
    """An error."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    remedy: str | None = None


class Refused(HTTPException):
    """An error with problem details. A framework exception, so the framework's handlers pass it on."""

    def __init__(
        self, status: int, kind: str, detail: str, *, remedy: str | None = None, field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(status, detail, dict(headers or {}))
        self.kind, self.remedy, self.field = kind, remedy, field

    def as_response(self) -> JSONResponse:
        """Return the response."""
        return answer(
            self.status_code, self.kind, self.detail, remedy=self.remedy, field=self.field, headers=self.headers
        )


def answer(
    status: int, kind: str, detail: str, *, remedy: str | None = None, field: str | None = None,
    headers: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None,
) -> JSONResponse:  # fmt: skip
    """Return a problem as a response. `more` has the extra members of this type."""
    content: dict[str, Any] = {"type": TYPE + kind, "title": kind.replace("-", " ").capitalize(), "status": status}
    shown = detail.encode("utf-8", "backslashreplace").decode()  # a guest's path may be no UTF-8
    content |= {"detail": shown, "field": field, "remedy": remedy, **(more or {})}
    return JSONResponse(content, status, dict(headers or {}), MEDIA_TYPE)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of any error."""
    if isinstance(error, HTTPException):
        return error.status_code
    statuses = (status for kind, status, _ in _CLASSES if isinstance(error, kind))
    return 422 if isinstance(error, RequestValidationError) else next(statuses, 500)


def answer_to(error: Exception) -> JSONResponse:
    """Return the response to an exception. An unexpected one is not described."""
    for kind, status, name in _CLASSES:
        if isinstance(error, kind):
            headers = {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
            reason, remedy = getattr(error, "reason", None) or str(error), getattr(error, "remedy", None) or None
            reason, field = _field_of(reason) if isinstance(error, _OF_FIELDS) else (reason, None)
            more = {"kind": error.kind} if isinstance(error, errors.SandboxFileError) and error.kind else {}
            return answer(status, name, reason, remedy=remedy, field=field, headers=headers, more=more)
    if isinstance(error, ClientDisconnect):  # not delivered; only for the log and metrics
        return answer(HTTPStatus.BAD_REQUEST, "incomplete-body", "the client disconnected before its body was complete")
    if not isinstance(error, errors.ClocheError):
        log.error("an unexpected error", exc_info=error)
    return answer(
        500, "internal-error", "an internal error of Cloche; it is not known whether anything ran",
        remedy="see the service's log, and report this as a bug",
    )  # fmt: skip


def _field_of(text: str) -> tuple[str, str | None]:
    """Return a message and its field, both with the wire's name instead of the library's."""
    match = _FIELD.match(text)
    if match is None or (name := FIELDS.get(match[1])) is None:
        return text, None
    return f"{name}{text[match.end(1) :]}", f"{name}{match[2]}"


def response_to(error: Exception) -> JSONResponse:
    """Return the response to any error, including the framework's."""
    if isinstance(error, Refused):
        return error.as_response()
    if isinstance(error, RequestValidationError):
        faults = [_fault(fault) for fault in error.errors()[:_MOST_FAULTS]]
        return answer(422, "invalid-request", "; ".join(f"{field}: {why}" for field, why in faults), field=faults[0][0])
    if isinstance(error, HTTPException):
        kind = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        return answer(error.status_code, kind, str(error.detail), headers=error.headers)
    return answer_to(error)


def install(app: FastAPI, respond: Callable[[Request, Exception], Awaitable[Response]]) -> None:
    """Register the handler of all errors with an application."""
    for kind in (Refused, errors.ClocheError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, respond)


def _fault(fault: Mapping[str, Any]) -> tuple[str, str]:
    """Return the location and the message of a validation error, without the value."""
    names = [str(name) for name in fault["loc"][1:]]  # after body, query, path or header
    why = "there is no such field" if fault["type"] == "extra_forbidden" else str(fault["msg"])
    if fault["type"] == "value_error":
        why = str(fault["ctx"]["error"])
    return escape_name(".".join(names)[:200]) or "body", why


# For the documentation of each route.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text, "content": {MEDIA_TYPE: {}}}
    for status, text in (
        (400, "The request cannot be parsed."),
        (401, "No key, or an invalid one."),
        (403, "The key's scopes or the rules do not allow it."),
        (404, "There is no record with that id."),
        (409, "The request conflicts with the stored state."),
        (413, "The request is too large."),
        (422, "A field is wrong."),
        (429, "Too many at once."),
        (500, "An internal error of Cloche."),
        (502, "The outcome is not known."),
        (503, "Not possible now; see Retry-After."),
    )
}
