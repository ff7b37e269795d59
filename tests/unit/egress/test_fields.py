"""What queries and bodies may have: values where a secret asked for them, and no credential of anybody else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from urllib.parse import parse_qsl, quote, urlencode
from weakref import WeakSet

import pytest

from cloche.core.record import replace
from cloche.core.secrets import Capture
from cloche.egress.credentials import Grant
from cloche.egress.fields import MOST_AT_ONCE, MOST_BYTES, HostFields, ReadBody
from cloche.egress.http_request import Rejected, RequestHead

HOST, LAB = "api.example.com", "gitlab.com"
MARK, VALUE, FOREIGN = b"tok/Mark+0000=abcd", b"tok/Real+9999=wxyz", b"glpat-anattackersown"
JSON, FORM = b"application/json", b"application/x-www-form-urlencoded"
CAPTURE = Capture(url=f"https://{HOST}/oauth/token", hosts=(HOST,))


def grant(*places: str, hosts: tuple[str, ...] = (HOST, LAB), **more: object) -> Grant:
    """Return a grant for some places."""
    return Grant(name="K", placeholder=MARK, value=VALUE, hosts=frozenset(hosts), places=frozenset(places), **more)  # type: ignore[arg-type]


def asked(target: str = "/", *headers: tuple[bytes, bytes]) -> RequestHead:
    """Return the head of a request."""
    return RequestHead(method=b"POST", target=target, headers=headers)


def query(target: str, *grants: Grant, host: str = HOST) -> str:
    """Return a target for upstream."""
    return HostFields(host, grants, [("LOGIN", CAPTURE)], WeakSet(), lambda _: None).edit(asked(target)).target


def sent(
    body: bytes, *grants: Grant, kind: bytes = JSON, host: str = HOST, target: str = "/",
    headers: tuple[tuple[bytes, bytes], ...] = (), tell: Callable[[bytes], None] = lambda _: None,
) -> bytes | None:  # fmt: skip
    """Return a body for upstream; None for one that is not read."""
    types = ((b"Content-Type", kind),) if kind else ()
    fields = HostFields(host, grants, [("LOGIN", CAPTURE)], WeakSet(), tell)
    edit = fields.body_edit(asked(target, *types, *headers))
    return None if edit is None else edit.edit(body)


PERCENT: dict[str, Callable[[bytes], str]] = {
    "as it is": lambda data: data.decode(),
    "percent": lambda data: quote(data, safe=""),
    "in small letters": lambda data: re.sub("%..", lambda match: match[0].lower(), quote(data, safe="")),
    "with slashes": lambda data: quote(data, safe="/"),
    "every byte": lambda data: "".join(f"%{byte:02X}" for byte in data),
}  # fmt: skip


@pytest.mark.parametrize("written", PERCENT.values(), ids=PERCENT)
@pytest.mark.parametrize("around", ["{}", "a-{}-b"])
def test_a_value_of_a_query_is_written_as_its_placeholder_was(written: Callable[[bytes], str], around: str) -> None:
    """Nothing else changes, the path included; a secret that did not ask for it stays where it is."""
    before = f"/a/{written(MARK)}?x=1&key={around.format(written(MARK))}&y"
    after = f"/a/{written(MARK)}?x=1&key={around.format(written(VALUE))}&y"
    assert query(before, grant("query")) == after
    assert query(before, grant("query:key")) == after
    assert query(before, grant("query:other")) == before
    assert query(before, grant("headers", "body")) == before
    assert query(before, grant("query", hosts=(LAB,))) == before


@pytest.mark.parametrize("written", PERCENT.values(), ids=PERCENT)
def test_a_value_of_a_form_is_written_as_its_placeholder_was(written: Callable[[bytes], str]) -> None:
    """Forms have the syntax of queries."""
    before, after = (f"a=b+c&secret={written(data)}&d=".encode() for data in (MARK, VALUE))
    assert sent(before, grant("body"), kind=FORM) == after
    assert sent(before, grant("body:secret"), kind=FORM + b"; charset=UTF-8") == after
    assert sent(before, grant("body:other"), kind=FORM) == before
    assert sent(before, grant("query"), kind=FORM) is None


@pytest.mark.parametrize(
    "written",
    [
        json.dumps,
        lambda text: json.dumps(text).replace("/", "\\/"),
        lambda text: '"' + "".join(f"\\u{ord(character):04x}" for character in text) + '"',
    ],
)
def test_a_text_of_json_is_written_as_its_placeholder_was(written: Callable[[str], str]) -> None:
    """Numbers, blanks and all else stay as they are; by name it is one member of the outermost object."""
    outer = ' {"n": 1.00e2,\n "secret" :%s, "list": [{"secret": 1}], "x": "\\ud83d\\ude00"} '
    before, after = ((outer % written(data.decode())).encode() for data in (MARK, VALUE))
    assert sent(before, grant("body")) == after
    assert sent(before, grant("body:secret"), kind=b"application/vnd.api+json") == after
    assert sent(before, grant("body:other")) == before
    nested = b'{"content": %b}' % before
    assert sent(nested, grant("body:secret")) == nested
    twice = b'{"content": %b, "secret": %b}' % (json.dumps(MARK.decode()).encode(), json.dumps(MARK.decode()).encode())
    assert sent(twice, grant("body:secret")) == twice


@pytest.mark.parametrize("body", [b"not JSON " + MARK, b'{"a": "' + MARK, b'\xef\xbb\xbf{"a":"%b"}' % MARK])
def test_json_that_is_none_passes_as_it_is(body: bytes) -> None:
    """And so does one that is compressed, or larger, where nothing but a value could be in it."""
    assert sent(body, grant("body")) == body
    assert sent(body, grant("body"), headers=((b"Content-Encoding", b"gzip"),)) is None
    assert sent(body, grant("body"), headers=((b"Content-Length", b"%d" % (MOST_BYTES + 1)),)) is None


def test_a_placeholder_that_is_left_is_told() -> None:
    """Of a body that is read."""
    told: list[bytes] = []
    sent(b'{"other": "%b"}' % MARK, grant("body:secret"), tell=told.append)
    assert MARK in told[0]


def test_a_value_with_other_punctuation_stays_one_text() -> None:
    """One that was fetched anew may have what ends a field, or a text."""
    other = b'tok"x&y=z%41+1\\2/3'
    own = replace(grant("query", "body"), value=other)
    assert parse_qsl(query(f"/?key={quote(MARK, safe='')}", own)[2:]) == [("key", other.decode())]
    assert parse_qsl(query(f"/?key={quote(MARK, safe='/+')}&a=b", own)[2:])[1] == ("a", "b")
    assert json.loads(sent(json.dumps({"a": MARK.decode()}).encode(), own) or b"") == {"a": other.decode()}


@pytest.mark.parametrize(
    "text",
    [
        "private_token=%s", "a=b&%%70rivate_token=%s", "a;Private_Token=%s", "private_token[]=%s", "[private_token]=%s",
        "+private_token=%s", "private_token=x&private_token=%s", "job_token=%s", "token=%s", "token=;%s", "$token=%s",
    ],
)  # fmt: skip
def test_a_foreign_credential_in_a_form_or_a_query_is_refused(text: str) -> None:
    """By the names of the provider's row, however they are written; without the words of it."""
    filled = text % FOREIGN.decode()
    with pytest.raises(Rejected, match="in the query") as caught:
        query(f"/?{filled}", grant("headers"), host=LAB)
    assert FOREIGN.decode() not in caught.value.what
    for kind in (FORM, b"", b"text/plain", FORM + b", x", FORM + b" x"):
        with pytest.raises(Rejected, match="in the body"):
            sent(filled.encode(), grant("headers"), kind=kind, host=LAB)
    allowed = grant("headers", is_foreign_allowed=True)
    assert query(f"/?{filled}", allowed, host=LAB) == f"/?{filled}"
    assert sent(filled.encode(), allowed, kind=FORM, host=LAB) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"private_token": "%b"}', b'{"a": 1, "private\\u005ftoken": "%b"}', b'{"Private_Token": "%b"}',
        b'{"private_token": null, "private_token": "%b"}', b'{"private_token": ["%b"]}', b'{"token": {"a": "%b"}}',
        b'[]\n{"private_token": "%b"}', b'\xef\xbb\xbf{"private_token": "%b"}', b'/**/{"private_token": "%b"}',
        b"{'private_token': '%b'}", b'{"private_token": "%b",}', b'{"private_token": "%b"',
    ],
)  # fmt: skip
def test_a_foreign_credential_in_json_is_refused(body: bytes) -> None:
    """Also twice, escaped, in another spelling, as another type, and where JSON is read less strictly than here."""
    for kind in (JSON, JSON + b",x", b"application/jsonrequest"):
        with pytest.raises(Rejected) as caught:
            sent(body % FOREIGN, grant("headers"), host=LAB, kind=kind)
        assert FOREIGN.decode() not in caught.value.what
    if body.startswith(b"{"):
        with pytest.raises(Rejected):
            sent(body % FOREIGN, grant("headers"), host=LAB, kind=FORM)


