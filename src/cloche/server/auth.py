"""Authentication: a key in the Authorization header, or the cookie of a browser that used a one-time link.

A browser's changes also need the page's CSRF token: a page of another site can make the browser send the cookie, but
cannot read the token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Annotated, Any

from fastapi import Depends, Request, WebSocket
from starlette.requests import HTTPConnection

from cloche.audit.log import act_for
from cloche.records.keys import E2B_PREFIX, SCOPES
from cloche.records.tables import DEFAULT_PROJECT
from cloche.wire.callers import Caller
from cloche.wire.problems import Refused

from .identities import csrf_token
from .observe import CALLER
from .sandbox_fusion import PATHS
from .service import Service

COOKIE, CSRF_HEADER, CSRF_FIELD = "cloche_session", "X-CSRF-Token", "csrfToken"
MOST_FORM_FILES, MOST_FORM_FIELDS, MOST_FORM_PART = 100, 2500, 8 << 20
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def service_of(connection: HTTPConnection) -> Service:
    """Return the service of a connection's application."""
    service: Service = connection.app.state.service
    return service


async def find_caller(connection: HTTPConnection) -> Caller:
    """Return the authenticated caller. Raises Refused: 401 without valid credentials, 403 without a CSRF token."""
    caller = await _find_caller(connection)
    _note_caller(connection, caller)
    return caller


def _note_caller(connection: HTTPConnection, caller: Caller) -> None:
    """Name the caller in the access log, and in the audit events of this request."""
    connection.scope[CALLER] = caller.name
    act_for(key=caller.name, address=caller.address)


async def _find_caller(connection: HTTPConnection) -> Caller:
    caller = await identify(service_of(connection), connection)
    if caller.session_hash is not None:
        _check_csrf(connection, caller)
    return caller


async def identify(service: Service, connection: HTTPConnection) -> Caller:
    """Return the owner of the key or cookie, without any check of scopes.

    Raises Refused: 401 for invalid ones, 403 for a key for E2B's SDKs that is below scope admin.
    """
    header = connection.headers.get("authorization")
    if header is not None:
        text = _key_in(service, connection, header)
        key = await service.identities.of_key(text) if text else None
        if key is None:
            raise _nobody("this key is not valid: it is wrong, revoked or expired")
        if text.startswith(E2B_PREFIX) and "admin" not in key.scopes:
            raise Refused(
                403, "scope-missing", "a key for E2B's SDKs has its own sandboxes alone, and the API has the project's",
                remedy="use the port of E2B's protocol, or a key that was made without --e2b",
            )  # fmt: skip
        address = connection.client.host if connection.client else ""
        return Caller(project=key.project, scopes=key.scopes, key_id=key.id, address=address)
    caller = await _of_cookie(service, connection)
    if caller is None:
        raise _nobody("no key was sent")
    return caller


