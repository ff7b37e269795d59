"""Headers that requests to a host get."""

import pytest

from cloche.core.errors import InvalidRequest
from cloche.core.host_headers import headers_for, parse_headers

SETS = {"api.example.org": {"A": "exact"}, "*.example.org": {"A": "wide"}, "*.b.example.org": {"A": "longer"}}


@pytest.mark.parametrize(
    ("host", "value"),
    [
        ("api.example.org", b"exact"),
        ("c.example.org", b"wide"),
        ("a.b.example.org", b"longer"),
        ("example.org", None),
        ("badexample.org", None),
        ("api.example.org.evil.example", None),
    ],
)
def test_the_exact_host_counts_else_the_longest_wildcard(host: str, value: bytes | None) -> None:
    """A wildcard is for names below it, at any depth; sets are not merged."""
    assert headers_for(parse_headers(SETS), host) == (((b"A", value),) if value is not None else ())


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        ("10.0.0.1", {"A": "b"}),
        ("*", {"A": "b"}),
        ("a b.example", {"A": "b"}),
        ("a.example", {"A b": "c"}),
        ("a.example", {"": "c"}),
        ("a.example", {"A": "b\r\nC: d"}),
        ("a.example", {"A": "b\0"}),
        ("a.example", {"A": " b"}),
        ("a.example", {"A": "b" * 2049}),
        ("a.example", {"A" * 65: "b"}),
        ("a.example", {"A": "\u4e2d"}),
        *(("a.example", {name: "1"}) for name in ("Host", "content-length", "Transfer-Encoding", "Connection", "TE")),
        ("a.example", {f"A{number}": "b" for number in range(21)}),
    ],
)
def test_a_header_that_could_change_the_request_is_refused(host: str, headers: dict[str, str]) -> None:
    """Neither another request, nor another host or length, nor more than a bounded size."""
    with pytest.raises(InvalidRequest, match=r"^headers: "):
        parse_headers({host: headers})
