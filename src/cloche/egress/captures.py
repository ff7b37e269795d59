"""Secrets in answers: a placeholder in place of each, before the program has them. No I/O.

Theory of operation: the answers of a capture's path are read whole. Each text in one of its fields becomes a grant of
this sandbox, and the answer is written anew with placeholders. Of each field the newest few grants are kept, since a
program may have several logins and use a token until its end; older placeholders are worth nothing. An answer of
another path of that host that has tokens is refused: there they would be values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from typing import Any, Protocol
from urllib.parse import quote_plus, unquote_plus
from weakref import WeakSet

from cloche.core.errors import InvalidRequest
from cloche.core.secrets import TOKENS, Capture, check_value

from .credentials import Grant
from .fields import Unreadable, capture_at, read_json
from .http_answer import AnswerEdit, AnswerRefused
from .http_request import Headers, RequestHead
from .placeholders import new_placeholder
from .redaction import AnswerRedaction

KEPT = 4  # grants of one field
MOST_AT_ONCE = 64  # answers of one sandbox that are read
MOST_BYTES, MOST_PARTS, MOST_FIELDS = 256 << 10, 5_000, 1000  # of an answer that is read, as JSON, as a form
MOST_FORM_BYTES = 64 << 10
MOST_TEXTS, MOST_CHARS = 16, 20 << 10  # of its secrets, for which placeholders are made at once
MOST_TAIL_BYTES = 1024  # of a watched answer, in which a token's name and the blanks behind it may be
_TOKENS = "|".join(TOKENS).encode()
_IN_TEXT = re.compile(rb'"(?:' + _TOKENS + rb')"\s*:\s*"|<(?:' + _TOKENS + rb")\s*>")  # JSON, XML
_IN_FORM = re.compile(rb"&(?:" + _TOKENS + rb")=")
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_IN_ADDRESS = re.compile(rb"[?#&](?:" + _TOKENS + rb")=")
_FORM = b"application/x-www-form-urlencoded"


class Placeholders(Protocol):
    """Choose what stands for the texts of answers; `reading` are those that are being read."""

    reading: WeakSet[CapturedAnswer]

    def placeholder(self, login: str, capture: Capture, field: str, text: str, /) -> str:
        """Return what stands for a text in a field. Raises AnswerRefused for one that cannot be a value."""
        ...


class Captures:
    """Hold the captures of one sandbox, by name, and add their grants to its own.

    `on_change` is called then, with those that had to go for it. `reading` are answers.
    """

    def __init__(
        self, rows: Sequence[tuple[str, Capture]], grants: list[Grant], on_change: Callable[[Sequence[Grant]], None]
    ):  # fmt: skip
        self.rows = rows
        self._grants, self._on_change = grants, on_change
        self.reading: WeakSet[CapturedAnswer] = WeakSet()

    @property
    def hosts(self) -> frozenset[str]:
        """Return the hosts of answers, and those that get the values."""
        return frozenset(host for _, capture in self.rows for host in (capture.host, *capture.hosts))

    def placeholder(self, login: str, capture: Capture, field: str, text: str) -> str:
        """Return what stands for a text in a field. Raises AnswerRefused for one that cannot be a value."""
        name = f"{login}.{field}"
        with refusing(name):
            value = check_value(name, text.encode("utf-8", "replace")).encode()
            known = next((grant for grant in self._grants if grant.value == value), None)
            if known is not None:
                return known.placeholder.decode("ascii")
            placeholder = new_placeholder(name, value.decode("ascii"))
        own = [grant for grant in self._grants if grant.name == name and grant.login == login]
        forgotten = own[: max(0, len(own) - KEPT + 1)]
        for grant in forgotten:
            self._grants.remove(grant)
        grant = Grant(
            name=name, placeholder=placeholder.encode(), value=value, hosts=frozenset(capture.hosts), login=login
        )
        self._grants.append(grant)
        self._on_change(forgotten)
        return placeholder


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Raise AnswerRefused for a text of an answer that cannot be a value."""
    try:
        yield
    except InvalidRequest:
        raise AnswerRefused(f"the text of {name} in the host's answer is none that a secret can have") from None


def edit_of_answer(
    captures: Captures, host: str, redaction: Callable[[], AnswerRedaction], head: RequestHead
) -> AnswerEdit:
    """Return what is done with the answer to a request for a host."""
    rows = [row for row in captures.rows if row[1].host == host]
    if (row := capture_at(rows, head)) is not None:
        return CapturedAnswer(*row, captures, redaction)
    return WatchedAnswer(redaction()) if rows else redaction()