@pytest.mark.parametrize("charset", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7", "cp037"])
@pytest.mark.parametrize("says", [True, False])
def test_a_credential_in_another_charset_is_refused(charset: str, says: bool) -> None:
    """Whether the type says so or not."""
    body = json.dumps({"private_token": FOREIGN.decode()}).encode(charset)
    if charset == "utf-7":
        body = b'{"private+AF8-token": "x"}'
        says = True  # else it is ASCII, with another name
    with pytest.raises(Rejected):
        sent(body, grant("headers"), host=LAB, kind=JSON + (f'; charset="{charset}"'.encode() if says else b""))


@pytest.mark.parametrize(
    "disposition",
    [
        b'form-data; name="private_token"', b"form-data; name=private_token", b'form-data; NAME="Private_Token"',
        b"form-data; name*=utf-8''private%5Ftoken", b'form-data;\r\n name="private_token"',
        b'form-data; name="private\\_token"', b'form-data;\r\nname="private_token"',
        b'form-data; \r\nname="private_token"',
        b'form-data;\rname="private_token"', b"x\r\nContent-Type: application/http\r\n\r\nGET /?private_token=x",
    ],
)  # fmt: skip
def test_a_foreign_credential_in_a_part_is_refused(disposition: bytes) -> None:
    """Of a multipart form; other parts pass, and so does a whole file."""
    body = b"--b\r\nContent-Disposition: %b\r\n\r\n" + FOREIGN + b"\r\n--b--\r\n"
    kind = b"multipart/form-data; boundary=b"
    with pytest.raises(Rejected):
        sent(body % disposition, grant("headers"), host=LAB, kind=kind)
    file = body % b'form-data; name="file"; filename="a.txt"'
    assert sent(file, grant("headers"), host=LAB, kind=kind) == file
    assert sent(file, grant("headers"), host=LAB, kind=b"application/octet-stream") is None


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        (((b"Content-Encoding", b"gzip"),), "compressed"),
        (((b"Content-Type", b"text/plain"),), "several headers"),
    ],
)
def test_a_body_that_could_hide_a_credential_is_refused(headers: tuple[tuple[bytes, bytes], ...], words: str) -> None:
    """Only where the host has credentials in bodies: others go on unread."""
    with pytest.raises(Rejected, match=words):
        sent(b"{}", grant("headers"), host=LAB, headers=headers)
    assert sent(b"{}", grant("headers"), headers=headers) is None


