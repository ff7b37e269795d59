"""HTML of the page: templates with autoescaping, a fixed table of static files, and error pages.

Templates are rendered in a thread, since the time grows with a guest's output.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache, partial
from http import HTTPStatus
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from cloche.core.errors import ClocheError, NotFound
from cloche.core.record import dataclass
from cloche.records.approvals import count_open
from cloche.wire.callers import Caller
from cloche.wire.problems import InvalidFields, Refused

from . import below, problems
from .auth import CSRF_FIELD, SAFE, service_of
from .identities import csrf_token
from .observe import CALLER
from .terminal import bounded, render_terminal

Call = Callable[[Request], Coroutine[Any, Any, Response]]

# All files served below /static. Path in the package -> media type.
STATIC: Mapping[str, str] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "terminal.js": "text/javascript; charset=utf-8",
    "upload.js": "text/javascript; charset=utf-8",
    "vendor/htmx.min.js": "text/javascript; charset=utf-8",
    "vendor/xterm.js": "text/javascript; charset=utf-8",
    "vendor/xterm-addon-fit.js": "text/javascript; charset=utf-8",
    "vendor/xterm.css": "text/css; charset=utf-8",
}
# The sections of the page, in menu order: path, name, and the key that opens it after "g".
PARTS = (
    ("/run", "Run", "r"), ("/activity", "Activity", "a"), ("/approvals", "Approvals", "p"),
    ("/sandboxes", "Sandboxes", "b"),
    ("/snapshots", "Snapshots", "s"), ("/hosts", "Hosts", "h"), ("/settings", "Settings", "t"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """Hold a static file."""

    content: bytes
    media_type: str
    version: str


@lru_cache(maxsize=1)
def assets() -> Mapping[str, Asset]:
    """Return all static files, by path."""
    folder = resources.files(str(__package__)) / "static"
    files = {}
    for path, media_type in STATIC.items():
        content = folder.joinpath(path).read_bytes()
        version = hashlib.sha256(content).hexdigest()[:12]
        files[path] = Asset(content=content, media_type=media_type, version=version)
    return files


def static_url(path: str) -> str:
    """Return the URL of a static file. It changes with the content, so browsers may cache it for ever."""
    return below.address(f"/static/{path}?v={assets()[path].version}")


class _Addresses(Extension):
    """Prepend the root path to every URL of the service in a template."""

    _WRITTEN = re.compile(r'((?:href|src|action|hx-[a-z]+|data-[a-z]+)=")(/[a-z])')

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:  # noqa: ARG002 - Jinja's
        """Return the template's source with prefixed URLs."""
        return self._WRITTEN.sub(r"\1{{ address('') }}\2", source)


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__ or "", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, extensions=[_Addresses],
    )  # fmt: skip
    environment.filters |= {"terminal": render_terminal, "pretty": pretty, "bounded": bounded, "moment": moment}
    environment.globals |= {
        "static_url": static_url,
        "address": below.address,
        "parts": PARTS,
        "csrf_field": CSRF_FIELD,
    }
    return environment


def part_of(path: str) -> str:
    """Return the URL path of the page's section for a path, empty without one."""
    if path.startswith("/runs/"):
        return "/activity"
    if path.startswith("/agents/"):
        return "/sandboxes"
    return next((address for address, _, _ in PARTS if path == address or path.startswith(f"{address}/")), "")


def pretty(value: object) -> str:
    """Return plain data as indented JSON, bounded."""
    return bounded(value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str))


def moment(text: str | None) -> str:
    """Return a timestamp of the records in a readable form: UTC, in seconds."""
    return "" if not text else text[:19].replace("T", " ")


def is_fragment(request: Request) -> bool:
    """Tell whether htmx asks for a fragment, and not the browser for a whole page."""
    return request.headers.get("hx-request") == "true"


async def render(
    request: Request,
    template: str,
    caller: Caller | None,
    *,
    status_code: int = 200,
    headers: Mapping[str, str] | None = None,
    **data: Any,  # noqa: ANN401 - what a template shows
) -> HTMLResponse:
    """Return a rendered template."""
    token = csrf_token(caller.session_hash) if caller is not None and caller.session_hash is not None else ""
    shown = {"part": part_of(request.url.path), "csrf": token, "is_fragment": is_fragment(request), "waits": 0, **data}
    if caller is not None and not is_fragment(request):
        shown["waits"] = await service_of(request).read(partial(count_open, project=caller.project))
    text = await asyncio.to_thread(lambda: _templates().get_template(template).render(shown))
    return HTMLResponse(text, status_code, dict(headers or {}))


class PageRoute(APIRoute):
    """A route of the page, whose errors are answered in HTML."""

    def get_route_handler(self) -> Call:
        """Return the handler, with errors as pages."""
        handle = super().get_route_handler()

        async def with_pages(request: Request) -> Response:
            try:
                return await handle(request)
            except (Refused, InvalidFields, ClocheError, RequestValidationError, HTTPException) as error:
                return await _problem_page(request, problems.original(error))

        return with_pages


async def _problem_page(request: Request, error: Exception) -> Response:
    await _note_refusal(request, error)
    is_ours = isinstance(error, Refused)
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND and not is_ours:
        error = NotFound("there is no page at this address")
    response = problems.response_to(error)
    status = response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        return await render(request, "no_cookie.html", None, status_code=status)
    problem, links = json.loads(bytes(response.body)), _ways_on(request)
    return await render(request, "problem.html", None, status_code=status, problem=problem, ways=links)


def _ways_on(request: Request) -> list[tuple[str, str]]:
    """Return the links of an error page, with their labels: to the previous page and to the section."""
    path, before = request.url.path, urlsplit(request.headers.get("referer", ""))
    section = part_of(path) or PARTS[0][0]
    links = [(section, f"Go to {next(name for address, name, _ in PARTS if address == section)}")]
    is_ours = before.netloc == request.headers.get("host") and not before.path.startswith("//")
    before = before._replace(scheme="", netloc="", fragment="", path=below.inner(before.path))
    if is_ours and before.path not in (path, section):
        links.insert(0, (before.geturl(), "Back to the page before"))
    return [link for link in links if link[0] != path or request.method != "GET"] or [("/run", "Go to Run")]


async def answer(request: Request, error: Exception) -> Response:
    """Return the response to any error: a page for a browser, else problem details."""
    error = problems.original(error)
    is_page = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")
    if is_page:
        return await _problem_page(request, error)
    await _note_refusal(request, error)
    return problems.response_to(error)


async def _note_refusal(connection: HTTPConnection, error: Exception) -> None:
    """Record in the audit log that an authenticated caller was refused."""
    method = connection.scope.get("method", "WEBSOCKET")
    if CALLER in connection.scope and method not in SAFE:
        route = getattr(connection.scope.get("route"), "path", connection.url.path)
        await service_of(connection).note_refusal(error, what=f"{method} {route}")
