"""Secrets in sandboxes with names: held by the sandbox's own egress process, for all who attach, and on no disk."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.escape.test_secrets_held import ASKS, HOST, SCAN, TABLE
from tests.harness.world import World, open_world

pytestmark = pytest.mark.both_users
OPENS = """
import cloche, json, os, sys
path, audit, asks = json.loads(sys.argv[1])
secrets = {"KEY": cloche.Secret(file=path, hosts=["api.openai.com"])}
with cloche.Sandbox(name="keys", keep="10m", timeout=60, secrets=secrets, audit=audit) as sandbox:
    print(sandbox.run(asks + "print(ask(os.environ['KEY']))").stdout)
"""
# The opener is gone, and so is the value's source. All processes of the sandbox are children of this one, which never
# has the value.
ATTACHES = """
import cloche, ctypes, os, signal, subprocess, sys
from cloche.core.errors import ClocheError
from cloche.keeper import registry
from cloche.keeper.attach import visit
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
file, folders = ARGUMENT["file"], [ARGUMENT["audit"], os.environ["XDG_RUNTIME_DIR"], os.environ["HOME"]]
code = ARGUMENT["asks"] + "print(ask(os.environ['KEY']), os.environ['SSL_CERT_FILE'])"
main = ["-c", "import sys; from cloche.__main__ import main; sys.exit(main())"]
def command(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    return done.stdout + done.stderr
def children():
    return set(open(f"/proc/self/task/{os.getpid()}/children").read().split())
def refused(work, *arguments, **named):
    try:
        work(*arguments, **named)
    except ClocheError as error:
        return str(error)
said = {"opener": command("-c", ARGUMENT["opens"], json.dumps([file, ARGUMENT["audit"], ARGUMENT["asks"]]))}
if "authorization" not in said["opener"]: print(json.dumps(said)); sys.exit()
os.rename(file, f"{file}.away")
keeper = visit(registry.find("keys"), "info")["pid"]
egress = [pid for pid in children() if b"cloche.egress.process" in open(f"/proc/{pid}/cmdline", "rb").read()]
with cloche.Sandbox.attach("keys", secrets={"KEY": cloche.Secret(hosts=["api.openai.com"])}) as sandbox:
    said["run"] = sandbox.run(code).stdout
    said["exec"] = sandbox.exec(["sh", "-c", "echo $KEY"]).stdout
    with sandbox.session() as session:
        said["cell"] = session.run(code).stdout
    said["apart"] = refused(lambda: sandbox.session(checkpoints=True).open())
    said["scan"] = json.loads(command("-c", ARGUMENT["scan"], str(os.getpid()), ",".join(egress), f"{file}.away"))
    for name, hosts in (("KEY", ["api.openai.com", "a.example"]), ("OTHER", ["api.openai.com"])):
        given = {name: cloche.Secret(hosts=hosts)}
        said[f"{name} for {len(hosts)}"] = refused(cloche.Sandbox.attach, "keys", secrets=given)
said["command"] = command(*main, "exec", "keys", "--", "sh", "-c", "echo $KEY")
said["same"] = command(*main, "run", "--in", "keys", "--secret", "KEY@api.openai.com", "-c", "print(1 + 1)")
said["other"] = command(*main, "run", "--in", "keys", "--secret", "KEY@other.example", "-c", "print(1 + 1)")
said["ps"] = command(*main, "ps"), command(*main, "sandbox", "inspect", "keys", "--json")
grep = ["xargs", "-0", "grep", "-lsF", "-f", f"{file}.away"]
new = ["find", "/tmp", "/var/tmp", "/dev/shm", "-newer", ARGUMENT["marker"], "-type", "f", "-size", "-1025k", "-print0"]
listed = subprocess.run(new, capture_output=True).stdout
listed += subprocess.run(["find", *folders, "-type", "f", "-print0"], capture_output=True).stdout
said["files"] = subprocess.run(grep, input=listed, capture_output=True).stdout.decode().split()
os.kill(int(egress[0]), signal.SIGKILL)
with cloche.Sandbox.attach("keys") as sandbox:
    said["later"] = repr(sandbox.run(code)), sandbox.exec(["sh", "-c", "echo $KEY"]).stdout
    sandbox.kill()
os.rename(f"{file}.away", file)
others = children()
said["again"] = command("-c", ARGUMENT["opens"], json.dumps([file, ARGUMENT["audit"], ARGUMENT["asks"]]))
os.kill(visit(registry.find("keys"), "info")["pid"], signal.SIGKILL)
while children() - others:  # all of the sandbox ends, its egress process too
    os.wait()
said["gone"] = refused(cloche.Sandbox.attach, "keys")
print(json.dumps({**said, "keeper": keeper, "texts": repr(said)}))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a provider."""
    with open_world(TABLE) as world:
        yield world


def test_all_who_attach_use_a_value_that_is_nowhere_else(world: World, tmp_path: Path) -> None:
    """Not in the keeper, and in no file; with other secrets nobody attaches, and without the process there are none."""
    value, file, marker = f"sk-proj-{secrets.token_hex(20)}", tmp_path / "value", tmp_path / "marker"
    marker.touch()
    os.utime(marker, (time.time() - 1,) * 2)
    file.write_text(value)
    for name in ("run", "audit"):
        (tmp_path / name).mkdir(mode=0o700)
    argument = {
        "file": str(file), "audit": str(tmp_path / "audit"), "asks": ASKS, "opens": OPENS, "scan": SCAN,
        "marker": str(marker),
    }  # fmt: skip
    said: dict[str, Any] = world.run(ATTACHES, argument, env={"XDG_RUNTIME_DIR": str(tmp_path / "run")})
    assert "exec" in said, said["opener"]
    placeholder = said["exec"].strip()
    echo = f"authorization: Bearer {placeholder}"
    assert all(echo in said[name] for name in ("opener", "run", "cell")), said
    assert said["run"].strip().endswith("/etc/cloche/authorities.pem")
    assert said["command"].strip() == placeholder
    assert said["same"].strip() == "2"
    arrivals = [one for one in world.seen().arrivals if f"authorization: bearer {value}" in one["text"]]
    assert len([one for one in arrivals if one["server_name"] == HOST]) == 4
    scan = said["scan"]
    assert len(scan["held"]) == 1, "the search finds what is there"
    # An ordinary user cannot read those that run as another one of its ids.
    assert [where for where in scan["found"].values() if "Permission denied" not in where] == []
    assert len(scan["searched"]) >= (4 if os.geteuid() == 0 else 2)
    assert said["files"] == [f"{file}.away"]
    assert value not in said["texts"]
    for name in ("KEY for 2", "OTHER for 1", "other"):
        assert "sandbox 'keys' has KEY for api.openai.com, and this call names" in said[name]
    assert "leave checkpoints out" in said["apart"]
    assert "secrets: KEY for api.openai.com" in said["ps"][0]
    assert '"KEY": [\n        "api.openai.com"' in said["ps"][1]
    assert "authorization" not in said["later"][0]
    assert said["later"][1].strip() == placeholder
    assert "authorization: Bearer" in said["again"]
    assert "no sandbox of yours is called 'keys'" in said["gone"]
