"""Where a secret's value is: in the egress process alone, which cannot be read, and where its sources are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.world import NAMES, PUBLIC, World, open_world

HOST = "api.openai.com"
VALUE = "sk-proj-RealValue0123456789abcdefXYZ"
TABLE = {**NAMES, HOST: [[PUBLIC]]}
ASKS = """
import os, urllib.error, urllib.request
def ask(token, path="/plain"):
    asked = urllib.request.Request(f"https://api.openai.com{path}", headers={"Authorization": f"Bearer {token}"})
    try:
        return urllib.request.urlopen(asked, timeout=10).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
"""
# Search a tree of processes, but for itself and those that it is told to leave out.
SCAN = r"""
import json, os, re, sys
root, left_out, path = int(sys.argv[1]), set(map(int, sys.argv[2].split(","))), sys.argv[3]
value = open(path, "rb").read().strip()
parents = {}
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        parents[int(name)] = int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        continue
tree = {root}
while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
    tree |= more
def has(pid):
    for name in ("environ", "cmdline"):
        if value in open(f"/proc/{pid}/{name}", "rb").read():
            return name
    with open(f"/proc/{pid}/mem", "rb") as memory:
        for line in open(f"/proc/{pid}/maps"):
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if "r" in line.split()[1] and "[v" not in line and end - begin < 1 << 28:
                try:
                    memory.seek(begin)
                    if value in memory.read(end - begin):
                        return line
                except (OSError, ValueError):
                    continue
    return ""
found, searched = {}, []
for pid in sorted(tree - {os.getpid()}):
    try:
        found[pid] = has(pid)
        searched.append(open(f"/proc/{pid}/comm").read().strip())
    except OSError as error:
        found[pid] = "" if error.errno in (2, 3) else str(error)
held = [pid for pid in left_out if found.pop(pid, "")]
found = {pid: where for pid, where in found.items() if where}
print(json.dumps({"held": held, "found": found, "searched": searched}))
"""
LOOKS = """
import cloche, io, logging, os, subprocess, sys
from cloche.egress import client
lines = io.StringIO()
logging.basicConfig(level=logging.DEBUG, stream=lines)
secret = cloche.Secret(file=ARGUMENT["file"], hosts=["api.openai.com"])
texts = []
with cloche.Sandbox(secrets={"KEY": secret}, audit=ARGUMENT["audit"], timeout=60) as sandbox:
    code = ARGUMENT["asks"] + "print(os.environ['KEY'], ask(os.environ['KEY']))\\n"
    code += "open('kept', 'w').write(repr(dict(os.environ)))"
    result = sandbox.run(code)
    with sandbox.session() as session:
        cell = session.run(code)
        process = sandbox.start(["sleep", "60"])
        left_out = client._process_with_secrets.process.pid
        scan = [sys.executable, "-c", ARGUMENT["scan"], str(os.getpid()), str(left_out), ARGUMENT["file"]]
        done = subprocess.run(scan, capture_output=True, text=True)
    texts += [repr(result), result.stdout, str(result.meta), cell.stdout, repr(sandbox.policy), repr(vars(sandbox))]
    texts += [sandbox.read_file("kept").decode(), repr(list(sandbox.network.traffic()))]
    try:
        sandbox.run("1", secrets={})
    except TypeError as error:
        texts.append(str(error))
for folder, _, names in os.walk(ARGUMENT["audit"]):
    texts += [open(os.path.join(folder, name), errors="replace").read() for name in names]
texts.append(lines.getvalue())
print(json.dumps({"scan": done.stdout, "wrong": done.stderr, "texts": texts, "echo": result.stdout}))
"""
TRACES = """
import cloche, ctypes, errno, os, signal, subprocess
from cloche.egress import client
PTRACE_ATTACH, PTRACE_DETACH, PIDFD_GETFD = 16, 17, 438
def reads_memory(libc, pid):
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(1)), 1)
    theirs = (ctypes.c_size_t * 2)(0, 1)  # not an address of theirs, which is found out after rights are checked
    return libc.process_vm_readv(pid, ours, 1, theirs, 1, 0) == 1 or ctypes.get_errno() == errno.EFAULT
