"""Logins that outlive their sandbox: the same placeholders everywhere, and one exchange of tokens at a time.

Theory of operation: `login_server`, at the other end of a link, has the files. Before each request it sends the logins
that have changed, so a placeholder means the current token after a refresh in any sandbox. A refresh does not go
through the relay: with the guest's connection the tokens of its answer would be lost, and the old ones are spent by
then. It is a separate task, which goes on without the program, its sandbox and the sandbox's process. Its request is
built anew from the known fields of a refresh, so that the answer has tokens of the same login.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode
from weakref import WeakSet

from cloche.core.record import dataclass
from cloche.core.secrets import Capture, check_value, is_web_token
from cloche.jail import messages

from .captures import CapturedAnswer, refusing
from .credentials import Grant
from .http import AnswerBody, BodyEdit
from .http_answer import AnswerRefused, WholeAnswer
from .http_request import Rejected, RequestHead
from .placeholders import lasting_placeholder
from .redaction import AnswerRedaction, StreamRedactor, pairs_of
from .stream import Stream
from .whole_exchange import NotSent, ReadAnswer, exchange

LOOK_S, LOCK_S = 5.0, 90.0
MOST_ASKED_BYTES = 64 << 10
MOST_AT_ONCE = 16  # exchanges of one sandbox, most of which wait for the first
REFRESH = "refresh_token"
LOGIN_GRANTS = frozenset(("authorization_code", "urn:ietf:params:oauth:grant-type:device_code"))
OF_A_REFRESH = frozenset(("grant_type", REFRESH, "client_id", "client_secret", "scope", "expires_in"))
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
Kind = Literal["login", "refresh", "revoke"]
Fields = Mapping[str, tuple[str, str]]  # placeholder and value
Message = dict[str, Any]
NO_OUTCOME: Message = {"fields": {}, "answer": "", "is_new": False, "is_dropped": False, "is_known": True}
_exchanges: set[asyncio.Task[WholeAnswer]] = set()  # of all sandboxes, also of those that are gone


async def finish_exchanges(seconds: float) -> None:
    """Wait for the exchanges that have begun, whose tokens would be lost."""
    if _exchanges:
        await asyncio.wait(_exchanges, timeout=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentLogin:
    """Hold the newest state of a login; `answer` is that of its last exchange."""

    version: int
    fields: Fields
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Hold a request to exchange tokens of a login. `version` is the newest one that its sandbox knew."""

    kind: Kind
    name: str
    capture: Capture
    head: RequestHead
    fields: Mapping[str, Any]
    is_form: bool
    version: int | None
    connect: Callable[[], Awaitable[Stream]]
    note: Callable[[str], None]

    def body_with(self, current: CurrentLogin | None) -> bytes:
        """Return the body for the host, with values in place of placeholders."""
        values = dict(current.fields.values()) if current is not None else {}
        written = {
            name: values.get(text, text) if name in (REFRESH, "token") else text for name, text in self.fields.items()
        }
        return urlencode(written).encode() if self.is_form else json.dumps(written).encode()

    async def send(self, body: bytes) -> ReadAnswer:
        """Have the host answer. Raises as `exchange` does."""
        kind = FORM if self.is_form else JSON
        return await exchange(self.connect, self.capture.host, self.head.target, self.head.headers, kind, body)


