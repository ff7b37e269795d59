"""Errors as responses: problem details (RFC 9457), also for the errors of the framework."""

from __future__ import annotations

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
from cloche.wire.problems import InvalidFields, ProblemDetails, Refused, problem, problem_of, problem_of_faults

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An error."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    remedy: str | None = None


def answer(
    status: int, kind: str, detail: str, *, remedy: str | None = None, field: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:  # fmt: skip
    """Return a problem as a response."""
    return _answer(problem(status, kind, detail, remedy=remedy, field=field, headers=headers))


def _answer(details: ProblemDetails) -> JSONResponse:
    return JSONResponse(details.content, details.status, dict(details.headers), MEDIA_TYPE)


def original(error: Exception) -> Exception:
    """Return the Refused that FastAPI replaced by an error of its own, since it came while it read a body."""
    cause = error.__cause__ if isinstance(error, HTTPException) else None
    return cause if isinstance(cause, Refused) else error


def response_to(error: Exception) -> JSONResponse:
    """Return the response to any error, including the framework's."""
    error = original(error)
    if isinstance(error, RequestValidationError):
        return _answer(problem_of_faults(error.errors()))
    if isinstance(error, HTTPException):
        kind = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        return answer(error.status_code, kind, str(error.detail), headers=error.headers)
    if isinstance(error, ClientDisconnect):  # not delivered; only for the log and metrics
        return answer(HTTPStatus.BAD_REQUEST, "incomplete-body", "the client disconnected before its body was complete")
    return _answer(problem_of(error))


def install(app: FastAPI, respond: Callable[[Request, Exception], Awaitable[Response]]) -> None:
    """Register the handler of all errors with an application."""
    for kind in (
        Refused, InvalidFields, errors.ClocheError, RequestValidationError, HTTPException, ClientDisconnect, Exception,
    ):  # fmt: skip
        app.add_exception_handler(kind, respond)


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
