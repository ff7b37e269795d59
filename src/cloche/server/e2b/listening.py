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
from cloche.serving.authority import OwnAuthority

from ..observe import RequestObserver
from ..service import Service
from .app import E2BApp
from .calls import E2B, key_of
from .defaults import sandbox_options
from .options import E2BOptions
from .tls import PROTOCOLS, lines_for_clients, reachable, serve_names, with_tls
from .upgrades import UpgradeProtocol

log = logging.getLogger("cloche.service")
NO_USERS = (
    "E2B's paths and users (/home/user, sudo, templates with steps) are missing: sandboxes of this backend and level "
    "have one user; cloche doctor tells why, docs/e2b.md what works"
)


async def serve_e2b(service: Service, options: E2BOptions, *, beside: Coroutine[Any, Any, None]) -> None:
    """Serve E2B's protocol, and the API `beside` it, until cancelled. Raises InvalidRequest, BackendUnavailable."""
    try:
        listener = http.listen(options.host, options.port)
    except BaseException:
        beside.close()
        raise
    try:
        port = listener.getsockname()[1]
        options, authority = await asyncio.to_thread(with_tls, options, port)
        e2b = E2B(service, options, await asyncio.to_thread(key_of, service))
        config = uvicorn.Config(
            RequestObserver(E2BApp(e2b), service.metrics), log_config=None, log_level="critical", access_log=False,
            server_header=False, proxy_headers=bool(options.trusted_proxies),
            forwarded_allow_ips=list(options.trusted_proxies), http=http.bounded(resets_broken=True), lifespan="off",
            ws=UpgradeProtocol,
            timeout_graceful_shutdown=max(1, round(service.options.drain_s)), backlog=http.backlog(),
            ssl_certfile=options.certificate, ssl_keyfile=options.key,
        )  # fmt: skip
        config.load()
        if config.ssl is not None:
            config.ssl.set_alpn_protocols(PROTOCOLS)
        service.in_background(_prepare(service))
        _greet([*lines_for_sdks(options, authority, port), *await _missing_users(service)])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beside)
            if authority is not None and config.ssl is not None:
                tasks.create_task(serve_names(authority, config.ssl))
            serving = http.serve(http.Unsignalled(config), listener, on_stop=lambda: e2b.cut_all("the service stops"))
            tasks.create_task(serving)
    finally:
        listener.close()


async def _prepare(service: Service) -> None:
    """Open spare sandboxes of the base template, whose first one would have to be waited for."""
    try:
        await service.sandboxes.prepare(await sandbox_options(service))
    except ClocheError as error:  # as the first create will report
        log.warning("no spare sandbox can be opened: %s", error)


async def _missing_users(service: Service) -> list[str]:
    """Return a line that tells if sandboxes have no users as at E2B."""
    try:
        options = await sandbox_options(service)
    except ClocheError as error:  # as the first create will report
        return [str(error)]
    is_like_e2b = "account" in options and options.get("users") is not False
    return [] if is_like_e2b else [NO_USERS]


def lines_for_sdks(options: E2BOptions, authority: OwnAuthority | None, port: int) -> list[str]:
    """Return the lines that tell how SDKs reach this listener."""
    scheme = "https" if options.certificate else "http"
    address = f"{scheme}://{http.bracketed(reachable(options.host))}:{port}"
    addresses = f"for E2B's SDKs: export E2B_API_URL={address} E2B_SANDBOX_URL={address} E2B_API_KEY=e2b_..."
    return [addresses, *lines_for_clients(options, authority)]


def _greet(lines: list[str]) -> None:
    for line in lines:
        print(f"cloche: {line}", file=sys.stderr, flush=True)  # noqa: T201