class KeptLogins:
    """Hold the kept logins of one sandbox, with the `rows` of their captures, and keep their `grants` up to date.

    Logins that are made here replace those in `takes_login`. `forget` gets grants whose values are others now.
    """

    def __init__(
        self, link: int, rows: Sequence[tuple[str, Capture]], takes_login: frozenset[str], grants: list[Grant],
        forget: Callable[[Sequence[Grant]], None],
    ):  # fmt: skip
        self._link, self._rows, self._takes_login = link, rows, takes_login
        self._grants, self._forget = grants, forget
        self._current: dict[str, CurrentLogin] = {}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._running = 0
        self._is_closed = False
        os.set_blocking(link, False)
        asyncio.get_running_loop().add_reader(link, self._receive)

    def close(self) -> None:
        """Let go of the files, once the exchanges that have begun are over."""
        self._is_closed = True
        if not self._running:
            self._lose()

    async def look(self) -> None:
        """Update the values. Without an answer they stay as they are."""
        try:
            async with asyncio.timeout(LOOK_S):
                reply = await self._ask("look", next(self._numbers))
        except OSError:  # of which TimeoutError is a kind
            return
        for name, login in reply["logins"].items():
            self._take(name, login)

    def body_edit(
        self, host: str, head: RequestHead, edit: BodyEdit | None, connect: Callable[[], Awaitable[Stream]],
        note: Callable[[str], None],
    ) -> BodyEdit | None:  # fmt: skip
        """Return what reads the body of a request that may exchange tokens; `edit` for another one."""
        at_path = (
            row for row in self._rows if row[1].host == host and head.target in (row[1].path, row[1].revoke or None)
        )
        row = next(at_path, None) if head.method == b"POST" else None
        return edit if row is None else ExchangeBody(edit, partial(self._answer, *row, head, connect, note))

    async def _answer(
        self, name: str, capture: Capture, head: RequestHead, connect: Callable[[], Awaitable[Stream]],
        note: Callable[[str], None], body: bytes,
    ) -> WholeAnswer | None:  # fmt: skip
        """Return the answer to a request that exchanges tokens; None for another one. Raises Rejected."""
        fields, is_form = _read(body)
        kind = self._kind(name, capture, head, fields)
        if kind is None:
            return None
        if self._running >= MOST_AT_ONCE:
            raise Rejected(403, f"a request while {MOST_AT_ONCE} others exchange tokens")
        current = self._current.get(name)
        version = current.version if current is not None and kind == "refresh" else None
        request = TokenRequest(
            kind=kind, name=name, capture=capture, head=head, fields=fields, is_form=is_form, version=version,
            connect=connect, note=note,
        )  # fmt: skip
        task = asyncio.create_task(self._exchange(request))
        self._running += 1
        _exchanges.add(task)
        task.add_done_callback(self._finish)
        return await asyncio.shield(task)

    def _finish(self, task: asyncio.Task[WholeAnswer]) -> None:
        _exchanges.discard(task)
        self._running -= 1
        if self._is_closed:
            self.close()

    def _kind(self, name: str, capture: Capture, head: RequestHead, fields: Mapping[str, Any]) -> Kind | None:
        current = self._current.get(name)
        marks = {mark for mark, _ in current.fields.values()} if current is not None else set()
        if head.target == capture.revoke:
            return "revoke" if fields.get("token") in marks else None
        if fields.get(REFRESH) in marks:
            if fields.get("grant_type") != REFRESH or not fields.keys() <= OF_A_REFRESH:
                what = f"a request with the refresh token of {name} that is not just a refresh"
                raise Rejected(403, what, "its answer could be another login")
            return "refresh"
        return "login" if name in self._takes_login and fields.get("grant_type") in LOGIN_GRANTS else None

    async def _exchange(self, request: TokenRequest) -> WholeAnswer:
        """Exchange tokens under the lock of the login; return the answer of an exchange that has ended meanwhile."""
        number = next(self._numbers)
        try:
            async with asyncio.timeout(LOCK_S):
                reply = await self._ask("begin", number, name=request.name, version=request.version)
        except OSError as error:
            self._give_up(number)
            return _failed(request, error)
        self._take(request.name, reply["login"])
        current = self._current.get(request.name)
        if not reply["is_begun"]:
            return WholeAnswer(status=200, body=current.answer.encode()) if current is not None else _logged_out()
        try:
            return await self._begun(number, request, current, reply["since"])
        except BaseException:  # a fault of ours: the lock is not held for it
            self._give_up(number, is_known=False)
            raise

    async def _begun(self, number: int, request: TokenRequest, current: CurrentLogin | None, since: str) -> WholeAnswer:
        tokens = Tokens(request.name, current, is_new=request.kind == "login")
        outcome: Message = {"is_new": tokens.is_new}
        try:
            answer = await request.send(request.body_with(current))
            body = self._edited(request, tokens, answer)
            is_good = answer.status < 300
            outcome |= {"fields": tokens.fields if is_good else {}, "answer": body.decode("utf-8", "replace")}
            outcome["is_dropped"] = is_good and request.kind == "revoke"
            if not is_good and request.kind == "refresh":
                request.note(_refusal(request, answer.status, since))
            result = WholeAnswer(status=answer.status, body=body)
        except NotSent as error:
            result = _failed(request, error)
        except OSError as error:  # the tokens may be spent
            result, outcome["is_known"] = _failed(request, error), False
        await self._keep(number, request, outcome)
        return result

    async def _keep(self, number: int, request: TokenRequest, outcome: Message) -> None:
        """Have written what an exchange has brought; this sandbox uses it in any case."""
        try:
            reply = await self._tell_end(number, **outcome)
            self._take(request.name, reply["login"])
        except OSError as error:
            request.note(f"the login of {request.name} could not be written: {error}")
            if outcome.get("fields"):
                self._take(request.name, {"version": 0, "fields": outcome["fields"], "answer": outcome["answer"]})

    def _edited(self, request: TokenRequest, tokens: Tokens, answer: ReadAnswer) -> bytes:
        """Return the body of an answer with placeholders. Raises AnswerRefused."""
        edit = CapturedAnswer(request.name, request.capture, tokens, lambda: self._redaction(tokens))
        edit.head(answer.status, answer.headers)
        return edit.feed(answer.body) + edit.end()

    def _redaction(self, tokens: Tokens) -> AnswerRedaction:
        new = [_grant(tokens.name, field, frozenset(), *pair) for field, pair in tokens.fields.items()]
        return AnswerRedaction(StreamRedactor(pairs_of([*self._grants, *new])))

    def _take(self, name: str, reply: Message | None) -> None:
        """Use another state of a login; None for one that has ended."""
        self._current.pop(name, None)
        if reply is not None:
            self._current[name] = CurrentLogin(**reply)
        hosts = frozenset(host for of, capture in self._rows if of == name for host in capture.hosts)
        fields = self._current[name].fields if reply is not None else {}
        new = [_grant(name, field, hosts, *pair) for field, pair in fields.items()]
        old = [grant for grant in self._grants if grant.login == _kept(name)]
        if new != old:
            self._grants[:] = [*(grant for grant in self._grants if grant not in old), *new]
            self._forget([grant for grant in old if grant not in new])

    # Messages.

    async def _ask(self, tag: str, number: int, **body: Any) -> Message:  # noqa: ANN401 - plain values
        """Return the answer to a message. Raises OSError, with a sentence."""
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            messages.send(self._link, tag, {"number": number, **body})
            reply = await self._waiting[number]
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise OSError(0, reply["error"])
        return reply

    def _tell_end(self, number: int, **outcome: Any) -> Awaitable[Message]:  # noqa: ANN401
        return self._ask("end", number, **{**NO_OUTCOME, **outcome})

    def _give_up(self, number: int, *, is_known: bool = True) -> None:
        """Have no lock held for an exchange that waits for it no more, or whose end nobody will tell."""
        with suppress(OSError):
            messages.send(self._link, "end", {"number": number, **NO_OUTCOME, "is_known": is_known})

    def _receive(self) -> None:
        try:
            tag, body, _ = messages.receive(self._link)
        except BlockingIOError:
            return
        except OSError:
            tag, body = "", {}
        if not tag:
            self._lose()
        elif (waiting := self._waiting.get(body["number"])) is not None and not waiting.done():
            waiting.set_result(body)

    def _lose(self) -> None:
        """Close the link, and end all waits for answers."""
        if self._link < 0:
            return
        asyncio.get_running_loop().remove_reader(self._link)
        os.close(self._link)
        self._link = -1
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError(0, "the process with the files of logins has ended"))


