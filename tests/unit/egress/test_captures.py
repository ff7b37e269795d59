"""Secrets in answers: a program gets placeholders for them, and nothing else gets around that."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

import pytest

from cloche.core.secrets import Capture, capture_as_wire
from cloche.egress.captures import KEPT, MOST_AT_ONCE, MOST_BYTES, Captures, edit_of_answer
from cloche.egress.credentials import Grant
from cloche.egress.http_answer import AnswerRefused
from cloche.egress.http_request import Rejected, RequestHead
from cloche.egress.opened import SandboxSecrets
from cloche.egress.redaction import AnswerRedaction, StreamRedactor, pairs_of
from cloche.egress.tls import Authority
from tests.harness.loops import in_loop

HOST, PATH = "login.example.com", "/oauth/token"
CAPTURE = Capture(url=f"https://{HOST}{PATH}", hosts=("api.example.com",))
ACCESS, REFRESH = "sk-ant-oat01-AccessOf0123456789", "sk-ant-ort01-RefreshOf987654321"

XML = f"<OAuth>\n <access_token>{ACCESS}</access_token>\n</OAuth>".encode()  # as GitHub answers who accepts it
JSON, FORM = "application/json; charset=utf-8", "application/x-www-form-urlencoded"


class Sandbox:
    """Hold captures and their grants."""

    def __init__(self, *grants: Grant):
        self.grants = list(grants)
        self.captures = Captures([("LOGIN", CAPTURE)], self.grants, lambda _: None)

    def redaction(self) -> AnswerRedaction:
        """Return what takes out the values of now."""
        return AnswerRedaction(StreamRedactor(pairs_of(self.grants)))

    def passed(
        self, body: bytes, kind: str = JSON, *, path: str = PATH, host: str = HOST, status: int = 200, size: int = 7,
        more: Mapping[str, str] | None = None,
    ) -> bytes:  # fmt: skip
        """Return what passes of an answer's body that comes in pieces."""
        head = RequestHead(method=b"POST", target=path, headers=())
        edit = edit_of_answer(self.captures, host, self.redaction, head)
        headers = {**({"Content-Type": kind} if kind else {}), **(more or {})}
        edit.head(status, [(name.encode(), value.encode()) for name, value in headers.items()])
        return b"".join(edit.feed(body[at : at + size]) for at in range(0, len(body), size)) + edit.end()


def answer(**more: object) -> bytes:
    """Return an answer with tokens."""
    return json.dumps({"access_token": ACCESS, "refresh_token": REFRESH, "expires_in": 3600, **more}).encode()


def test_tokens_of_an_answer_become_placeholders() -> None:
    """Of the same length and prefix, also nested and where they stand once more; all else stays as it was."""
    sandbox = Sandbox()
    told = json.loads(sandbox.passed(answer(account={"id_token": ACCESS[::-1]}, copy=f"it is {ACCESS}.")))
    assert {grant.name for grant in sandbox.grants} == {f"LOGIN.{name}" for name in CAPTURE.answer}
    assert {grant.value.decode() for grant in sandbox.grants} == {ACCESS, REFRESH, ACCESS[::-1]}
    mark = told["access_token"]
    assert (mark[:13], len(mark)) == (ACCESS[:13], len(ACCESS))
    assert told["copy"] == f"it is {mark}."
    assert told["expires_in"] == 3600
    assert all(value not in json.dumps(told) for value in (ACCESS, REFRESH, ACCESS[::-1]))
    assert all(grant.hosts == {"api.example.com"} for grant in sandbox.grants)


def test_a_form_has_placeholders_too() -> None:
    """As GitHub answers without an Accept."""
    sandbox = Sandbox()
    told = dict(parse_qsl(sandbox.passed(urlencode({"access_token": ACCESS, "scope": "a b"}).encode(), FORM).decode()))
    assert told == {"access_token": sandbox.grants[0].placeholder.decode(), "scope": "a b"}


@pytest.mark.parametrize("escaped", ["\\u002b", "\\u002B", "\\/"])
def test_an_escaped_token_is_one(escaped: str) -> None:
    """However the host's writer spells it."""
    sandbox = Sandbox()
    body = b'{"access_token" : "%b"}' % ACCESS.replace("-", escaped, 1).encode()
    value = json.loads(body)["access_token"]
    assert json.loads(sandbox.passed(body))["access_token"] == sandbox.grants[0].placeholder.decode()
    assert sandbox.grants[0].value.decode() == value


