"""What a request to a host with a secret may have: the placeholder in a known place, and no other credential."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import pytest

from cloche.egress.credentials import Grant, HostCredentials, placeholders_in
from cloche.egress.http_request import Rejected, RequestHead, RequestTarget, read_request

HOST, OTHER_HOST = "api.github.com", "api.example.com"
MARK, VALUE, FOREIGN = b"ghp_placeholder0000", b"ghp_thevalueitself00", b"ghp_anattackersown00"
GRANT = Grant(name="GH_TOKEN", placeholder=MARK, value=VALUE, hosts=frozenset((HOST,)))


def edited(
    *headers: tuple[bytes, bytes], target: str = "/", grant: Grant = GRANT, host: str = HOST
) -> dict[bytes, bytes]:
    """Return the headers of a request for upstream."""
    return dict(HostCredentials(host, [grant]).edit(asked(*headers, target=target)).headers)


def asked(*headers: tuple[bytes, bytes], target: str = "/") -> RequestHead:
    """Return the head of a request."""
    return RequestHead(method=b"GET", target=target, headers=headers)


def basic(user: bytes, password: bytes) -> bytes:
    """Return Basic credentials."""
    return b"Basic " + base64.b64encode(user + b":" + password)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (b"Authorization", b"Bearer " + MARK, b"Bearer " + VALUE),
        (b"authorization", b"token " + MARK, b"token " + VALUE),
        (b"X-Api-Key", MARK, VALUE),
        (b"Authorization", basic(b"x-access-token", MARK), basic(b"x-access-token", VALUE)),
        (b"Authorization", basic(MARK, b"x-oauth-basic"), basic(VALUE, b"x-oauth-basic")),
        (b"Authorization", b"", b""),
    ],
)
def test_a_value_stands_where_the_placeholder_stood(name: bytes, before: bytes, after: bytes) -> None:
    """Headers, and Basic credentials as git sends them."""
    assert edited((name, before)) == {name: after}


def test_a_host_without_a_row_may_want_any_header() -> None:
    """One whose credential headers are known has the value in these alone."""
    grant = Grant(name="K", placeholder=MARK, value=VALUE, hosts=frozenset((HOST, OTHER_HOST)))
    header = (b"X-Subscription", b"key=" + MARK)
    assert edited(header, grant=grant, host=OTHER_HOST) == {b"X-Subscription": b"key=" + VALUE}
    assert edited(header, grant=grant) == dict([header])


@pytest.mark.parametrize("name", [b"User-Agent", b"Referer", b"Host", b"X-Forwarded-For", b"Accept", b"Range", b"Link"])
def test_a_header_that_describes_keeps_the_placeholder(name: bytes) -> None:
    """Servers log these, and show them to others."""
    grant = Grant(name="K", placeholder=MARK, value=VALUE, hosts=frozenset((OTHER_HOST,)))
    assert edited((name, MARK), grant=grant, host=OTHER_HOST)[name] == MARK


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"Authorization", b"Bearer " + FOREIGN),
        (b"AUTHORIZATION", FOREIGN),
        (b"Authorization", b"Bearer " + FOREIGN + b", Bearer " + MARK),
        (b"Authorization", b"Bearer " + MARK + b" " + FOREIGN),
        (b"Authorization", basic(FOREIGN, MARK)),
        (b"Authorization", basic(MARK, FOREIGN)),
        (b"Authorization", b"Basic !!!"),
        (b"Authorization", basic(b"x-access-token", MARK + b":" + FOREIGN)),
        (b"Proxy-Authorization", b"Bearer " + FOREIGN),
        (b"X_Api_Key", FOREIGN),
        (b"Private-Token", FOREIGN),
        (b"X-NuGet-ApiKey", FOREIGN),
        (b"X-Auth-Token", FOREIGN),
    ],
)
def test_a_foreign_credential_is_refused(name: bytes, value: bytes) -> None:
    """Alone, or beside the placeholder, in any spelling of a credential's header."""
    with pytest.raises(Rejected) as caught:
        edited((name, value))
    assert FOREIGN.decode() not in caught.value.what
    assert "GH_TOKEN" in caught.value.what


