"""A client of OpenAI-compatible chat completions: bounds, retries, server-sent events, tokens.

The answer is hostile. Compressed answers are refused, redirects are not followed (they would send the code to another
host), and reading stops at MOST_ANSWER_BYTES. The key is in no message, log or repr, and is removed from every text of
the endpoint. A request is streamed where the endpoint supports it, and repeated where that may help. httpx is imported
with the first request.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest
from cloche.core.record import dataclass, replace

from .extract import MOST_REPLY_CHARS

if TYPE_CHECKING:
    import ssl

    import httpx

CHARS_PER_TOKEN = 3  # fewer than usual, so that a budget is not overrun where an endpoint tells nothing
MOST_ANSWER_BYTES = 32 * 1024 * 1024  # on the wire: a stream takes some hundred bytes for every token
MOST_ERROR_CHARS = 300
MOST_RETRIES = 3
RETRY_WAIT_S = 0.5
MOST_CLAIMED_TOKENS = 1 << 31  # as many as a budget can have; what an endpoint counts beyond that says nothing more
MAX_RETRY_AFTER_S = 60.0  # of what an endpoint asks for, no more is waited
HIDDEN = "[key]"
LEAST_SECRET_CHARS = 4  # a key shorter than that is no secret, and would strike out half the text

# Forms of a request, the preferred one first; if the endpoint refuses one form, the next one is tried.
_REQUEST_FORMS: tuple[Mapping[str, Any], ...] = (
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True},
    {},
)
_HEADERS = {
    "Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json",
    "User-Agent": "cloche",
}  # fmt: skip
_REASONING_KEYS = (
    "reasoning_content",
    "reasoning",
)  # where endpoints put what is no answer, and is paid for: some in both
_FORM_REFUSED = (400, 415, 422, 501)
_WORTH_RETRYING = (408, 409, 429, 500, 502, 503, 504, 529)
log = logging.getLogger("cloche.agent")
OnProgress = Callable[[int], None]


def tokens_of(text: str) -> int:
    """Return about how many tokens a text is, rather too many."""
    return len(text) // CHARS_PER_TOKEN + 1


class ModelFailed(ClocheError):
    """Report that the model gave no answer; the message has the reason and the next step, `tokens` the cost so far."""

    def __init__(self, message: str, *, tokens: int = 0):
        super().__init__(message)
        self.tokens = tokens


class OverBudget(ModelFailed):
    """Report that an answer was broken off because it would cost more than there is; raised by who hears of it."""


class _Retryable(Exception):
    """Report an answer that was cut off or malformed; a retry may help. `wait_s` is how long to wait first."""

    def __init__(self, message: str, wait_s: float = 0.0):
        super().__init__(message)
        self.wait_s = wait_s


class _FormRefused(Exception):
    """Report that the endpoint does not accept this form of request."""


class _Unreadable(Exception):
    """Report an answer that is refused unread."""


@dataclass(slots=True)
class _Meter:
    """Count the cost of one question over all its tries. A try without any answer costs nothing."""

    prompt: str
    heard: OnProgress
    tries: int = 0  # that are over, and of which something came
    before: int = 0  # characters of those
    chars: int = 0  # of this one

    @property
    def tokens(self) -> int:
        """Return about how many tokens that is."""
        tries = self.tries + (self.chars > 0)
        return tries * tokens_of(self.prompt) + (self.before + self.chars) // CHARS_PER_TOKEN + (tries > 0)

    def add(self, chars: int) -> None:
        """Note how many characters came in this try so far. Raises what `heard` raises."""
        self.chars = chars
        self.heard(self.before + chars)

    def try_again(self) -> None:
        """Begin another try."""
        self.tries, self.before, self.chars = self.tries + (self.chars > 0), self.before + self.chars, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Hold an answer: the text, and the tokens of question and answer, the larger of counted and reported.

    Other output counts, too: thoughts, and earlier incomplete answers. `is_cut` says that it was too long and ends
    early.
    """

    text: str
    tokens: int = 0
    is_cut: bool = False


