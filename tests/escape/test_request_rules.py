"""Attempts on rules with methods and paths: to have a server read another request than the one that was allowed.

Each is first shown to work where a naive proxy compares what is written: its request is let through, and a server that
reads as generously as some do reads another path, or another method. Inside, the same request does not arrive.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

import cloche
from tests.harness.world import NAMES, PUBLIC, World, open_world

HOST, OTHER = "api.github.com", "other.example"
PROGRAM = (Path(__file__).parent / "requests_program.py").read_text()
TABLE = {**NAMES, HOST: [[PUBLIC]]}
RULES = [f"{HOST}/GET,POST:/repos/me/*", f"{HOST}/GET:/users/*/keys"]
# Name and code of each attempt; what is not `is_seen` a naive proxy does not compare.
ROWS = {
    "dot segments": 'send(request("/repos/me/../other/x"))',
    "encoded dots": 'send(request("/repos/me/%2e%2e/other/x"))',
    "half encoded dots": 'send(request("/repos/me/.%2E/other/x"))',
    "dots behind an encoded slash": 'send(request("/repos/me/..%2fother/x"))',
    "dots between encoded slashes": 'send(request("/repos/me/a%2F..%2F..%2Fother%2Fx"))',
    "dots that are encoded twice": 'send(request("/repos/me/%252e%252e/other/x"))',
    "a backslash": 'send(request("/repos/me/..\\\\other/x"))',
    "an encoded backslash": 'send(request("/repos/me/..%5cother/x"))',
    "parameters of a segment": 'send(request("/repos/me/..;a=b/other/x"))',
    "dots that are too long": 'send(request("/repos/me/%c0%ae%c0%ae/other/x"))',
    "wide dots": 'send(request("/repos/me/%EF%BC%8E%EF%BC%8E/other/x"))',
    "a blank behind dots": 'send(request("/repos/me/..%20/other/x"))',
    "a NUL behind dots": 'send(request("/repos/me/..%00/other/x"))',
    "two slashes and dots": 'send(request("/repos/me//../../other/x"))',
    "the folder itself": 'send(request("/repos/me/"))',
    "the folder itself, by a dot": 'send(request("/repos/me/."))',
    "the whole address, with dots": 'send(request(f"https://{HOST}/repos/me/../other/x"))',
    "the address in capitals, with dots": 'send(request(f"https://{HOST.upper()}/repos/me/%2e./other/x"))',
    "a star over a slash": 'send(request("/users/me/repos/other/keys"))',
    "a star over an encoded slash": 'send(request("/users/me%2frepos/keys"))',
    "another method in a header": 'send(request("/repos/me/x", "X-HTTP-Method-Override: DELETE"))',
    "another method in a header with underscores": 'send(request("/repos/me/x", "X_HTTP_METHOD: DELETE"))',
    "another method in the query": 'send(request("/repos/me/x?a&%5Fmethod=DELETE", method="POST"))',
    "another path in a header": 'send(request("/repos/me/x", "X-Original-URL: /repos/other/x"))',
    "a second request": 'send(request("/repos/me/x", more=request("/repos/other/x", method="DELETE").decode()))',
    "a smuggled request": """send(request(
        "/repos/me/x", "Content-Length: 5", "Transfer-Encoding: chunked", method="POST",
        more="0\\r\\n\\r\\n" + request("/repos/other/x", method="DELETE").decode()))""",
    "a request in a bare line feed": """send(request(
        "/repos/me/x", "A: b\\n\\n" + request("/repos/other/x").decode()))""",
    "plain HTTP": 'send(request("/repos/other/x"), port=80, is_seen=False)',
    "by its address": 'send(request("/repos/other/x"), ADDRESS, is_seen=False)',
    "by another host": 'send(request("/repos/other/x"), OTHER, is_seen=False)',
    "by another host's connection": 'send(request("/repos/other/x"), OTHER, port=80, is_seen=False)',
}
OUTSIDE = 'exec(compile(ARGUMENT["program"], "<attempts>", "exec"))\n'
INSIDE = """
import cloche
result = cloche.run(ARGUMENT["program"], network_allow=ARGUMENT["allow"], timeout=60, level="jail")
print(json.dumps({"stdout": result.stdout, "stderr": result.stderr, "network": result.meta.get("network")}))
"""
WORDS = f"""
import contextlib, socket, ssl
with contextlib.suppress(OSError):
    socket.getaddrinfo("not.example", 443)
with contextlib.suppress(OSError):
    ssl.create_default_context().wrap_socket(socket.create_connection(("{PUBLIC}", 443)), server_hostname="not.example")
"""
LIVE = """
import cloche
def ask(sandbox, url):
    return sandbox.run("curl -s " + url, language="bash").stdout
def add(sandbox, rule):
    try:
        sandbox.network.allow(rule)
    except cloche.InvalidRequest as error:
        return str(error)
told = []
with cloche.Sandbox(network_allow=ARGUMENT, live=True) as sandbox:
    user = "https://api.github.com/user"
    told += [ask(sandbox, user), add(sandbox, "api.github.com/GET:/user"), ask(sandbox, user)]
    told += [add(sandbox, "api.github.com")]
with cloche.Sandbox(network="open", live=True) as sandbox:
    told += [add(sandbox, "good.example/GET:/user"), ask(sandbox, "https://good.example/")]
