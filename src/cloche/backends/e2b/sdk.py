"""The package `e2b`: its import, an explicit value for each of its options, its connections, and its errors.

Theory of operation: the package reads every option that is not passed from the environment (`E2B_*`), so all options
are passed. It keeps connections in a table with one entry per proxy. Each account has its own entry there, under the
name of a proxy that does not exist: an `AccountTransport`. It trusts the account's certificate authorities, sends
nothing to other hosts, bounds the size of answers, and maps every failure to an error with a sentence.

All calls of the package are coroutines. They run in one event loop in a thread (`call`). Methods block and are
thread-safe, except those of `AccountTransport`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable
from cloche.core.remote import DOMAINS, RemoteAccount

from ..own_loop import OwnLoop
from ..remote.failures import Failure, RemoteUnavailable, by_status, remote_error

PROVIDER, PACKAGE, EXTRA, KEY_VARIABLE = "e2b", "e2b", "e2b", "E2B_API_KEY"
DOMAIN = DOMAINS[PROVIDER]
ENVD_PORT = 49983
ANSWER_S, CREATE_S, END_S, MARGIN_S = 30.0, 90.0, 20.0, 10.0
CONNECT_S, CONNECT_TRIES = 10.0, 2
MOST_ANSWER_BYTES, MOST_ERROR_BYTES, MOST_MESSAGE_BYTES = 2 << 20, 64 << 10, 1 << 20
KEY_HEADER = "x-api-key"
TOO_MANY = (
    "maximum number of concurrent"  # E2B's text for too many sandboxes; the status is 429, as for too many requests
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?")
_BY_CODE = {
    "unauthenticated": Failure.UNAUTHORIZED, "permission_denied": Failure.FORBIDDEN, "not_found": Failure.NOT_FOUND,
    "resource_exhausted": Failure.RATE_LIMITED, "deadline_exceeded": Failure.TIMEOUT,
}  # fmt: skip
_CERTIFICATE = re.compile(r"certificate|tls|ssl|unknownissuer|notvalid", re.IGNORECASE)
T = TypeVar("T")


call = OwnLoop("cloche-e2b", margin_s=MARGIN_S)


def find_package() -> Any:
    """Return the used modules of the package. Raises BackendUnavailable if they are missing or incompatible."""
    try:
        modules = {
            "top": "e2b",
            "connections": "e2b.api.client_async",
            "proxies": "e2b.api",
            "config": "e2b.connection_config",
            "rpc": "e2b.envd.client_async",
            "messages": "e2b.envd.process.process_pb",
            "process": "e2b.envd.process.process_connect",
            "protobuf": "protobuf",
            "pyqwest": "pyqwest",
        }
        package = SimpleNamespace(**{name: importlib.import_module(module) for name, module in modules.items()})
    except (ImportError, ValueError) as error:  # it raises ValueError for invalid E2B_* variables
        raise BackendUnavailable(
            f'backend "e2b": the package {PACKAGE} cannot be used ({error}).',
            remedy=f'Install the extra, which brings a suitable version: "pip install cloche[{EXTRA}]".',
        ) from error
    return package


def said_domain(account: RemoteAccount) -> str:
    """Return the account's domain; E2B's own if the account names no address at all; "" if it names only URLs."""
    return account.domain or ("" if account.url or account.sandbox_url else DOMAIN)


class Provider:
    """One account at E2B: the package's options for it, and its connections."""

    def __init__(self, account: RemoteAccount):
        self.account, self.package = account, find_package()
        self.domain = said_domain(account)
        self.api_url = account.url or f"https://api.{self.domain}"
        self.transport = AccountTransport(self)
        self._proxy = f"cloche-{account.id.replace(':', '-')}-{id(self):x}"
        self._keep_connections()

    def _keep_connections(self) -> None:
        """Register the account's transport in the package's table of connections. Raises BackendUnavailable."""
        table, proxy = self.package.connections, self.package.proxies.proxy_to_config(self._proxy)
        keys = [(proxy, None, "2"), (proxy, None, True)]  # keys of versions since 2.46, and of earlier ones
        try:
            for name in ("_transports", "_pools"):
                pool = getattr(table, name, None)
                if pool is not None or name == "_transports":
                    pool.update(dict.fromkeys(keys, self.transport))  # type: ignore[union-attr]
            transport = table.get_pyqwest_transport(proxy)
        except (AttributeError, TypeError, ValueError) as error:
            transport = error
        if transport is not self.transport:
            raise BackendUnavailable(
                'backend "e2b": this version of its package keeps connections in a way that Cloche does not know.',
                remedy="Install a tested one: pip install 'e2b>=2.45.1,<=2.63'.",
            )

    def options(self) -> dict[str, Any]:
        """Return a value for each option that the package would otherwise read from the environment or choose
        itself.
        """
        options = {
            "api_key": self.account.api_key.reveal(),
            "domain": self.domain or DOMAIN,
            "api_url": self.api_url,
            "sandbox_url": self.account.sandbox_url or f"https://sandbox.{self.domain or DOMAIN}",
            "debug": False,
            "validate_api_key": False,
            "proxy": self._proxy,
            "request_timeout": ANSWER_S,
            "http_version": "2",
            "retries": 0,
        }
        parameters = inspect.signature(self.package.config.ConnectionConfig.__init__).parameters
        return {name: value for name, value in options.items() if name in parameters}

    def ask(self, make: Callable[[], Awaitable[T]], timeout_s: float = ANSWER_S) -> T:
        """Return the result of a call. Raises BackendUnavailable with a sentence about the failure."""
        try:
            return call(make, timeout_s)
        except Exception as error:
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> BackendUnavailable:
        """Return the error with a sentence for an exception of the package."""
        current: BaseException | None = error
        for _ in range(10):
            if current is None:
                break
            if isinstance(current, RemoteUnavailable):
                return current
            if isinstance(current, asyncio.CancelledError):  # the package wraps it in its own error
                return self.failure(Failure.TIMEOUT)
            current = current.__cause__ or current.__context__
        if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
            return self.failure(Failure.TIMEOUT)
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError):
            return self.failure(Failure.BAD_ANSWER, detail=f"{type(error).__name__} while it was read")
        code = str(getattr(getattr(error, "code", None), "value", ""))  # Connect's code of a process stream
        return self.failure(_BY_CODE.get(code, Failure.SERVER), detail=str(error))

    def failure(self, failure: Failure, **more: Any) -> RemoteUnavailable:
        """Return an error about this account."""
        return remote_error(PROVIDER, failure, account=self.account, **more)

    def process_client(self, sandbox: Any) -> Any:
        """Return the package's client for processes of a sandbox.

        Incoming messages are bounded by `MOST_MESSAGE_BYTES`.
        """
        url = self.sandbox_url(sandbox)
        self.transport.allow(url)
        new = functools.partial(self.package.process.ProcessClient, read_max_bytes=MOST_MESSAGE_BYTES)
        return self.package.rpc.create_rpc_client(new, url, sandbox.connection_config)

    def sandbox_url(self, sandbox: Any) -> str:
        """Return the URL of a sandbox. Raises BackendUnavailable."""
        if self.account.sandbox_url:
            return self.account.sandbox_url
        name, reported_domain = str(sandbox.sandbox_id), getattr(sandbox, "sandbox_domain", None)
        domain = (
            reported_domain
            if isinstance(reported_domain, str) and reported_domain and reported_domain != DOMAIN
            else self.domain
        )
        if not domain:
            raise BackendUnavailable(
                'backend "e2b": the account has the address of an API, but no address of its sandboxes.',
                remedy="Set e2b.domain, or e2b.sandbox_url, in your configuration.",
            )
        if not _HOST.fullmatch(domain.lower()):
            raise self.failure(Failure.BAD_ANSWER, detail="the domain of the sandbox is invalid")
        if self._is_known(domain):
            return f"https://sandbox.{domain}"
        return f"https://{ENVD_PORT}-{name}.{domain}"

    def _is_known(self, domain: str) -> bool:
        """Return whether the package reaches all sandboxes of this domain by one host."""
        is_supported: bool = self.package.config.is_supported_sandbox_domain(domain)
        return is_supported

    def check_name(self, text: object) -> str:
        """Return the provider's id of a sandbox, which becomes part of a host name.

        Raises BackendUnavailable if it is invalid.
        """
        if not isinstance(text, str) or not _NAME.fullmatch(text):
            raise self.failure(Failure.BAD_ANSWER, detail="the name of the sandbox is invalid")
        return text