class Endpoint:
    """Be a model at an OpenAI-compatible endpoint. `base_url` ends before `/chat/completions`.

    `api_key` may be empty for a server without keys. Raises InvalidRequest for an invalid address, and
    BackendUnavailable without the `httpx` package.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        retries: int = MOST_RETRIES,
        retry_wait_s: float = RETRY_WAIT_S,
    ):
        self.host = host_of(base_url)
        if not model.strip():
            raise InvalidRequest(
                "autofix.model: no model is named; set it in your own configuration file, or CLOCHE_AUTOFIX_MODEL"
            )
        if not model.isprintable():
            raise InvalidRequest("autofix.model: the name holds characters that cannot be sent; write it on one line")
        self.model = model.strip()
        self._base_url, self._key = base_url, _checked_key(api_key)
        self._retries, self._retry_wait_s = retries, retry_wait_s
        self._way = 0
        if importlib.util.find_spec("httpx") is None:
            raise BackendUnavailable(
                "auto-fix by an endpoint needs the package httpx.",
                remedy='Install it with: pip install "cloche[fix]".',
            )

    def __repr__(self) -> str:
        return f"Endpoint({self._base_url!r}, {self.model!r})"

    async def ask(self, prompt: str, *, timeout_s: float, heard: OnProgress) -> Reply:
        """Return the answer. `heard` gets the number of characters so far, thoughts and broken answers included.

        Raises ModelFailed.
        """
        clock, meter = asyncio.get_running_loop(), _Meter(prompt, heard)
        end = clock.time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._ask_until(end, meter)
        except TimeoutError:
            message = f"{self.host} did not answer within the time budget ({timeout_s:.0f} s left)"
            raise ModelFailed(message, tokens=meter.tokens) from None
        except ModelFailed as failed:
            failed.tokens = meter.tokens
            raise
        return replace(reply, tokens=max(reply.tokens, meter.tokens))

    async def _ask_until(self, end: float, meter: _Meter) -> Reply:
        clock, tries, form = asyncio.get_running_loop(), 0, self._way  # which others who ask may change meanwhile
        async with self._client(end - clock.time()) as client:
            while True:
                try:
                    reply = await self._ask_once(client, meter, form)
                except _FormRefused:
                    form += 1
                except _Retryable as error:
                    tries += 1
                    meter.try_again()
                    wait_s = max(error.wait_s, self._retry_wait_s * 2 ** (tries - 1))
                    if tries > self._retries or clock.time() + wait_s > end:
                        raise ModelFailed(f"{self._clean(error)} (asked {tries} times)") from None
                    log.debug("asking %s again in %.1f s: %s", self.host, wait_s, self._clean(error))
                    await asyncio.sleep(wait_s)
                else:
                    self._way = form
                    return reply

    def _client(self, timeout_s: float) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            headers=_HEADERS | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=not _is_loopback(self._base_url),  # what is for this machine goes through nobody's proxy
            verify=_trusted(),
        )

    async def _ask_once(self, client: httpx.AsyncClient, meter: _Meter, form: int) -> Reply:
        """Ask in one way, with the library's errors in our words."""
        try:
            return await self._answer(client, meter, form)
        except _Unreadable as error:
            raise ModelFailed(f"{self.host}: {error}") from None
        except (ClocheError, _Retryable, _FormRefused, TimeoutError):
            raise
        except Exception as error:  # what a library makes of bytes that make no sense
            log.debug("an answer that makes no sense", exc_info=True)
            raise _Retryable(
                f"{self.host} answered something that makes no sense ({type(error).__name__}); check the base URL"
            ) from None

    async def _answer(self, client: httpx.AsyncClient, meter: _Meter, form: int) -> Reply:
        asked = {"messages": [{"role": "user", "content": meter.prompt}], "model": self.model, **_REQUEST_FORMS[form]}
        data = json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()
        url = f"{self._base_url}{'' if self._base_url.endswith('/') else '/'}chat/completions"
        request = client.build_request("POST", url, content=data)
        with self._connected():
            response = await client.send(request, stream=True)
        try:
            encoding = response.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity"):
                raise _Unreadable(f"the answer is packed ({encoding[:20]!r}), which was not asked for")
            if not response.is_success:
                raise self._error_of(response, await _read(response), form)
            if "text/event-stream" in response.headers.get("content-type", "").lower():
                async with aclosing(self._chunks(response)) as chunks:
                    return await self._streamed(chunks, meter)
            return self._whole(json.loads(await _read(response)), meter)
        finally:
            await response.aclose()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Make a failure of the connection one that another try may mend."""
        import ssl

        import httpx

        try:
            yield
        except (httpx.RequestError, ssl.SSLError) as error:
            raise _Retryable(
                f"{self.host} cannot be reached: {self._clean(error)}; check it and the base URL"
            ) from None

    def _error_of(self, response: httpx.Response, body: bytes, form: int) -> Exception:
        """Return what an HTTP status means: another way, another try, or the end."""
        status, error = response.status_code, _error_in(body)
        message = error.get("message")
        detail = f" - {message}" if isinstance(message, str) and message else ""
        text = f"{self.host} answered {status}: {self._clean(f'Error code: {status}{detail}')}"
        if status in _FORM_REFUSED and form < len(_REQUEST_FORMS) - 1:
            return _FormRefused(text)
        self._way = 0 if status in _FORM_REFUSED else self._way  # it was not for the way of asking
        if 300 <= status < 400:
            return ModelFailed(f"{self.host} answered {status}, a redirect, and none is followed; correct the base URL")
        if status in _WORTH_RETRYING and error.get("code") != "insufficient_quota":
            return _Retryable(text, _wait_of(response.headers))
        setting = "autofix.api_key, or CLOCHE_AUTOFIX_API_KEY"
        key = f"check the key ({setting})" if self._key else f"no key is set; set {setting}"
        hints = {401: key, 403: key, 404: "check the base URL and the model"}
        hint = f"; {hints[status]}" if status in hints else ""
        return ModelFailed(text + hint)

    async def _chunks(self, response: httpx.Response) -> AsyncGenerator[object]:
        """Yield the chunks of a stream as they come, until it says that it is done."""
        events = _Events()
        with self._connected():
            async for piece in _bounded(response):
                for data in events.feed(piece):
                    if data.startswith("[DONE]"):
                        return
                    yield self._checked(json.loads(data))

    def _checked(self, chunk: object) -> object:
        """Return a chunk, unless it reports an error."""
        error = _get(chunk, "error")
        if error:
            message = _get(error, "message")
            detail = message if isinstance(message, str) and message else "An error occurred during streaming"
            raise _Retryable(f"{self.host} failed while it answered: {self._clean(detail)}")
        return chunk

    async def _streamed(self, chunks: AsyncIterator[object], meter: _Meter) -> Reply:
        """Put an answer together from its pieces; one that breaks off is no answer."""
        pieces, size, thought, tokens, ending = [], 0, 0, 0, None
        async for chunk in chunks:
            tokens = max(tokens, _tokens(_get(chunk, "usage")))
            for choice in _first(_get(chunk, "choices")):
                ending = _get(choice, "finish_reason") or ending
                delta = _get(choice, "delta")
                piece = _text(_get(delta, "content"))
                pieces.append(piece)
                size += len(piece)
                thought += max(len(_text(_get(delta, name))) for name in _REASONING_KEYS)
                meter.add(size + thought)
            if size > MOST_REPLY_CHARS:
                ending = "length"
                break
        if ending is None:
            raise _Retryable(f"{self.host} broke off its answer")
        return self._reply("".join(pieces), tokens, ending)

    def _whole(self, answer: Any, meter: _Meter) -> Reply:  # noqa: ANN401
        """Read an answer that came in one piece."""
        if not isinstance(answer, dict):
            raise _Retryable(f"{self.host} answered something that is not a completion")
        if "error" in answer and "choices" not in answer:
            raise _Retryable(f"{self.host} failed: {self._clean(answer['error'])}")
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
            raise _Retryable(f"{self.host} answered something that is not a completion")
        text = _text(message.get("content"))
        meter.add(len(text) + max(len(_text(message.get(name))) for name in _REASONING_KEYS))
        return self._reply(text, _tokens(answer.get("usage")), choice.get("finish_reason"))

    def _reply(self, text: str, tokens: int, ending: object) -> Reply:
        is_cut = ending in ("length", "max_tokens") or len(text) > MOST_REPLY_CHARS
        return Reply(text=self._without_key(text[:MOST_REPLY_CHARS]), tokens=tokens, is_cut=is_cut)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, HIDDEN) if len(self._key) >= LEAST_SECRET_CHARS else text

    def _clean(self, text: object) -> str:
        """Return the endpoint's text as one short line, without the key."""
        line = " ".join(self._without_key(str(text)).split())
        return line[:MOST_ERROR_CHARS] or type(text).__name__


