"""Requests to AWS are signed anew, or refused with the reason."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakSet

import pytest

from cloche.egress.aws import (
    FORMS,
    MOST_BODY_BYTES,
    MOST_READ_BYTES,
    AwsCredentials,
    canonical_request,
    read_signature,
    sign,
)
from cloche.egress.credentials import Grant
from cloche.egress.http_request import Headers, Rejected, RequestHead

KEY_ID, KEY = b"AKIDEXAMPLE", b"wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
OWN_ID, OWN = b"AKPLACEHOLD", b"aBcdefghIjKlM/N0OPQRS+tUvWxyZ0aBcDEFGHIJ"
TOKEN, OWN_TOKEN = b"the-session-token-of-aws", b"abc-defghij-klmno-pq-rst"
HOST, TIME = "iam.amazonaws.com", b"20150830T123600Z"
FORM = b"application/x-www-form-urlencoded; charset=utf-8"
EMPTY = hashlib.sha256().hexdigest().encode()
AS_S3, TWICE = FORMS[0], FORMS[2]


def grant(name: str, value: bytes, placeholder: bytes, **more: Any) -> Grant:
    """Return a secret for the host."""
    return Grant(name=name, value=value, placeholder=placeholder, hosts=frozenset({HOST}), **more)


GRANTS = [
    grant("AWS_ACCESS_KEY_ID", KEY_ID, OWN_ID), grant("AWS_SECRET_ACCESS_KEY", KEY, OWN),
    grant("AWS_SESSION_TOKEN", TOKEN, OWN_TOKEN),
]  # fmt: skip


def signed(
    *more: tuple[bytes, bytes], method: bytes = b"GET", target: str = "/?Action=ListUsers&Version=2010-05-08",
    names: bytes = b"content-type;host;x-amz-date", key: bytes = OWN, key_id: bytes = OWN_ID, payload: bytes = EMPTY,
    form: Any = AS_S3, service: bytes = b"iam",
) -> RequestHead:  # fmt: skip
    """Return a request as a guest signs it."""
    headers = [(b"Host", HOST.encode()), (b"Content-Type", FORM), (b"X-Amz-Date", TIME), *more]
    head = RequestHead(method=method, target=target, headers=headers)
    text = b"AWS4-HMAC-SHA256 Credential=%b/20150830/us-east-1/%b/aws4_request, SignedHeaders=%b, Signature=%b"
    signature = read_signature(text % (key_id, service, names, b"0" * 64))
    assert signature is not None
    value = sign(key, signature, TIME, canonical_request(head, HOST, signature.names, payload, form))
    return RequestHead(method=method, target=target, headers=[*headers, signature.header(key_id, value)])


def edited(head: RequestHead, grants: list[Grant] | None = None) -> RequestHead:
    """Return what goes upstream."""
    return AwsCredentials(HOST, grants or GRANTS, WeakSet()).edit(head)


def value(headers: Headers, name: bytes) -> bytes:
    """Return a header that is there once."""
    (text,) = [text for key, text in headers if key.lower() == name]
    return text


def test_the_published_example_is_signed_as_published() -> None:
    """The guest's signature becomes the one in AWS's documents; no byte of the key is in the request."""
    upstream = edited(signed())
    assert value(upstream.headers, b"authorization") == (
        b"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request, "
        b"SignedHeaders=content-type;host;x-amz-date, "
        b"Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
    )
    assert not any(KEY in text or OWN in text for _, text in upstream.headers)


def test_the_published_example_of_s3_is_signed_as_published() -> None:
    """Where the payload's hash is a header, and a part of an object is asked for."""
    host, key = "examplebucket.s3.amazonaws.com", b"wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    text = (
        b"AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        b"SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature="
        b"f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
    signature = read_signature(text)
    assert signature is not None
    rows = [(b"Range", b"bytes=0-9"), (b"x-amz-content-sha256", EMPTY), (b"x-amz-date", b"20130524T000000Z")]
    head = RequestHead(method=b"GET", target="/test.txt", headers=rows)
    canonical = canonical_request(head, host, signature.names, EMPTY, AS_S3)
    assert sign(key, signature, b"20130524T000000Z", canonical) == signature.value


def test_what_is_signed_is_what_is_sent() -> None:
    """The session token, and a header that is changed on the way, are signed as the host gets them."""
    names = b"accept-encoding;host;x-amz-date;x-amz-security-token"
    more = ((b"X-Amz-Security-Token", OWN_TOKEN), (b"Accept-Encoding", b"gzip, br"))
    upstream = edited(signed(*more, names=names))
    assert value(upstream.headers, b"x-amz-security-token") == TOKEN
    assert value(upstream.headers, b"accept-encoding") == b"identity"
    again = signed(
        (b"X-Amz-Security-Token", TOKEN), (b"Accept-Encoding", b"identity"), names=names, key=KEY, key_id=KEY_ID
    )  # fmt: skip
    assert value(upstream.headers, b"authorization") == value(again.headers, b"authorization")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(part.__name__ for part in form))
def test_each_form_of_path_and_query_is_signed_anew(form: Any) -> None:
    """Services differ in it: the guest's own signature shows which one it is."""
    target = "/a%20b/./c//../d:e?b=2&a=x%2Fy&a=%7e"
    upstream = edited(signed(target=target, form=form))
    again = signed(target=target, form=form, key=KEY, key_id=KEY_ID)
    assert value(upstream.headers, b"authorization") == value(again.headers, b"authorization")


