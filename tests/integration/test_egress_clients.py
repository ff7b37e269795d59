"""Clients as people have them, unmodified, by an allowlist: each against a server of a world that speaks its protocol.

All are run by one program on the host of the world, each first without a policy and then in a sandbox.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.internet.build import SYSTEM_PATH
from tests.harness.world import NAMES, PUBLIC, RESOLVER, World, open_world

WEBSITES = "93.184.216.40"
DATABASE = "10.1.2.3"
PLACES = ("index", "files", "registry", "modules", "git", "socket")
TABLE = {**NAMES, **{f"{place}.example": [[WEBSITES]] for place in PLACES}, "db.example": [[DATABASE]]}
TIMEOUT_S = 100
MEGABYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Say how a client is used, in Bash, what it then `prints`, whom it may reach, and what it needs."""

    code: str
    prints: str
    allow: tuple[str, ...]
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def lacks(self) -> list[str]:
        """Return what of it is not here."""
        programs = [name for name in self.programs if shutil.which(name, path=PATH) is None]
        return [*programs, *(name for name in self.modules if importlib.util.find_spec(name) is None)]


def python(code: str, **more: Any) -> Client:
    """Return a client that is a program of Python's."""
    return Client(code=f"python3 - <<'END'\n{code}\nEND", **more)


PATH = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
HELLO = "for good.example"
GOOD, INDEX = ("good.example",), ("index.example", "files.example")
DATABASE_RULE = f"db.example:5432@{DATABASE}/32"
# Two requests by each scheme, the later ones on connections that are there.
TWICE = "print(*(opened.get(f'{scheme}://good.example/').text for scheme in ('http', 'https') * 2))"
BYTES = MEGABYTES << 20
PSQL = """
psql=$(ls /usr/lib/postgresql/*/bin/psql /usr/bin/psql 2>/dev/null | head -n 1)
"$psql" "host=db.example user=postgres sslmode={mode}" -AtX <<'END'
create temporary table numbers as select generate_series(1, 20000) as number;
select sum(number) || ':' || (select ssl from pg_stat_ssl where pid = pg_backend_pid()) from numbers;
END
"""
CLIENTS: Mapping[str, Client] = {
    "curl": Client(
        code="curl -sS --fail https://good.example/ http://good.example/", prints=HELLO, allow=GOOD, programs=("curl",)
    ),
    "curl, many bytes": Client(
        code=f"curl -sS --fail https://good.example/bytes/{BYTES} | wc -c",
        prints=str(BYTES), allow=GOOD, programs=("curl",),
    ),
    "curl, a body": Client(
        code="head -c 3000000 /dev/zero | curl -sS --fail -T - http://good.example/echo | wc -c",
        prints="3000000", allow=GOOD, programs=("curl",),
    ),
    "urllib": python(
        "from urllib.request import urlopen\nfor s in ('', 's'): print(urlopen(f'http{s}://good.example/').read())",
        prints=HELLO, allow=GOOD,
    ),
    "requests": python(
        f"import requests\nwith requests.Session() as opened: {TWICE}",
        prints=HELLO, allow=GOOD, modules=("requests",),
    ),
    "httpx": python(
        f"import httpx\nwith httpx.Client() as opened: {TWICE}",
        prints=HELLO, allow=GOOD, modules=("httpx",),
    ),
    "aiohttp": python(
        """
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession() as opened:
        for scheme in ("http", "https") * 2:
            async with opened.get(f"{scheme}://good.example/") as answer:
                print(await answer.text())
asyncio.run(main())
""",
        prints=HELLO, allow=GOOD, modules=("aiohttp",),
    ),
    "fetch of Node": Client(
        code="node -e 'fetch(\"https://good.example/\").then(r => r.text()).then(console.log)'",
        prints=HELLO, allow=GOOD, programs=("node",),
    ),
    "WebSockets": python(
        """
from websockets.sync.client import connect
for scheme in ("ws", "wss"):
    with connect(f"{scheme}://socket.example/", proxy=None) as socket:
        for size in (5, 500, 50_000):
            socket.send("x" * size)
            assert socket.recv() == "x" * size
print("echoed")
""",
        prints="echoed", allow=("socket.example",), modules=("websockets",),
    ),
    "pip": Client(
        code="""
python3 -m pip install --quiet --no-cache-dir --index-url https://index.example/simple/ --target here harmless
PYTHONPATH=here python3 -c 'import harmless, harmless_more; print(harmless.WORD)'
""",
        prints="harmless", allow=INDEX, modules=("pip",),
    ),
    "uv": Client(
        code="""
python=$(command -v python3)
uv pip install --quiet --no-cache --index-url https://index.example/simple/ --target here --python "$python" harmless
PYTHONPATH=here python3 -c 'import harmless, harmless_more; print(harmless.WORD)'
""",
        prints="harmless", allow=INDEX, programs=("uv",),
    ),
    "npm": Client(
        code="""
npm install --silent --registry https://registry.example/ harmless
node -p 'require("harmless")'
""",
        prints="harmless", allow=("registry.example",), programs=("npm", "node"),
    ),
    "git": Client(
        code="git clone --quiet https://git.example/harmless.git && cat harmless/harmless.txt",
        prints="harmless", allow=("git.example",), programs=("git",),
    ),
    "go get": Client(
        code="""
export GOPROXY=https://modules.example GOSUMDB=off GOFLAGS=-modcacherw GOPATH=$PWD/go GOCACHE=$PWD/cache
mkdir module && cd module && go mod init example.com/module 2>&1
go get harmless.example/harmless@v1.0.0 2>&1
grep harmless go.mod
""",
        prints="require harmless.example/harmless v1.0.0", allow=("modules.example",), programs=("go",),
    ),
    "psql": Client(
        code=PSQL.format(mode="disable"), prints="200010000:false", allow=(DATABASE_RULE,), programs=("psql",)
    ),
    "psql, by TLS": Client(
        code=PSQL.format(mode="require"), prints="200010000:true", allow=(DATABASE_RULE,), programs=("psql",)
    ),
}  # fmt: skip
RUN_ALL = """
import concurrent.futures, os, subprocess, tempfile
import cloche

def outside(code):
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PATH": ARGUMENT["path"], "HOME": folder}
        words = ["bash", "-c", code]
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return {"out": done.stdout, "err": done.stderr}

def inside(code, allow):
    result = cloche.run(
        code, language="bash", network="allowlist", network_allow=allow, level=ARGUMENT["level"],
        timeout=ARGUMENT["timeout_s"], memory="2g", disk="1g", pids=400, cpus=2, package_managers=True,
    )
    network, status = result.meta.get("network"), str(result.status)
    return {"out": result.stdout, "err": result.stderr, "status": status, "network": network}

def both(client):
    return {"outside": outside(client["code"]), "inside": inside(client["code"], client["allow"])}

with concurrent.futures.ThreadPoolExecutor(2) as pool:
    came = dict(zip(ARGUMENT["clients"], pool.map(both, ARGUMENT["clients"].values())))
print(json.dumps(came))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with the sites."""
    with open_world(TABLE) as world:
        yield world


