"""Requests to AWS, signed anew with the keys in place of their placeholders: Signature Version 4. No I/O.

Theory of operation: a guest signs with the placeholder of the secret key. Its signature is checked first: mistakes are
told here, and the form of path and query that it fits is the one to sign, for services differ in it. Then the same
headers, as they are sent, are signed with the key, for the same date and scope. The key itself is sent to nobody. A
request without `X-Amz-Content-Sha256`, as to all services but S3, is signed over the hash of its whole body. Bodies
with signed parts, presigned addresses and other algorithms are refused.

The algorithm is AWS's "Create a signed AWS API request". botocore has it too, but its import takes 0.3 s of a processor
and 24 MB, here for each first secret of a process, and it signs one form only. The tests compare both.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from urllib.parse import quote, unquote
from weakref import WeakSet

from cloche.core.record import dataclass, replace
from cloche.core.secrets import AWS_KEY, AWS_KEY_ID, AWS_NAMES, AWS_TOKEN

from .credentials import Grant, HostCredentials
from .http_request import Headers, Rejected, RequestHead, shown

MOST_BODY_BYTES, MOST_READ_BYTES = 8 << 20, 128 << 20  # of a body that is read for its hash, and of all of a sandbox
ALGORITHM, TERM = b"AWS4-HMAC-SHA256", b"aws4_request"
_AUTHORIZATION = re.compile(
    rb"AWS4-HMAC-SHA256 +Credential=([^/,\s]{1,128})/([0-9]{8})/([a-z0-9-]{1,64})/([a-z0-9-]{1,64})/aws4_request *,"
    rb" *SignedHeaders=([a-z0-9_.;-]{1,4096}) *, *Signature=([0-9a-f]{64})"
)
_TIME = re.compile(rb"[0-9]{8}T[0-9]{6}Z")
_OTHER = {
    b"aws4-ecdsa-p256-sha256": "SigV4A, which is not signed anew here; sign for one region, with AWS4-HMAC-SHA256",
    b"aws": "Signature Version 2, which is not signed anew here; sign with AWS4-HMAC-SHA256",
}
_PRESIGNED = {"x-amz-signature", "x-amz-credential", "x-amz-security-token", "x-amz-algorithm", "awsaccesskeyid"}
MOST_QUERY_PARTS = 1000  # which are signed in several forms
_UNHASHED = {b"GET", b"HEAD", b"DELETE", b"OPTIONS"}  # without a length there is no body
_NO_BODY = hashlib.sha256().hexdigest().encode()
Form = Callable[[str], str]


def has_aws_keys(host: str, grants: Sequence[Grant]) -> bool:
    """Tell whether requests for a host are signed with AWS keys."""
    return any(grant.name == AWS_KEY and host in grant.hosts for grant in grants)


def _as_sent(path: str) -> str:
    """Return the path as S3 signs it."""
    return path


def _encoded(path: str) -> str:
    """Return the path as most services sign it: encoded once more."""
    return quote(path, safe="/~")


def _normalized(path: str) -> str:
    """Return it without dot segments and empty ones, encoded once more."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts[-1:] = []
        elif part not in ("", "."):
            parts.append(part)
    is_folder = bool(parts) and path.endswith("/")
    return quote("/" + "/".join(parts) + "/" * is_folder, safe="/~")


def _sorted(query: str) -> str:
    """Return a query with its parts in order."""
    pairs = sorted(part.partition("=")[::2] for part in query.split("&") if part)
    return "&".join(f"{key}={value}" for key, value in pairs)


def _encoded_anew(query: str) -> str:
    """Return it with the one encoding that AWS describes."""
    parts = ("=".join(quote(unquote(text), safe="-_.~") for text in part.split("=", 1)) for part in query.split("&"))
    return _sorted("&".join(parts))