def test_a_body_without_a_stated_hash_is_signed_once_it_is_here() -> None:
    """Until then the request has no signature; the guest's is checked with it."""
    body = b"Action=ListUsers&Version=2010-05-08"
    payload = hashlib.sha256(body).hexdigest().encode()
    length = (b"Content-Length", b"%d" % len(body))
    upstream = edited(signed(length, method=b"POST", target="/", payload=payload))
    assert upstream.signing is not None
    assert b"authorization" not in {name.lower() for name, _ in upstream.headers}
    again = signed(length, method=b"POST", target="/", payload=payload, key=KEY, key_id=KEY_ID)
    assert value(upstream.signing.headers(body), b"authorization") == value(again.headers, b"authorization")
    with pytest.raises(Rejected, match="does not match the placeholder"):
        upstream.signing.headers(body + b"&more")


def test_bodies_that_are_read_are_bounded() -> None:
    """One by itself, and all of a sandbox; a stated hash has no bound."""
    aws = AwsCredentials(HOST, GRANTS, WeakSet())
    large, half = (b"Content-Length", b"%d" % (MOST_BODY_BYTES + 1)), (b"Content-Length", b"%d" % MOST_BODY_BYTES)
    with pytest.raises(Rejected, match="X-Amz-Content-Sha256"):
        aws.edit(signed(large, method=b"POST"))
    stated = signed(large, (b"X-Amz-Content-Sha256", EMPTY), names=STATED, method=b"PUT")
    assert aws.edit(stated).signing is None
    heads = [aws.edit(signed(half, method=b"POST")) for _ in range(MOST_READ_BYTES // MOST_BODY_BYTES)]
    with pytest.raises(Rejected, match="while others have"):
        aws.edit(signed((b"Content-Length", b"1"), method=b"POST"))
    heads.pop()
    assert aws.edit(signed((b"Content-Length", b"1"), method=b"POST")).signing is not None


STATED = b"host;x-amz-content-sha256;x-amz-date"


POLICY = (b"Content-Type", b"Multipart/Form-Data; boundary=b")  # as a browser sends one that was signed before


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (signed(key_id=b"AKIAATTACKER"), "'Authorization' that is not the one in AWS_ACCESS_KEY_ID"),
        (signed(key=KEY), "does not match the placeholder in AWS_SECRET_ACCESS_KEY"),
        (signed((b"X-Amz-Security-Token", b"anothers-token")), "'X-Amz-Security-Token'"),
        (signed((b"X_Amz_Security_Token", b"anothers-token")), "'X-Amz-Security-Token'"),
        (signed((b"Authorization", b"Bearer attackers-token")), "'Authorization'"),
        (signed((b"X-Api-Key", b"attackers-key")), "'X-Api-Key'"),
        (signed(target="/?X-Amz-Credential=AKIAATTACKER&X-Amz-Signature=00"), "a presigned address"),
        (signed(target="/?AWSAccessKeyId=AKIAATTACKER&Signature=00"), "a presigned address"),
        (signed(names=b"x-amz-date"), "is not over Host"),
        (signed(target="/?" + "a&" * 1000), "a query of more than 1000 parts"),
        (RequestHead(method=b"POST", target="/", headers=[POLICY]), "a form with a signature of its own"),
        (
            signed((b"X-Amz-Content-Sha256", b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD"), names=STATED, method=b"PUT"),
            "a body in parts",
        ),
        (
            signed((b"X-Amz-Content-Sha256", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"), names=STATED, method=b"PUT"),
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_signed_anew_is_refused(head: RequestHead, why: str) -> None:
    """Another's credential too; the reason says what, and what to do."""
    with pytest.raises(Rejected) as caught:
        edited(head)
    assert why in caught.value.what
    assert KEY.decode() not in caught.value.what


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"AWS4-ECDSA-P256-SHA256 Credential=AKPLACEHOLD/20150830/iam/aws4_request, Signature=00", "SigV4A"),
        (b"AWS AKPLACEHOLD:c2lnbmF0dXJl", "Signature Version 2"),
        (b"Bearer aBcdefghIjKlM/N0OPQRS+tUvWxyZ0aBcDEFGHIJ", "'Authorization'"),
    ],
)
def test_other_algorithms_are_refused(text: bytes, why: str) -> None:
    """The placeholder of the key is no credential by itself, and its value is sent nowhere."""
    with pytest.raises(Rejected) as caught:
        edited(RequestHead(method=b"GET", target="/", headers=[(b"Authorization", text)]))
    assert why in caught.value.what


def test_the_key_is_not_put_into_a_header() -> None:
    """It signs; a host of AWS has no use for it."""
    head = signed((b"X-Own", OWN), (b"X-Other", OWN_ID))
    assert value(edited(head).headers, b"x-own") == OWN


def test_foreign_keys_may_be_allowed() -> None:
    """Then they pass as they are, and the placeholder is signed as ever."""
    grants = [grant(one.name, one.value, one.placeholder, is_foreign_allowed=True) for one in GRANTS]
    foreign = signed((b"Cookie", b"own=1"), key_id=b"AKIAANOTHER", key=KEY)
    assert edited(foreign, grants) == foreign
    assert b"AKIDEXAMPLE" in value(edited(signed(), grants).headers, b"authorization")


def test_a_request_without_a_signature_passes() -> None:
    """Public objects need none."""
    head = RequestHead(method=b"GET", target="/public", headers=[(b"Accept", b"*/*")])
    assert edited(head) == head
