"""A stand-in of AWS: objects of S3, items of DynamoDB, and STS, for requests that botocore finds well signed.

botocore is installed where these are used (requirements/frameworks/clients.txt).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re

from .web import Request, Response

KEY_ID, KEY = "AKIAREALKEYID0123456", "RealSecretKeyOfAws/0123456789+abcdefXYZW"
TOKEN = "RealSessionTokenOfAws/0123456789abcdefghijklmnopqrstuvwxyz"
REGION = "eu-central-1"
HOSTS = tuple(f"{name}.{REGION}.amazonaws.com" for name in ("acme.s3", "s3", "dynamodb", "sts"))
_AUTHORIZATION = re.compile(r"AWS4-HMAC-SHA256 Credential=(\S+?)/(.+), SignedHeaders=(\S+), Signature=(\w+)")
_objects: dict[str, bytes] = {}
NOT_ALLOWED = Response(b"<Error><Code>SignatureDoesNotMatch</Code></Error>", "403 Forbidden")


def is_signed(request: Request) -> bool:
    """Tell whether a request has the signature that botocore makes of it with the real keys, and the real token."""
    from botocore.auth import S3SigV4Auth, SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    match = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
    if match is None or match[1] != KEY_ID or request.headers.get("x-amz-security-token", TOKEN) != TOKEN:
        return False
    _, region, service, _ = match[2].split("/")
    stated = request.headers.get("x-amz-content-sha256", "")
    if re.fullmatch("[0-9a-f]{64}", stated) and stated != hashlib.sha256(request.body).hexdigest():
        return False
    headers = {name: request.headers[name] for name in match[3].split(";")}
    url = f"https://{request.headers['host']}{request.target}"
    asked = AWSRequest(method=request.method, url=url, data=request.body, headers=headers)
    asked.context["timestamp"] = request.headers["x-amz-date"]
    kind = S3SigV4Auth if service == "s3" else SigV4Auth
    signer = kind(Credentials(KEY_ID, KEY), service, region)
    text = signer.string_to_sign(asked, signer.canonical_request(asked))
    return hmac.compare_digest(signer.signature(text, asked), match[4])


def aws(request: Request) -> Response:
    """Answer as AWS does."""
    if not is_signed(request):
        return NOT_ALLOWED
    service = request.host.removesuffix(f".{REGION}.amazonaws.com").rpartition(".")[2]
    if service == "dynamodb":
        asked = json.loads(request.body)
        return Response(
            json.dumps({"Item": asked["Key"]}).encode(), headers={"Content-Type": "application/x-amz-json-1.0"}
        )
    if service == "sts":
        who = "<Account>123456789012</Account><Arn>arn:aws:iam::123456789012:user/agent</Arn><UserId>AIDA</UserId>"
        result = f"<GetCallerIdentityResult>{who}</GetCallerIdentityResult>"
        return Response(f"<GetCallerIdentityResponse>{result}</GetCallerIdentityResponse>".encode())
    if request.method == "PUT":
        _objects[request.path] = request.body
        return Response(b"", headers={"ETag": '"1"'})
    if "list-type" in request.target:
        keys = "".join(f"<Contents><Key>{key[1:]}</Key></Contents>" for key in sorted(_objects))
        return Response(f"<ListBucketResult>{keys}</ListBucketResult>".encode())
    return Response(_objects[request.path], headers={"ETag": '"1"'})