def host_of(base_url: object) -> str:
    """Return host and port of an endpoint's address. Raises InvalidRequest for an invalid one."""
    name = "autofix.base_url"
    if not isinstance(base_url, str) or not base_url.strip():
        raise InvalidRequest(
            f"{name}: no endpoint is named; set it in your own configuration file, or CLOCHE_AUTOFIX_BASE_URL"
        )
    try:
        address = urlsplit(base_url.strip())
        host, port = address.hostname, address.port
    except ValueError:
        address, host, port = urlsplit(""), None, None
    if address.scheme not in ("http", "https") or not host or not base_url.isprintable() or " " in base_url:
        raise InvalidRequest(
            f"{name}: this is not an http or https address; write one such as http://localhost:8000/v1"
        )
    if address.username is not None or address.password is not None or address.query or address.fragment:
        raise InvalidRequest(f"{name}: give the address alone, and the key as autofix.api_key")
    shown = f"[{host}]" if ":" in host else host
    if address.netloc.lower() not in (shown.lower(), f"{shown}:{address.netloc.rpartition(':')[2]}".lower()):
        raise InvalidRequest(
            f"{name}: {address.netloc[:80]!r} is not a host with a port; write one such as localhost:8000"
        )
    return f"{shown}:{port}" if port is not None else shown


