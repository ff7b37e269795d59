"""The listener of E2B's protocol, beside the API's in the same process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from typing import Any

import uvicorn

from cloche.core.errors import ClocheError
from cloche.serving import http

from ..observe import RequestObserver
from ..service import Service
from .app import E2BApp
from .calls import E2B, key_of
from .defaults import sandbox_options
from .options import E2BOptions
from .upgrades import UpgradeProtocol

log = logging.getLogger("cloche.service")


async def serve_e2b(service: Service, options: E2BOptions, *, beside: Coroutine[Any, Any, None]) -> None:
    """Serve E2B's protocol, and the API `beside` it, until cancelled. Raises InvalidRequest, BackendUnavailable."""
    try:
        listener = http.listen(options.host, options.port)
    except BaseException:
        beside.close()
        raise
    try:
        e2b = E2B(service, options, await asyncio.to_thread(key_of, service))
        config = uvicorn.Config(
            RequestObserver(E2BApp(e2b), service.metrics), log_config=None, log_level="critical", access_log=False,
            server_header=False, proxy_headers=False, http=http.bounded(), lifespan="off", ws=UpgradeProtocol,
            timeout_graceful_shutdown=max(1, round(service.options.drain_s)), backlog=http.backlog(),
            ssl_certfile=options.certificate, ssl_keyfile=options.key,
        )  # fmt: skip
        service.in_background(_prepare(service))
        _greet(options, listener.getsockname()[1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beside)
            tasks.create_task(http.serve(http.Unsignalled(config), listener))
    finally:
        listener.close()


async def _prepare(service: Service) -> None:
    """Open spare sandboxes of the base template, whose first one would have to be waited for."""
    try:
        await service.sandboxes.prepare(await sandbox_options(service))
    except ClocheError as error:  # as the first create will report
        log.warning("no spare sandbox can be opened: %s", error)


def _greet(options: E2BOptions, port: int) -> None:
    scheme = "https" if options.certificate else "http"
    address = f"{scheme}://{http.bracketed(options.host)}:{port}"
    print(  # noqa: T201
        f"cloche: for E2B's SDKs: export E2B_API_URL={address} E2B_SANDBOX_URL={address} E2B_API_KEY=e2b_...",
        file=sys.stderr, flush=True,
    )  # fmt: skip
