"""The network of E2B's sandboxes, in a world of its own: rules at creation and later, and what no rule opens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.world import METADATA, OWN, PRIVATE, PUBLIC, PUBLIC_TOO, World, open_world

# Serve, open sandboxes by E2B's routes, and try addresses from inside by the service's own.
SERVES = r"""
import os, re, subprocess, sys, threading, time
import httpx
place = ARGUMENT["place"]
os.environ.update(HOME=place, XDG_STATE_HOME=place + "/state", XDG_CONFIG_HOME=place, XDG_CACHE_HOME=place + "/cache",
                  XDG_RUNTIME_DIR=place + "/run")
os.makedirs(place + "/run", mode=0o700, exist_ok=True)
TRIES = '''
import socket, sys, urllib.request
for name in sys.argv[1:]:
    try:
        print(name, urllib.request.urlopen(f"http://{name}/plain", timeout=5).status == 200)
    except Exception as error:
        print(name, False)
'''
HOLDS = '''
import socket
held = socket.create_connection(("good.example", 80), timeout=60)
held.sendall(b"HEAD /plain HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n")
print(held.recv(12).decode().split()[1], flush=True)
open("/tmp/held", "w").write("yes")
while held.recv(1 << 16):
    pass
print("closed")
'''
class Served:
    def __init__(self, number, *words):
        log = f"{place}/log{number}"
        with open(log, "wb") as file:
            words = ["serve", "--port", "0", "--e2b", "--e2b-port", "0", "--host", "0.0.0.0", "--allow-public",
                     "--database", f"{place}/{number}.db", "--end-sandboxes", *words]
            self.process = subprocess.Popen([sys.executable, "-m", "cloche", *words], stdout=file, stderr=file,
                                            stdin=subprocess.DEVNULL)
        def told(pattern):
            while self.process.poll() is None and not (found := re.search(pattern, open(log).read())):
                time.sleep(0.02)
            assert self.process.poll() is None, open(log).read()
            return found[1]
        self.port, api = told(r"E2B_API_URL=\S+:(\d+)"), told(r"serving at \S+:(\d+)/api")
        self.key = told(r"once: (\S+)")
        self.e2b = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers={"X-API-KEY": self.key}, timeout=60)
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{api}/api", timeout=60,
                                headers={"Authorization": f"Bearer {self.key}"})
    def with_key(self, *scopes):
        made = self.api.post("/keys", json={"name": "other", "scopes": list(scopes)}).json()
        self.e2b.headers["X-API-KEY"] = made["key"]
    def create(self, **fields):
        return self.e2b.post("/v2/sandboxes", json={"templateID": "base", **fields})
    def made(self, **fields):
        answer = self.create(**fields)
        assert answer.status_code == 201, answer.text
        return answer.json()["sandboxID"]
    def put(self, sandbox, **fields):
        return self.e2b.put(f"/sandboxes/{sandbox}/network", json=fields).status_code
    def run(self, sandbox, *argv):
        answer = self.api.post(f"/sandboxes/sb_{sandbox}/exec", json={"argv": list(argv)}).json()
        assert "stdout" in answer, answer
        return answer["stdout"]
    def reached(self, sandbox, *names):
        lines = self.run(sandbox, "python3", "-c", TRIES, *names).splitlines()
        return [line.partition(" ")[0] for line in lines if line.endswith("True")]
    def end(self):
        self.process.terminate()
        self.process.wait()
"""
RULES = (
    SERVES
    + r"""
served, told = Served(1, "--network", "open"), {}
try:
    names, never = ARGUMENT["names"], [*ARGUMENT["never"], f"{ARGUMENT['own']}:{served.port}"]
    sandbox = served.made()
    told["default"] = served.reached(sandbox, *names)
    told["never"] = served.reached(sandbox, *never)
    for step, fields in ARGUMENT["steps"].items():
        told[step] = [served.put(sandbox, **fields), served.reached(sandbox, *names)]
    told["info"] = served.e2b.get(f"/sandboxes/{sandbox}").json()
    served.put(sandbox)
    lines = []
    holding = threading.Thread(target=lambda: lines.append(served.run(sandbox, "python3", "-c", HOLDS)))
    holding.start()
    while holding.is_alive() and not served.run(sandbox, "sh", "-c", "cat /tmp/held || true"):
        time.sleep(0.02)
    served.put(sandbox, allow_internet_access=False)
    holding.join()
    told["held"] = lines[0].split()
    off = served.made(allow_internet_access=False)
    told["off"] = served.reached(off, *names)
    served.put(off)
    told["on again"] = served.reached(off, *names)
    told["rules at creation"] = served.reached(served.made(network=ARGUMENT["steps"]["a name"]), *names)
    wrong = served.create(network={"allowOut": ["good.example"]})
    told["wrong"] = [wrong.status_code, wrong.json()["message"]]
finally:
    served.end()
print(json.dumps(told))
"""
)
HEADERS = (
    SERVES
    + r"""
