"""The clients of docs/secrets.md, unmodified: each against a stand-in of its provider, which takes the value alone."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloche.egress.aws import FORMS, canonical_request, read_signature, sign
from cloche.egress.http_request import RequestHead
from tests.harness.internet.aws import KEY, KEY_ID
from tests.harness.internet.build import SYSTEM_PATH
from tests.harness.internet.providers import VALUES, WORDS
from tests.harness.internet.sites import wheels
from tests.harness.world import NAMES, PUBLIC, World, open_world

PAGE = (Path(__file__).parents[2] / "docs" / "secrets.md").read_text()
SECTION = PAGE.partition("\n## Clients\n")[2].partition("\n## ")[0]
BLOCKS = dict(
    zip(
        ("openai", "anthropic", "git", "npm", "pip"),
        re.findall(r"```(?:py|bash)\n(.*?)```", SECTION, re.DOTALL),
        strict=True,
    )
)
TABLE = {**NAMES, **{host: [[PUBLIC]] for host in VALUES}}
KNOWN = ("api.openai.com", "api.anthropic.com", "github.com")
AWS_HOST, AWS_KEYS = "other.example", {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY}
PATH = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
RUN = """
import cloche, os
os.environ.update(ARGUMENT["values"])
options = {"timeout": 120, "memory": "2g", "pids": 256, "disk": "1g", "secrets": ARGUMENT["secrets"]}
with cloche.Sandbox(live=True, env={"PATH": ARGUMENT["path"]}, **options) as sandbox:
    for name, data in ARGUMENT["files"].items():
        sandbox.write_file(name, bytes.fromhex(data))
    result = sandbox.exec(ARGUMENT["command"])
print(json.dumps({"stdout": result.stdout, "stderr": result.stderr, "exit": result.exit_code}))
"""
# The second piece of a stream is sent when the models were asked for, which the first piece has this program do.
STREAMS = {
    "openai": """
client, words = openai.OpenAI(), []
for chunk in client.chat.completions.create(model="waits", messages=[{"role": "user", "content": "x"}], stream=True):
    words.append(chunk.choices[0].delta.content)
    if len(words) == 1:
        client.models.list()
print(words)
whole = client.chat.completions.create(model="waits", messages=[{"role": "user", "content": "x"}])
print(whole.choices[0].message.content)
""",
    "anthropic": """