print(json.dumps(told))
"""
_HEAD = re.compile(r"(?m)^([A-Z]+) (\S+) HTTP/1\.1\r?\n((?:[^\r\n]+\r?\n)*)")
_OVERRIDE = re.compile(r"(?im)^x[-_](?:http[-_]method|original)\S*: *(\S+)")


def is_within(method: str, path: str) -> bool:
    """Tell whether a request is what the rules are meant to allow."""
    is_mine = method in ("GET", "POST") and re.fullmatch(r"/repos/me/[^/].*", path) is not None
    return is_mine or (method == "GET" and re.fullmatch(r"/users/[^/]+/keys", path) is not None)


def generous(target: str) -> str:
    """Return the path that a server reads which does all that some servers do."""
    path = re.sub("^https?://[^/]*", "", target.partition("?")[0], flags=re.IGNORECASE)
    for _ in range(2):
        data = unquote_to_bytes(path).replace(b"\xc0\xae", b".").replace(b"\xc0\xaf", b"/")
        path = data.decode("utf-8", "replace")
    path = unicodedata.normalize("NFKC", path).replace("\\", "/")
    segments: list[str] = []
    for segment in path.split("/"):
        name = segment.partition(";")[0].partition("\0")[0].rstrip(" ")
        if name == "..":
            del segments[-1:]
        elif name not in ("", "."):
            segments.append(name)
    return "/" + "/".join(segments)


@dataclass(frozen=True, slots=True)
class Came:
    """What came of all attempts: what each returned, what arrived, and the rows of the network."""

    returned: Mapping[str, str]
    arrivals: list[dict[str, Any]]
    network: list[dict[str, Any]]

    def readings(self, name: str) -> list[tuple[str, str]]:
        """Return the methods and paths that a generous server read of an attempt."""
        mark = f"mark-{list(ROWS).index(name)}-"
        heads = [head for one in self.arrivals for head in _HEAD.findall(one["said"] or one["raw"]) if mark in head[2]]
        return [reading for method, target, rest in heads for reading in _readings(method, target, rest)]


def _readings(method: str, target: str, rest: str) -> Iterator[tuple[str, str]]:
    path = generous(target)
    yield method, path
    for other in _OVERRIDE.findall(rest):
        yield (method, other) if other.startswith("/") else (other, path)
    if "method=" in target:
        yield target.rpartition("=")[2], path


def program(*, is_naive: bool) -> str:
    """Return the program that makes all attempts."""
    told = [{"name": name, "mark": f"mark-{number}-", "code": code} for number, (name, code) in enumerate(ROWS.items())]
    constants = {"HOST": HOST, "OTHER": OTHER, "ADDRESS": PUBLIC, "IS_NAIVE": is_naive, "TOLD": told}
    return "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + PROGRAM


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with an API."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture(scope="module")
def outside(world: World) -> Came:
    """Make all attempts behind a naive proxy."""
    printed = world.run(OUTSIDE, {"program": program(is_naive=True)})
    return Came(printed, list(world.seen().arrivals), [])


@pytest.fixture(scope="module")
def inside(world: World, outside: Came) -> Came:
    """Make all attempts in a sandbox."""
    world.forget()
    allow = [*RULES, OTHER, f"{PUBLIC}:443"]
    run = world.run(INSIDE, {"program": program(is_naive=False), "allow": allow})
    assert run["stdout"], run
    return Came(json.loads(run["stdout"].splitlines()[-1]), list(world.seen().arrivals), run["network"])


@pytest.mark.parametrize("name", ROWS)
def test_no_other_request_arrives(name: str, outside: Came, inside: Came) -> None:
    """An attempt that reaches another path, or by another method, behind a naive proxy does not in a sandbox."""
    assert not all(is_within(*reading) for reading in outside.readings(name)), outside.returned[name]
    assert all(is_within(*reading) for reading in inside.readings(name)), inside.returned[name]


def test_rules_can_be_added_to_a_sandbox_that_opens_connections(world: World) -> None:
    """One that was opened without such a rule has no authority, and a rule of the whole host is refused."""
    before, added, after, whole, without, other = world.run(LIVE, RULES)
    assert "GET /user is not allowed" in before
    assert (added, after[:5]) == (None, "HELLO")
    assert "would limit nothing" in whole
    assert "which this one was opened without" in without
    assert "HELLO" in other


@pytest.mark.parametrize("options", [{"level": "confined"}, {"backend": "subprocess"}], ids=str)
def test_what_cannot_open_connections_refuses_such_rules(options: dict[str, Any]) -> None:
    """No rule is enforced by halves."""
    with pytest.raises(cloche.BackendUnavailable, match="network rules with methods and paths need level jail"):
        cloche.run("1", network_allow=RULES, **options)


def test_a_name_is_refused_in_the_same_words_by_lookup_and_by_tls(world: World) -> None:
    """A lookup has no port; the rest is equal."""
    run = world.run(INSIDE, {"program": WORDS, "allow": [f"{PUBLIC}:443"]})
    why = [row["why"] for row in run["network"]]
    told = 'not.example{} is not allowed; the rules are 93.184.216.34:443; allow it with network_allow "not.example"'
    assert sorted(why) == [told.format(""), told.format(":443")], run


def test_a_refusal_names_the_rules_and_what_would_allow_it(inside: Came) -> None:
    """In TLS and in plain HTTP it is one sentence, which is a row of the network, too."""
    told = (
        "GET /repos/other/x is not allowed; the rules for this host are GET,POST /repos/me/*, GET /users/*/keys; "
        f'allow it with network_allow "{HOST}/GET:/repos/other/x"'
    )
    assert inside.returned["plain HTTP"].endswith(f"{HOST}:80: {told}\n")
    assert "its path has a dot segment; no rule can allow that" in inside.returned["dot segments"]
    assert f"{HOST}:80: {told}" in [row["why"] for row in inside.network if row["port"] == 80]
    assert "by its address, is not allowed" in str([row["why"] for row in inside.network if row["port"] == 443])
