"""Which requests a rule with methods and paths allows: the one form of a path, and what has none."""

from __future__ import annotations

import pytest

from cloche.core.ceilings import covers
from cloche.core.errors import InvalidRequest
from cloche.core.network import NetworkRules, parse_deny_rule, parse_rule
from cloche.core.request_rules import Ambiguous, RequestRefused, check_request, normal_path

HOST = "api.example.org"


def rules(*parts: str) -> NetworkRules:
    """Return the rules of a host, one for each part."""
    return NetworkRules.parse(mode="allowlist", allow=[f"{HOST}/{part}" for part in parts])


def asked(target: str, *parts: str, method: str = "GET", headers: tuple[tuple[bytes, bytes], ...] = ()) -> str:
    """Return the target that the server gets."""
    rule = rules(*parts).decide(HOST, 443).rule
    assert rule is not None
    return check_request(method, target, headers, rule.requests, HOST)


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("/", "/"),
        ("/repos/me/it", "/repos/me/it"),
        ("/%72epos/%6De/i%74/", "/repos/me/it/"),
        ("/%7Eme/a%2db", "/~me/a-b"),
        ("/a%2fb%c3%a9%20c", "/a%2Fb%C3%A9%20c"),
        ("/v1/models/x:run,now@2(a)!*'$&+=", "/v1/models/x:run,now@2(a)!*'$&+="),
        ("/%40scope%2fname", "/%40scope%2Fname"),
        ("/.well-known/a.json", "/.well-known/a.json"),
        ("/a..b/..c/.d", "/a..b/..c/.d"),
    ],
)
def test_a_path_has_one_form(path: str, normal: str) -> None:
    """What need not be encoded is not, and codes are in upper case; the form of a form is itself."""
    assert normal_path(path) == normal
    assert normal_path(normal) == normal


@pytest.mark.parametrize(
    "path",
    [
        "", "a", "*", "/a/../b", "/a/./b", "/a/..", "/a/.", "/a/%2e%2e/b", "/a/.%2E/b", "/a%2F..%2Fb", "/a%2f..", "//a",
        "/a//b", "/a/%2Fb", "/a%2F%2Fb", "/a%2F/b", "/a\\b", "/a%5Cb", "/a;b", "/a%3Bb", "/a%00b", "/a%0Ab", "/a%7Fb",
        "/a%25b", "/a%252e", "/a%", "/a%2", "/a%zz", "/a%u002e", "/a#b", "/a%23b", "/a%3Fb", "/a b", "/a\tb", "/a\xe9",
        "/a|b", "/a[b]", '/a"b', "/a<b", "/a^b", "/a{b}", "/a`b", "/a./b", "/a%20/b", "/a%2E/b", "/.../b", "/a%20",
        "/a.", "/%c0%ae", "/%c0%af", "/%ff", "/%ed%a0%80", "/%EF%BC%8E%EF%BC%8E", "/a%EF%BC%8Fb", "/%E2%80%A5",
        "/a%E2%84%80b", "/a%EF%BC%9Bb", "/a%EF%BC%85b", "/%E2%80%AEa", "/a%C2%85b", "/a%C2%ADb", "/%EF%BC%BCa",
        "/a%E2%81%84b", "/a%E2%88%96b", "/a%C2%A5b",
    ],
)  # fmt: skip
def test_a_path_that_servers_read_in_several_ways_is_refused(path: str) -> None:
    """Dot segments, empty segments, parameters, codes of codes, and all that only looks like a separator."""
    with pytest.raises(Ambiguous):
        normal_path(path)


@pytest.mark.parametrize(
    ("part", "allowed", "refused"),
    [
        ("GET:/repos/me/*", ["/repos/me/a", "/repos/me/a/b/", "/repos/me/a%2Fb"],
         ["/repos/me", "/repos/me/", "/repos/mexico", "/repos/me%2Fa", "/repos", "/", "/Repos/me/a", "/repos/me.json"]),
        ("GET:/users/*/keys", ["/users/a/keys", "/users/a%20b/keys"],
         ["/users/a/b/keys", "/users/a%2Fb/keys", "/users/keys", "/users/a/keys/", "/users/a/keys/1"]),
        ("GET:/users/*/*", ["/users/a/b", "/users/a/b/c"], ["/users/a", "/users/a/"]),
        ("GET:/*", ["/", "/a", "/a%2Fb/c", "/a/"], []),
        ("GET:/", ["/"], ["/a"]),
        ("GET:/simple/", ["/simple/"], ["/simple", "/simple/a"]),
        ("GET:/p/me%2Fit/*", ["/p/me%2Fit/a"], ["/p/me/it/a", "/p/me%2Fother/a"]),
    ],
)  # fmt: skip
def test_a_star_stands_for_a_segment_or_for_all_below(part: str, allowed: list[str], refused: list[str]) -> None:
    """At the end for all that is below, and never for the folder itself, whose other spelling that may be."""
    for target in allowed:
        assert asked(f"{target}?a=b//../", part) == f"{target}?a=b//../"
    for target in refused:
        with pytest.raises(RequestRefused, match="the rules for this host are GET /"):
            asked(target, part)


