"""Fields of requests, in the query and in bodies: values in place of placeholders, and no foreign credential. No I/O.

Theory of operation: a value is written in the way in which its placeholder stands there, one of those of `redaction`,
and nothing around it changes. A body is read where a secret may stand in it, or where its host has fields with
credentials, which a provider's row or a capture names; every other body passes unread. A body with credentials is read
as strictly as it can be, since its server may read it in another way: an unknown charset, a compressed one, JSON that
is not valid, and a larger one are refused. Names are looked up in a whole form, and in the outermost object of JSON,
which servers take for parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import quote, unquote, unquote_to_bytes
from weakref import WeakSet

from cloche.core.guest_json import check_parts
from cloche.core.record import dataclass, replace
from cloche.core.secrets import Capture, provider_of

from .credentials import Grant, foreign
from .http_request import Headers, Rejected, RequestHead
from .redaction import MOST_KEPT, Pairs, json_forms, percent_forms
from .web_sockets import is_web_socket

MOST_BYTES = 1 << 20
MOST_PARTS, MOST_FIELDS = 50_000, 5_000  # of JSON, of a form
MOST_DISPOSITION_BYTES, MOST_BREAKS = 4096, 64  # a line that goes on behind breaks
MOST_CODES = 20_000  # of the percent encoding, in names
READ = "it has to be read, since it could have a credential that is not the secret's"
MOST_VALUE_BYTES = 48 << 10  # of a credential, each character in percent encoding
MOST_AT_ONCE = 64  # bodies of one sandbox that are read
_SEPARATOR = re.compile(rb"([&;])")
_JSON = re.compile(r"(application|text)/([\x21-\x7e]+\+)?json(request)?")
_TYPE_END = re.compile(r"[;,\s]")  # a comma, too, for some servers
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1"}
_PARAMETER = re.compile(r';\s*charset\s*=\s*"?([^";\s]*)', re.IGNORECASE)
# What may name a part of a multipart body, in any of the ways to write it; some servers go on behind a semicolon.
_DISPOSITION = re.compile(
    rb"(?i)content-(?:disposition|id|type)[^\r\n]*"
    rb"(?:(?:\r(?!\n)|\r?\n(?=[ \t])|(?<=[; \t])\r?\n)[^\r\n]*){0,%d}" % (MOST_BREAKS + 1)
)
_BLANKS, _BEFORE_JSON = b" \t\r\n", b" \t\r\n\xef\xbb\xbf\0"
_NOT_OF_A_NAME = " []$\t\r\n\0"  # that some servers leave out at its ends
Kind = Literal["json", "form", "multipart", "unnamed", "other"]


class Unreadable(ValueError):
    """Report JSON that is not read as such."""


def read_json(body: bytes, hook: Callable[[list[tuple[str, Any]]], Any] = list, most_parts: int = MOST_PARTS) -> Any:  # noqa: ANN401 - any JSON
    """Return JSON, with numbers as texts, and what `hook` makes of the members of each object. Raises Unreadable."""
    try:
        text = body.decode("utf-8")
        check_parts(text, most_parts)
        return json.loads(text, object_pairs_hook=hook, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):  # whose words may be the body's own
        raise Unreadable from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Name a grant whose value may stand in some fields, in any where `names` is None."""

    grant: Grant
    names: frozenset[str] | None

    def takes(self, name: str) -> bool:
        """Tell whether it may stand in a field."""
        return self.names is None or name in self.names


