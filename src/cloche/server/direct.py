"""The route of which there are most requests, called without the framework, which takes longer than its own work.

What needs anything of the framework is left to it: a query, pages of other sites, the description of the route.
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
    """Take requests to run code; pass all others on to the framework's application."""

    def __init__(self, app: FastAPI, service: Service):
        self._app, self._service, self.state = app, service, app.state
        self._route = next(route for route in code.router.routes if getattr(route, "path", None) == PATH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
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