def test_the_claims_of_a_web_token_stay() -> None:
    """Clients read them; the signature is random."""

    def packed(data: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")

    token = f"{packed({'alg': 'RS256'})}.{packed({'account': 'me'})}.{'Sig0' * 20}"
    told = json.loads(Sandbox().passed(answer(id_token=token)))["id_token"]
    assert told.rpartition(".")[0] == token.rpartition(".")[0]
    assert told != token


def test_the_same_token_has_the_same_placeholder_and_the_oldest_is_forgotten() -> None:
    """A program that refreshes a million times fills no memory; its last few tokens are still worth something."""
    sandbox = Sandbox()
    first = sandbox.passed(answer())
    assert sandbox.passed(answer()) == first
    for number in range(100):
        sandbox.passed(answer(access_token=f"{ACCESS}{number}"))
    assert len(sandbox.grants) == KEPT + 1
    assert f"{ACCESS}99".encode() in {grant.value for grant in sandbox.grants}
    own = Grant(name="K", placeholder=b"p" * 30, value=ACCESS.encode(), hosts=frozenset((HOST,)))
    assert json.loads(Sandbox(own).passed(answer()))["access_token"] == "p" * 30


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (answer()[:-1], JSON),
        (b"\xef\xbb\xbf" + answer(), JSON),
        (answer().decode().encode("utf-16"), JSON),
        (answer(access_token="short"), JSON),
        (answer(access_token={"text": ACCESS}), JSON),
        (answer(access_token=f"{ACCESS}\u00e9"), JSON),
        (answer(access_token="x" * 20_000), JSON),
        (answer(all=[{"access_token": f"{ACCESS}{number}"} for number in range(17)]), JSON),
        (answer(all=[{"access_token": "x" * 9000 + f"{ACCESS}{number}"} for number in range(3)]), JSON),
        ("&".join(f"access_token={ACCESS}{number}" for number in range(17)).encode(), FORM),
        (b"a=" + b"%41" * 30_000, FORM),
        (answer(), "text/plain"),
        (XML, "application/xml"),
        (urlencode({"access_token": ACCESS}).encode(), "text/plain"),
        (answer(), ""),
        (b"[" * 100_000, JSON),
        (b'{"a": "' + b"x" * MOST_BYTES + b'"}', JSON),
    ],
)
def test_an_answer_that_cannot_be_read_is_refused(body: bytes, kind: str) -> None:
    """Its tokens would be values."""
    with pytest.raises(AnswerRefused) as caught:
        Sandbox().passed(body, kind, size=1 << 16)
    assert ACCESS not in str(caught.value)


@pytest.mark.parametrize("body", [b'{"error": "slow_down"}', b'{"access_token": null}', b"", b"[1, 2.50, NaN]"])
def test_an_answer_without_tokens_passes(body: bytes) -> None:
    """As it is."""
    assert Sandbox().passed(body, status=400) == body
    assert Sandbox().passed(b"<h1>no</h1>", "text/html", status=502) == b"<h1>no</h1>"


@pytest.mark.parametrize("path", [PATH, "/other"])
@pytest.mark.parametrize("mark", ["?", "#", "#state=a&"])
def test_tokens_in_an_address_are_refused(path: str, mark: str) -> None:
    """A redirect has them in the implicit flow."""
    with pytest.raises(AnswerRefused, match="address"):
        Sandbox().passed(b"", "", path=path, status=302, more={"Location": f"https://a.example/{mark}access_token=x"})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("kind", [JSON, "text/html", ""])
def test_tokens_of_another_path_are_refused(size: int, kind: str) -> None:
    """Before any of them has passed, wherever the pieces are cut; other hosts are not asked."""
    sandbox = Sandbox()
    for body in (answer(), b'{"a": 1, "refresh_token" : \n"%b"}' % REFRESH.encode(), XML):
        for path in (f"{PATH}/", "/oauth/%74oken", "/other"):
            with pytest.raises(AnswerRefused, match="another path"):
                sandbox.passed(body, kind, path=path, size=size)
    with pytest.raises(AnswerRefused):
        sandbox.passed(b"scope=a&access_token=x", FORM, path="/other", size=size)
    assert sandbox.passed(answer(), kind, host="api.example.com", size=size) == answer()
    harmless = b'{"response_types": ["code", "id_token"], "access_token": null}'
    assert sandbox.passed(harmless, kind, path="/other", size=size) == harmless


def test_answers_that_are_read_are_counted() -> None:
    """A host that never ends them takes a bounded part of the memory."""
    sandbox = Sandbox()
    head = RequestHead(method=b"POST", target=PATH, headers=())
    edits = [edit_of_answer(sandbox.captures, HOST, sandbox.redaction, head) for _ in range(MOST_AT_ONCE + 1)]
    for edit in edits:
        edit.head(200, [(b"Content-Type", JSON.encode())])
    assert [edit.feed(b"{") for edit in edits[:-1]] == [b""] * MOST_AT_ONCE
    with pytest.raises(AnswerRefused, match="being read"):
        edits[-1].feed(b"{")
    assert edits[0].feed(b"}") + edits[0].end() == b"{}"
    assert edits[-1].feed(b"{}") == b""


def test_a_forgotten_token_is_still_taken_out_of_answers() -> None:
    """A host may have kept it, and show it later."""

    async def claim() -> None:
        secrets = SandboxSecrets([], ssl.create_default_context(), Authority(), [capture_as_wire("LOGIN", CAPTURE)])
        edits = secrets.edits(HOST, lambda head: head, lambda _: None)
        for number in range(2 * KEPT):
            login = edits.answer_edit(RequestHead(method=b"POST", target=PATH, headers=()))
            login.head(200, [(b"Content-Type", JSON.encode())])
            login.feed(answer(access_token=f"{ACCESS}{number}x"))
            login.end()
        shown = edits.answer_edit(RequestHead(method=b"GET", target="/kept", headers=()))
        shown.head(200, [])
        assert ACCESS.encode() not in shown.feed(f"it was {ACCESS}0x.".encode()) + shown.end()

    in_loop(claim)


def test_a_login_alone_opens_its_hosts() -> None:
    """Before there is any token, too: then every credential is foreign."""

    async def claim() -> None:
        secrets = SandboxSecrets([], ssl.create_default_context(), Authority(), [capture_as_wire("LOGIN", CAPTURE)])
        assert [secrets.opens(host) for host in (HOST, "api.example.com", "other.example")] == [True, True, False]
        edits = secrets.edits("api.example.com", lambda head: head, lambda _: None)
        with pytest.raises(Rejected, match="a login that is captured"):
            edits.edit(RequestHead(method=b"GET", target="/", headers=[(b"Authorization", b"Bearer x")]))

    in_loop(claim)