class CapturedAnswer:
    """Take the secrets of a capture out of an answer, and then all known ones by a new `redaction`."""

    keeps_length = False

    def __init__(
        self, login: str, capture: Capture, captures: Placeholders, redaction: Callable[[], AnswerRedaction]
    ):  # fmt: skip
        self._login, self._capture, self._captures, self._redaction = login, capture, captures, redaction
        self._body, self._is_form, self._is_success = bytearray(), False, False
        self._passing: AnswerRedaction | WatchedAnswer | None = None

    def head(self, status: int, headers: Headers) -> Headers:
        """Return the headers. Raises AnswerRefused for a compressed body."""
        _check_address(headers)
        if status < 200:
            return self._redaction().head(status, headers)
        if self._passing is None:
            kind = _kind(headers)
            self._is_form = kind == _FORM
            is_read, self._is_success = self._is_form or b"json" in kind, status < 300
            self._passing = self._redaction() if is_read else WatchedAnswer(self._redaction())
        return self._passing.head(status, headers)

    def feed(self, data: bytes) -> bytes:
        """Take a part of the body. Raises AnswerRefused for too large a one."""
        if isinstance(self._passing, WatchedAnswer):
            if self._is_success and data.strip():
                raise AnswerRefused("the host's answer is neither JSON nor a form, and has to be read for secrets")
            return self._passing.feed(data)
        if len(self._captures.reading) >= MOST_AT_ONCE and self not in self._captures.reading:
            raise AnswerRefused(f"{MOST_AT_ONCE} other answers of this sandbox are being read for secrets")
        self._captures.reading.add(self)
        self._body += data
        most_bytes = MOST_FORM_BYTES if self._is_form else MOST_BYTES
        if len(self._body) > most_bytes:
            raise AnswerRefused(f"the host's answer has more than {most_bytes} bytes, and has to be read for secrets")
        return b""

    def end(self) -> bytes:
        """Return the body with placeholders. Raises AnswerRefused for one that cannot be read."""
        if isinstance(self._passing, WatchedAnswer):
            return self._passing.end()
        body, self._body = bytes(self._body), bytearray()
        self._captures.reading.discard(self)
        edited = self._form(body) if self._is_form else self._json(body)
        redaction = self._redaction()
        return redaction.feed(edited) + redaction.end()

    def _json(self, body: bytes) -> bytes:
        """Return JSON with placeholders in the fields. What else is in it stays as it was written."""
        if not body.strip():
            return body
        fields = {text: name for name, text in self._texts(body)}
        _check_amount(fields)
        marks = {
            text: self._captures.placeholder(self._login, self._capture, name, text) for text, name in fields.items()
        }
        edited = _TEXT.sub(partial(_marked, marks), body)
        if not {text for _, text in self._texts(edited)} <= set(marks.values()):
            raise AnswerRefused("the host's answer has secrets in a form that is not understood")
        return edited

    def _texts(self, body: bytes) -> list[tuple[str, str]]:
        """Return the fields of the capture, with the texts in them. Raises AnswerRefused."""
        texts: list[tuple[str, str]] = []

        def note(members: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
            for name, value in members:
                if name in self._capture.answer and value and not isinstance(value, bool):
                    if not isinstance(value, str):
                        raise AnswerRefused(f"{name!r} in the host's answer is no text")
                    texts.append((name, value))
            return members

        try:
            read_json(body, note, MOST_PARTS)
        except Unreadable:
            raise AnswerRefused("the host's answer is not valid JSON, and has to be read for secrets") from None
        return texts

    def _form(self, body: bytes) -> bytes:
        parts = body.decode("latin-1").split("&")
        if len(parts) > MOST_FIELDS:
            raise AnswerRefused(f"the host's answer has more than {MOST_FIELDS} fields")
        fields = [(part, *map(unquote_plus, part.partition("=")[::2])) for part in parts]
        _check_amount({text for _, name, text in fields if name in self._capture.answer})
        return "&".join(starmap(self._part, fields)).encode("latin-1")

    def _part(self, part: str, name: str, text: str) -> str:
        if name not in self._capture.answer or not text:
            return part
        placeholder = self._captures.placeholder(self._login, self._capture, name, text)
        return f"{part.partition('=')[0]}={quote_plus(placeholder)}"


def _check_amount(texts: Collection[str]) -> None:
    """Raise AnswerRefused for secrets whose placeholders would take long to make."""
    if len(texts) > MOST_TEXTS or sum(map(len, texts)) > MOST_CHARS:
        raise AnswerRefused(f"the host's answer has more than {MOST_TEXTS} secrets, or {MOST_CHARS} characters of them")


class WatchedAnswer:
    """Pass on an answer of a host with captures, of another path: one without tokens."""

    def __init__(self, redaction: AnswerRedaction):
        self._redaction, self._tail, self._tokens = redaction, b"", _IN_TEXT
        self.keeps_length, self.end = redaction.keeps_length, redaction.end

    def head(self, status: int, headers: Headers) -> Headers:
        """Return the headers. Raises AnswerRefused."""
        _check_address(headers)
        if status >= 200 and _kind(headers) == _FORM:
            self._tokens, self._tail = _IN_FORM, self._tail or b"&"
        return self._redaction.head(status, headers)

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on. Raises AnswerRefused before the text of a token is."""
        seen = self._tail + data
        if self._tokens.search(seen):
            raise AnswerRefused(
                "the host's answer has tokens, which are captured at another path of this host alone; they are not "
                "passed on"
            )
        self._tail = seen[-MOST_TAIL_BYTES:]
        return self._redaction.feed(data)


def _check_address(headers: Headers) -> None:
    if any(_IN_ADDRESS.search(value) for name, value in headers if name.lower() == b"location"):
        raise AnswerRefused("the host's answer has tokens in an address; they are not passed on")


def _kind(headers: Headers) -> bytes:
    types = [value for name, value in headers if name.lower() == b"content-type"]
    return types[-1].partition(b";")[0].strip().lower() if types else b""


def _marked(marks: Mapping[str, str], match: re.Match[bytes]) -> bytes:
    """Return a text of JSON, or the placeholder of a secret that it is."""
    text = json.loads(match[0]) if b"\\" in match[0] else match[0][1:-1].decode("utf-8")
    return json.dumps(marks[text]).encode() if text in marks else match[0]
