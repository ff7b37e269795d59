"""Requests to Daytona: sandboxes and terminals in them; and the meaning of its error answers.

Of the SDK `daytona` this uses the two generated clients, which send requests and do nothing else. The class above them
reads variables and files of the working directory, keeps a connection for events, and may export traces: none of that
is imported. All connections belong to one HTTP session, which ignores proxies and .netrc. Answers are parsed here, with
bounds, because the clients' models reject answers of slightly older servers.

All calls are coroutines of one loop in a thread (`OwnLoop`). Methods of `DaytonaClient` block and are thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import math
import os
import re
import ssl
import uuid
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import quote

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.record import dataclass, replace
from cloche.core.remote import DOMAINS, RemoteAccount, why_no_address

from ..own_loop import OwnLoop
from ..remote.accounts import check_account
from ..remote.failures import Failure, RemoteUnavailable, by_status, remote_error, scrub

log = logging.getLogger("cloche.remote")
T = TypeVar("T")
PROVIDER, EXTRA, VARIABLE = "daytona", "daytona", "DAYTONA_API_KEY"
API, TOOLBOX, HTTP = "daytona_api_client_async", "daytona_toolbox_api_client_async", "aiohttp"
URL = f"https://{DOMAINS[PROVIDER]}/api"
ANSWER_S, CREATE_S, CONNECT_S, MARGIN_S = 30.0, 180.0, 15.0, 5.0
POLL_S = 0.25
MOST_ANSWER, MOST_MESSAGE = 4 << 20, 1 << 20
MOST_PAGES, PAGE = 200, 100
MOST_ADDRESS, MOST_TEXT = 2048, 1000  # maximum characters of a sandbox's texts
TRIES, MOST_WAIT_S, REFUSED_WAIT_S = 3, 5.0, 0.2
HEARTBEATS = 1.7  # heartbeats per `silence_s`; aiohttp waits half an interval for the pong
READY, GONE = "started", ("error", "build_failed", "destroyed", "destroying", "archived", "stopped")
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Messages of failures that have no HTTP status of their own.
_WORDED = (
    (re.compile(r"region|target|no available runners?", re.IGNORECASE), Failure.REGION),
    (
        re.compile(r"limit exceeded|quota|exceeds? (the )?maximum|deplete|credit|suspended", re.IGNORECASE),
        Failure.QUOTA,
    ),
)


call = OwnLoop("cloche-daytona", margin_s=MARGIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSandbox:
    """A sandbox at the provider: its id, state, toolbox URL and labels."""

    id: str
    state: str
    toolbox: str
    labels: Mapping[str, str]
    kind: str = ""
    reason: str = ""


def checked(account: RemoteAccount | None) -> RemoteAccount:
    """Return the account. Raises BackendUnavailable if something is missing. Sends no request."""
    checked_account = check_account(account, provider=PROVIDER, package=API, extra=EXTRA, variable=VARIABLE)
    if importlib.util.find_spec(TOOLBOX) is None:
        raise BackendUnavailable(
            f"backend {PROVIDER!r}: the package {TOOLBOX} is not installed.",
            remedy=f'Install the extra that brings it: "pip install cloche[{EXTRA}]".',
        )
    return checked_account


class DaytonaClient:
    """Make requests for one account."""

    def __init__(self, account: RemoteAccount):
        self.account = account
        self._url = account.url or URL
        self.is_given_up = False  # set when the creation of a sandbox is to be aborted
        self._session: Any = None
        self._api: Any = None

    def create(self, **settings: Any) -> ProviderSandbox:
        """Create a sandbox and wait until it has started.

        Raises RemoteUnavailable, StartFailed; no sandbox is left then.
        """
        name = f"cloche-{uuid.uuid4().hex[:16]}"
        try:
            return self._call(lambda: self._create(name, settings), CREATE_S)
        except BaseException as error:
            if not isinstance(error, RemoteUnavailable) or error.failure in _MAY_HAVE_MADE:
                with contextlib.suppress(BackendUnavailable):
                    self.delete(name)
            raise

    def delete(self, name: str) -> None:
        """Delete a sandbox by name or id; a missing one is ignored. Raises RemoteUnavailable."""
        try:
            self._call(lambda: self._ask("delete_sandbox", sandbox_id_or_name=name), ANSWER_S)
        except RemoteUnavailable as error:
            if error.failure is not Failure.NOT_FOUND:
                raise

    def list_with(self, label: str) -> list[ProviderSandbox]:
        """Return all sandboxes that have this label, with any value."""
        return self._call(lambda: self._list(label), ANSWER_S * 4)

    def open_terminal(self, sandbox: ProviderSandbox) -> Any:
        """Return the web socket of a new terminal in a sandbox. Raises RemoteUnavailable."""
        return self._call(lambda: self._terminal(sandbox), ANSWER_S)

    def close(self) -> None:
        """Close all connections."""

        async def closed() -> None:
            session, self._session, self._api = self._session, None, None
            if session is not None:
                await session.close()

        with contextlib.suppress(TimeoutError):
            call(closed, CONNECT_S)

    def error(self, failure: Failure, detail: str = "", **more: Any) -> RemoteUnavailable:
        """Return the error of a failure, with the provider's message."""
        return remote_error(PROVIDER, failure, detail=detail, account=self.account, **more)

    # In the loop.

    def _call(self, make: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        try:
            return call(lambda: self._explained(make), timeout_s)
        except TimeoutError as error:
            raise self.error(Failure.TIMEOUT) from error

    async def _explained(self, make: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call; connection errors become ours, because the clients' messages may contain the
        key.
        """
        http = importlib.import_module(HTTP)
        try:
            return await make()
        except (http.ClientConnectorCertificateError, http.ClientSSLError, ssl.SSLError) as error:
            raise self.error(Failure.TLS, _tls_reason(error)) from None
        except http.WSServerHandshakeError as error:
            raise self.error(by_status(error.status), status=error.status) from None
        except (http.ClientPayloadError, http.ClientResponseError) as error:
            raise self.error(Failure.BAD_ANSWER, type(error).__name__) from None
        except (http.ClientConnectionError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise self.error(Failure.TIMEOUT) from None
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
            raise self.error(Failure.NO_NETWORK, reason) from None
        except (ValueError, RecursionError) as error:
            raise self.error(Failure.BAD_ANSWER, type(error).__name__) from None
        except RuntimeError:  # the session was closed meanwhile
            raise self.error(Failure.NO_NETWORK, "the connection was closed") from None

    async def _connected(self) -> Any:
        """Return the HTTP session, which the first call opens."""
        if self._session is None:
            http = importlib.import_module(HTTP)
            self._api = self._new_api(API, self._url)
            context = self._api.rest_client.ssl_context
            if context is not None:
                context.keylog_filename = None  # otherwise TLS keys are written to SSLKEYLOGFILE
            connector = http.TCPConnector(ssl=context, limit=0)
            watch = http.TraceConfig()
            watch.on_request_redirect.append(_refuse_redirect)
            self._session = http.ClientSession(
                connector=connector, trust_env=False, cookie_jar=http.DummyCookieJar(), auto_decompress=False,
                trace_configs=[watch], headers={"Accept-Encoding": "identity"},
                timeout=http.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )  # fmt: skip
            await self._use_session(self._api)
        return self._session

    def _new_api(self, package: str, url: str) -> Any:
        module: ModuleType = importlib.import_module(package)
        api = module.ApiClient(module.Configuration(host=url.rstrip("/"), ssl_ca_cert=self.account.ca_file or None))
        api.default_headers.update(self._headers())
        return api

    async def _use_session(self, api: Any) -> None:
        own, api.rest_client.pool_manager = api.rest_client.pool_manager, self._session
        if own is not None:
            await own.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.account.api_key.reveal()}", "X-Daytona-Source": "cloche"}
        if self.account.organisation:
            headers["X-Daytona-Organization-ID"] = self.account.organisation
        return headers

    async def _ask(self, name: str, **arguments: Any) -> Any:
        """Call a method of the API and return its answer."""
        await self._connected()
        method = getattr(importlib.import_module(API).SandboxApi(self._api), f"{name}_without_preload_content")
        return await self._read(await method(**arguments, _request_timeout=ANSWER_S))

    async def _read(self, answered: Any) -> Any:
        response = getattr(answered, "response", answered)
        async with response:
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise self.error(Failure.BAD_ANSWER, "an answer in an encoding that was not requested")
            data = bytearray()
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > MOST_ANSWER:
                    raise self.error(Failure.BAD_ANSWER, f"an answer of more than {MOST_ANSWER} bytes")
            if response.status >= 400:
                raise self._refusal(response.status, response.headers, bytes(data))
        return json.loads(data) if data else {}

    def _refusal(self, status: int, headers: Mapping[str, str], data: bytes) -> RemoteUnavailable:
        message = ""
        with contextlib.suppress(ValueError, RecursionError):
            problem = json.loads(data)
            message = str(problem.get("message") or problem.get("error") or "") if isinstance(problem, dict) else ""
        failure = by_status(status)
        if status in (400, 402, 403, 404, 409, 422, 503):
            failure = next((worded_failure for pattern, worded_failure in _WORDED if pattern.search(message)), failure)
        return self.error(failure, message, status=status, retry_after_s=_seconds(headers.get("Retry-After")))

    async def _create(self, name: str, settings: Mapping[str, Any]) -> ProviderSandbox:
        body = importlib.import_module(API).CreateSandbox(name=name, **settings)
        sandbox = self._described(await self._ask_until_heard("create_sandbox", create_sandbox=body))
        while sandbox.state != READY:
            if sandbox.state in GONE:
                reason = f": {scrub(sandbox.reason, self.account)}" if sandbox.reason else ""
                raise StartFailed(
                    f"the sandbox at Daytona did not start, it is {sandbox.state!r}{reason}", step="create"
                )
            if self.is_given_up:
                raise StartFailed("the sandbox was closed before it had started; open another one", step="create")
            await asyncio.sleep(POLL_S)
            sandbox = self._described(await self._ask("get_sandbox", sandbox_id_or_name=sandbox.id))
        if not sandbox.toolbox:
            answer = await self._ask("get_toolbox_proxy_url", sandbox_id=sandbox.id)
            url = answer.get("url") if isinstance(answer, dict) else None
            with_toolbox = self._described({"id": sandbox.id, "toolboxProxyUrl": url})
            sandbox = replace(sandbox, toolbox=with_toolbox.toolbox)
        return sandbox

    async def _ask_until_heard(self, name: str, **arguments: Any) -> Any:
        """Repeat a request a few times if the server cannot have processed it: a refused connection, or a short
        Retry-After.
        """
        http = importlib.import_module(HTTP)
        for attempt in range(1, TRIES + 1):
            try:
                return await self._ask(name, **arguments)
            except RemoteUnavailable as error:
                wait_s = error.retry_after_s if error.failure is Failure.RATE_LIMITED else None
                if attempt == TRIES or wait_s is None or wait_s > MOST_WAIT_S:
                    raise
            except http.ClientSSLError:
                raise
            except http.ClientConnectorError:
                if attempt == TRIES:
                    raise
                wait_s = REFUSED_WAIT_S
            await asyncio.sleep(wait_s)
        raise self.error(Failure.TIMEOUT)

    def _described(self, answer: Any) -> ProviderSandbox:
        """Return the description of a sandbox. Raises RemoteUnavailable if it is invalid."""
        fields = answer if isinstance(answer, dict) else {}
        texts = {key: value for key, value in fields.items() if isinstance(value, str)}
        toolbox, labels = texts.get("toolboxProxyUrl", ""), fields.get("labels")
        if not _ID.fullmatch(texts.get("id", "")):
            raise self.error(Failure.BAD_ANSWER, "a sandbox without an id")
        why = why_no_address(toolbox) if toolbox else ""
        if toolbox.startswith("http:") and not self._url.startswith("http:"):
            why = "is not https"
        if why or len(toolbox) > MOST_ADDRESS:
            raise self.error(Failure.BAD_ANSWER, f"the address of its toolbox {why or 'is too long'}")
        return ProviderSandbox(
            id=texts["id"], state=texts.get("state", "")[:40], toolbox=toolbox.rstrip("/"),
            labels=_short_texts(labels),
            kind=texts.get("sandboxClass", "")[:40], reason=texts.get("errorReason", "")[:MOST_TEXT],
        )  # fmt: skip

    async def _list(self, label: str) -> list[ProviderSandbox]:
        sandboxes: list[ProviderSandbox] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await self._ask("list_sandboxes", cursor=cursor, limit=PAGE)
            items = page.get("items") if isinstance(page, dict) else None
            if not isinstance(items, list):
                raise self.error(Failure.BAD_ANSWER, "an invalid list of sandboxes")
            sandboxes += [sandbox for sandbox in map(self._described, items[:PAGE]) if label in sandbox.labels]
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or not cursor:
                break
        return sandboxes

    async def _terminal(self, sandbox: ProviderSandbox) -> Any:
        session = await self._connected()
        base, name = f"{sandbox.toolbox}/{quote(sandbox.id, safe='')}", uuid.uuid4().hex
        toolbox, api = importlib.import_module(TOOLBOX), self._new_api(TOOLBOX, base)
        await self._use_session(api)
        request = toolbox.PtyCreateRequest(id=name, cols=80, rows=24, cwd="/", envs={"HISTFILE": ""}, lazy_start=True)
        create = toolbox.ProcessApi(api).create_pty_session_without_preload_content
        await self._read(await create(request=request, _request_timeout=ANSWER_S))
        url = f"{base}/process/pty/{name}/connect"
        return await session.ws_connect(
            re.sub("^http", "ws", url),
            headers=self._headers(),
            max_msg_size=MOST_MESSAGE,
            heartbeat=self.account.silence_s / HEARTBEATS,
        )


# After these failures a sandbox may have been created whose id is unknown.
_MAY_HAVE_MADE = (Failure.NO_NETWORK, Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.SERVER)


def _short_texts(labels: object) -> dict[str, str]:
    """Return the labels that can be ours: short texts."""
    rows = labels.items() if isinstance(labels, dict) else ()
    return {key: value for key, value in rows if isinstance(value, str) and len(key) + len(value) <= MOST_TEXT}


async def _refuse_redirect(_: Any, __: Any, ___: Any) -> None:
    """Refuse a redirect: code and key are sent to the account's host only."""
    raise ValueError("redirected")


def _tls_reason(error: Exception) -> str:
    inner = getattr(error, "certificate_error", None) or error
    return str(getattr(inner, "verify_message", "") or getattr(inner, "reason", "") or type(inner).__name__)


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
