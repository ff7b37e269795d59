"""The busiest route, called without FastAPI, whose overhead exceeds the work of the route itself.

Requests that need the framework go to it: those with a query, from pages of other sites (CORS), for the OpenAPI
document.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .auth import find_caller
from .bodies import JsonRequest
from .html import answer
from .routes import code
from .service import Service

PATH = "/api/code/exec"


class Direct:
    """Handle requests to run code; pass all others to the framework's application."""

    def __init__(self, app: FastAPI, service: Service):
        self._app, self._service, self.state = app, service, app.state
        self._route = next(route for route in code.router.routes if getattr(route, "path", None) == PATH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or pass it on."""
        is_ours = scope["path"] == PATH and scope["type"] == "http" and scope["method"] == "POST"
        if not is_ours or scope["query_string"]:
            await self._app(scope, receive, send)
            return
        scope["route"] = self._route
        request = JsonRequest(scope, receive)
        try:
            response = await self._execute(request)
        except Exception as error:
            response = await answer(request, error)
        await response(scope, receive, send)

    async def _execute(self, request: JsonRequest) -> Response:
        caller = await find_caller(request)
        caller.require("run")
        header = request.headers.get
        return await code.execute(
            request, caller, self._service, prefer=header("prefer"), idempotency_key=header("idempotency-key")
        )