class Fields:
    """Edit the fields of one part of a request.

    In those that are `refused`, whose names are in lower case, there is nothing but the placeholder of a grant that is
    `accepted` there. `refusal` is that of a field.
    """

    def __init__(self, accepted: Sequence[Accepted], refused: frozenset[str], refusal: Callable[[str], Rejected]):
        self.accepted, self.refused, self._refusal = accepted, refused, refusal

    def form(self, text: bytes) -> bytes:
        """Return a query or a form. Raises Rejected."""
        present = self._present(text, _in_percent)
        named = [(row, pairs) for row, pairs in present if row.names is not None]
        if self.refused or named:
            if text.count(b"&") + text.count(b";") >= MOST_FIELDS:
                raise Rejected(413, f"a form of more than {MOST_FIELDS} fields", READ)
            parts = _SEPARATOR.split(text)
            if sum(part.partition(b"=")[0].count(b"%") for part in parts) > MOST_CODES:
                raise Rejected(413, "a form with long names", READ)
            for part in text.split(b"&") if b";" in text else ():  # which separates nothing to some servers
                self._name(part)
            text = b"".join([self._part(part, named) for part in parts])
        for row, pairs in present:
            text = _replaced(text, pairs) if row.names is None else text
        return text

    def _present(self, text: bytes, pairs_of: Callable[[Grant], Pairs]) -> list[tuple[Accepted, Pairs]]:
        """Return the grants whose placeholders stand in a text, with the ways to write placeholder and value."""
        rows = [(row, pairs_of(row.grant)) for row in self.accepted]
        return [(row, pairs) for row, pairs in rows if any(form in text for form, _ in pairs)]

    def _part(self, part: bytes, named: Sequence[tuple[Accepted, Pairs]]) -> bytes:
        """Return one field of a form."""
        name = self._name(part)
        key, equals, value = part.partition(b"=")
        for row, pairs in named:
            value = _replaced(value, pairs) if row.takes(name) else value
        return key + equals + value

    def _name(self, part: bytes) -> str:
        """Return the name of a field of a form. Raises Rejected."""
        key, _, value = part.partition(b"=")
        name = unquote(key.replace(b"+", b" ").decode("latin-1"), errors="replace")
        if value and self._is_refused(name) and not self._is_accepted(name, unquote_to_bytes(value[:MOST_VALUE_BYTES])):
            raise self._refusal(repr(name[:100]))
        return name

    def _is_refused(self, name: str) -> bool:
        return name.strip(_NOT_OF_A_NAME).lower() in self.refused

    def _is_accepted(self, name: str, value: bytes) -> bool:
        return any(row.takes(name) and row.grant.placeholder == value for row in self.accepted)

    def json(self, body: bytes) -> bytes:
        """Return JSON. Raises Rejected."""
        present = self._present(body, _in_json)
        if not present and not self.refused:
            return body
        try:
            members = read_json(body)
        except Unreadable:
            if self.refused:
                raise Rejected(400, "a body that is not valid JSON, or too complex,", READ) from None
            return body
        members = members if body.lstrip(_BLANKS)[:1] == b"{" else []
        for name, value in members:
            if self._is_refused(name) and not self._is_empty_or_accepted(name, value):
                raise self._refusal(repr(name[:100]))
        for row, pairs in present:
            body = _replaced(body, pairs) if row.names is None else _in_member(body, members, row, pairs)
        return body

    def _is_empty_or_accepted(self, name: str, value: object) -> bool:
        if not value or isinstance(value, bool):
            return True
        return isinstance(value, str) and self._is_accepted(name, value.encode("utf-8", "replace"))

    def multipart(self, body: bytes) -> bytes:
        """Return a body in several parts as it is. Raises Rejected for a part that is named like a credential."""
        codes = 0
        for number, match in enumerate(_DISPOSITION.finditer(body)):
            line = match[0]
            codes += line.count(b"%")
            is_long = len(line) > MOST_DISPOSITION_BYTES or line.count(b"\r") + line.count(b"\n") > MOST_BREAKS
            if number >= MOST_FIELDS or is_long or codes > MOST_CODES:
                raise Rejected(413, "a form in too many parts, or with long names,", READ)
            text = unquote(line.decode("latin-1")).replace("\\", "").lower()
            if "application/http" in text:
                raise Rejected(403, "a request in a part of a body", READ)
            for name in self.refused.intersection(re.split(r"[^a-z0-9_.-]+", text)):
                raise self._refusal(repr(name))
        return body