# At level confined as an ordinary user: root's guests have an id for which a private home is closed.
LEVELS = ({"level": "jail", "user": None}, {"level": "confined", "user": "ordinary"})


@pytest.fixture(
    scope="module", params=[LEVELS[0], pytest.param(LEVELS[1], marks=pytest.mark.soak)], ids=["jail", "confined"]
)
def came(world: World, request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """Run all clients that are here."""
    level, user = request.param["level"], request.param["user"]
    clients = {name: client for name, client in CLIENTS.items() if not client.lacks}
    if any(name.startswith("psql") for name in clients):
        lack = world.start_postgres()
        clients = {name: client for name, client in clients.items() if not (lack and name.startswith("psql"))}
    told = {name: {"code": f"set -e\n{client.code}", "allow": client.allow} for name, client in clients.items()}
    world.forget()
    argument = {"clients": told, "path": PATH, "timeout_s": TIMEOUT_S, "level": level}
    found: Mapping[str, Any] = world.run(RUN_ALL, argument, user=user)
    return found


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_works_unmodified(name: str, came: Mapping[str, Any]) -> None:
    """What a client does without a policy it does with a list, and the result says whom it reached."""
    client = CLIENTS[name]
    if name not in came:
        pytest.skip(f"missing: {', '.join(client.lacks) or 'postgres'} (make setup-system)")
    outside, inside = came[name]["outside"], came[name]["inside"]
    assert client.prints in outside["out"], outside
    assert (inside["status"], client.prints in inside["out"]) == ("ok", True), inside
    assert inside["network"]
    assert all(row["is_allowed"] for row in inside["network"]), inside["network"]


def test_nobody_else_was_reached(world: World, came: Mapping[str, Any]) -> None:
    """All clients together talked to the resolver of their host and to their servers."""
    ports = {PUBLIC: {80, 443}, WEBSITES: {80, 443}, DATABASE: {5432}}
    allowed = {("tcp", address, port) for address, some in ports.items() for port in some}
    assert world.seen().endpoints <= {("udp", RESOLVER, 53), *allowed}