client, words = anthropic.Anthropic(), []
options = {"model": "waits", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
with client.messages.stream(**options) as stream:
    for text in stream.text_stream:
        words.append(text)
        if len(words) == 1:
            client.models.list()
print(words)
print(client.messages.create(**options).content[0].text)
""",
}
# Nobody is there who decides, in a sandbox without a name: the answer is no.
REFUSED = """
import cloche, os
os.environ.update(ARGUMENT)
asks = {"network": "allowlist", "network_allow": ["good.example"], "on_network": "ask", "secrets": ["GITHUB_TOKEN"]}
curl = "curl --silent --show-error --write-out '%{http_code}' --data x https://other.example/"
node = "fetch('https://other.example/').then(async answer => console.log(answer.status, await answer.text()))"
with cloche.Sandbox(live=True, timeout=60, memory="1g", pids=256, **asks) as sandbox:
    said = [sandbox.exec(shell=curl).stdout, sandbox.exec(["node", "-e", node]).stdout]
    rows = [dict(row) for row in sandbox.network.traffic() if not row["is_allowed"]]
print(json.dumps([said, rows]))
"""
# A project whose remote is written for SSH, and a token that a command of the host prints.
PUSH = """
import cloche, os, subprocess, tempfile
folder = tempfile.mkdtemp(dir=os.environ["HOME"])
token = os.path.join(tempfile.mkdtemp(), "token")
open(token, "w").write(ARGUMENT["value"])
def git(*words):
    subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@a.example", *words], cwd=folder, check=True)
git("init", "--quiet", "--initial-branch=main")
git("remote", "add", "origin", "git@github.com:acme/private.git")
git("commit", "--quiet", "--allow-empty", "--message", "First")
push = "git push --quiet --force origin HEAD:pushed && git ls-remote https://github.com/acme/private.git && env"
def pushed(secrets):
    with cloche.Sandbox(workspace=folder, timeout=60, network="allowlist", secrets=secrets) as sandbox:
        result = sandbox.exec(shell=push, env={"GIT_TERMINAL_PROMPT": "0"})
    return {"stdout": result.stdout, "stderr": result.stderr, "exit": result.exit_code}
print(json.dumps([pushed([f"GH_TOKEN=cmd:cat {token}"]), pushed(None)]))
"""
GITHUB = ("GITHUB_TOKEN", "github.com")
WHEEL = "harmless_more-1.0-py3-none-any.whl"
SDKS = {"openai": ("OPENAI_API_KEY", "api.openai.com"), "anthropic": ("ANTHROPIC_API_KEY", "api.anthropic.com")}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with providers."""
    with open_world(TABLE) as world:
        yield world


def run(world: World, command: Sequence[str], *secrets: tuple[str, str], files: dict[str, bytes] | None = None) -> Any:
    """Run a command in a live sandbox with secrets by name and host, of the caller's environment; none has a value."""
    names = [f"{name}@{host}" if host not in KNOWN else name for name, host in secrets]
    values = {name: AWS_KEYS.get(name) or VALUES[host] for name, host in secrets}
    told = {name: data.hex() for name, data in (files or {}).items()}
    argument = {"command": command, "secrets": names, "values": values, "path": PATH, "files": told}
    result = world.run(RUN, argument)
    assert not [value for value in values.values() if value in str(result)]
    return result


def in_bash(code: str) -> list[str]:
    """Return the command of a script whose failures end it."""
    return ["bash", "-ec", code]


@pytest.mark.parametrize("name", ["openai", pytest.param("anthropic", marks=pytest.mark.soak)])
def test_sdks_of_providers_stream_with_a_placeholder(world: World, name: str) -> None:
    """The example of the page, and each piece of a stream as it is sent."""
    result = run(world, ["python3", "-c", f"import {name}\n{STREAMS[name]}"], SDKS[name])
    assert str(list(WORDS)) in result["stdout"], result
    assert result["stdout"].endswith("".join(WORDS) + "\n")


@pytest.mark.soak
@pytest.mark.parametrize("name", SDKS)
def test_the_examples_of_sdks_run_as_they_stand(world: World, name: str) -> None:
    """Nothing in them is for a sandbox."""
    result = run(world, ["python3", "-c", BLOCKS[name]], SDKS[name])
    assert result["stdout"] == "".join(WORDS) + "\n", result


def test_git_clones_and_pushes_with_a_token(world: World) -> None:
    """What one sandbox has pushed, another one clones."""
    result = run(world, in_bash(BLOCKS["git"]), GITHUB)
    assert result["exit"] == 0, result
    again = BLOCKS["git"].partition("\n")[0] + "\ncat notes.txt; cat .git/config"
    result = run(world, in_bash(again), GITHUB)
    assert result["stdout"].startswith("Pushed\n"), result
    assert "x-access-token:ghp_" in result["stdout"]


@pytest.mark.both_users
def test_git_pushes_where_the_user_gave_a_token_and_nowhere_else(world: World) -> None:
    """No address has the token, and one for SSH is taken as HTTPS; without the secret there is no helper."""
    value = VALUES["github.com"]
    pushed, without = world.run(PUSH, {"value": value})
    assert pushed["exit"] == 0, pushed
    assert "refs/heads/pushed" in pushed["stdout"]
    assert value not in str(pushed)
    assert without["exit"] != 0
    assert "ssh" in without["stderr"] or "Could not" in without["stderr"], without


def test_a_refusal_is_an_answer_where_the_sandboxs_certificates_are_trusted(world: World) -> None:
    """A client reads the sentence with status 403, in TLS too, and the host is not reached."""
    world.forget()
    said, rows = world.run(REFUSED, {"GITHUB_TOKEN": VALUES["github.com"]})
    for answer in said:
        assert "403" in answer
        assert 'allow it with network_allow "other.example"' in answer
    assert [(row["host"], row["connections"]) for row in rows] == [("other.example", 2)]
    assert not [one for one in world.seen().arrivals if one["server_name"] == "other.example"]


def test_curl_signs_for_aws_with_a_placeholder(world: World) -> None:
    """The host gets the signature of the real key, over the same headers and the body."""
    world.forget()
    curl = 'curl --fail --aws-sigv4 aws:amz:eu-central-1:dynamodb --user "$AWS_ACCESS_KEY_ID:$AWS_SECRET_ACCESS_KEY"'
    code = f"{curl} --data '{{}}' https://{AWS_HOST}/plain"
    result = run(world, in_bash(code), *((name, AWS_HOST) for name in AWS_KEYS))
    assert result["exit"] == 0, result
    (text,) = [one["said"] for one in world.seen().arrivals if one["server_name"] == AWS_HOST]
    _, *lines = text.partition("\r\n\r\n")[0].encode().split(b"\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    signature = read_signature(dict(headers)[b"Authorization"])
    assert signature is not None
    assert signature.key_id == KEY_ID.encode()
    head = RequestHead(method=b"POST", target="/plain", headers=headers)
    signed = canonical_request(head, AWS_HOST, signature.names, hashlib.sha256(b"{}").hexdigest().encode(), FORMS[0])
    assert sign(KEY.encode(), signature, dict(headers)[b"X-Amz-Date"], signed) == signature.value
    assert KEY not in text


@pytest.mark.soak
def test_npm_installs_and_publishes_with_a_token(world: World) -> None:
    """The token stands in `.npmrc`, as the name of a variable."""
    code = f"mkdir mine && cd mine\n{BLOCKS['npm']}\ncat node_modules/harmless/index.js"
    result = run(world, in_bash(code), ("NPM_TOKEN", "npm.example"))
    assert result["exit"] == 0, result
    assert 'module.exports = "harmless"' in result["stdout"]
    methods = {(row["method"], row["target"]) for one in world.seen().arrivals for row in one["requests"]}
    assert ("PUT", "/mine") in methods


@pytest.mark.soak
@pytest.mark.parametrize("client", ["python3 -m pip", "uv pip", "uv publish"])
def test_clients_of_an_index_show_a_token(world: World, client: str) -> None:
    """Pip and uv install from an index that wants credentials, and uv sends what was built."""
    world.forget()
    (line,) = [line for line in BLOCKS["pip"].splitlines() if line.startswith(client)]
    result = run(
        world, in_bash(f"{line}\nls"), ("PYPI_TOKEN", "pypi.example"), files={f"dist/{WHEEL}": wheels()[WHEEL]}
    )
    assert result["exit"] == 0, result
    if client == "uv publish":
        assert "file_upload" in str([one["said"] for one in world.seen().arrivals])
    else:
        assert "harmless.py" in result["stdout"], result