@lru_cache(MOST_KEPT)
def _in_percent(grant: Grant) -> Pairs:
    """Return the ways to write a placeholder in a form, each with that of the value.

    A value that was fetched anew may have other punctuation, which has to be encoded.
    """
    first, *marks = percent_forms(grant.placeholder)
    _, *values = percent_forms(grant.value)
    return [(first, quote(grant.value, safe=grant.placeholder).encode()), *zip(marks, values, strict=True)]


@lru_cache(MOST_KEPT)
def _in_json(grant: Grant) -> Pairs:
    (_, *marks), (_, *values) = json_forms(grant.placeholder), json_forms(grant.value)
    return list(zip(marks, values, strict=True))


def _replaced(text: bytes, pairs: Pairs) -> bytes:
    for form, value in pairs:
        text = text.replace(form, value)
    return text


def _in_member(body: bytes, members: Sequence[tuple[str, Any]], row: Accepted, pairs: Pairs) -> bytes:
    """Return JSON with the value in the one member that takes it and has the placeholder, if this is nowhere else."""
    mark, value = row.grant.placeholder.decode("ascii"), row.grant.value.decode("ascii")
    rows = [(name, text) for name, text in members if row.takes(name) and isinstance(text, str) and mark in text]
    if len(rows) != 1 or sum(body.count(form) for form in {form for form, _ in pairs}) != 1:
        return body
    edited = _replaced(body, pairs)
    return edited if (rows[0][0], rows[0][1].replace(mark, value)) in read_json(edited) else body


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldsBody:
    """Edit a body of one kind; `tell` gets it when it is edited."""

    fields: Fields
    kind: Kind
    tell: Callable[[bytes], None]
    most_bytes: int = MOST_BYTES

    def edit(self, body: bytes) -> bytes:
        """Return the body for upstream. Raises Rejected."""
        edited = self._edited(body)
        self.tell(edited)
        return edited

    def _edited(self, body: bytes) -> bytes:
        if self.kind == "json":
            return self.fields.json(body) if body.strip() else body
        if self.kind == "multipart":
            return self.fields.multipart(body)
        if body.lstrip(_BEFORE_JSON)[:1] == b"{":  # which some servers read as JSON whatever its type is
            body = self.fields.json(body)
        return self.fields.form(body)


class ReadBody:
    """Edit a body; while it is there, it counts as one that is read."""

    answer = None

    def __init__(self, fields_body: FieldsBody):
        self.edit, self.most_bytes = fields_body.edit, fields_body.most_bytes


