"""Requests to a Kubernetes API server, in JSON; its failures are errors of Cloche with a remedy.

The package `kubernetes_asyncio` finds the server and the credentials, and refreshes them. Its models are not used: a
server may be older or newer than they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from cloche.core.errors import BackendUnavailable

ANSWER_S, CONNECT_S = 10.0, 5.0
FIRST_S, AWAY_S = 3.0, 20.0  # after which a failed connection is not tried again: one that never answered, or did
TRIES, AGAIN_S, MOST_AGAIN_S = 5, 0.2, 5.0
MOST_SKEW_S = 10.0
MOST_TEXT = 400
CLOSE_S, MOST_MESSAGE = 0.5, 1 << 20  # of a web socket
OTHER_CONTEXT = 'Look at "kubectl version" with the same kubeconfig; fleet.address names another context of it.'
BIND = (
    'Bind the role cloche-caller to an account that runs code ("cloche fleet up --engine kubernetes" prints it); '
    '"cloche fleet up --apply", "drain" and "down" need one that administers the namespace.'
)
MERGE, APPLY = "application/merge-patch+json", "application/apply-patch+yaml"


class ApiError(BackendUnavailable):
    """Report an answer of the API server that is a refusal; `status` is that of HTTP, `word` the server's.

    It is to be asked again after `again_s`.
    """

    def __init__(self, message: str, *, remedy: str = "", status: int = 0, reason: str = "", again_s: float = 0.0):
        super().__init__(message, remedy=remedy)
        self.status, self.word, self.again_s = status, reason, again_s


class KubernetesApi:
    """Call one API server. `offset_s` is how far its clock is ahead of this machine's."""

    def __init__(self, context: str = ""):
        self._context = context
        self._config: Any = None
        self._rest: Any = None
        self._used: list[Any] = []  # clients with old credentials, on which other requests may still wait
        self._connecting = asyncio.Lock()
        self.offset_s = 0.0
        self.requests = 0
        self._has_answered = False

    @property
    def host(self) -> str:
        """Return the URL of the API server, empty before the first request."""
        return "" if self._config is None else str(self._config.host)

    def now(self) -> float:
        """Return the time of the API server's clock, in seconds since 1970."""
        return time.time() + self.offset_s

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return an object or a list. Raises ApiError, BackendUnavailable."""
        return await self.ask("GET", path, query=query)

    async def patch(self, path: str, body: Mapping[str, Any], *, kind: str = MERGE, **query: str) -> dict[str, Any]:
        """Change an object, and return it. Raises ApiError, BackendUnavailable."""
        return await self.ask("PATCH", path, body=body, kind=kind, query=query)

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, and return it. Raises ApiError, BackendUnavailable."""
        return await self.ask("POST", path, body=body)

    async def delete(self, path: str, *, uid: str = "") -> None:
        """Delete an object, if it is there and has this uid."""
        body: dict[str, Any] = {"preconditions": {"uid": uid}} if uid else {}
        try:
            await self.ask("DELETE", path, body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def text(self, path: str, **query: str) -> str:
        """Return text, such as a log. Raises ApiError, BackendUnavailable."""
        return (await self._tried("GET", path, query=query)).decode(errors="replace")

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Make a request, again where the server is busy; return its answer. Raises ApiError, BackendUnavailable."""
        content = await self._tried(method, path, body=body, kind=kind, query=query)
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise self._foreign() from error
        return answer if isinstance(answer, dict) else {}

    async def _tried(self, method: str, path: str, **more: Any) -> bytes:  # noqa: ANN401 - of `_send`
        loop = asyncio.get_running_loop()
        again_s, has_renewed = AGAIN_S, False
        ends = loop.time() + (AWAY_S if self._has_answered else FIRST_S)
        for tries_left in reversed(range(TRIES)):
            wait_s, is_last = again_s, not tries_left or loop.time() > ends
            try:
                async with self._sent(method, path, timeout_s=ANSWER_S, **more) as response:
                    return bytes(await response.read())
            except ApiError as error:
                if error.status == 401 and not has_renewed:
                    has_renewed = True
                    self._forget_credentials()
                    continue
                if is_last or (error.status != 429 and error.status < 500):
                    raise
                wait_s = max(wait_s, min(error.again_s, MOST_AGAIN_S))
            except (OSError, TimeoutError) as error:
                if is_last or loop.time() > ends:
                    raise self._unreachable(error) from error
            await asyncio.sleep(wait_s)
            again_s = min(2 * again_s, MOST_AGAIN_S)
        raise AssertionError

    @asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Any]:
        """Yield the response to one request. Raises ApiError, OSError, TimeoutError."""
        rest, url = await self._connected(), self.host + path
        headers = {"Accept": "application/json, */*", "Content-Type": kind, **await self._authorization()}
        self.requests += 1
        response = None
        try:
            response = await rest.request(
                method, url, headers=headers, body=None if body is None else dict(body), query_params=dict(query or {}),
                _preload_content=False, _request_timeout=(CONNECT_S, timeout_s),
            )  # fmt: skip
            self._has_answered = True
            self._note_clock(response.headers.get("Date", ""))
            if response.status >= 300:
                content, again = (await response.read())[: 1 << 16], response.headers.get("Retry-After", "")
                is_page = response.status == 404 and content.lstrip().startswith(b"<")
                verb = "watch" if (query or {}).get("watch") else verb_of(method, path)
                raise self._foreign() if is_page else error_of(verb, path, response.status, content, again=again)
            yield response
        except imported().aiohttp.ClientError as error:
            if isinstance(error, TimeoutError):
                raise TimeoutError from error
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            if response is not None:
                response.release()

    async def lines(self, path: str, *, timeout_s: float, **query: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a watch until it ends. Raises ApiError, OSError, TimeoutError."""
        async for line in self.text_lines(path, timeout_s=timeout_s, **query):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event

    async def text_lines(self, path: str, *, timeout_s: float, **query: str) -> AsyncIterator[str]:
        """Yield lines as they come, such as a log's. Raises ApiError, OSError, TimeoutError."""
        async with self._sent("GET", path, timeout_s=timeout_s, query=query) as response:
            while line := await response.content.readline():
                yield line.decode(errors="replace")

    @asynccontextmanager
    async def socket(self, path: str, protocol: str, **query: str) -> AsyncIterator[Any]:
        """Yield a web socket, of an HTTP client of its own. Raises ApiError, OSError, TimeoutError."""
        await self._connected()
        module = imported()
        client, aiohttp = module.RESTClientObject(self._config, maxsize=1), module.aiohttp
        headers, self.requests = await self._authorization(), self.requests + 1
        try:
            async with client.pool_manager.ws_connect(
                self.host + path, params=query, headers=headers, protocols=[protocol], max_msg_size=MOST_MESSAGE,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S), proxy=self._config.proxy,
            ) as stream:  # fmt: skip
                yield stream
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                self._forget_credentials()
            raise error_of(verb_of("GET", path), path, error.status, b"") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            await client.close()

    async def _authorization(self) -> dict[str, str]:
        token = await self._config.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token} if token else {}

    def _note_clock(self, date: str) -> None:
        try:
            self.offset_s = parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
        except ValueError:
            return
        if abs(self.offset_s) < 1.0:  # the header has whole seconds
            self.offset_s = 0.0

    async def _connected(self) -> Any:  # noqa: ANN401 - a client
        async with self._connecting:
            if self._rest is None:
                rest = imported()
                self._config = await configured(self._context)
                self._rest = rest.RESTClientObject(self._config)
            return self._rest

    def _forget_credentials(self) -> None:
        """Read the credentials again with the next request: a program may have to make new ones."""
        if self._rest is not None:
            self._used.append(self._rest)
            self._rest = None

    def _foreign(self) -> BackendUnavailable:
        return BackendUnavailable(f"what answers at {self.host} is no API server of Kubernetes.", remedy=OTHER_CONTEXT)

    def _unreachable(self, error: Exception) -> BackendUnavailable:
        detail = str(error) or ("it is silent" if isinstance(error, TimeoutError) else type(error).__name__)
        return BackendUnavailable(
            f"the API server of Kubernetes at {self.host} does not answer: {detail[:MOST_TEXT].rstrip('.')}.",
            remedy=OTHER_CONTEXT,
        )

    async def close(self) -> None:
        """Close the connections."""
        self._forget_credentials()
        while self._used:
            await self._used.pop().close()