def test_hosts_without_credentials_in_bodies_stream() -> None:
    """An upload to a model's host is not read, whatever its type; nor is a file that the API of GitHub gets as JSON."""
    assert sent(b"{}", grant("headers", hosts=("api.github.com",)), host="api.github.com") is None
    for kind in (JSON, FORM, b"", b"multipart/form-data; boundary=b"):
        own = grant("headers", hosts=("api.anthropic.com",))
        assert sent(b"{}", own, host="api.anthropic.com", kind=kind) is None
    assert (
        sent(
            b"{}",
            grant("headers", hosts=("generativelanguage.googleapis.com",)),
            host="generativelanguage.googleapis.com",
        )
        is None
    )


def test_the_own_placeholder_is_no_foreign_credential() -> None:
    """Where the secret asked for its place; elsewhere it is as foreign as another one."""
    assert query(f"/?private_token={quote(MARK, safe='')}", grant("query:private_token"), host=LAB).endswith(
        quote(VALUE, safe="")
    )
    body = json.dumps({"private_token": MARK.decode()}).encode()
    assert json.loads(sent(body, grant("body"), host=LAB) or b"") == {"private_token": VALUE.decode()}
    for refused in (grant("headers"), grant("body:other")):
        with pytest.raises(Rejected):
            sent(body, refused, host=LAB)
    with pytest.raises(Rejected):
        sent(json.dumps({"private_token": f"x{MARK.decode()}"}).encode(), grant("body"), host=LAB)


def test_a_captured_token_comes_back_at_its_path_alone() -> None:
    """In the fields of its capture; another one there is refused, as is a body that is not understood."""
    captured = grant("headers", hosts=(HOST,), login="LOGIN")
    fields = {"grant_type": "refresh_token", "refresh_token": MARK.decode()}
    expected = {**fields, "refresh_token": VALUE.decode()}
    assert json.loads(sent(json.dumps(fields).encode(), captured, target="/oauth/token?x=1") or b"") == expected
    form = sent(urlencode(fields).encode(), captured, target="/oauth/token", kind=FORM)
    assert dict(parse_qsl((form or b"").decode())) == expected
    assert sent(json.dumps(fields).encode(), captured, target="/oauth/token/") is None
    for body, kind in (
        (b'{"refresh_token": "%b"}' % FOREIGN, JSON),
        (b"refresh_token=x", FORM),
        (b"<a/>", b"application/xml"),
    ):
        with pytest.raises(Rejected):
            sent(body, captured, target="/oauth/token", kind=kind)
    with pytest.raises(Rejected):
        query("/oauth/token?refresh_token=x", captured)
    assert sent(b'{"code": "abc"}', captured, target="/oauth/token") == b'{"code": "abc"}'


