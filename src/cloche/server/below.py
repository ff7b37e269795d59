"""The service below a path of its host, such as `/cloche`: behind a proxy that takes this away from requests, or not.

Inside nothing knows of it but what writes addresses that come back: templates, redirects, cookies, login links.
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
    """Return where a path of the service is, as a browser has to ask for it."""
    return _root.get() + path


def inner(path: str) -> str:
    """Return the path of the service that an address of its names; one that is none of it stays."""
    return _without(path, _root.get())


def read_root_path(text: str, taken: Iterable[str] = ()) -> str:
    """Return a root path, empty for none. Raises InvalidRequest, also where it begins as one of the paths inside."""
    root = text.rstrip("/")
    if not root:
        return ""
    if _SHAPE.fullmatch(root) is None:
        raise InvalidRequest(f"--root-path {escape_name(text)}: write it as /NAME, of letters, digits and ._~-")
    if root.split("/")[1] in {path.split("/")[1] for path in taken}:
        raise InvalidRequest(f"--root-path {escape_name(text)}: the service has paths like that itself; take another")
    return root


class RootPath:
    """Take the root path away from requests that have it, and put it before what an answer redirects to."""

    def __init__(self, app: ASGIApp, root: str):
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        _root.set(self._root)
        headers = Headers(scope=scope)
        is_passed_on = MARK in headers  # by a worker that puts it there itself

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
        parts = urlsplit(location)
        if parts.netloc not in ("", host) or not parts.path.startswith("/"):
            return location
        return parts._replace(path=self._root + parts.path).geturl()


def _without(path: str, root: str) -> str:
    if not root or not (path == root or path.startswith(f"{root}/")):
        return path
    return path[len(root) :] or "/"
