"""Secrets as callers and programs have them: clients that trust the sandbox's authority, sessions, refusals."""

from __future__ import annotations

import ast
import base64
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import cloche
from cloche.execution.secrets import _check_packages
from tests.harness.world import NAMES, PUBLIC, World, open_world

HOST = "api.anthropic.com"
VALUE = "sk-ant-api03-RealValue0123456789abcdefXYZ"
TABLE = {**NAMES, HOST: [[PUBLIC]], "github.com": [[PUBLIC]]}
PROXY = "10.20.30.40"
RUN = """
import cloche, os
os.environ.update(ARGUMENT["keys"])
options = {"language": ARGUMENT["language"], "timeout": 60, "memory": "1g", **ARGUMENT["more"]}
events = []
result = cloche.run(ARGUMENT["code"], secrets=ARGUMENT["secrets"], on_event=events.append, **options)
print(json.dumps({"stdout": result.stdout, "stderr": result.stderr, "told": repr(events[-1])}))
"""
SESSIONS = """
import cloche, os
os.environ["ANTHROPIC_API_KEY"] = ARGUMENT["value"]
cell = "import os, urllib.request\\n" + ARGUMENT["cell"]
said = []
for live in (True, False):
    with cloche.Sandbox(secrets=["ANTHROPIC_API_KEY"], live=live, timeout=60) as sandbox:
        with sandbox.session(checkpoints=not live) as session:
            said.append(session.run(cell).stdout)
            if not live:
                said += [fork.run(ARGUMENT["cell"]).stdout for fork in session.fork(1)]
        said.append(sandbox.run(cell).stdout)
        said.append(sandbox.run(cell).stdout)
        if live:
            said.append(sandbox.exec(["sh", "-c", "curl -s -H \\"x-api-key: $ANTHROPIC_API_KEY\\" https://api.anthropic.com/plain"]).stdout)
print(json.dumps(said))
"""
CELL = """
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
asked = urllib.request.Request("https://api.anthropic.com/plain", headers=headers)
print(urllib.request.urlopen(asked, timeout=10).read().decode())
"""
STARTS = """
import os, subprocess, sys
env = {**os.environ, **ARGUMENT["env"]}
done = subprocess.run([sys.executable, *ARGUMENT["words"]], capture_output=True, text=True, env=env)
print(json.dumps([done.stdout, done.stderr]))
"""
MAKES = """
import subprocess, sys
words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=other -keyout /dev/null -out".split()
subprocess.run(["openssl", *words, sys.argv[1]], check=True, capture_output=True)
"""
COMMAND = [
    "import sys; from cloche.__main__ import main; sys.exit(main())", "run", "--secret", "ANTHROPIC_API_KEY", "-c",
    f"import os, urllib.request{CELL}",
]  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with providers."""
    with open_world(TABLE) as world:
        yield world


def run(
    world: World,
    code: str,
    *secrets: str,
    language: str = "bash",
    env: dict[str, str] | None = None,
    **more: Any,
) -> Any:
    """Run code with secrets by name; the caller's environment has a value for each."""
    world.forget()
    argument = {"code": code, "language": language, "secrets": secrets, "keys": dict.fromkeys(secrets, VALUE)}
    return world.run(RUN, {**argument, "more": more}, env=env)


def came(world: World, text: str) -> bool:
    """Tell whether a text came to a host in TLS."""
    return any(text.lower() in one["text"] for one in world.seen().arrivals if one["server_name"])


CURL = f'curl -s -H "x-api-key: $ANTHROPIC_API_KEY" https://{HOST}/plain'
NODE = f"""
fetch("https://{HOST}/plain", {{headers: {{"x-api-key": process.env.ANTHROPIC_API_KEY}}}})
  .then(answer => answer.text()).then(console.log, error => console.log(error.cause))
"""


def test_programs_trust_the_authority_of_their_sandbox(world: World) -> None:
    """By the usual variables, and by the host's own file of certificates; other hosts are not opened.

    git shows a token in Basic credentials when it is asked for one.
    """
    commands = (
        CURL,
        f'env -i "ANTHROPIC_API_KEY=$ANTHROPIC_API_KEY" sh -c {shlex.quote(CURL)}',
        f"node -e {shlex.quote(NODE)}",
        "curl -sv https://good.example/ 2>&1",
        'git ls-remote "https://x-access-token:$GITHUB_TOKEN@github.com/me/it" 2>&1',
    )
    code = "; echo; echo =====; ".join(commands)
    result = run(world, code, "ANTHROPIC_API_KEY", "GITHUB_TOKEN", network_allow=["good.example"])
    *echoes, other, _ = result["stdout"].split("=====")
    assert len(echoes) == 3, result
    assert all("x-api-key: sk-ant-api03-" in text for text in echoes), result
    assert "HELLO" in other, result
    assert "Authority of tests" in other, result
    assert VALUE not in result["stdout"]
    packed = base64.b64encode(f"x-access-token:{VALUE}".encode()).decode()
    assert came(world, f"x-api-key: {VALUE}")
    assert came(world, f"authorization: basic {packed}")


