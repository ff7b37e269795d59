"""The ASGI application: a request goes to the control plane, to envd, the code interpreter, or another port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from . import ports
from .calls import E2B, Call, Row, Rows
from .errors import Dropped, E2BError, answer, connect_answer, text_answer
from .target import CODE, ENVD, Target, target_of

# The modules with a table `ROWS`, of the control plane and of the two ports that are served here.
CONTROL = (
    "sandbox_metrics", "sandbox_logs", "sandbox_lists", "sandboxes", "network", "signed_files", "snapshots",
    "build_files", "template_tags", "template_builds", "template_routes", "teams", "volumes", "secrets",
)  # fmt: skip
ENVD_PARTS = (
    "envd.health", "envd.processes", "envd.filesystem", "envd.watches", "envd.files", "envd.environment",
)  # fmt: skip
CODE_PARTS = ("code.health", "code.routes", "code.execute")
FILES = "/files"  # at the control plane for URLs that name no sandbox
TARGET, SHARED = "cloche.e2b.target", "cloche.e2b"
Answer = Callable[[Exception], Response]


class E2BApp:
    """Serve E2B's protocol."""

    def __init__(self, e2b: E2B):
        self._e2b = e2b
        self._control = _router(CONTROL, answer)
        self._signed_files = _for_browsers(self._control)
        self._of_port: dict[int, ASGIApp] = {
            ENVD: _for_browsers(_router(ENVD_PARTS, connect_answer)),
            CODE: _router(CODE_PARTS, text_answer),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":  # `UpgradeProtocol` has made one of a web socket
            return
        scope[SHARED] = self._e2b
        try:
            target = scope[TARGET] = target_of(Headers(scope=scope), self._e2b.options.domain)
            if target is not None and target.port == CODE:
                await ports.check_code_traffic(Call(e2b=self._e2b, request=Request(scope), target=target))
        except E2BError as error:
            await answer(error)(scope, receive, send)
            return
        of_control = self._signed_files if scope["path"] == FILES else self._control
        app = of_control if target is None else self._of_port.get(target.port)
        if app is None:
            await ports.pass_on(self._e2b, target, scope, receive, send)
        else:
            await app(scope, receive, send)


def _for_browsers(app: ASGIApp) -> ASGIApp:
    """Let pages of any origin use an application: who may is said by a token or a signature, never by a cookie."""
    return CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], max_age=7200)


def rows_of(names: tuple[str, ...]) -> list[Row]:
    """Return the rows of modules of this package."""
    rows: list[Row] = []
    for name in names:
        module_rows: Rows = import_module(f"{__package__}.{name}").ROWS
        rows += module_rows
    return rows


class _Route(Route):
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a wrong method in E2B's form, too."""
        if self.methods and scope["method"] not in self.methods:
            error = E2BError(405, f"{scope['path'][:200]} does not have the method {scope['method']}")
            await answer(error)(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


def _router(names: tuple[str, ...], to_answer: Answer) -> Router:
    routes = [_Route(row.path, _endpoint(row, to_answer), methods=[row.method]) for row in rows_of(names)]
    return Router(routes, default=_no_route, redirect_slashes=False)


def _endpoint(row: Row, to_answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        target: Target | None = request.scope[TARGET]
        try:
            return await row.handler(Call(e2b=request.scope[SHARED], request=request, target=target))
        except (Dropped, HTTPException):
            raise
        except Exception as error:
            return to_answer(error)

    return endpoint


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(E2BError(404, f"there is no route {scope['method']} {scope['path'][:200]}"))(scope, receive, send)
