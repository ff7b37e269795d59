"""boto3 with secrets, unmodified, against a stand-in of AWS that verifies each request by botocore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.internet.aws import HOSTS, KEY, KEY_ID, REGION, TOKEN
from tests.harness.world import NAMES, PUBLIC, World, open_world

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
RUN = """
import cloche, os
os.environ.update(ARGUMENT["values"])
secrets = [f"{name}@{','.join(ARGUMENT['hosts'])}" for name in ARGUMENT["values"]]
options = {"timeout": 120, "memory": "2g", "env": {"AWS_DEFAULT_REGION": ARGUMENT["region"], "AWS_MAX_ATTEMPTS": "1"}}
result = cloche.run(ARGUMENT["code"], secrets=secrets, **options)
print(json.dumps({"stdout": result.stdout, "stderr": result.stderr, "network": repr(result.meta.get("network"))}))
"""
BEGINS = "import boto3, botocore, botocore.config, io, urllib.error, urllib.request\ns3 = boto3.client('s3')\n"
WORKS = """
key = "a folder/ä+b=c&d~e.txt"
s3.put_object(Bucket="acme", Key=key, Body=b"an object")
print(s3.get_object(Bucket="acme", Key=key)["Body"].read())
s3.upload_fileobj(io.BytesIO(b"x" * 3_000_000), "acme", "large")
print(len(s3.get_object(Bucket="acme", Key="large", Range="bytes=0-")["Body"].read()))
by_path = boto3.client("s3", config=botocore.config.Config(s3={"addressing_style": "path"}))
by_path.put_object(Bucket="acme", Key="by path", Body=b"by path")
print([row["Key"] for row in s3.list_objects_v2(Bucket="acme", Prefix="a/ b", Delimiter="/")["Contents"]])
print(boto3.client("dynamodb").get_item(TableName="t", Key={"id": {"S": "an item"}})["Item"])
print(boto3.client("sts").get_caller_identity()["Account"])
"""
TRIES = """
try:
    {call}
except (urllib.error.HTTPError, botocore.exceptions.ClientError) as error:
    print(error, error.read().decode() if isinstance(error, urllib.error.HTTPError) else "")
"""
PRESIGNS = "botocore.config.Config(signature_version='s3v4', s3={'addressing_style': 'virtual'})"
ASKS = "client.generate_presigned_url('get_object', Params={'Bucket': 'acme', 'Key': 'k'})"
SUPPORTED = "botocore.config.Config(request_checksum_calculation='when_supported')"
PUTS = "client.put_object(Bucket='acme', Key='stolen', Body=b'x')"
# A client's options, a call, and a part of the reason.
REFUSED = {
    "a presigned address": (f"config={PRESIGNS}", f"urllib.request.urlopen({ASKS})", "a presigned address"),
    "a checksum behind the body": (f"config={SUPPORTED}", PUTS, "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"),
    "another's keys": ("aws_access_key_id='AKIAATTACKER', aws_secret_access_key='a' * 40", PUTS, "AWS_ACCESS_KEY_ID"),
}
LONG_LIVED = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with AWS."""
    with open_world({**NAMES, **{host: [[PUBLIC]] for host in HOSTS}}) as world:
        yield world


def run(world: World, code: str, values: dict[str, str]) -> Any:
    """Run code with keys."""
    argument = {"code": BEGINS + code, "values": values, "hosts": HOSTS, "region": REGION}
    result = world.run(RUN, argument)
    assert not [value for value in values.values() if value in str(result)]
    return result


@pytest.mark.parametrize("token", [{}, {"AWS_SESSION_TOKEN": TOKEN}], ids=["long-lived", "temporary"])
def test_boto3_works_with_placeholders(world: World, token: dict[str, str]) -> None:
    """Of several services, with names that are encoded in several ways, and bodies of megabytes."""
    world.forget()
    result = run(world, WORKS, {**LONG_LIVED, **token})
    assert result["stdout"].splitlines() == [
        "b'an object'", "3000000", "['a%20folder/%C3%A4%2Bb%3Dc%26d~e.txt', 'acme/by%20path', 'large']",
        "{'id': {'S': 'an item'}}", "123456789012",
    ], result  # fmt: skip
    texts = [one["text"] for one in world.seen().arrivals if one["server_name"] in HOSTS]
    assert texts
    assert not [text for text in texts if KEY.lower() in text]
    assert all((TOKEN.lower() in text) == bool(token) for text in texts)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_signed_anew_is_refused(world: World, name: str) -> None:
    """Nothing of it comes to AWS, and the report says why."""
    world.forget()
    options, call, why = REFUSED[name]
    result = run(world, f"client = boto3.client('s3', {options})\n{TRIES.format(call=call)}", LONG_LIVED)
    assert "403" in result["stdout"], result
    assert why in result["network"]
    assert not [one for one in world.seen().arrivals if one["server_name"] in HOSTS and one["requests"]]