def test_sessions_forks_and_live_sandboxes_have_them(world: World) -> None:
    """Each kind of sandbox uses the value, and none reads it."""
    world.forget()
    said = world.run(SESSIONS, {"value": VALUE, "cell": CELL})
    assert len(said) == 8
    assert all("x-api-key: sk-ant-api03-" in text for text in said), said
    assert not any(VALUE in text for text in said)


def test_the_command_line_has_them(world: World) -> None:
    """`cloche run --secret` does the same."""
    out, wrong = world.run(STARTS, {"words": ["-c", *COMMAND], "env": {"ANTHROPIC_API_KEY": VALUE}})
    assert "x-api-key: sk-ant-api03-" in out, wrong
    assert VALUE not in out + wrong


def test_a_placeholder_that_leaves_is_an_event(world: World) -> None:
    """In plain HTTP to another host it can be seen; the other host has no use for it."""
    code = 'curl -s -H "x-api-key: $ANTHROPIC_API_KEY" http://good.example/'
    told = run(world, code, "ANTHROPIC_API_KEY", network_allow=["good.example"])["told"]
    assert told.startswith("PlaceholderSent(host='good.example', port=80, why='the placeholder of ANTHROPIC_API_KEY ")
    assert "in a request to good.example: its value is for api.anthropic.com on port 443, in headers'" in told
    assert not any(VALUE.lower() in one["text"] for one in world.seen().arrivals)


def test_a_host_that_nobody_vouches_for_gets_nothing(world: World) -> None:
    """A host is verified as strictly as by an ordinary client; the program reads why there is no answer."""
    world.run(STARTS, {"words": ["-c", MAKES, "/mnt/home/other.pem"], "env": {}})
    result = run(world, CURL, "ANTHROPIC_API_KEY", env={"SSL_CERT_FILE": "/mnt/home/other.pem"})
    assert "its certificate is not valid" in result["stdout"], result
    assert not came(world, VALUE)


def test_the_operators_proxy_is_the_way_out(world: World) -> None:
    """What is opened goes through the upstream proxy like all else."""
    proxy = f"http://{PROXY}:3128"
    result = run(world, CURL, "ANTHROPIC_API_KEY", env={"HTTPS_PROXY": proxy, "http_proxy": proxy})
    assert "x-api-key: sk-ant-api03-" in result["stdout"], result
    assert world.seen().endpoints == {("tcp", PROXY, 3128)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": "process"}, "level process. Choose no other level. Or leave the secrets out."),
        ({"level": "confined"}, "secrets need level jail"),
        ({"network": "bridge"}, "with network 'bridge' no host is reached through Cloche"),
        ({"network": "off"}, "with network 'off' no host is reached through Cloche"),
        ({"name": "refused", "level": "confined"}, "secrets need level jail"),
    ],
)
def test_what_cannot_hold_secrets_refuses_them(options: dict[str, Any], words: str) -> None:
    """With the remedy, before anything runs."""
    secret = cloche.Secret(value=VALUE, hosts=[HOST])  # type: ignore[arg-type]
    with pytest.raises(cloche.ClocheError, match=words) as caught:
        cloche.Sandbox(secrets={"KEY": secret}, **options).open()
    assert VALUE not in str(caught.value)


def test_an_extra_that_is_not_installed_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for rules with methods and paths, without any secret."""
    monkeypatch.setattr("cloche.egress.client.OPENING", ("no_such_package",))
    _check_packages.cache_clear()
    with pytest.raises(cloche.BackendUnavailable, match=r'package no_such_package.*pip install "cloche\[secrets\]"'):
        cloche.run("1", network_allow=["a.example/GET:/x"])


def test_another_backend_refuses_them() -> None:
    """A backend says itself that it takes secrets."""

    class Other:
        name = "other"

        def open(self, policy: object, limits: object) -> Any:
            raise AssertionError("it was opened")

    with pytest.raises(cloche.BackendUnavailable, match='Use backend "local"'):
        cloche.run("1", backend=Other(), secrets={"KEY": cloche.Secret(value=VALUE, hosts=[HOST])})  # type: ignore[arg-type]


def test_a_run_without_secrets_loads_nothing_for_them() -> None:
    """The modules are for those who use them."""
    program = "import cloche, sys\ncloche.run('1')\nprint([name for name in sys.modules if 'secrets' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [name for name in ast.literal_eval(done.stdout) if name.startswith("cloche.")] == []
