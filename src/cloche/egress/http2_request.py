"""The valid forms of a request and of an answer in HTTP/2, which is no text. No I/O.

Theory of operation: what `http_request` is for HTTP/1. A request has each of its pseudo headers once, and they name the
host of its connection. A header has the form that it needs in HTTP/1, since servers pass requests on in that. Edits see
the same `RequestHead` for both versions: a web socket, which is CONNECT here (RFC 8441), is for them a GET that asks
for an upgrade. Forms are of RFC 9113.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpack import HeaderTuple, NeverIndexedHeaderTuple

from ..core.record import dataclass
from .http_answer import AnswerRefused
from .http_request import ANOTHER_HOST, LENGTH, MOST_HEADERS, Headers, Rejected, RequestHead, RequestTarget, shown

WEB_SOCKET = b"websocket"
MOST_ANSWER_HEADERS = 256
_UPGRADE = (b"upgrade", WEB_SOCKET)
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH = re.compile(rb"/[\x21-\x7e]*")
_STATUS = re.compile(rb"[1-9][0-9]{2}")
# Of one connection, which has them in its frames; servers that pass a request on as HTTP/1 would read them.
_OF_CONNECTIONS = {
    b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"http2-settings",
}  # fmt: skip
_SINGLE = {b"host", b"content-length"}
_NOT_PASSED = {b"host", b"proxy-authorization"}
_OF_REQUESTS = {b":method", b":scheme", b":authority", b":path", b":protocol"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Request:
    """Hold one request: its headers as they go upstream, and what edits see of it.

    `is_upgrade`: it asks for a web socket. `awaits_continue`: its body comes after a 100.
    """

    edited: RequestHead
    headers: tuple[HeaderTuple, ...]
    is_upgrade: bool
    awaits_continue: bool

    def headers_for(self, length: int, added: Headers) -> tuple[HeaderTuple, ...]:
        """Return the headers for a body of this many bytes that is there already, with these headers added."""
        kept = [header for header in self.headers if header[0] not in (b"content-length", b"expect")]
        kept += [NeverIndexedHeaderTuple(name.lower(), value) for name, value in added]
        return (*kept, HeaderTuple(b"content-length", b"%d" % length))


def read_http2_request(headers: Headers, place: RequestTarget, *, takes_web_sockets: bool) -> Http2Request:
    """Return a request that may go upstream. Raises Rejected for any other.

    `takes_web_sockets`: the host has said so.
    """
    pseudo, rest = _parts(headers)
    is_upgrade = _is_upgrade(pseudo, takes_web_sockets=takes_web_sockets)
    _check_host(pseudo, rest, place)
    method, path = (b"GET" if is_upgrade else pseudo[b":method"]), pseudo[b":path"]
    if not _PATH.fullmatch(path) and (method, path) != (b"OPTIONS", b"*"):
        raise Rejected(400, f"a request for {shown(path)}")
    seen = [(b"host", place.authority.encode()), *(row for row in rest if row[0] != b"host"), *[_UPGRADE] * is_upgrade]
    head = RequestHead(method=method, target=path.decode("ascii"), headers=seen)
    edited = place.edit(head) if place.edit is not None else head
    return Http2Request(
        edited=edited,
        headers=(*_pseudo(edited, place, is_upgrade=is_upgrade), *_passed(edited.headers, set(rest))),
        is_upgrade=is_upgrade,
        awaits_continue=(b"expect", b"100-continue") in [(name, value.lower()) for name, value in rest],
    )


def _parts(headers: Headers) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    """Return the pseudo headers and the others, each of a valid form."""
    pseudo: dict[bytes, bytes] = {}
    rest: list[tuple[bytes, bytes]] = []
    if len(headers) > MOST_HEADERS:
        raise Rejected(431, f"a request with more than {MOST_HEADERS} headers")
    for name, value in headers:
        if not _VALUE.fullmatch(value):
            raise Rejected(400, f"a request with the header {shown(name)} that is not text in one line")
        if name.startswith(b":"):
            if name in pseudo or name not in _OF_REQUESTS or rest:
                raise Rejected(400, f"a request with the pseudo header {shown(name)} at a place that is not its own")
            pseudo[name] = value
        else:
            rest.append((name, value))
    _check_fields(rest)
    if missing := {b":method", b":scheme", b":path"} - pseudo.keys():
        raise Rejected(400, f"a request without the pseudo header {shown(min(missing))}")
    return pseudo, rest


def _check_fields(headers: Headers) -> None:
    seen = set()
    for name, value in headers:
        if not _NAME.fullmatch(name):
            raise Rejected(400, f"a request with a header that has the name {shown(name)}")
        key = name.replace(b"_", b"-")
        if key in _OF_CONNECTIONS or (key in _SINGLE and (key != name or key in seen)):
            raise Rejected(400, f"a request with the header {shown(name)}, or with several of them")
        is_wrong = {b"te": value.lower() != b"trailers", b"content-length": not LENGTH.fullmatch(value)}
        if is_wrong.get(key):
            raise Rejected(400, f"a request with the header {shown(name)} of the value {shown(value)}")
        seen.add(key)


def _is_upgrade(pseudo: dict[bytes, bytes], *, takes_web_sockets: bool) -> bool:
    """Say that a request asks for a web socket; refuse every other CONNECT, and every other protocol."""
    method, protocol = pseudo[b":method"], pseudo.get(b":protocol")
    if not _METHOD.fullmatch(method):
        raise Rejected(400, f"a request with the method {shown(method)}")
    if method.upper() != b"CONNECT" and protocol is None:
        return False
    if method != b"CONNECT" or protocol != WEB_SOCKET:
        raise Rejected(403, f"CONNECT to {shown(protocol or pseudo.get(b':authority', b''))}")
    if not takes_web_sockets:
        raise Rejected(400, "a web socket by HTTP/2", "the host has not said that it takes any")
    return True


def _check_host(pseudo: dict[bytes, bytes], rest: Headers, place: RequestTarget) -> None:
    if pseudo[b":scheme"] != b"https":
        raise Rejected(403, f"a request with the scheme {shown(pseudo[b':scheme'])}")
    hosts = [value for name, value in rest if name == b"host"]
    hosts += [pseudo[b":authority"]] if b":authority" in pseudo else []
    if not hosts:
        raise Rejected(400, "a request that names no host")
    for host in hosts:
        if not place.is_meant_by(host.decode("latin-1")):
            raise Rejected(403, f"a request for {shown(host)}", ANOTHER_HOST)


def _pseudo(edited: RequestHead, place: RequestTarget, *, is_upgrade: bool) -> list[HeaderTuple]:
    method = b"CONNECT" if is_upgrade else edited.method
    rows = [(b":method", method), (b":scheme", b"https"), (b":authority", place.authority.encode())]
    rows += [(b":protocol", WEB_SOCKET)] if is_upgrade else []
    return [*(HeaderTuple(*row) for row in rows), NeverIndexedHeaderTuple(b":path", edited.target.encode("ascii"))]


def _passed(headers: Headers, before: set[tuple[bytes, bytes]]) -> Iterable[HeaderTuple]:
    """Return the headers for upstream; what an edit has written is kept out of the table of headers."""
    for name, value in headers:
        key = name.lower()
        if key not in _NOT_PASSED and key not in _OF_CONNECTIONS:
            yield HeaderTuple(key, value) if (name, value) in before else NeverIndexedHeaderTuple(key, value)


def read_http2_answer(headers: Headers) -> tuple[int, Sequence[tuple[bytes, bytes]]]:
    """Return the status of an answer and its headers, of a valid form. Raises AnswerRefused for any other."""
    (name, status), *rest = headers or [(b"", b"")]
    if name != b":status" or not _STATUS.fullmatch(status):
        raise AnswerRefused("the host's answer is malformed")
    return int(status), read_http2_trailers(rest)


def read_http2_trailers(headers: Headers) -> Sequence[tuple[bytes, bytes]]:
    """Return the headers behind an answer's body, of a valid form. Raises AnswerRefused for any other."""
    if len(headers) > MOST_ANSWER_HEADERS:
        raise AnswerRefused(f"the host's answer has more than {MOST_ANSWER_HEADERS} headers")
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or name in _OF_CONNECTIONS:
            raise AnswerRefused("the host's answer is malformed")
    return [(bytes(name), bytes(value)) for name, value in headers]