def _key_in(service: Service, connection: HTTPConnection, header: str) -> str:
    """Return the key of an Authorization header; empty if there is none.

    SandboxFusion's callers know no keys, but an address: `http://anyone:KEY@host`, which becomes Basic credentials.
    Browsers send these with requests of other sites' pages, too. Raises Refused (403) for such a request.
    """
    kind, _, text = header.partition(" ")
    if kind.lower() == "bearer":
        return text.strip()
    is_theirs = service.options.has_sandbox_fusion and connection.scope["path"] in PATHS
    if kind.lower() != "basic" or not is_theirs:
        return ""
    _check_origin(connection)
    try:
        return base64.b64decode(text.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


async def find_browser(request: Request) -> Caller:
    """Return the owner of the cookie of a request for the page. A form has the CSRF token in a field.

    Raises Refused: 401 without a valid cookie, 403 without the token.
    """
    caller = await _find_browser(request)
    if request.method not in SAFE:
        form = await request.form(max_files=MOST_FORM_FILES, max_fields=MOST_FORM_FIELDS, max_part_size=MOST_FORM_PART)
        _check_token(caller, str(form.get(CSRF_FIELD, "")))
    return caller


async def _find_browser(connection: HTTPConnection) -> Caller:
    """Return the owner of the cookie. Raises Refused: 401, or 403 for a request from another site's page."""
    caller = await _of_cookie(service_of(connection), connection)
    if caller is None:
        raise _nobody("no valid cookie was sent")
    _note_caller(connection, caller)
    if connection.scope["method"] not in SAFE:
        _check_origin(connection)
    return caller


async def check_passing(connection: HTTPConnection) -> Caller:
    """Authenticate a request that will be forwarded; the form with the CSRF token is left unread. Raises Refused."""
    is_api = connection.scope["path"].startswith("/api/")
    return await (find_caller(connection) if is_api else _find_browser(connection))


async def _of_cookie(service: Service, connection: HTTPConnection) -> Caller | None:
    cookie = connection.cookies.get(COOKIE)
    digest = await service.identities.of_cookie(cookie) if cookie else None
    if digest is None:
        return None
    address = connection.client.host if connection.client else ""
    return Caller(project=DEFAULT_PROJECT, scopes=SCOPES, session_hash=digest, address=address)


def _check_csrf(connection: HTTPConnection, caller: Caller) -> None:
    """Raise Refused for a request that a page of another site may have sent with this browser's cookie."""
    if isinstance(connection, WebSocket):
        # A browser sends cookies with a web socket of any page, and its true Origin (RFC 6455, 10.2).
        if not _is_own_origin(connection, connection.headers.get("origin", "")):
            raise Refused(403, "csrf", "the web socket comes from a page of another site")
        return
    if connection.scope["method"] not in SAFE:
        _check_origin(connection)
        _check_token(caller, connection.headers.get(CSRF_HEADER, ""))


def _check_origin(connection: HTTPConnection) -> None:
    """Raise Refused if the browser says that a page of another origin sent the request.

    Cookies do not isolate ports (RFC 6265, 8.5). A server at another port of this host, such as a guest's forwarded
    server, receives the cookie and can compute the CSRF token from it. It cannot forge `Sec-Fetch-Site` or `Origin`,
    which the browser sets.
    """
    site, origin = connection.headers.get("sec-fetch-site"), connection.headers.get("origin")
    if site not in (None, "same-origin") or not (origin is None or _is_own_origin(connection, origin)):
        raise Refused(403, "csrf", "the request comes from a page of another site, or of another port")


def _is_own_origin(connection: HTTPConnection, origin: str) -> bool:
    return origin.partition("://")[2] == connection.headers.get("host", "")


def _check_token(caller: Caller, sent: str) -> None:
    if caller.session_hash is None or not hmac.compare_digest(sent.encode(), csrf_token(caller.session_hash).encode()):
        raise Refused(
            403, "csrf", f"a browser's request needs the page's token, in {CSRF_HEADER} or a form's {CSRF_FIELD}",
            remedy="reload the page",
        )  # fmt: skip


def _nobody(why: str) -> Refused:
    return Refused(
        401, "not-authenticated", why, remedy="send Authorization: Bearer KEY; cloche keys create NAME makes one",
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def needs(*scopes: str) -> Any:  # noqa: ANN401 - what FastAPI takes as a default
    """Return a dependency that passes the caller to a route, and requires one of these scopes."""

    async def find(request: Request) -> Caller:
        caller = await find_caller(request)
        if not any(map(caller.has, scopes)):
            caller.require(scopes[0])
        return caller

    return Depends(find)


Browser = Annotated[Caller, Depends(find_browser)]
Runner = Annotated[Caller, needs("run")]
Reader = Annotated[Caller, needs("read")]
Approver = Annotated[Caller, needs("approve")]
Admin = Annotated[Caller, needs("admin")]


async def _service(request: Request) -> Service:
    return service_of(request)


TheService = Annotated[Service, Depends(_service)]
