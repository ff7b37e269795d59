"""The busiest routes, called without FastAPI, whose overhead exceeds the work of the route itself.

Requests that need the framework go to it: those with a query, from pages of other sites (CORS), for the OpenAPI
document.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter, FastAPI
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from cloche.wire.callers import Caller

from .auth import find_caller
from .bodies import JsonRequest
from .html import answer
from .routes import code, sandbox_fusion
from .sandbox_fusion import RUN_CODE, RUN_JUPYTER
from .service import Service

PATH = "/api/code/exec"
Call = Callable[[JsonRequest, Caller, Service], Awaitable[Response]]


class Direct:
    """Handle requests to run code; pass all others to the framework's application."""

    def __init__(self, app: FastAPI, service: Service):
        self._app, self._service, self.state = app, service, app.state
        self._routes: Mapping[str, tuple[BaseRoute, Call]] = {PATH: (_route(code.router, PATH), _execute)}
        if service.options.has_sandbox_fusion:
            calls: Mapping[str, Call] = {RUN_CODE: sandbox_fusion.code, RUN_JUPYTER: sandbox_fusion.jupyter}
            theirs = {path: (_route(sandbox_fusion.router, path), call) for path, call in calls.items()}
            self._routes = {**self._routes, **theirs}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or pass it on."""
        is_ours = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes
        if not is_ours or scope["query_string"]:
            await self._app(scope, receive, send)
            return
        scope["route"], call = self._routes[scope["path"]]
        request = JsonRequest(scope, receive)
        try:
            caller = await find_caller(request)
            caller.require("run")
            response = await call(request, caller, self._service)
        except Exception as error:
            response = await answer(request, error)
        await response(scope, receive, send)


def _route(router: APIRouter, path: str) -> BaseRoute:
    return next(route for route in router.routes if getattr(route, "path", None) == path)


async def _execute(request: JsonRequest, caller: Caller, service: Service) -> Response:
    header = request.headers.get
    return await code.execute(
        request, caller, service, prefer=header("prefer"), idempotency_key=header("idempotency-key")
    )
