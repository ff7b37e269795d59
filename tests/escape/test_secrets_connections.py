"""Attempts on secrets by the connection: names, sessions, certificates, framing, and keys that sign.

Each is first shown to work where a program has the value, on the host of a world whose server asks for a client's
certificate. Those on the text of requests are in test_secrets.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.world import METADATA, NAMES, PUBLIC, Seen, World, open_world

HOST, OTHER, REBOUND, STORE = "api.anthropic.com", "other.example", "rebound.example", "store.example"
VALUE = "sk-ant-api03-RealValue0123456789abcdefXYZ"
FOREIGN = "sk-ant-api03-AttackersOwn9876543210fedcb"
PROGRAM = (Path(__file__).parent / "secrets_connections_program.py").read_text()
TABLE = {**NAMES, HOST: [[PUBLIC]], REBOUND: [[PUBLIC], [METADATA]], STORE: [[PUBLIC]]}
# How each shows that it succeeded: `does` and says so; `brings` a foreign credential to anybody; `sends` the value to
# another place than its host, or outside of TLS; `leaks` the value to anybody.
MADE: Mapping[str, str] = {
    "resumed_session": "does",
    "key_of_the_authority": "does",
    "client_certificate": "brings",
    "foreign_without_name": "brings",
    "foreign_with_name_in_capitals": "brings",
    "foreign_with_trailing_dot": "brings",
    "foreign_behind_pieces": "brings",
    "foreign_by_datagram": "brings",
    "foreign_key_of_aws": "brings",
    "foreign_token_of_aws": "brings",
    "foreign_presigned_address": "brings",
    "plain_on_the_port_of_tls": "sends",
    "rebound_name": "sends",
    "secret_key_of_aws_in_a_header": "leaks",
    "secret_key_of_aws_as_a_bearer": "leaks",
}
OUTSIDE = 'exec(compile(ARGUMENT["program"], "<attempts>", "exec"))\n'
INSIDE = """
import cloche, os
os.environ["THE_KEY"] = ARGUMENT["value"]
hosts = {"ANTHROPIC_API_KEY": ARGUMENT["hosts"][:2]}
hosts |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ARGUMENT["hosts"][2:])
secrets = {name: cloche.Secret(env="THE_KEY", hosts=named) for name, named in hosts.items()}
result = cloche.run(ARGUMENT["program"], secrets=secrets, network_allow=ARGUMENT["allow"], timeout=90, level="jail")
print(json.dumps({"stdout": result.stdout, "stderr": result.stderr}))
"""
# Made by the authority of the world, which its server trusts.
SIGNS = """
import subprocess
words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -CA authority.pem -CAkey authority.key"
more = ["-subj", f"/CN={ARGUMENT}", "-keyout", "-", "-out", "-"]
done = subprocess.run(["openssl", *words.split(), *more], cwd="/mnt", capture_output=True, text=True, check=True)
print(json.dumps(done.stdout))
"""


@dataclass(frozen=True, slots=True)
class Came:
    """What came of all attempts: what each returned, and what the world saw."""

    returned: Mapping[str, str]
    seen: Seen

    def shows(self, name: str) -> bool:
        """Tell whether an attempt succeeded."""
        if MADE[name] == "does":
            return self.returned[name] == "DONE"
        texts = [one for one in self.seen.arrivals if f"mark-{name}-" in one["text"]]
        searched = FOREIGN if MADE[name] == "brings" else VALUE
        texts = [one for one in texts if searched.lower() in one["text"]]
        return any(MADE[name] != "sends" or _is_elsewhere(one) for one in texts)


def _is_elsewhere(arrival: Mapping[str, Any]) -> bool:
    return arrival["address"] == METADATA or not arrival["server_name"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with providers."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture(scope="module")
def program(world: World) -> str:
    """Return the program that makes all attempts."""
    constants = {
        "HOST": HOST, "OTHER": OTHER, "REBOUND": REBOUND, "STORE": STORE, "FOREIGN": FOREIGN, "NAMES": list(MADE),
        "CERTIFICATE": world.run(SIGNS, FOREIGN),
    }  # fmt: skip
    return "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + PROGRAM


@pytest.fixture(scope="module")
def outside(world: World, program: str) -> Came:
    """Make all attempts where the program has the value."""
    world.forget()
    env = dict.fromkeys(("ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY"), VALUE)
    return Came(world.run(OUTSIDE, {"program": program}, env=env), world.seen())


@pytest.fixture(scope="module")
def inside(world: World, program: str, outside: Came) -> Came:
    """Make all attempts in a sandbox."""
    world.forget()
    argument = {"program": program, "value": VALUE, "hosts": [HOST, REBOUND, STORE], "allow": [OTHER]}
    run = world.run(INSIDE, argument)
    assert run["stdout"], run
    return Came(json.loads(run["stdout"].splitlines()[-1]), world.seen())


@pytest.mark.parametrize("name", MADE)
def test_a_connection_gives_nothing_away(name: str, outside: Came, inside: Came) -> None:
    """An attempt that succeeds with the value in the environment does not in a sandbox."""
    assert outside.shows(name), outside.returned[name]
    assert not inside.shows(name), inside.returned[name]


def test_the_value_arrives_where_it_belongs(inside: Came) -> None:
    """At its own host, in TLS: else all of this would show nothing."""
    assert any(f"x-api-key: {VALUE.lower()}" in one["text"] for one in inside.seen.arrivals)
