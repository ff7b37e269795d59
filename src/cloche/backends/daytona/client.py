"""What Daytona is asked for: sandboxes, and terminals in them; and what its refusals mean.

Of the SDK `daytona` this uses the two clients that it is built on, which do what they are told and nothing else. The
class on top of them reads variables and files of the working directory, keeps a connection for events, and may export
traces: none of that is imported. Connections are of one session, which no proxy and no .netrc of the environment
reaches. Answers are read here, with bounds: the clients' models refuse an answer of a server that is a little older.

All calls are coroutines of one loop, in a thread of its own (`OwnLoop`). Methods of `Client` block, for any thread.
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
MOST_ADDRESS, MOST_TEXT = 2048, 1000  # characters of what is said of a sandbox
TRIES, MOST_WAIT_S, REFUSED_WAIT_S = 3, 5.0, 0.2
HEARTBEATS = 1.7  # in the time after which a silent terminal is lost; an answer has half the time between two
READY, GONE = "started", ("error", "build_failed", "destroyed", "destroying", "archived", "stopped")
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# How the API words what has no status of its own.
_WORDED = (
    (re.compile(r"region|target|no available runners?", re.IGNORECASE), Failure.REGION),
    (
        re.compile(r"limit exceeded|quota|exceeds? (the )?maximum|deplete|credit|suspended", re.IGNORECASE),
        Failure.QUOTA,
    ),
)


call = OwnLoop("cloche-daytona", margin_s=MARGIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Describe a sandbox at the provider: its name there, where its toolbox is, what it was given."""

    id: str
    state: str
    toolbox: str
    labels: Mapping[str, str]
    kind: str = ""
    reason: str = ""


def checked(account: RemoteAccount | None) -> RemoteAccount:
    """Return the account. Raises BackendUnavailable, with what is missing; nobody is asked."""
    found = check_account(account, provider=PROVIDER, package=API, extra=EXTRA, variable=VARIABLE)
    if importlib.util.find_spec(TOOLBOX) is None:
        raise BackendUnavailable(
            f"backend {PROVIDER!r}: the package {TOOLBOX} is not installed.",
            remedy=f'Install the extra that brings it: "pip install cloche[{EXTRA}]".',
        )
    return found


