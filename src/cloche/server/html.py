"""HTML of the page: templates that escape everything, static files by a table, and errors that a human reads.

Rendering is done in a thread, as it grows with what a guest wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from importlib import resources
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException

from cloche.core.errors import ClocheError

from . import problems
from .auth import CSRF_FIELD
from .identities import Caller, csrf_token
from .terminal import bounded, render_terminal

Call = Callable[[Request], Coroutine[Any, Any, Response]]

# What is served below /static; nothing else is. Path in the package -> media type.
STATIC: Mapping[str, str] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "vendor/htmx.min.js": "text/javascript; charset=utf-8",
}
# The parts of the page, in the order of its menu: path, name, and the key that goes there after "g".
PARTS = (
    ("/run", "Run", "r"), ("/activity", "Activity", "a"), ("/approvals", "Approvals", "p"),
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
    found = {}
    for path, media_type in STATIC.items():
        content = folder.joinpath(path).read_bytes()
        version = hashlib.sha256(content).hexdigest()[:12]
        found[path] = Asset(content=content, media_type=media_type, version=version)
    return found


def static_url(path: str) -> str:
    """Return where a static file is; it has another address when it has another content, so browsers may keep it."""
    return f"/static/{path}?v={assets()[path].version}"


@lru_cache(maxsize=1)
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader(__package__ or "", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {"terminal": render_terminal, "pretty": pretty, "bounded": bounded, "moment": moment}
    found.globals |= {"static_url": static_url, "parts": PARTS, "csrf_field": CSRF_FIELD}
    return found


def pretty(value: object) -> str:
    """Return plain data as JSON to read, bounded."""
    return bounded(value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str))


def moment(text: str | None) -> str:
    """Return a time of the records to read: UTC, in seconds."""
    return "" if not text else text[:19].replace("T", " ")


def is_fragment(request: Request) -> bool:
    """Tell whether the script asks for a part to put into the page, and not the browser for a page."""
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
    shown = {"path": request.url.path, "csrf": token, "is_fragment": is_fragment(request), **data}
    text = await asyncio.to_thread(lambda: _templates().get_template(template).render(shown))
    return HTMLResponse(text, status_code, dict(headers or {}))


class PageRoute(APIRoute):
    """Be a route of the page: what goes wrong is said in HTML."""

    def get_route_handler(self) -> Call:
        """Return the handler, with errors as pages."""
        handle = super().get_route_handler()

        async def with_pages(request: Request) -> Response:
            try:
                return await handle(request)
            except (problems.Refused, ClocheError, RequestValidationError, HTTPException) as error:
                return await _problem_page(request, error)

        return with_pages


async def _problem_page(request: Request, error: Exception) -> Response:
    response = problems.response_to(error)
    status = response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        return await render(request, "no_cookie.html", None, status_code=status)
    return await render(request, "problem.html", None, status_code=status, problem=json.loads(bytes(response.body)))
