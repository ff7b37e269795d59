"""Errors in E2B's forms: of the control plane, of Connect RPC, and of the proxy to a sandbox's ports.

SDKs retry 429, 502, 503 and 504 three times unless the answer has `Should-Retry: false`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from cloche.core.errors import ClocheError
from cloche.wire.problems import InvalidFields, Refused, problem_of

NOT_RUNNING = "The sandbox was not found"  # SDKs compare these texts
NO_LISTENER = "The sandbox is running but port is not open"
# Connect's code of an HTTP status, and the status of a code (connectrpc.com/docs/protocol, error codes).
_CODE_OF_STATUS: Mapping[int, str] = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found", 409: "already_exists",
    413: "resource_exhausted", 422: "invalid_argument", 429: "resource_exhausted", 499: "canceled",
    501: "unimplemented", 502: "unavailable", 503: "unavailable", 504: "deadline_exceeded", 507: "resource_exhausted",
}  # fmt: skip
STATUS_OF_CODE: Mapping[str, int] = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404,
    "already_exists": 409, "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400,
    "aborted": 409, "out_of_range": 400, "unimplemented": 501, "internal": 500, "unavailable": 503,
    "data_loss": 500, "unauthenticated": 401,
}  # fmt: skip
ERROR_CODES: Mapping[str, str] = {"idempotency-key-reused": "idempotency_request_mismatch"}  # of kinds of problems
RETRIED = frozenset({429, 502, 503, 504})


class E2BError(Exception):
    """An error with its HTTP status. `can_retry` tells the SDK whether the same request may succeed later.

    `connect` is Connect's code, where the status does not decide it; `error_code` is E2B's word for the cause.
    """

    def __init__(
        self, status: int, message: str, *, can_retry: bool = False, connect: str | None = None,
        error_code: str | None = None, headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.can_retry, self.headers = status, message, can_retry, dict(headers or {})
        self.connect, self.error_code = connect or _CODE_OF_STATUS.get(status, "internal"), error_code


class PortError(E2BError):
    """An error of the proxy to a sandbox's ports: 502 where it does not run, or nothing listens there."""

    def __init__(self, sandbox_id: str, message: str, port: int | None = None, *, status: int = 502):
        super().__init__(status, message, connect="unavailable" if status == 502 else None)
        self.sandbox_id, self.port = sandbox_id, port


class Dropped(Exception):
    """End a response that has begun without its proper end: the client sees a broken connection."""


def as_e2b(error: Exception) -> E2BError:
    """Return any error as one of E2B's. An unexpected one is logged, and not described."""
    if isinstance(error, E2BError):
        return error
    problem = problem_of(error)
    message = str(problem.content["detail"])
    if remedy := problem.content.get("remedy"):
        message = f"{message.removesuffix('.')}; {remedy}"
    status = 400 if problem.status == 422 else problem.status
    is_known = isinstance(error, ClocheError | Refused | InvalidFields)
    can_retry = status == 503 or (status == 429 and "Retry-After" in problem.headers)
    return E2BError(
        status, message, can_retry=is_known and can_retry, headers=problem.headers,
        error_code=ERROR_CODES.get(getattr(error, "kind", "")),
    )  # fmt: skip


def _headers(error: E2BError) -> dict[str, str]:
    may_be_retried = error.status in RETRIED or error.status >= 500
    return {**error.headers, **({"Should-Retry": str(error.can_retry).lower()} if may_be_retried else {})}


def answer(error: Exception) -> Response:
    """Return the answer of the control plane, of files and of the code interpreter: `{"code": 404, "message": …}`."""
    known = as_e2b(error)
    content: dict[str, Any] = {"code": known.status, "message": known.message}
    if isinstance(known, PortError):
        content["sandboxId"] = known.sandbox_id
        content |= {"port": known.port} if known.port is not None else {}
    if known.error_code is not None:
        content["error_code"] = known.error_code
    return JSONResponse(content, known.status, _headers(known))


def text_answer(error: Exception) -> Response:
    """Return the answer of the code interpreter: the message alone. An error of the port itself is E2B's proxy's."""
    known = as_e2b(error)
    if isinstance(known, PortError):
        return answer(known)
    return PlainTextResponse(known.message, known.status, _headers(known))


def connect_error(error: Exception) -> dict[str, Any]:
    """Return an error as Connect writes it: `{"code": "not_found", "message": …}`."""
    known = as_e2b(error)
    return {"code": known.connect, "message": known.message}


def connect_answer(error: Exception) -> Response:
    """Return the answer of a unary Connect call. An error of the port itself is E2B's proxy's, not Connect's."""
    known = as_e2b(error)
    if isinstance(known, PortError):
        return answer(known)
    return JSONResponse(connect_error(known), STATUS_OF_CODE[known.connect], _headers(known))