def attempts(pid):
    libc, came = ctypes.CDLL(None, use_errno=True), {}
    came["process_vm_readv"] = reads_memory(libc, pid)
    came["pidfd_getfd"] = libc.syscall(PIDFD_GETFD, os.pidfd_open(pid), 0, 0) >= 0
    for name in ("mem", "environ", "maps", "fd", "root"):
        try:
            os.listdir(f"/proc/{pid}/{name}") if name in ("fd", "root") else open(f"/proc/{pid}/{name}", "rb").close()
            came[name] = True
        except OSError:
            came[name] = False
    came["ptrace"] = libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0
    if came["ptrace"]:
        os.waitpid(pid, os.WUNTRACED) if pid == own.pid else None
        libc.ptrace(PTRACE_DETACH, pid, None, None)
    return came
os.environ["THE_KEY"] = ARGUMENT["value"]
with cloche.Sandbox(secrets={"KEY": cloche.Secret(env="THE_KEY", hosts=["api.openai.com"])}) as sandbox:
    sandbox.run("1")
    pid = client._process_with_secrets.process.pid
    status = open(f"/proc/{pid}/status").read()
    uid, gid = (int(status.partition(f"{name}:")[2].split()[0]) for name in ("Uid", "Gid"))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        if os.geteuid() == 0:
            os.setgroups([]), os.setresgid(gid, gid, gid), os.setresuid(uid, uid, uid)
        own = subprocess.Popen(["sh", "-c", "echo; read word"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        own.stdout.readline()  # only then the kernel has made it readable for sure
        os.write(writer, json.dumps({"own": attempts(own.pid), "egress": attempts(pid)}).encode())
        own.kill()
        os._exit(0)
    os.waitpid(child, 0)
    came = json.loads(os.read(reader, 65536))
    limits = open(f"/proc/{pid}/limits").read()
print(json.dumps({**came, "core": limits.partition("Max core file size")[2].split()[:2]}))
"""
SOURCES = """
import cloche, os
os.environ["THE_KEY"] = ARGUMENT["value"]
came = {}
for name, given in ARGUMENT["sources"].items():
    try:
        came[name] = cloche.run(ARGUMENT["code"], secrets={"KEY": cloche.Secret(**given)}, timeout=30).stdout
    except cloche.ClocheError as error:
        came[name] = f"{type(error).__name__}: {error}"
print(json.dumps(came))
"""
TWO = """
import cloche, os
os.environ["THE_KEY"] = ARGUMENT["value"]
secrets = {"KEY": cloche.Secret(env="THE_KEY", hosts=["api.openai.com"])}
with cloche.Sandbox(secrets=secrets) as one, cloche.Sandbox(secrets=secrets) as other:
    mine = one.run("import os; print(os.environ['KEY'])").stdout.strip()
    theirs = other.run("import os; print(os.environ['KEY'])").stdout.strip()
    code = ARGUMENT["asks"] + f"print(ask({mine!r}))"
    print(json.dumps({"are_same": mine == theirs, "own": one.run(code).stdout, "other": other.run(code).stdout}))
"""


WARM = """
import cloche, os, time
os.environ["THE_KEY"] = ARGUMENT["value"]
secrets = {
    "KEY": cloche.Secret(env="THE_KEY", hosts=["api.openai.com"]),
    **{f"FROM_{n}": cloche.Secret(file=ARGUMENT["file"], hosts=["api.openai.com"]) for n in range(ARGUMENT["files"])},
}
def nothing():
    pass
for _ in range(30):
    if cloche.run("1", secrets=secrets).meta["start"] == "pooled":
        break
came, before = [], ["none", ""]
for _ in range(3):
    code = ARGUMENT["asks"] + f"BEFORE = {before!r}\\n" + ARGUMENT["looks"]
    result = cloche.run(code, secrets=secrets, tools=[nothing], timeout=60)
    time.sleep(ARGUMENT["pause"])
    before = result.value[:2]
    came.append([result.meta["start"], *result.value])
print(json.dumps(came))
"""
# The placeholder, the authority, whether it stands in the host's own file, uses of the value and of that before, and
# whether one who was allowed to could have changed the file.
SEES = """
import cloche_host, ssl
cloche_host.nothing()
key, bundle = os.environ["KEY"], "/etc/ssl/certs/ca-certificates.crt"
text = open(os.environ["SSL_CERT_FILE"]).read()
own = [row["serialNumber"] for row in ssl.create_default_context().get_ca_certs() if "Cloche" in str(row["subject"])]
changes = []
for path in (bundle, os.environ["SSL_CERT_FILE"]):
    for mode in ("r+", "w"):
        try:
            open(path, mode).close()
            changes.append(path)
        except OSError:
            pass
[key, own, open(bundle).read() == text, ask(key), ask(BEFORE[0]), BEFORE[1] != own, changes]
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a provider."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return a file with a value, which others may read, and this user alone elsewhere."""
    path = tmp_path / "value"
    path.write_text(f"{VALUE}\n")
    return str(path)


def arrived(world: World) -> bool:
    """Tell whether the provider was told the value, in TLS."""
    text = f"authorization: bearer {VALUE}".lower()
    return any(text in one["text"] and one["server_name"] == HOST for one in world.seen().arrivals)


def test_the_value_is_in_the_egress_process_alone(world: World, file: str, tmp_path: Path) -> None:
    """A search of memory, environments and command lines, of logs, audit, results and files finds it nowhere else."""
    audit = str(tmp_path / "audit")
    said: dict[str, Any] = world.run(LOOKS, {"file": file, "audit": audit, "asks": ASKS, "scan": SCAN})
    scan = json.loads(said["scan"] or said["wrong"])
    assert arrived(world)
    assert len(scan["held"]) == 1, "the search finds what is there"
    assert len(scan["searched"]) >= 5, scan
    assert scan["found"] == {}
    assert not [text for text in said["texts"] if VALUE in text]
    assert "authorization: Bearer sk-proj-" in said["echo"]


@pytest.mark.both_users
def test_the_egress_process_cannot_be_read_or_traced(world: World) -> None:
    """Not by another process of its own user, which can do that to others."""
    came = world.run(TRACES, {"value": VALUE})
    assert set(came["own"].values()) == {True}, came
    assert set(came["egress"].values()) == {False}, came
    assert came["core"] == ["0", "0"]


def test_each_source_of_a_value(world: World, file: str) -> None:
    """A variable, a file, a command and a text; what is wrong with one is told without a value."""
    hosts = {"hosts": [HOST]}
    sources = {
        "env": {"env": "THE_KEY", **hosts}, "file": {"file": file, **hosts}, "value": {"value": VALUE, **hosts},
        "command": {"command": f"sed 's/^/ /' {file}", **hosts},
        "no variable": {"env": "NO_SUCH_KEY", **hosts}, "no file": {"file": f"{file}-no", **hosts},
        "no program": {"command": "no-such-program", **hosts},
        "failing": {"command": f"grep -c nothing {file}", **hosts},
        "folder": {"file": "/etc", **hosts}, "short": {"value": VALUE[:11], **hosts},
    }  # fmt: skip
    world.forget()
    code = f"{ASKS}\nprint(ask(os.environ['KEY']))"
    came = world.run(SOURCES, {"value": VALUE, "sources": sources, "code": code})
    assert arrived(world)
    for name, text in came.items():
        assert VALUE[8:] not in text
        if name in ("env", "file", "value", "command"):
            assert "authorization: Bearer sk-proj-" in text, text
        else:
            assert ("InvalidRequest: secrets: the" in text and "of KEY" in text) or "which has the value" in text, text


@pytest.mark.both_users
@pytest.mark.parametrize("files", [0, 1])
def test_a_warm_run_has_its_own_authority_and_placeholder(world: World, tmp_path: Path, files: int) -> None:
    """Of what the runs before it in the same jail had, it can use nothing, and it cannot change its certificates.

    With a value of a file, the egress process makes the placeholder, and the run waits for it.
    """
    world.forget()
    path = tmp_path / "value"
    path.write_text(VALUE[::-1])
    told = {"value": VALUE, "file": str(path), "files": files, "asks": ASKS, "looks": SEES, "pause": 0.1}
    runs = world.run(WARM, told)
    assert [run[0] for run in runs] == ["pooled"] * 3, runs
    assert arrived(world)
    placeholders = {run[1] for run in runs}
    authorities = {serial for run in runs for serial in run[2]}
    assert (len(placeholders), len(authorities)) == (3, 3)
    for _, key, own, is_in_bundle, answer, answer_to_before, is_new, changes in runs:
        assert len(own) == 1
        assert (is_in_bundle, is_new, changes) == (True, True, [])
        assert f"authorization: Bearer {key}" in answer
        assert answer_to_before.startswith("403"), answer_to_before
    assert VALUE not in str(runs)


def test_a_placeholder_is_for_its_own_sandbox(world: World) -> None:
    """Each sandbox has another one; that of another sandbox is a foreign credential."""
    came = world.run(TWO, {"value": VALUE, "asks": ASKS})
    assert not came["are_same"]
    assert "Bearer" in came["own"]
    assert came["other"].startswith("403")