def imported() -> Any:  # noqa: ANN401 - a module
    """Return the client's module of the package. Raises BackendUnavailable."""
    try:
        from kubernetes_asyncio.client import rest
    except ImportError as error:
        raise BackendUnavailable(
            "the package kubernetes_asyncio is not installed.",
            remedy='Install the extra that brings it: "pip install cloche[kubernetes]".',
        ) from error
    return rest


async def configured(context: str) -> Any:  # noqa: ANN401 - a configuration
    """Return where the API server is, and the credentials: a kubeconfig's, else those of the pod that this runs in.

    Raises BackendUnavailable.
    """
    from kubernetes_asyncio import config
    from kubernetes_asyncio.client import Configuration

    made = Configuration()
    files, has_file = _kubeconfig()
    try:
        if has_file:
            await config.load_kube_config(
                config_file=files, context=context or None, client_configuration=made, persist_config=False
            )
        else:
            config.load_incluster_config(client_configuration=made)
    except Exception as error:
        raise _unconfigured(files, context, str(error) or type(error).__name__, has_file=has_file) from error
    return made


def check_configured() -> None:
    """Raise BackendUnavailable where there is neither a kubeconfig nor the account of a pod."""
    files, has_file = _kubeconfig()
    if not has_file and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise _unconfigured(files, "", "", has_file=False)


