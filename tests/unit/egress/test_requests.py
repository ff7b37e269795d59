"""Requests to a host whose rules have methods and paths, by HTTP/1.1 and by HTTP/2 alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from cloche.core.network import NetworkRules
from cloche.egress.http2_request import read_http2_request
from cloche.egress.http_request import Rejected, RequestTarget, read_request
from cloche.egress.requests import checked_request

HOST = "api.example.org"
RULES = NetworkRules.parse(mode="allowlist", allow=[f"{HOST}/GET:/repos/me/*", f"{HOST}/POST:/graphql"])
PLACE = RequestTarget(host=HOST, port=443, is_tls=True, edit=partial(checked_request, rules=RULES, host=HOST, port=443))


def by_lines(method: str, target: str, *headers: tuple[str, str]) -> str:
    """Return the target that goes upstream by HTTP/1.1."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {HOST}", *(f"{name}: {value}" for name, value in headers), "", ""]
    request, _ = read_request("\r\n".join(lines).encode(), PLACE)
    return request.head.split(b" ")[1].decode()


def by_frames(method: str, target: str, *headers: tuple[str, str]) -> str:
    """Return the target that goes upstream by HTTP/2."""
    pseudo = ((":method", method), (":scheme", "https"), (":authority", HOST), (":path", target))
    rows = [(name.encode(), value.encode()) for name, value in (*pseudo, *headers)]
    request = read_http2_request(rows, PLACE, takes_web_sockets=True)
    return dict(request.headers)[b":path"].decode()


CARRIERS = pytest.mark.parametrize("ask", [by_lines, by_frames])
Ask = Callable[..., str]


@CARRIERS
def test_an_allowed_request_is_sent_with_the_path_that_was_compared(ask: Ask) -> None:
    """And with its query as it is."""
    assert ask("GET", "/repos/%6De/%7eit?a=%2e%2e&b=//") == "/repos/me/~it?a=%2e%2e&b=//"
    assert ask("POST", "/graphql") == "/graphql"


OWN = "the rules for this host are GET /repos/me/*, POST /graphql"
OVERRIDE = ("x-http-method-override", "PUT")


@CARRIERS
@pytest.mark.parametrize(
    ("method", "target", "headers", "why"),
    [
        ("GET", "/repos/a", (), f'{OWN}; allow it with network_allow "{HOST}/GET:/repos/a"'),
        ("GET", "/repos/me/%2e%2e/x", (), "its path has a dot segment; no rule can allow that"),
        ("get", "/graphql", (), OWN),
        ("OPTIONS", "*", (), "its path is no path; no rule can allow that"),
        ("POST", "/graphql", (OVERRIDE,), f"its header {OVERRIDE[0]} could change its method or path; leave it out"),
    ],
)
def test_a_refusal_is_the_same_sentence(
    ask: Ask, method: str, target: str, headers: tuple[tuple[str, str], ...], why: str
) -> None:
    """It has the parts that those of refused hosts have."""
    with pytest.raises(Rejected) as caught:
        ask(method, target, *headers)
    assert (caught.value.status, caught.value.what) == (403, f"{method} {target} is not allowed; {why}")


def test_a_web_socket_is_a_get() -> None:
    """By HTTP/1.1 and by HTTP/2, where its method is CONNECT."""
    upgrade = (("Upgrade", "websocket"), ("Connection", "Upgrade"))
    assert by_lines("GET", "/repos/me/live", *upgrade) == "/repos/me/live"
    with pytest.raises(Rejected, match="GET /graphql is not allowed"):
        by_lines("GET", "/graphql", *upgrade)
    assert by_frames("CONNECT", "/repos/me/live", (":protocol", "websocket")) == "/repos/me/live"
    with pytest.raises(Rejected, match="GET /graphql is not allowed"):
        by_frames("CONNECT", "/graphql", (":protocol", "websocket"))