def test_rules_of_a_host_add_up_and_methods_are_compared_exactly() -> None:
    """A method in another case is another method, and HEAD is no GET."""
    parts = "GET,HEAD:/a/*", "*:/b", "POST:/a/c"
    assert asked("/a/x", *parts, method="HEAD") == "/a/x"
    assert asked("/b", *parts, method="PURGE") == "/b"
    assert asked("/a/c", *parts, method="POST") == "/a/c"
    for method in ("POST", "get", "Head", "DELETE"):
        with pytest.raises(RequestRefused):
            asked("/a/x", *parts, method=method)


@pytest.mark.parametrize(
    ("target", "header"),
    [
        ("/a", b"X-HTTP-Method-Override"), ("/a", b"x_http_method"), ("/a", b"X-Method-Override"),
        ("/a", b"X-Rewrite-URL"), ("/a", b"Destination"),
         ("/a", b"X-Original_URL"), ("/a?_method=PUT", b""), ("/a?b;%5fMethod=PUT", b""),
        ("/a?$httpMethod=PUT", b""),
    ],
)  # fmt: skip
def test_what_could_change_a_request_is_refused(target: str, header: bytes) -> None:
    """Headers and keys of the query from which some servers read another method or path."""
    with pytest.raises(RequestRefused, match="could change its method or path"):
        asked(target, "GET:/a", headers=((header, b"PUT"),) if header else ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a.example/repos/me", "has a path without methods, or methods without a path. Write the host alone, or"),
        ("a.example/get:/a", "has the method 'get'; methods are in capital letters"),
        ("a.example/:/a", "has an empty method"),
        ("a.example/GET,:/a", "has an empty method"),
        ("a.example/GET:/a*", "has a \\* beside other characters"),
        ("a.example/GET:/a?b", "has a query"),
        ("a.example/GET:/a/../b", "has a path that has a dot segment"),
        ("a.example/GET:/%61", "has a path in another form than requests get; write '/a'"),
        ("*.a.example/GET:/a", "go with the whole name of one host"),
        ("10.0.0.5/GET:/a", "go with the whole name of one host"),
        ("a.example:8443/GET:/a", "go with the ports 80 and 443 alone"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_reason(text: str, fault: str) -> None:
    """And what to write instead."""
    with pytest.raises(InvalidRequest, match=fault):
        parse_rule(text)


def test_a_rule_that_denies_has_neither() -> None:
    """A denied path would have other spellings."""
    with pytest.raises(InvalidRequest, match="list in network_allow what is allowed"):
        parse_deny_rule("a.example/GET:/a")


@pytest.mark.parametrize("whole", [HOST, "*.example.org", f"{HOST}:443", HOST.upper()])
def test_a_rule_of_the_whole_host_beside_it_is_an_error(whole: str) -> None:
    """It would make the other one meaningless, also when it comes later; on another port it does not."""
    with pytest.raises(InvalidRequest, match="would limit nothing; leave one of them out"):
        rules("GET:/x").with_further(allow=[whole])
    assert rules("GET:/x").with_further(allow=[f"{HOST}:8443"]).decide(HOST, 8443).is_allowed


def test_mode_open_reaches_a_host_with_such_rules_by_them_alone() -> None:
    """On no other port, and no approval opens it."""
    opened = NetworkRules.parse(mode="open", ports=[8443], allow=["a.example:443/GET:/x"])
    assert opened.decide("b.example", 8443).is_allowed
    assert not opened.decide("a.example", 8443).is_allowed
    assert not opened.decide("a.example", 80).is_allowed
    assert opened.denies("a.example", 8443)


@pytest.mark.parametrize(
    ("outer", "inner", "is_covered"),
    [
        ("GET,POST:/a/*", "GET:/a/b/*", True),
        ("GET:/a/*", "GET:/a/*/c", True),
        ("GET:/a/*", "GET:/a/", False),
        ("GET:/*/c", "GET:/a/c", True),
        ("GET:/a/c", "GET:/*/c", False),
        ("GET:/a/*", "GET:/*", False),
        ("GET:/*/*", "GET:/*", False),
        ("GET:/*", "GET:/a/*", True),
        ("GET:/a", "*:/a", False),
        ("*:/a", "GET,PUT:/a", True),
        ("GET:/a", "", False),
        ("", "GET:/a", True),
    ],
)
def test_a_ceiling_compares_what_is_allowed(outer: str, inner: str, is_covered: bool) -> None:
    """A rule without methods and paths allows more than each that has them."""
    wide, narrow = (f"{HOST}/{part}" if part else HOST for part in (outer, inner))
    assert covers(NetworkRules.parse(mode="allowlist", allow=[wide]), parse_rule(narrow)) is is_covered


def test_a_ceilings_limit_holds_below_a_wildcard() -> None:
    """A rule for all hosts of a domain is not covered where one of them is limited."""
    limited = NetworkRules.parse(mode="open", allow=[f"{HOST}/GET:/a"])
    assert not covers(limited, parse_rule("*.example.org"))
    assert covers(limited, parse_rule("*.example.com"))