def _kubeconfig() -> tuple[str, bool]:
    """Return the files with the configuration, and whether there is one."""
    files = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    return files, any(os.path.exists(file) for file in files.split(os.pathsep))


def _unconfigured(files: str, context: str, detail: str, *, has_file: bool) -> BackendUnavailable:
    if not has_file:
        return BackendUnavailable(
            f"no Kubernetes cluster was found: there is no kubeconfig at {files}, and this is no pod with an account.",
            remedy="Set KUBECONFIG, or run in a pod whose service account is cloche-caller.",
        )
    named = f" context {context!r} of" if context else ""
    return BackendUnavailable(
        f"the cluster of{named} {files} cannot be used: {detail[:MOST_TEXT].rstrip('.')}.",
        remedy='Look at "kubectl config get-contexts"; fleet.address names the context.',
    )


def error_of(verb: str, path: str, status: int, body: bytes, *, again: str = "") -> ApiError:
    """Return the error for a refusal of the API server; `again` is its Retry-After."""
    try:
        said = json.loads(body)
        message, reason = str(said.get("message", "")), str(said.get("reason", ""))
    except (ValueError, AttributeError):
        message, reason = body.decode(errors="replace"), ""
    message = " ".join(message.split())[:MOST_TEXT] or f"status {status}"
    resource, namespace = resource_of(path), namespace_of(path)
    if status == 401:
        text = f"the API server refuses these credentials: {message}."
        remedy = "They have expired, or are another cluster's: log in again, and look at KUBECONFIG."
    elif status == 403 and "exceeded quota" in message:
        text = f"a quota of namespace {namespace} is used up: {message}."
        remedy = f'"kubectl describe quota -n {namespace}" shows it; raise it, or release leases.'
    elif status == 403:
        text = f"no permission to {verb} {resource} in namespace {namespace}: {message}."
        remedy = f'{BIND} Try "kubectl auth can-i {verb} {resource} -n {namespace}".'
    elif status == 429:
        text = f"the API server takes no further requests of this account for now: {message}."
        remedy = "Try again in a minute; its flow control (FlowSchema) bounds each account."
    else:
        text = f"the API server refuses to {verb} {resource}: {message} (status {status})."
        remedy = "Look at the API server." if status >= 500 else ""
    again_s = float(again) if again.isdecimal() else 0.0
    return ApiError(text, remedy=remedy, status=status, reason=reason, again_s=again_s)


def verb_of(method: str, path: str) -> str:
    """Return the verb of a request, as roles write it."""
    is_collection = len(_within(path)) == 1
    words = {"GET": "list", "DELETE": "deletecollection"} if is_collection else {"GET": "get", "DELETE": "delete"}
    return {"POST": "create", "PATCH": "patch", **words}.get(method, method)


def _within(path: str) -> list[str]:
    """Return the parts of a path from its resource on."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    return rest[2:] if rest[:1] == ["namespaces"] and len(rest) > 2 else rest


def resource_of(path: str) -> str:
    """Return the resource of a path, as roles write it, such as `pods/log`."""
    rest = _within(path)
    return "/".join([rest[0], *rest[2:3]]) if rest else path


def namespace_of(path: str) -> str:
    """Return the namespace of a path, empty for an object of the cluster."""
    _, _, rest = path.partition("/namespaces/")
    return rest.partition("/")[0]