def test_a_login_has_several_addresses() -> None:
    """One gives tokens and another refreshes them; that of another login takes none of them."""
    captured = grant("headers", hosts=(HOST,), login="LOGIN")
    other = Capture(url="https://refresh.example/t", hosts=(HOST,))
    body = json.dumps({"refresh_token": MARK.decode()}).encode()
    for name in ("LOGIN", "ANOTHER"):
        fields = HostFields("refresh.example", [captured], [(name, other)], WeakSet(), lambda _: None)
        edit = fields.body_edit(asked("/t", (b"Content-Type", JSON)))
        assert edit is not None
        if name == "LOGIN":
            assert json.loads(edit.edit(body)) == {"refresh_token": VALUE.decode()}
        else:
            with pytest.raises(Rejected):
                edit.edit(body)


def test_a_web_socket_has_no_body() -> None:
    """Over HTTP/2 its messages would be taken for one."""
    fields = HostFields(LAB, [grant("headers")], [], WeakSet(), lambda _: None)
    assert fields.body_edit(asked("/", (b"Upgrade", b"websocket"))) is None


def test_bodies_that_are_read_are_counted() -> None:
    """A guest that begins many of them takes a bounded part of the memory."""
    reading: WeakSet[ReadBody] = WeakSet()
    fields = HostFields(LAB, [grant("headers")], [], reading, lambda _: None)
    held = [fields.body_edit(asked()) for _ in range(MOST_AT_ONCE)]
    with pytest.raises(Rejected, match="being read"):
        fields.body_edit(asked())
    held.pop()
    assert fields.body_edit(asked()) is not None


TOOK_LONGEST: dict[str, tuple[bytes, bytes]] = {
    "one text": (JSON, b'{"a":"' + b"x" * (MOST_BYTES - 64) + b'"}'),
    "escapes": (JSON, b'{"a":"' + b"\\u0041" * 170_000 + b'"}'),
    "numbers": (JSON, b'{"a":[' + b"1," * 49_000 + b"1]}"),
    "floats": (JSON, b'{"a":[' + b"0.12345678901234567," * 49_000 + b"1]}"),
    "objects": (JSON, b'{"a":[' + b"{}," * 24_000 + b"1]}"),
    "members": (JSON, b"{" + b'"private":"a",' * 49_000 + b'"b":1}'),
    "nested": (JSON, b"[" * 500_000),
    "too many parts": (JSON, b"[" + b"1," * 500_000 + b"1]"),
    "a form": (FORM, b"a=b&" * 4_999),
    "a form of one field": (FORM, b"a=" + b"%41" * 340_000),
    "a form of one name": (FORM, b"%41" * 340_000 + b"=a"),
    "a form of a credential": (FORM, b"token=" + b"%41" * 340_000),
    "a form of long names": (FORM, (b"%41" * 69 + b"&") * 4_990),
    "too many fields": (FORM, b"&" * (MOST_BYTES - 64)),
    "marks": (FORM, b"a=" + (MARK + b"&") * 4_000),
    "parts": (b"multipart/form-data", b"content-id\r\n\r\n" * 74_000),
    "names of parts": (b"multipart/form-data", (b"content-id:" + b"%41" * 1_360 + b"\n") * 250),
    "breaks in parts": (b"multipart/form-data", (b"content-id:" + b"\r" * 4_000) * 250),
    "a long part": (b"multipart/form-data", b"content-id" + b" a" * 500_000),
}


@pytest.mark.parametrize("name", TOOK_LONGEST)
def test_the_largest_body_does_not_hold_the_loop(name: str) -> None:
    """Whatever is in it, it takes less than 50 ms (500 here, for a machine with much else to do)."""
    kind, body = TOOK_LONGEST[name]
    assert len(body) <= MOST_BYTES
    own = [grant("headers", "body", "query")] * 4
    began = time.thread_time()
    try:
        sent(body, *own, host=LAB, kind=kind)
    except Rejected:
        pass
    assert time.thread_time() - began < 0.5