class Tokens:
    """Choose the placeholders of an answer's tokens: those of the login, or new ones."""

    def __init__(self, name: str, current: CurrentLogin | None, *, is_new: bool):
        self.name, self.is_new = name, is_new
        self._current = current.fields if current is not None else {}
        self.fields: dict[str, tuple[str, str]] = {}
        self.reading: WeakSet[CapturedAnswer] = WeakSet()

    def placeholder(self, login: str, _: Capture, field: str, text: str) -> str:
        """Return the placeholder of a text. Raises AnswerRefused for a second text of a field, and for no value."""
        name = f"{login}.{field}"
        if field in self.fields and self.fields[field][1] != text:
            raise AnswerRefused(f"the host's answer has two texts of {name}")
        with refusing(name):
            value = check_value(name, text.encode("utf-8", "replace"))
            self.fields[field] = (self._mark(name, field, value), value)
        return self.fields[field][0]

    def _mark(self, name: str, field: str, value: str) -> str:
        current = self._current.get(field)
        if current is not None and not (self.is_new and is_web_token(value)):  # whose claims may be another user's
            return current[0]
        return lasting_placeholder(name, value)


class ExchangeBody:
    """Read the body of a request that may exchange tokens; `edit` changes other ones."""

    most_bytes = MOST_ASKED_BYTES

    def __init__(self, edit: BodyEdit | None, answer: AnswerBody):
        self._edit, self.answer = edit, answer

    def edit(self, body: bytes) -> bytes:
        """Return the body of a request that exchanges no tokens. Raises Rejected."""
        return body if self._edit is None else self._edit.edit(body)