def test_a_cookie_is_left_out() -> None:
    """It is a credential, and clients keep those that an answer sets."""
    assert edited((b"Cookie", b"session=" + FOREIGN)) == {}


def test_compressed_answers_are_not_asked_for() -> None:
    """A value in one could not be found."""
    assert edited((b"Accept-Encoding", b"gzip, br")) == {b"Accept-Encoding": b"identity"}


def test_a_subprotocol_of_a_web_socket_may_be_a_credential() -> None:
    """It gets the value behind a known beginning, and no other credential stands there."""
    known = b"openai-insecure-api-key."
    name = b"Sec-WebSocket-Protocol"
    assert edited((name, b"realtime,  " + known + MARK)) == {name: b"realtime, " + known + VALUE}
    assert edited((name, b"chat, " + MARK)) == {name: b"chat, " + MARK}
    for other in (known + FOREIGN, known.upper() + FOREIGN, known + MARK + b"x"):
        with pytest.raises(Rejected, match="Sec-WebSocket-Protocol"):
            edited((name, b"realtime, " + other))


def test_foreign_credentials_may_be_allowed() -> None:
    """`foreign=allow` passes them on, and cookies."""
    grant = Grant(name="K", placeholder=MARK, value=VALUE, hosts=frozenset((HOST,)), is_foreign_allowed=True)
    headers = ((b"Authorization", FOREIGN), (b"Cookie", b"a=b"))
    assert edited(*headers, grant=grant) == dict(headers)


def test_a_format_is_the_only_form() -> None:
    """Where the caller says what the header looks like, another form is a foreign credential."""
    grant = Grant(name="K", placeholder=MARK, value=VALUE, hosts=frozenset((HOST,)), form=b"Bearer {}")
    assert edited((b"Authorization", b"Bearer " + MARK), grant=grant) == {b"Authorization": b"Bearer " + VALUE}
    with pytest.raises(Rejected):
        edited((b"Authorization", b"token " + MARK), grant=grant)


def test_a_host_of_another_secret_gets_no_value() -> None:
    """A placeholder is for its own hosts."""
    other = Grant(name="K", placeholder=b"p" * 20, value=b"v" * 20, hosts=frozenset((OTHER_HOST,)))
    with pytest.raises(Rejected):
        HostCredentials(OTHER_HOST, [GRANT, other]).edit(asked((b"Authorization", b"Bearer " + MARK)))


def test_a_request_is_written_with_what_it_was_changed_to() -> None:
    """`read_request` takes the changed headers; the rest of a head is as strict as without secrets."""
    target = RequestTarget(host=HOST, port=443, is_tls=True, edit=HostCredentials(HOST, [GRANT]).edit)
    head = b"GET https://api.github.com/user HTTP/1.1\r\nHost: api.github.com\r\nAuthorization: Bearer " + MARK
    request, _ = read_request(head + b"\r\nCookie: a=b\r\n\r\n", target)
    assert request.head == b"GET /user HTTP/1.1\r\nHost: api.github.com\r\nAuthorization: Bearer " + VALUE + b"\r\n\r\n"


@pytest.mark.parametrize(
    "line",
    [
        b"GET http://api.github.com/ HTTP/1.1",
        b"GET https://u:p@api.github.com/ HTTP/1.1",
        b"GET https://other/ HTTP/1.1",
    ],
)
def test_another_target_is_refused(line: bytes) -> None:
    """In TLS, a target is of this host and of https."""
    with pytest.raises(Rejected):
        read_request(line + b"\r\nHost: api.github.com\r\n\r\n", RequestTarget(host=HOST, port=443, is_tls=True))


@pytest.mark.parametrize(
    "texts", [[b"GET /?k=" + MARK], [b"Authorization: " + basic(b"u", MARK)], [b"a", b"b: " + MARK]]
)
def test_a_placeholder_in_a_head_is_found(texts: Sequence[bytes]) -> None:
    """Also in Basic credentials; a value or another text is none."""
    assert placeholders_in(b"\n".join(texts), [GRANT]) == ["GH_TOKEN"]
    assert placeholders_in(b"Authorization: Bearer " + VALUE, [GRANT]) == []
