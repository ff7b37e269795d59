"""Host names of sandboxes over TLS: E2B's SDKs, unmodified, with the printed variables and a name server alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness import e2b
from tests.harness.world import NAMES, open_world

PROGRAM = Path(__file__).parents[1] / "harness/programs/any_answer.py"
# A domain of one label, for which clients take no wildcard.
DOMAIN = "localtest"
USES = """
import urllib.request
from e2b import Sandbox
from websockets.sync.client import connect

with Sandbox.create() as sandbox:
    print(sandbox.commands.run("echo out").stdout.strip(), sandbox.is_running())
    sandbox.commands.run("python3 -m http.server 8000 --directory /etc", background=True)
    print(urllib.request.urlopen(f"https://{sandbox.get_host(8000)}/hostname").status)
    print(sandbox.get_host(8000).partition(".")[2] == sandbox.sandbox_domain)
    sandbox.files.write("/tmp/server.py", open("any_answer.py").read())
    sandbox.commands.run("sed -i s/8000/8002/ /tmp/server.py; python3 /tmp/server.py", background=True)
    with connect(f"wss://{sandbox.get_host(8002)}/ws") as talking:
        talking.send("a" * 100_000)
        print(len(talking.recv()))
"""
SERVES = r"""
import os, re, subprocess, sys, time
place = ARGUMENT["place"]
os.environ.update(HOME=place, XDG_STATE_HOME=place + "/state", XDG_CONFIG_HOME=place, XDG_CACHE_HOME=place + "/cache",
                  XDG_RUNTIME_DIR=place + "/run")
os.makedirs(place + "/run", mode=0o700, exist_ok=True)
words = ["serve", "--port", "0", "--e2b", "--e2b-port", "0", "--domain", ARGUMENT["domain"], "--end-sandboxes"]
with open(place + "/log", "wb") as log:
    words = [sys.executable, "-m", "cloche", *words]
    server = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
def told(pattern):
    while server.poll() is None and not (found := re.search(pattern, open(place + "/log").read())):
        time.sleep(0.02)
    assert server.poll() is None, open(place + "/log").read()
    return found
try:
    key, answers = told(r"shown once: (\S+)")[1], []
    told("dnsmasq: address=/")
    printed = dict(told(pattern).groups() for pattern in (r"export (E2B_DOMAIN)=(\S+)", r"(SSL_CERT_FILE)=(\S+)",
                                                          r"(NODE_EXTRA_CA_CERTS)=(\S+)"))
    for program in ARGUMENT["programs"]:
        done = subprocess.run(program, env={**os.environ, **printed, "E2B_API_KEY": key}, capture_output=True,
                              text=True, cwd=place, timeout=100)
        answers.append(done.stdout.split() or done.stderr)
finally:
    server.terminate()
    server.wait()
print(json.dumps(answers))
"""
USES_JS = """
import { Sandbox } from 'e2b'
const sandbox = await Sandbox.create()
console.log((await sandbox.commands.run('echo out')).stdout.trim(), await sandbox.isRunning())
await sandbox.commands.run('python3 -m http.server 8000 --directory /etc', { background: true })
console.log((await fetch(`https://${sandbox.getHost(8000)}/hostname`)).status)
await sandbox.kill()
"""


@pytest.mark.soak
def test_the_sdks_reach_sandboxes_by_host_name(tmp_path: Path) -> None:
    """Create, run, and a request to a server inside: in Python and JavaScript, by the printed variables."""
    (tmp_path / "uses.mjs").write_text(USES_JS)
    (tmp_path / "any_answer.py").write_bytes(PROGRAM.read_bytes())
    (tmp_path / "node_modules").symlink_to(e2b.javascript("e2b"))
    programs = [[sys.executable, "-c", USES], ["node", "uses.mjs"]]
    with open_world({**NAMES, f"*.{DOMAIN}": [["127.0.0.1"]]}) as world:
        python, node = world.run(SERVES, {"place": str(tmp_path), "domain": DOMAIN, "programs": programs})
    assert python == ["out", "True", "200", "True", "100000"]
    assert node == ["out", "true", "200"]