class Client:
    """Ask for one account."""

    def __init__(self, account: RemoteAccount):
        self.account = account
        self._url = account.url or URL
        self.is_given_up = False  # nobody waits for a sandbox any more
        self._session: Any = None
        self._api: Any = None

    def create(self, **wanted: Any) -> Found:
        """Create a sandbox, and wait until it has started. Raises RemoteUnavailable, StartFailed; then none is left."""
        name = f"cloche-{uuid.uuid4().hex[:16]}"
        try:
            return self._call(lambda: self._create(name, wanted), CREATE_S)
        except BaseException as error:
            if not isinstance(error, RemoteUnavailable) or error.failure in _MAY_HAVE_MADE:
                with contextlib.suppress(BackendUnavailable):
                    self.delete(name)
            raise

    def delete(self, name: str) -> None:
        """Have no sandbox of this name or id. Raises RemoteUnavailable, unless there is none."""
        try:
            self._call(lambda: self._ask("delete_sandbox", sandbox_id_or_name=name), ANSWER_S)
        except RemoteUnavailable as error:
            if error.failure is not Failure.NOT_FOUND:
                raise

    def list_with(self, label: str) -> list[Found]:
        """Return all sandboxes that have this label, whatever its value."""
        return self._call(lambda: self._list(label), ANSWER_S * 4)

    def open_terminal(self, found: Found) -> Any:
        """Return the web socket of a new terminal in a sandbox. Raises RemoteUnavailable."""
        return self._call(lambda: self._terminal(found), ANSWER_S)

    def close(self) -> None:
        """Close all connections."""

        async def closed() -> None:
            session, self._session, self._api = self._session, None, None
            if session is not None:
                await session.close()

        with contextlib.suppress(TimeoutError):
            call(closed, CONNECT_S)

    def error(self, failure: Failure, detail: str = "", **more: Any) -> RemoteUnavailable:
        """Return the error of a failure, with the provider's words about it."""
        return remote_error(PROVIDER, failure, detail=detail, account=self.account, **more)

    # In the loop.

    def _call(self, make: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        try:
            return call(lambda: self._explained(make), timeout_s)
        except TimeoutError as error:
            raise self.error(Failure.TIMEOUT) from error

    async def _explained(self, make: Callable[[], Awaitable[T]]) -> T:
        """Return what comes of it, with errors of the connection said in our words; the clients' may have the key."""
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
        except RuntimeError:  # of a session that was closed meanwhile
            raise self.error(Failure.NO_NETWORK, "the connection was closed") from None

    async def _connected(self) -> Any:
        """Return the session; it is opened when it is first asked for."""
        if self._session is None:
            http = importlib.import_module(HTTP)
            self._api = self._new_api(API, self._url)
            context = self._api.rest_client.ssl_context
            if context is not None:
                context.keylog_filename = None  # else it writes its keys where SSLKEYLOGFILE says
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
        found = module.ApiClient(module.Configuration(host=url.rstrip("/"), ssl_ca_cert=self.account.ca_file or None))
        found.default_headers.update(self._headers())
        return found

    async def _use_session(self, api: Any) -> None:
        own, api.rest_client.pool_manager = api.rest_client.pool_manager, self._session
        if own is not None:
            await own.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self.account.api_key.reveal()}", "X-Daytona-Source": "cloche"}
        if self.account.organisation:
            headers["X-Daytona-Organization-ID"] = self.account.organisation
        return headers

    async def _ask(self, name: str, **given: Any) -> Any:
        """Call a method of the API, and return what is answered."""
        await self._connected()
        method = getattr(importlib.import_module(API).SandboxApi(self._api), f"{name}_without_preload_content")
        return await self._read(await method(**given, _request_timeout=ANSWER_S))

    async def _read(self, answered: Any) -> Any:
        response = getattr(answered, "response", answered)
        async with response:
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise self.error(Failure.BAD_ANSWER, "an answer in a coding that was not asked for")
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
            said = json.loads(data)
            message = str(said.get("message") or said.get("error") or "") if isinstance(said, dict) else ""
        failure = by_status(status)
        if status in (400, 402, 403, 404, 409, 422, 503):
            failure = next((one for pattern, one in _WORDED if pattern.search(message)), failure)
        return self.error(failure, message, status=status, retry_after_s=_seconds(headers.get("Retry-After")))

    async def _create(self, name: str, wanted: Mapping[str, Any]) -> Found:
        body = importlib.import_module(API).CreateSandbox(name=name, **wanted)
        found = self._found(await self._ask_until_heard("create_sandbox", create_sandbox=body))
        while found.state != READY:
            if found.state in GONE:
                said = f": {scrub(found.reason, self.account)}" if found.reason else ""
                raise StartFailed(f"the sandbox at Daytona did not start, it is {found.state!r}{said}", step="create")
            if self.is_given_up:
                raise StartFailed("the sandbox was closed before it was up; open another one", step="create")
            await asyncio.sleep(POLL_S)
            found = self._found(await self._ask("get_sandbox", sandbox_id_or_name=found.id))
        if not found.toolbox:
            answer = await self._ask("get_toolbox_proxy_url", sandbox_id=found.id)
            url = answer.get("url") if isinstance(answer, dict) else None
            told = self._found({"id": found.id, "toolboxProxyUrl": url})
            found = replace(found, toolbox=told.toolbox)
        return found

    async def _ask_until_heard(self, name: str, **given: Any) -> Any:
        """Ask again where nobody can have heard of it, a few times: a connection refused, or a short wait asked for."""
        http = importlib.import_module(HTTP)
        for attempt in range(1, TRIES + 1):
            try:
                return await self._ask(name, **given)
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

    def _found(self, answer: Any) -> Found:
        """Return what is said of a sandbox. Raises RemoteUnavailable where that cannot be true."""
        said = answer if isinstance(answer, dict) else {}
        texts = {key: value for key, value in said.items() if isinstance(value, str)}
        toolbox, labels = texts.get("toolboxProxyUrl", ""), said.get("labels")
        if not _ID.fullmatch(texts.get("id", "")):
            raise self.error(Failure.BAD_ANSWER, "a sandbox without an id")
        why = why_no_address(toolbox) if toolbox else ""
        if toolbox.startswith("http:") and not self._url.startswith("http:"):
            why = "is not https"
        if why or len(toolbox) > MOST_ADDRESS:
            raise self.error(Failure.BAD_ANSWER, f"the address of its toolbox {why or 'is too long'}")
        return Found(
            id=texts["id"], state=texts.get("state", "")[:40], toolbox=toolbox.rstrip("/"),
            labels=_short_texts(labels),
            kind=texts.get("sandboxClass", "")[:40], reason=texts.get("errorReason", "")[:MOST_TEXT],
        )  # fmt: skip

    async def _list(self, label: str) -> list[Found]:
        found: list[Found] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await self._ask("list_sandboxes", cursor=cursor, limit=PAGE)
            items = page.get("items") if isinstance(page, dict) else None
            if not isinstance(items, list):
                raise self.error(Failure.BAD_ANSWER, "a list of sandboxes that is none")
            found += [one for one in map(self._found, items[:PAGE]) if label in one.labels]
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or not cursor:
                break
        return found

    async def _terminal(self, found: Found) -> Any:
        session = await self._connected()
        base, name = f"{found.toolbox}/{quote(found.id, safe='')}", uuid.uuid4().hex
        toolbox, api = importlib.import_module(TOOLBOX), self._new_api(TOOLBOX, base)
        await self._use_session(api)
        wanted = toolbox.PtyCreateRequest(id=name, cols=80, rows=24, cwd="/", envs={"HISTFILE": ""}, lazy_start=True)
        made = toolbox.ProcessApi(api).create_pty_session_without_preload_content
        await self._read(await made(request=wanted, _request_timeout=ANSWER_S))
        url = f"{base}/process/pty/{name}/connect"
        return await session.ws_connect(
            re.sub("^http", "ws", url),
            headers=self._headers(),
            max_msg_size=MOST_MESSAGE,
            heartbeat=self.account.silence_s / HEARTBEATS,
        )


# After these, a sandbox may have been made of which nobody was told.
_MAY_HAVE_MADE = (Failure.NO_NETWORK, Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.SERVER)


def _short_texts(labels: object) -> dict[str, str]:
    """Return labels without what none of ours is."""
    rows = labels.items() if isinstance(labels, dict) else ()
    return {key: value for key, value in rows if isinstance(value, str) and len(key) + len(value) <= MOST_TEXT}


async def _refuse_redirect(_: Any, __: Any, ___: Any) -> None:
    """Refuse to go where an answer says: code and key go to the account's host alone."""
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
