"""`cloche serve`: check where to listen, create the first key, print the addresses, serve until a signal arrives."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import resource
import ssl
import stat
import sys
from typing import TYPE_CHECKING

from cloche.config.options import SandboxOptions
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field, replace
from cloche.serving.process import until_signal

from . import require_extra

if TYPE_CHECKING:
    from cloche.audit.log import Audit
    from cloche.records.database import Database

    from .e2b.options import E2BOptions
    from .peers import Listening
from .service import Service, WorkspaceRoot

FORCED_EXIT_S = 10.0  # after the drain, and after the sandboxes have ended
END_S = 20.0  # for the sandboxes to end
_WORKER_ADDRESS = re.compile(r"https://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """Hold the parsed command line of `cloche serve`, not yet checked."""

    host: str = "127.0.0.1"
    port: int = 8470
    database: str | None = None
    certificate: str | None = None
    key: str | None = None
    self_signed: str | None = None
    allows_public: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    queue_limit: int = 256
    queue_deadline_s: float = 30.0
    drain_s: float = 30.0
    keep_runs_s: float = 30 * 86_400.0
    keep_sandboxes_s: float = 600.0
    ends_sandboxes: bool = False
    most_sandboxes: int = 64
    spare_sandboxes: int = 0
    worker_address: str | None = None
    root_path: str = ""
    is_debugging: bool = False
    has_sandbox_fusion: bool = False
    has_agents: bool = False
    secrets_from: str = ""
    snapshots_bytes: int = 20 << 30
    secrets_key: str = ""
    e2b: E2BOptions | None = None
    options: SandboxOptions = field(default_factory=SandboxOptions)


def serve(command: ServeCommand) -> int:
    """Serve, and return the exit code. Raises InvalidRequest, BackendUnavailable."""
    require_extra()
    from .log import configure_log

    configure_log()
    ending_s = END_S if command.ends_sandboxes else 0.0
    return until_signal(serving(command), exit_timeout_s=command.drain_s + ending_s + FORCED_EXIT_S)


async def serving(command: ServeCommand) -> None:
    """Serve until cancelled. Raises InvalidRequest, BackendUnavailable."""
    import uvicorn

    from cloche.core.remote import MOST_MESSAGE
    from cloche.serving import http

    from .app import create_app
    from .capacity import check_capacity
    from .peers import UNIX, Listening
    from .service import ServiceOptions, opened
    from .telemetry import configure_telemetry
    from .web_frames import BoundedWebSocket

    command, sha256 = await asyncio.to_thread(_with_certificate, command)
    is_secure = _check_tls(command)
    if not (is_secure or command.allows_public or http.is_loopback(command.host)):
        raise InvalidRequest(
            f"--host {command.host}: keys would cross the network unencrypted; give --tls-certificate and "
            "--tls-key, --self-signed, or --allow-public if a proxy in front of the service has TLS"
        )
    check_capacity(command.most_sandboxes)
    if (places := _secrets(command))["secrets_key"] or command.e2b is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    options = ServiceOptions(
        options=command.options, roots=tuple(read_root(root) for root in command.roots), is_secure=is_secure,
        allowed_hosts=command.allowed_hosts, allowed_origins=command.allowed_origins, queue_limit=command.queue_limit,
        queue_deadline_s=command.queue_deadline_s, drain_s=command.drain_s,
        keep_runs_s=command.keep_runs_s, keep_sandboxes_s=command.keep_sandboxes_s,
        ends_sandboxes=command.ends_sandboxes, most_sandboxes=command.most_sandboxes,
        spare_sandboxes=command.spare_sandboxes, is_debugging=command.is_debugging,
        has_sandbox_fusion=command.has_sandbox_fusion, has_agents=command.has_agents,
        secrets_from=places["secrets_from"], secrets_key=places["secrets_key"],
        makes_secrets_key=command.e2b is not None, snapshots_bytes=command.snapshots_bytes,
    )  # fmt: skip
    address_host = _check_worker_address(command)
    listener = http.listen(command.host, command.port)
    beside: Listening | None = None
    end_telemetry = configure_telemetry()
    try:
        async with opened(command.database, options) as service:
            _watch(service)
            names = (*command.allowed_hosts, *([] if http.is_wildcard(command.host) else [command.host]))
            app = create_app(service, names=(*names, *address_host), root_path=command.root_path)
            beside = await asyncio.to_thread(Listening)
            await service.peers.join(command.worker_address or UNIX + beside.path, _read_text(command.certificate))
            scheme, port = "https" if is_secure else "http", listener.getsockname()[1]
            shown = "127.0.0.1" if http.is_wildcard(command.host) else http.bracketed(command.host)
            address = f"{scheme}://{shown}:{port}{command.root_path.rstrip('/')}"
            await _greet(service, address, is_e2b=command.e2b is not None)
            if sha256:
                facts = {"address": address, "certificate": sha256, "pid": os.getpid()}
                print(json.dumps(facts), flush=True)  # noqa: T201
            if command.has_sandbox_fusion:
                _say(
                    f"cloche: for SandboxFusion's callers: {scheme}://cloche:KEY@{shown}:{port}{command.root_path.rstrip('/')}"
                )
            gc.freeze()  # a collection of the objects of the start takes longer than most requests
            config = uvicorn.Config(
                app, log_config=None, log_level="critical", access_log=False, server_header=False,
                proxy_headers=bool(command.trusted_proxies),  # of no other proxy: the address goes into the audit log
                forwarded_allow_ips=list(command.trusted_proxies),
                http=http.bounded(), lifespan="off", ws=BoundedWebSocket, ws_max_size=MOST_MESSAGE,
                ws_ping_timeout=None, ws_per_message_deflate=False,
                timeout_graceful_shutdown=max(1, round(command.drain_s)), backlog=http.backlog(),
                ssl_certfile=command.certificate, ssl_keyfile=command.key,
            )  # fmt: skip
            serving_api = http.serve(http.Unsignalled(config), listener, beside.socket, on_stop=service.begin_draining)
            if command.e2b is None:
                await serving_api
            else:
                from .e2b.listening import serve_e2b

                e2b = replace(command.e2b, certificate=command.certificate, key=command.key)
                await serve_e2b(service, e2b, beside=serving_api)
    finally:
        listener.close()
        if beside is not None:
            beside.close()
        end_telemetry()


def _secrets(command: ServeCommand) -> dict[str, str]:
    """Return where the secrets of the service are: by the command line, else by the configuration."""
    from cloche.config.settings import load_settings

    settings = load_settings(dict(command.options))
    return {
        "secrets_from": command.secrets_from or settings.secrets_from,
        "secrets_key": command.secrets_key or settings.secrets_key,
    }


def _watch(service: Service) -> None:
    """Measure the queue if tracing is on."""
    from cloche.audit.recording import is_traced

    if is_traced():
        from cloche.audit.telemetry import watch_queue

        watch_queue(lambda: service.runs.waiting, lambda: service.runs.running)


async def _greet(service: Service, address: str, *, is_e2b: bool) -> None:
    """Print the address of the service, a one-time link for a browser, and the first key if it was just created."""
    from .identities import make_link_code

    first_key = await asyncio.to_thread(_first_key, service.database, await service.audit(), is_e2b)
    if first_key is not None:
        _say(f"cloche: the first key, which is shown once: {first_key}")
    else:
        _say("cloche: the database has keys already; cloche keys create NAME makes another one")
    await service.record("login", what="link")
    code = await asyncio.to_thread(make_link_code, service.database)
    _say(f"cloche: serving at {address}/api")
    _say(f"cloche: open within 10 minutes, once: {address}/login?code={code}")


def _first_key(database: Database, audit: Audit | None, is_e2b: bool) -> str | None:
    from cloche.records.keys import SCOPES, create_key, list_keys

    return (
        None
        if list_keys(database)
        else create_key(database, name="first", scopes=SCOPES, audit=audit, is_e2b=is_e2b)[1]
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def read_root(text: str) -> WorkspaceRoot:
    """Return the root of --workspace-root: `FOLDER` to read, `FOLDER:rw` to write as well. Raises InvalidRequest."""
    from .service import WorkspaceRoot

    path, colon, mode = text.rpartition(":")
    if not colon or mode not in ("ro", "rw"):
        path, mode = text, "ro"
    try:
        status = os.stat(path)
    except OSError as error:
        raise InvalidRequest(f"--workspace-root {escape_name(text)}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidRequest(f"--workspace-root {escape_name(text)}: this is not a folder")
    return WorkspaceRoot(path=os.path.realpath(path), is_writable=mode == "rw")


def _check_worker_address(command: ServeCommand) -> tuple[str, ...]:
    """Return the host name of this worker for those of other machines. Raises InvalidRequest."""
    if command.worker_address is None:
        return ()
    match = _WORKER_ADDRESS.fullmatch(command.worker_address)
    if match is None:
        raise InvalidRequest(f"--worker-address {escape_name(command.worker_address)}: write it as https://HOST:PORT")
    if command.certificate is None:
        raise InvalidRequest(
            "--worker-address: keys of callers would cross the network unencrypted; give --tls-certificate and "
            "--tls-key"
        )
    return (match[1].lower(),)


def _read_text(path: str | None) -> str | None:
    """Return the first certificate of a PEM file, as text for the database."""
    if path is None:
        return None
    with open(path, encoding="ascii", errors="replace") as file:
        text = file.read()
    end = "-----END CERTIFICATE-----"
    return text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)] + "\n"


def _with_certificate(command: ServeCommand) -> tuple[ServeCommand, str]:
    """Return the command with the certificate of --self-signed, and its SHA-256; empty without that option."""
    from cloche.serving.certificate import keep_certificate

    if command.self_signed is None:
        return command, ""
    if command.certificate is not None or command.key is not None:
        raise InvalidRequest("--self-signed takes the place of --tls-certificate and --tls-key")
    path, sha256 = keep_certificate(command.self_signed, command.host)
    return replace(command, certificate=path, key=path), sha256


def _check_tls(command: ServeCommand) -> bool:
    if (command.certificate is None) != (command.key is None):
        raise InvalidRequest("--tls-certificate and --tls-key must be given together")
    if command.certificate is None or command.key is None:
        return False
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(command.certificate, command.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"--tls-certificate, --tls-key: cannot be used: {error}") from error
    return True