def _kept(name: str) -> str:
    """Return the `login` of a grant, which no capture has: so no other request may have its value in the body."""
    return f"{name} (kept)"


def _grant(name: str, field: str, hosts: frozenset[str], mark: str, value: str) -> Grant:
    return Grant(
        name=f"{name}.{field}", placeholder=mark.encode(), value=value.encode(), hosts=hosts, login=_kept(name)
    )


def _read(body: bytes) -> tuple[Mapping[str, Any], bool]:
    """Return the fields of a body, and whether it is a form; none where it is not plain, or has one twice."""
    try:
        if body.lstrip()[:1] == b"{":
            fields, is_form = json.loads(body, object_pairs_hook=list), False
        else:
            fields, is_form = parse_qsl(body.decode("ascii"), keep_blank_values=True, strict_parsing=True), True
    except (ValueError, RecursionError):
        return {}, False
    is_plain = len(dict(fields)) == len(fields) and all(isinstance(text, str | int | None) for _, text in fields)
    return (dict(fields) if is_plain else {}), is_form


def _refusal(request: TokenRequest, status: int, since: str) -> str:
    why = f"; an exchange of {since} was interrupted, so that its tokens may be spent" if since else ""
    what = f"the login of {request.name} was not refreshed"
    return f"{what}: {request.capture.host} answered with {status}{why}; log in again"


def _failed(request: TokenRequest, error: OSError) -> WholeAnswer:
    why = error.strerror or "it takes too long"
    request.note(f"the login of {request.name} was not exchanged: {why}")
    return _told("temporarily_unavailable", f"cloche: the login was not exchanged: {why}", 503)


def _logged_out() -> WholeAnswer:
    return _told("invalid_grant", "cloche: this login has ended; log in again", 400)


def _told(error: str, sentence: str, status: int) -> WholeAnswer:
    return WholeAnswer(status=status, body=json.dumps({"error": error, "error_description": sentence}).encode())