FORMS = tuple(product((_as_sent, _normalized, _encoded), (_sorted, _encoded_anew)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSignature:
    """Hold the parts of an `Authorization` of this algorithm."""

    key_id: bytes
    scope: tuple[bytes, ...]  # date, region, service, and a constant
    names: tuple[bytes, ...]
    value: bytes

    def header(self, key_id: bytes, value: bytes) -> tuple[bytes, bytes]:
        """Return the header with another key id, and its signature."""
        scope, names = b"/".join(self.scope), b";".join(self.names)
        text = b"%b Credential=%b/%b, SignedHeaders=%b, Signature=%b" % (ALGORITHM, key_id, scope, names, value)
        return b"Authorization", text


def read_signature(text: bytes) -> AwsSignature | None:
    """Return the parts of a header; None for another algorithm or form."""
    match = _AUTHORIZATION.fullmatch(text)
    if match is None:
        return None
    key_id, date, region, service, names, value = match.groups()
    return AwsSignature(
        key_id=key_id, scope=(date, region, service, TERM), names=tuple(names.split(b";")), value=value
    )  # fmt: skip


def sign(key: bytes, signature: AwsSignature, time: bytes, canonical: bytes) -> bytes:
    """Return the signature of a canonical request."""
    hashed = hashlib.sha256(canonical).hexdigest().encode()
    secret = b"AWS4" + key
    for part in signature.scope:
        secret = hmac.digest(secret, part, "sha256")
    return (
        hmac.digest(secret, b"\n".join((ALGORITHM, time, b"/".join(signature.scope), hashed)), "sha256").hex().encode()
    )


def canonical_request(
    head: RequestHead, host: str, names: Sequence[bytes], payload: bytes, form: tuple[Form, Form]
) -> bytes:
    """Return the text that is signed. Raises Rejected for a header that is not there."""
    path, _, query = head.target.partition("?")
    values = _values(head.headers) | {b"host": [host.encode()]}
    for name in names:
        if name not in values:
            raise Rejected(403, f"a request whose AWS signature is over a header that is not sent: {name.decode()}")
    lines = [b"%b:%b" % (name, b",".join(values[name])) for name in names]
    texts = (form[0](path).encode(), form[1](query).encode())
    return b"\n".join((head.method, *texts, *lines, b"", b";".join(names), payload))


def _values(headers: Headers) -> dict[bytes, list[bytes]]:
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name.lower(), []).append(b" ".join(value.split()))
    return values


class AwsCredentials:
    """Check and change the requests for one host of AWS keys; the other secrets are placed as everywhere.

    `grants` and `signing`, the requests whose bodies are read, are those of the sandbox.
    """

    def __init__(self, host: str, grants: Sequence[Grant], signing: WeakSet[RequestSigning]):
        self._host, self._all, self._signing = host, grants, signing

    def edit(self, head: RequestHead) -> RequestHead:
        """Return the head of a request for upstream. Raises Rejected for a foreign credential."""
        grants = [grant for grant in self._all if self._host in grant.hosts]  # a renewed one has another value
        keys = {grant.name: grant for grant in grants if grant.name in AWS_NAMES}
        self._key_id, self._key, self._token = keys[AWS_KEY_ID], keys[AWS_KEY], keys.get(AWS_TOKEN)
        self._is_foreign_allowed = any(grant.is_foreign_allowed for grant in grants)
        others = HostCredentials(
            self._host, [_unplaced(grant) if grant in keys.values() else grant for grant in grants]
        )
        values = _values([(name.replace(b"_", b"-"), value) for name, value in head.headers])
        signature = self._read_signature(values.get(b"authorization", []))
        if signature is None and self._is_foreign_allowed:
            return others.edit(head)
        self._check_query(head.target)
        if signature is None and any(b"multipart/" in kind.lower() for kind in values.get(b"content-type", [])):
            raise Rejected(403, "a form with a signature of its own, which S3 takes,", "sign in a header")
        token = self._given_token(values.get(b"x-amz-security-token", []))
        edited = others.edit(replace(head, headers=_without_credentials(head.headers)))
        edited = replace(edited, headers=[*edited.headers, *token])
        return edited if signature is None else self._signed(signature, values, head, edited)

    def _signed(
        self, signature: AwsSignature, values: Mapping[bytes, Sequence[bytes]], head: RequestHead, edited: RequestHead
    ) -> RequestHead:
        """Return the edited head with its signature, or with what makes it once the body is here."""
        signing = RequestSigning(self._host, signature, (self._key_id, self._key), head, edited)
        payload = _payload(head, values)
        if payload is not None:
            return replace(edited, headers=[*edited.headers, *signing.signed(payload)])
        length = values.get(b"content-length", [b""])[0]
        signing.most_bytes = int(length) if length.isdigit() else MOST_BODY_BYTES
        if signing.most_bytes > MOST_BODY_BYTES:
            what = f"a body of more than {MOST_BODY_BYTES} bytes without its hash in X-Amz-Content-Sha256"
            raise Rejected(413, what, "let the client send that header")
        if sum(each.most_bytes for each in self._signing) + signing.most_bytes > MOST_READ_BYTES:
            raise Rejected(403, f"a body to be signed, while others have the {MOST_READ_BYTES} bytes of a sandbox,")
        self._signing.add(signing)
        return replace(edited, signing=signing)

    def _read_signature(self, texts: Sequence[bytes]) -> AwsSignature | None:
        """Return the signature of a request; None without one, and for a foreign one that is allowed."""
        if not texts:
            return None
        signature = read_signature(texts[0])
        if signature is not None and signature.key_id == self._key_id.placeholder and len(texts) == 1:
            return signature
        if self._is_foreign_allowed:
            return None
        if other := _OTHER.get(texts[0].partition(b" ")[0].lower()):
            raise Rejected(403, f"a request that is signed by {other}")
        raise self._refusal("the header 'Authorization'")

    def _check_query(self, target: str) -> None:
        parts = re.split("[&;]", target.partition("?")[2])
        if len(parts) > MOST_QUERY_PARTS:
            raise Rejected(403, f"a query of more than {MOST_QUERY_PARTS} parts that may be signed for AWS")
        keys = {unquote(part.partition("=")[0]).lower() for part in parts}
        if keys & _PRESIGNED:
            what = "a presigned address (a signature in the query), which is not signed anew here,"
            raise Rejected(403, what, "sign in a header")

    def _given_token(self, texts: Sequence[bytes]) -> Headers:
        if not texts:
            return []
        if self._token is None or list(texts) != [self._token.placeholder]:
            raise self._refusal("the header 'X-Amz-Security-Token'")
        return [(b"X-Amz-Security-Token", self._token.value)]

    def _refusal(self, where: str) -> Rejected:
        what = f"a request with a credential in {where} that is not the one in {self._key_id.name}"
        return Rejected(403, what, 'no other is taken here, unless the secret has foreign="allow"')


def _unplaced(grant: Grant) -> Grant:
    """Return a grant whose value is put nowhere."""
    return replace(grant, places=frozenset())


def _without_credentials(headers: Headers) -> Headers:
    taken = (b"authorization", b"x-amz-security-token")
    return [header for header in headers if header[0].lower().replace(b"_", b"-") not in taken]


def _payload(head: RequestHead, values: Mapping[bytes, Sequence[bytes]]) -> bytes | None:
    """Return the stated hash of the body; None where it has to be computed. Raises Rejected."""
    stated = values.get(b"x-amz-content-sha256", [b""])[0]
    if stated.upper().startswith(b"STREAMING-"):
        kind = shown(stated)[1:-1]
        raise Rejected(
            403,
            f"a body in parts with signatures or a checksum of their own (X-Amz-Content-Sha256: {kind}), which are not "
            "signed anew here,",
            "let the client hash it whole (AWS_REQUEST_CHECKSUM_CALCULATION=when_required)",
        )
    if stated:
        return stated
    length = values.get(b"content-length")
    is_empty = b"transfer-encoding" not in values and (length == [b"0"] or (not length and head.method in _UNHASHED))
    return _NO_BODY if is_empty else None


class RequestSigning:
    """Sign one request, whose guest's `head` becomes `edited`."""

    most_bytes = 0  # of its body, where that is read

    def __init__(
        self, host: str, signature: AwsSignature, keys: tuple[Grant, Grant], head: RequestHead, edited: RequestHead
    ):
        self._host, self._signature, self._head, self._edited = host, signature, head, edited
        self._key_id, self._key = keys
        times = _values(head.headers).get(b"x-amz-date", [])
        if len(times) != 1 or not _TIME.fullmatch(times[0]) or not times[0].startswith(signature.scope[0]):
            raise Rejected(403, "a request that is signed for AWS without one X-Amz-Date of the same day")
        self._time = times[0]
        if b"host" not in signature.names:
            raise Rejected(403, "a request whose AWS signature is not over Host")

    def headers(self, body: bytes) -> Headers:
        """Return the headers to add for a body. Raises Rejected."""
        return self.signed(hashlib.sha256(body).hexdigest().encode())

    def signed(self, payload: bytes) -> Headers:
        """Return the headers to add, for the hash of a body. Raises Rejected where the guest's signature is wrong."""
        for form in FORMS:
            if hmac.compare_digest(self._signature.value, self._sign(self._key.placeholder, self._head, payload, form)):
                value = self._sign(self._key.value, self._edited, payload, form)
                return [self._signature.header(self._key_id.value, value)]
        raise Rejected(403, f"a request whose AWS signature does not match the placeholder in {self._key.name}")

    def _sign(self, key: bytes, head: RequestHead, payload: bytes, form: tuple[Form, Form]) -> bytes:
        names = self._signature.names
        return sign(key, self._signature, self._time, canonical_request(head, self._host, names, payload, form))