def _checked_key(key: object) -> str:
    """Return a key as a header takes it; a library that refuses one says it in its message, with escapes."""
    stripped = key.strip() if isinstance(key, str) else None
    if stripped is None or not stripped.isascii() or not stripped.isprintable():
        raise InvalidRequest("autofix.api_key: this is not a key; a key is one word of printable ASCII characters")
    return stripped


def _is_loopback(base_url: str) -> bool:
    """Tell whether an address is this machine's own."""
    host = urlsplit(base_url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _trusted() -> ssl.SSLContext | bool:
    """Trust the certificates of this machine, or without any those that httpx brings."""
    import ssl

    paths = ssl.get_default_verify_paths()
    has_store = paths.cafile or (paths.capath and any(Path(paths.capath).glob("*.0")))
    return ssl.create_default_context() if has_store else True


async def _bounded(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield an answer's bytes, and no more of them than any answer needs."""
    bytes_left = MOST_ANSWER_BYTES
    async for piece in response.aiter_raw():
        bytes_left -= len(piece)
        if bytes_left < 0:
            raise _Unreadable(f"the answer is longer than {MOST_ANSWER_BYTES} bytes")
        yield piece


async def _read(response: httpx.Response) -> bytes:
    return b"".join([piece async for piece in _bounded(response)])


class _Events:
    """Take server-sent events out of bytes, linear in their number. Of an event only the data counts here."""

    def __init__(self) -> None:
        self._line, self._data, self._ended_with_cr = bytearray(), list[str](), False

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yield the data of each event that ends in this piece. A line ends with CR, LF or both."""
        text = piece[1:] if self._ended_with_cr and piece.startswith(b"\n") else piece
        self._ended_with_cr = piece.endswith(b"\r")
        for part in text.splitlines(keepends=True):
            self._line += part
            if not part.endswith((b"\r", b"\n")):
                return
            line = self._line.rstrip(b"\r\n").decode()
            self._line.clear()
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif not line and self._data:
                yield "\n".join(self._data)
                self._data.clear()


def _error_in(body: bytes) -> Mapping[str, Any]:
    """Return the error in a body; empty without one."""
    try:
        body_data = json.loads(body)
    except Exception:  # bytes of any kind, nested however deep
        return {}
    error = body_data.get("error", body_data) if isinstance(body_data, dict) else None
    return error if isinstance(error, dict) else {}


def _get(answer: object, name: str) -> Any:  # noqa: ANN401 - whatever an endpoint put there
    """Return a field of an object; None if it is no object."""
    return answer.get(name) if isinstance(answer, dict) else None


def _first(choices: object) -> list[Any]:
    return choices[:1] if isinstance(choices, list) else []


def _text(content: object) -> str:
    """Return the text of a message, which some endpoints give in parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(item["text"] for item in content if isinstance(item, dict) and isinstance(item.get("text"), str))
    return ""


def _tokens(usage: object) -> int:
    """Return the tokens that an endpoint reports; 0 for an invalid number."""
    total = _get(usage, "total_tokens")
    if not isinstance(total, int) or isinstance(total, bool):
        return 0
    return min(max(total, 0), MOST_CLAIMED_TOKENS)


def _wait_of(headers: Mapping[str, str]) -> float:
    """Return for how long an endpoint wants to be left alone."""
    try:
        wait_s = float(headers.get("retry-after", "0"))
    except ValueError:
        return 0.0
    return min(wait_s, MAX_RETRY_AFTER_S) if wait_s > 0 else 0.0