class HostFields:
    """Edit the queries and the bodies of requests for one host. `grants` and `reading` are those of its sandbox."""

    def __init__(
        self, host: str, grants: Sequence[Grant], captures: Sequence[tuple[str, Capture]], reading: WeakSet[ReadBody],
        tell: Callable[[bytes], None],
    ):  # fmt: skip
        self._host, self._all, self._reading, self._tell = host, grants, reading, tell
        self._captures = [row for row in captures if row[1].host == host]
        self._provider = provider_of(host)

    def edit(self, head: RequestHead) -> RequestHead:
        """Return the head of a request with its query as it is for upstream. Raises Rejected."""
        path, mark, query = head.target.partition("?")
        if not query:
            return head
        refused = {name for _, capture in self._captures for name in capture.request}
        refused.update(self._provider.query if self._provider else ())
        fields = self._fields("query", refused, None)
        return replace(head, target=path + mark + fields.form(query.encode("ascii")).decode("ascii"))

    def body_edit(self, head: RequestHead) -> ReadBody | None:
        """Return what edits a body; None for one that passes unread. Raises Rejected."""
        if is_web_socket(head):  # which has none
            return None
        kind = _kind(head.headers)
        capture = capture_at(self._captures, head)
        refused = set(capture[1].request if capture is not None else ())
        if self._provider is not None and self._host in (self._provider.body_hosts or self._provider.hosts):
            refused.update(self._provider.form if kind in ("form", "multipart", "unnamed") else ())
            refused.update(self._provider.json if kind in ("json", "unnamed") else ())
        fields = self._fields("body", refused, capture)
        if not fields.refused and not self._may_be_edited(fields, kind, head.headers):
            return None
        if fields.refused and (kind != "other" or capture is not None):
            _check_form(kind, head.headers)
        elif kind == "other":
            return None
        return self._read(FieldsBody(fields=fields, kind=kind, tell=self._tell))

    def _fields(self, place: str, refused: Collection[str], capture: tuple[str, Capture] | None) -> Fields:
        grants = [grant for grant in self._all if self._host in grant.hosts]
        accepted = [Accepted(grant=grant, names=_names(grant, place)) for grant in grants]
        if capture is not None:
            own, names = [grant for grant in self._all if grant.login == capture[0]], frozenset(capture[1].request)
            accepted += [Accepted(grant=grant, names=names) for grant in own]
        is_foreign_allowed = any(grant.is_foreign_allowed for grant in grants)
        return Fields(
            [row for row in accepted if row.names is None or row.names],
            frozenset(() if is_foreign_allowed else (name.lower() for name in refused)),
            lambda name: foreign(f"{name} in the {place}", grants),
        )

    def _may_be_edited(self, fields: Fields, kind: Kind, headers: Headers) -> bool:
        """Tell whether a value may stand in a body without credentials, and it is no larger than that is done for."""
        lengths = [int(value) for name, value in headers if name.lower() == b"content-length" and value.isdigit()]
        is_plain = not any(name.lower() == b"content-encoding" for name, _ in headers)
        return bool(fields.accepted) and kind in ("json", "form") and is_plain and max(lengths, default=0) <= MOST_BYTES

    def _read(self, fields_body: FieldsBody) -> ReadBody:
        if len(self._reading) >= MOST_AT_ONCE:
            raise Rejected(403, f"a request while {MOST_AT_ONCE} others have bodies that are being read")
        read = ReadBody(fields_body)
        self._reading.add(read)
        return read


def capture_at(captures: Sequence[tuple[str, Capture]], head: RequestHead) -> tuple[str, Capture] | None:
    """Return the capture of a request's exact path, with its name."""
    path = head.target.partition("?")[0]
    return next((row for row in captures if row[1].path == path), None)


def _names(grant: Grant, place: str) -> frozenset[str] | None:
    """Return the fields in which a value may stand: none, or None for all."""
    if place in grant.places:
        return None
    return frozenset(name for at, _, name in (text.partition(":") for text in grant.places) if at == place and name)


def _content_types(headers: Headers) -> list[str]:
    return [value.decode("latin-1").lower() for name, value in headers if name.lower() == b"content-type"]


def _kind(headers: Headers) -> Kind:
    types = _content_types(headers)
    kind = _TYPE_END.split(types[0], maxsplit=1)[0] if types else ""
    if _JSON.fullmatch(kind):
        return "json"
    if kind == "application/x-www-form-urlencoded":
        return "form"
    if kind.startswith("multipart/"):
        return "multipart"
    return "unnamed" if not kind or kind.startswith("text/") or len(types) > 1 else "other"


def _check_form(kind: Kind, headers: Headers) -> None:
    """Raise Rejected for a body in which a credential could not be seen."""
    types = _content_types(headers)
    charsets = {charset.lower() for text in types for charset in _PARAMETER.findall(text)}
    codings = {value.strip().lower() for name, value in headers if name.lower() == b"content-encoding"}
    if len(types) > 1:
        raise Rejected(400, "a request with several headers content-type")
    if codings - {b"", b"identity"}:
        raise Rejected(403, "a compressed body", READ)
    if charsets - _CHARSETS:
        raise Rejected(403, f"a body in the charset {min(charsets)[:100]!r}", READ)
    if kind == "other":
        raise Rejected(403, "a body that is neither JSON nor a form", READ)
