"""The ASGI application: routes, error handlers and middleware."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from cloche import __version__

from . import html, problems
from .auth import check_passing, identify
from .below import RootPath, read_root_path
from .direct import Direct
from .forwarding import Forwarding
from .guard import Guard
from .observe import RequestObserver
from .service import Service

# The modules of `routes/`, each with a `router`.
ROUTES: Sequence[str] = (
    "code", "sandbox", "debug", "sandboxes", "sandbox_processes", "sandbox_sessions", "sandbox_files", "sandbox_folder",
    "sandbox_marks", "sandbox_streams", "sandbox_questions", "sandbox_snapshots", "wire", "snapshots", "workspace",
    "devenv", "repro", "keys", "secrets", "links", "approvals", "audit",
    "health",
)  # fmt: skip
FUSION_ROUTES: Sequence[str] = ("sandbox_fusion",)  # with --sandbox-fusion
AGENT_ROUTES: Sequence[str] = ("page_agents",)  # with --agents
PAGE_ROUTES: Sequence[str] = ("pages", "page_approvals", "page_sandboxes", "page_snapshots", "page_settings")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "::1")
# Newer FastAPI versions have telemetry that would send queries and error texts; Cloche's is in `observe.py`.
_NO_TELEMETRY: Any = {
    "tracing": False, "metrics": False, "logs": False, "operation_spans": False, "auto_configure": False,
}  # fmt: skip
_ABOUT = "Runs code that a language model wrote, so that it cannot hurt the machine it runs on."


def create_app(
    service: Service, *, names: Sequence[str] = (), is_any_host: bool = False, root_path: str = ""
) -> ASGIApp:
    """Return the ASGI application of an open service. `names` are further host names that it accepts.

    `root_path` is the path below which it is served. Raises InvalidRequest for an invalid one.
    """
    app = FastAPI(
        title="Cloche", version=__version__, description=_ABOUT, openapi_url="/api/openapi.json", docs_url=None,
        redoc_url=None, telemetry=_NO_TELEMETRY,
    )  # fmt: skip
    app.state.service = service
    problems.install(app, html.answer)
    fusion_routes = FUSION_ROUTES if service.options.has_sandbox_fusion else ()
    agent_routes = AGENT_ROUTES if service.options.has_agents else ()
    for name in (*ROUTES, *fusion_routes, *agent_routes, *PAGE_ROUTES):
        app.include_router(_described(import_module(f"{__package__}.routes.{name}").router))
    root = read_root_path(root_path, (route.path for route in app.routes if isinstance(route, Route)))
    app.servers = [{"url": root}] if root else []
    allowed = service.options.allowed_origins
    if allowed:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["Location", "Retry-After"],
        )  # fmt: skip
    known_hosts = [name.lower() for name in (*LOOPBACK_NAMES, *names)]
    direct = app if allowed else Direct(app, service)
    forwarding = Forwarding(
        direct, service.peers, sandbox=service.sandboxes.elsewhere, has_run=service.runs.has, check=check_passing
    )
    guard = Guard(forwarding, names=known_hosts, identify=partial(identify, service), is_any_host=is_any_host)
    observed = RequestObserver(guard, service.metrics)
    return RootPath(observed, root) if root else observed


def _described(router: APIRouter) -> APIRouter:
    """Return a router whose routes have the first sentence of their description as their summary."""
    for route in router.routes:
        if isinstance(route, APIRoute) and route.summary is None:
            first = re.split(r"\.(?:\s|$)", route.description, maxsplit=1)[0]
            route.summary = " ".join(first.split())
    return router
