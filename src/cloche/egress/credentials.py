"""Credentials in the heads of requests: a value in place of its placeholder, and no other one. No I/O.

Theory of operation: a `Grant` is one secret of one sandbox. At its hosts, a head's credential headers must be empty, or
hold the placeholder in one of the known forms; then the value is put there. Any other credential is refused, since an
allowed host with an attacker's key is a way out. A host without a provider's row may want the value in any header, so
there the placeholder is replaced in all but those that describe the request, which servers log and show. Nothing is
added. `fields` does the same for queries and bodies. Cookies are left out: they are credentials, too, and clients keep
those of an answer without being asked to.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence

from cloche.core.record import dataclass, field, replace
from cloche.core.secrets import CREDENTIAL_HEADERS, CREDENTIAL_PROTOCOLS, provider_of

from .http_request import Headers, Rejected, RequestHead

# A placeholder in one of these stays as it is.
DESCRIPTIVE = re.compile(
    rb"accept.*|content-.*|cookie|date|expect|forwarded|from|host|if-.*|link|origin|pragma|range|referer|sec-.*|te"
    rb"|transfer-encoding|upgrade.*|user-agent|via|x-forwarded-.*|x-request-.*|idempotency-key|connection|cache-control"
)
# What stands beside a token in Basic credentials. Another text may itself be a credential.
USERS = frozenset((b"", b"x-access-token", b"x-oauth-basic", b"oauth2", b"__token__", b"token", b"git",
                   b"gitlab-ci-token", b"user", b"api"))  # fmt: skip
_SCHEME = re.compile(rb"(?i)([a-z][a-z0-9-]{0,31}) +([\x21-\x7e]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Hold one secret of one sandbox; `form` is what its headers must look like, empty for the usual forms.

    `places` are the parts of a request where it may stand, as in `Secret`. One that an answer brought has the name of
    its captures as `login`.
    """

    name: str
    placeholder: bytes
    value: bytes = field(repr=False)
    hosts: frozenset[str]
    form: bytes = b""
    is_foreign_allowed: bool = False
    places: frozenset[str] = frozenset(("headers",))
    login: str = ""


PROTOCOLS = tuple(prefix.encode() for prefix in CREDENTIAL_PROTOCOLS)


class HostCredentials:
    """Check and change the requests for one host of some grants."""

    def __init__(self, host: str, grants: Sequence[Grant]):
        self._host, self._all = host, grants
        provider = provider_of(host)
        self._headers = {name.encode() for name in (*CREDENTIAL_HEADERS, *(provider.headers if provider else ()))}
        self._kept = re.compile(b".*") if provider else DESCRIPTIVE

    def edit(self, head: RequestHead) -> RequestHead:
        """Return the head of a request for upstream. Raises Rejected for a foreign credential."""
        self._grants = [grant for grant in self._all if self._host in grant.hosts]  # captures bring further ones
        self._is_foreign_allowed = any(grant.is_foreign_allowed for grant in self._grants)
        return replace(head, headers=list(self._edited(head.headers)))

    def _edited(self, headers: Headers) -> Iterator[tuple[bytes, bytes]]:
        for name, value in headers:
            key = name.lower().replace(b"_", b"-")
            if key == b"cookie" and not self._is_foreign_allowed:
                continue
            if key.endswith(b"accept-encoding"):  # also of gRPC: else a value in the answer could not be found
                yield name, b"identity"
            elif key in self._headers:
                yield name, self._credential(name, value)
            elif key == b"sec-websocket-protocol":
                yield name, b", ".join(self._protocol(protocol.strip()) for protocol in value.split(b","))
            elif self._kept.fullmatch(key):
                yield name, value
            else:
                yield name, self._replaced(value)

    @property
    def _in_headers(self) -> list[Grant]:
        return [grant for grant in self._grants if "headers" in grant.places]

    def _replaced(self, value: bytes) -> bytes:
        for grant in self._in_headers:
            value = value.replace(grant.placeholder, grant.value)
        return value

    def _credential(self, name: bytes, value: bytes) -> bytes:
        """Return a credential with its value. Raises Rejected for one that is not the placeholder's."""
        if not value.strip():
            return value
        for grant in self._in_headers:
            if (replaced := _in_form(grant, value.strip())) is not None:
                return replaced
        if self._is_foreign_allowed:
            return value
        raise self._refusal(f"the header {name.decode('latin-1')[:100]!r}")

    def _protocol(self, protocol: bytes) -> bytes:
        """Return a subprotocol of a web socket with the value that it has. Raises Rejected for a foreign one."""
        size = next((len(prefix) for prefix in PROTOCOLS if protocol.lower().startswith(prefix)), 0)
        if not size or self._is_foreign_allowed:
            return self._replaced(protocol) if size else protocol
        for grant in self._in_headers:
            if protocol[size:] == grant.placeholder:
                return protocol[:size] + grant.value
        raise self._refusal("the header 'Sec-WebSocket-Protocol'")

    def _refusal(self, where: str) -> Rejected:
        return foreign(where, self._grants)


def foreign(where: str, grants: Sequence[Grant]) -> Rejected:
    """Return the refusal of a credential at a host of these grants."""
    names = " or ".join(dict.fromkeys(grant.name for grant in grants)) or "a login that is captured"
    what = f"a request with a credential in {where} that is not just the placeholder of {names}"
    return Rejected(403, what, 'no other is taken here, unless the secret has foreign="allow"')


def _in_form(grant: Grant, value: bytes) -> bytes | None:
    """Return a header's value with the secret's; None where it is not the placeholder in a known form."""
    scheme = _SCHEME.fullmatch(value)
    if scheme is not None and scheme[1].lower() == b"basic":
        return _in_basic(grant, scheme[1], scheme[2])
    if grant.form:
        return grant.form.replace(b"{}", grant.value) if value == grant.form.replace(b"{}", grant.placeholder) else None
    if value == grant.placeholder:
        return grant.value
    return scheme[1] + b" " + grant.value if scheme is not None and scheme[2] == grant.placeholder else None


def _in_basic(grant: Grant, scheme: bytes, encoded: bytes) -> bytes | None:
    try:
        user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
    except binascii.Error:
        return None
    if user in USERS and password == grant.placeholder:
        pair = user + colon + grant.value
    elif user == grant.placeholder and password in USERS:
        pair = grant.value + colon + password
    else:
        return None
    return scheme + b" " + base64.b64encode(pair)


def placeholders_in(data: bytes, grants: Sequence[Grant]) -> list[str]:
    """Return the names of the secrets whose placeholders stand in a text, also in Basic credentials."""
    return names_in(data, [(grant.name, grant.placeholder) for grant in grants])


def names_in(data: bytes, marks: Sequence[tuple[str, bytes]]) -> list[str]:
    """Return the names of the marks that stand in a text, also in Basic credentials."""
    texts = [data]
    for encoded in re.findall(rb"(?i)\bbasic +([a-z0-9+/=]+)", data)[:8]:
        try:
            texts.append(base64.b64decode(encoded))
        except binascii.Error:
            continue
    return [name for name, mark in marks if any(mark in text for text in texts)]