served = Served(3, "--network", "open")
asks = '''
import sys, urllib.request
for scheme in ("https", "http"):
    asked = urllib.request.Request(f"{scheme}://{sys.argv[1]}/{sys.argv[2]}{scheme}", headers={"X-Rule": "own"})
    print(urllib.request.urlopen(asked, timeout=20).status)
'''
def asked(sandbox, word):
    return [served.run(sandbox, "python3", "-c", asks, host, word).split() for host in ARGUMENT["hosts"]]
try:
    rules, other = ({host: [{"transform": {"headers": {"X-Rule": value}}}]} for host, value in ARGUMENT["rules"])
    sandbox = served.made(network={"rules": rules})
    told = [asked(sandbox, "first"), served.put(sandbox, rules=other), asked(sandbox, "second"), served.put(sandbox),
            asked(sandbox, "third"), served.put(served.made(), rules=rules)]
finally:
    served.end()
print(json.dumps(told))
"""
)
CEILING = (
    SERVES
    + r"""
served, told = Served(2, "--network", "allowlist", "--network-allow", "good.example"), {}
try:
    names = ARGUMENT["names"]
    served.with_key("run", "read")
    told["default"] = served.reached(served.made(), *names)
    sandbox = served.made(network={"denyOut": ["0.0.0.0/0"], "allowOut": ["good.example"]})
    told["within"] = served.reached(sandbox, *names)
    wide = {"denyOut": ["0.0.0.0/0"], "allowOut": ["other.example"]}
    told["above"] = [served.create(network=wide).status_code, served.put(sandbox, **wide)]
    told["still"] = served.reached(sandbox, *names)
finally:
    served.end()
print(json.dumps(told))
"""
)
NAMES = ["good.example", "other.example", "wild.example", PUBLIC, PUBLIC_TOO]
NEVER = [METADATA, PRIVATE, "127.0.0.1:80", f"{OWN}:80"]
STEPS: dict[str, dict[str, Any]] = {
    "a name": {"denyOut": ["0.0.0.0/0"], "allowOut": ["good.example"]},
    "a network, but one address": {"denyOut": ["93.184.216.0/24"], "allowOut": [PUBLIC]},
    "a network alone": {"denyOut": ["0.0.0.0/0"], "allowOut": ["93.184.216.34/31"]},
    "nothing": {"allow_internet_access": False},
    "all again": {},
    "nothing, by its network": {"denyOut": ["0.0.0.0/0"], "dnsServers": ["8.8.8.8"]},
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world."""
    with open_world() as world:
        yield world


def test_rules_of_e2b_decide_at_creation_and_later(world: World, tmp_path: Path) -> None:
    """Each update replaces all rules and closes what they deny; nothing opens the host, private or metadata ones."""
    told = world.run(RULES, {"place": str(tmp_path), "names": NAMES, "never": NEVER, "own": OWN, "steps": STEPS})
    assert told["default"] == told["on again"] == NAMES
    assert told["never"] == told["off"] == []
    assert told["a name"] == [204, ["good.example"]]
    assert told["rules at creation"] == ["good.example"]
    assert told["a network, but one address"] == [204, ["good.example", "other.example", PUBLIC]]
    assert told["a network alone"] == [204, [PUBLIC, PUBLIC_TOO]]
    assert told["nothing"] == told["nothing, by its network"] == [204, []]
    assert told["all again"] == [204, NAMES]
    assert told["info"]["network"] == {"denyOut": ["0.0.0.0/0"], "dnsServers": ["8.8.8.8"]}
    assert told["held"] == ["200", "closed"]
    assert told["wrong"][0] == 400
    assert "you must include 'ALL_TRAFFIC' in deny out" in told["wrong"][1]


def test_the_operators_network_is_the_ceiling(world: World, tmp_path: Path) -> None:
    """Without rules a sandbox has the operator's network; a key below scope admin gets no more, at no time."""
    told = world.run(CEILING, {"place": str(tmp_path), "names": NAMES})
    assert told["default"] == told["within"] == told["still"] == ["good.example"]
    assert told["above"] == [403, 403]


def test_rules_put_headers_into_requests(world: World, tmp_path: Path) -> None:
    """In TLS and without, to the rule's hosts alone, in place of the guest's own, as the last update says."""
    world.forget()
    hosts, rules = ["good.example", "a.other.example"], [["good.example", "value-1"], ["*.other.example", "value-2"]]
    told = world.run(HEADERS, {"place": str(tmp_path), "hosts": hosts, "rules": rules})
    fine = [["200", "200"]] * 2
    assert told == [fine, 204, fine, 204, fine, 400]
    seen = {
        (word, scheme): sorted(
            re.findall(r"x-rule: (\S+)", row["text"])[0] for row in world.seen().holding(f"/{word}{scheme} ")
        )
        for word in ("first", "second", "third")
        for scheme in ("http", "https")
    }
    assert seen["first", "https"] == seen["first", "http"] == ["own", "value-1"]
    assert seen["second", "https"] == seen["second", "http"] == ["own", "value-2"]
    assert seen["third", "https"] == seen["third", "http"] == ["own", "own"]