def origin(url: str) -> tuple[str, str]:
    """Return scheme and host with port."""
    split_url = urlsplit(url)
    return split_url.scheme, split_url.netloc.lower()


class AccountTransport:
    """Carry the requests of one account, to its API and its sandboxes only; see `pyqwest.Transport`."""

    def __init__(self, provider: Provider):
        self._provider = provider
        self._api = origin(provider.api_url)
        self._allowed = {self._api}
        if provider.account.sandbox_url:
            self.allow(provider.account.sandbox_url)
        self._inner: Any = None

    def allow(self, url: str) -> None:
        """Also allow requests to the host of `url`."""
        self._allowed.add(origin(url))

    def _connections(self) -> Any:
        if self._inner is None:
            file = self._provider.account.ca_file
            trusted: dict[str, Any] = {"tls_include_system_certs": True}
            if file:
                with open(file, "rb") as pem:
                    trusted = {"tls_ca_cert": pem.read(), "tls_include_system_certs": False}
            self._inner = self._provider.package.pyqwest.HTTPTransport(
                **trusted, connect_timeout=CONNECT_S, follow_redirects=False, pool_max_idle_per_host=20
            )
        return self._inner

    async def execute(self, request: Any) -> Any:
        """Send a request and return the answer. Raises RemoteUnavailable, also for an answer with an error status."""
        request_origin = origin(request.url)
        if request_origin not in self._allowed or (request_origin != self._api and KEY_HEADER in request.headers):
            raise self._provider.failure(Failure.BAD_ANSWER, detail="a request would have gone to another host")
        answer = await self._sent(request)
        is_stream = "connect+json" in request.headers.get("content-type", "")
        if answer.status >= 300:
            raise await self._refusal(answer)
        if is_stream:
            return answer
        return self._bounded(answer)

    async def _sent(self, request: Any) -> Any:
        """Send a request. It is sent again only if no connection was established."""
        for attempt in range(CONNECT_TRIES):
            try:
                return await self._connections().execute(request)
            except ConnectionError as error:
                is_certificate = bool(_CERTIFICATE.search(f"{error!r} {error.__cause__!r}"))
                if is_certificate or attempt + 1 == CONNECT_TRIES:
                    failure = Failure.TLS if is_certificate else Failure.NO_NETWORK
                    raise self._provider.failure(failure, detail=last_words(error)) from error
                await asyncio.sleep(0.2)
            except TimeoutError as error:
                raise self._provider.failure(Failure.TIMEOUT) from error
            except OSError as error:
                raise self._provider.failure(Failure.NO_NETWORK, detail=last_words(error)) from error
            except ValueError as error:
                raise self._provider.failure(Failure.BAD_ANSWER, detail="the address is invalid") from error
            except Exception as error:  # an error of pyqwest: a broken connection or invalid HTTP
                raise self._provider.failure(Failure.BAD_ANSWER, detail=last_words(error)) from error
        raise AssertionError("unreachable")

    async def _refusal(self, answer: Any) -> RemoteUnavailable:
        """Return the error for an answer with an error status."""
        body = b""
        with contextlib.suppress(Exception):  # a truncated body does not matter: the status decides
            async for piece in answer.content:
                body += bytes(piece)
                if len(body) > MOST_ERROR_BYTES:
                    break
        failure = by_status(answer.status) if answer.status >= 400 else Failure.BAD_ANSWER
        detail = _message(answer.headers.get("content-type", ""), body)
        if failure is Failure.RATE_LIMITED and TOO_MANY in detail:
            failure = Failure.QUOTA
        return self._provider.failure(
            failure, status=answer.status, detail=detail, retry_after_s=_seconds(answer.headers.get("retry-after", ""))
        )

    def _bounded(self, answer: Any) -> Any:
        content = self._pieces(answer.content)
        return self._provider.package.pyqwest.Response(
            status=answer.status, http_version=answer.http_version, headers=answer.headers, content=content
        )

    async def _pieces(self, content: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        total = 0
        try:
            async for piece in content:
                total += len(piece)
                if total > MOST_ANSWER_BYTES:
                    raise self._provider.failure(Failure.BAD_ANSWER, detail="it is too long")
                yield bytes(piece)
        except RemoteUnavailable:
            raise
        except Exception as error:
            raise self._provider.failure(Failure.BAD_ANSWER, detail=f"it broke off: {last_words(error)}") from error


def last_words(error: BaseException) -> str:
    """Return the message of an error's innermost cause."""
    text, cause = str(error), error.__cause__
    while cause is not None:
        text, cause = str(cause) or text, cause.__cause__
    return text or type(error).__name__


def _message(kind: str, body: bytes) -> str:
    """Return the error message of an API answer. A page that a proxy made has none."""
    if "json" not in kind:
        return "the answer does not follow its API" if body else ""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    message = document.get("message") if isinstance(document, Mapping) else None
    return message if isinstance(message, str) else ""


def _seconds(text: str) -> float | None:
    """Return the seconds of a Retry-After header. None for a date, which would need synchronised clocks."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds <= 86_400 else None


_providers: dict[tuple[int, RemoteAccount], Provider] = {}
_turn = threading.Lock()


def provider_of(account: RemoteAccount) -> Provider:
    """Return the `Provider` of an account, one per process and account. Raises BackendUnavailable."""
    with _turn:
        key = os.getpid(), account
        if key not in _providers:
            _providers[key] = Provider(account)
        return _providers[key]
