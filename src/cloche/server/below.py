"""The service below a root path, such as `/cloche`, behind a proxy that may or may not strip it.

Only code that writes URLs for clients knows the root path: templates, redirects, cookies, login links.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name

from .peers import MARK

_SHAPE = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*){1,8}")
_root: ContextVar[str] = ContextVar("root", default="")


def address(path: str) -> str:
    """Return the URL path of a path of the service, as browsers request it."""
    return _root.get() + path


def inner(path: str) -> str:
    """Return the service's path for a URL path; a path outside the root path is returned unchanged."""
    return _without(path, _root.get())


def read_root_path(text: str, route_paths: Iterable[str] = ()) -> str:
    """Return a normalised root path, empty for none. Raises InvalidRequest for one that is invalid or a route's."""
    root = text.rstrip("/")
    if not root:
        return ""
    if _SHAPE.fullmatch(root) is None:
        raise InvalidRequest(f"--root-path {escape_name(text)}: write it as /NAME, of letters, digits and ._~-")
    if root.split("/")[1] in {path.split("/")[1] for path in route_paths}:
        raise InvalidRequest(f"--root-path {escape_name(text)}: the service itself uses that path; choose another")
    return root


class RootPath:
    """Strip the root path from requests, and prepend it to the Location of responses."""

    def __init__(self, app: ASGIApp, root: str):
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        _root.set(self._root)
        headers = Headers(scope=scope)
        is_passed_on = MARK in headers  # the forwarding worker adds the root path itself

        async def located(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_passed_on:
                sent = MutableHeaders(scope=message)
                if "location" in sent:
                    sent["location"] = self._outer(sent["location"], headers.get("host", ""))
            await send(message)

        await self._app(self._inner(scope), receive, located)

    def _inner(self, scope: Scope) -> Scope:
        raw: bytes = scope["raw_path"]
        path, raw_path = _without(scope["path"], self._root), _without(raw.decode("latin-1"), self._root)
        if path == scope["path"] or raw_path == raw.decode("latin-1"):
            return scope
        return {**scope, "path": path, "raw_path": raw_path.encode("latin-1")}

    def _outer(self, location: str, host: str) -> str:
        address = urlsplit(location)
        if address.netloc not in ("", host) or not address.path.startswith("/"):
            return location
        return address._replace(path=self._root + address.path).geturl()


def _without(path: str, root: str) -> str:
    if not root or not (path == root or path.startswith(f"{root}/")):
        return path
    return path[len(root) :] or "/"
