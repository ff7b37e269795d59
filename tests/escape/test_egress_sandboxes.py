"""Attempts at the network of others, or past the end: of other sandboxes, without the egress process, after a run.

Each is one program on the host of a world (tests/harness/world.py), where the same guest is first run without a policy.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.world import PUBLIC, PUBLIC_TOO, World, open_world

pytestmark = pytest.mark.both_users

TABLE = {
    "good.example": [[PUBLIC]], "third.example": [[PUBLIC_TOO]],
}  # fmt: skip
# What guests and the host's programs have in common. `reach` says what came back, or why nothing did.
REACH = """
import os, socket, sys, time
def reach(host, word, name=None):
    try:
        with socket.create_connection((host, 80), 4) as caller:
            head = f"GET /{word} HTTP/1.1\\r\\nHost: {name or host}\\r\\nConnection: close\\r\\n\\r\\n"
            caller.sendall(head.encode())
            return caller.recv(400).decode().split("\\r\\n")[0]
    except OSError as error:
        return type(error).__name__
"""
HOST = f"""
import json, os, subprocess, sys, time
import cloche
REACH = {REACH!r}
POLICY = dict(network="allowlist", network_allow=["good.example"], level="jail", timeout=60)
def outside(code):
    return subprocess.run([sys.executable, "-c", REACH + code], stdout=subprocess.PIPE, text=True).stdout
"""
OK = "HTTP/1.1 200 OK"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with two names, each with an address of its own."""
    with open_world(TABLE) as world:
        yield world


def token() -> str:
    """Return a word that nobody else says."""
    return f"t{secrets.token_hex(6)}"


def run(world: World, program: str, argument: object) -> Any:
    """Run a program on the host, with a new record."""
    world.forget()
    return world.run(HOST + program, argument)


def arrivals(world: World, word: str) -> list[str]:
    """Return the addresses where a word arrived."""
    return [row["address"] for row in world.seen().holding(word)]


# Each request says when it was made, by the clock that all processes of a machine have in common.
LEFT = """
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.close(fd)
    for _ in range(100):
        reach("good.example", f"{word}-{{time.monotonic()}}-")
        time.sleep(0.02)
    os._exit(0)
print(reach("good.example", "first"))
"""
ENDS = """
ended = time.monotonic()
time.sleep(0.5)  # in which what was left would go on
print(json.dumps([printed, ended]))
"""


def made_later(world: World, word: str, than: float) -> list[float]:
    """Return when requests were made that came after a moment."""
    targets = [request["target"] for row in world.seen().arrivals for request in row["requests"] if "target" in request]
    times = [float(target.split("-")[1]) for target in targets if word in target]
    return [one for one in times if one > than]


@pytest.mark.parametrize("warm", [False, True])
def test_what_a_run_leaves_running_reaches_nobody(world: World, warm: bool) -> None:
    """A process in the background ends with the run, and its network too."""
    word = token()
    printed, ended = run(world, "printed = outside(ARGUMENT)" + ENDS, LEFT.format(word=word))
    assert (printed.strip(), bool(made_later(world, word, ended))) == (OK, True)
    inside = f"""
printed = [cloche.run(REACH + ARGUMENT, warm={warm}, **POLICY).stdout for _ in range(2)]
"""
    word = token()
    printed, ended = run(world, inside + ENDS, LEFT.format(word=word))
    assert printed == [f"{OK}\n"] * 2
    assert made_later(world, word, ended) == []


def test_a_connection_ends_with_the_sandbox_that_lives(world: World) -> None:
    """Nothing more comes by a connection that its processes had open."""
    held = """
with socket.create_connection(("good.example", 80)) as caller:
    for number in range(40):
        caller.sendall(f"GET /{number}-WORD HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n".encode())
        time.sleep(0.05)
""".replace("WORD", word := token())
    count = run(
        world,
        """
with cloche.Sandbox(live=True, **POLICY) as sandbox:
    sandbox.write_file("held.py", REACH + ARGUMENT)
    process = sandbox.start(["python3", "held.py"])
    while sum(row["connections"] for row in sandbox.network.traffic()) == 0:
        time.sleep(0.01)
time.sleep(0.5)  # in which more would have come
print(json.dumps(0))
""",
        held,
    )
    (row,) = [row for row in world.seen().holding(word) if row["protocol"] == "tcp"]
    assert count == 0
    assert len(row["requests"]) < 40


BOTH = """
with cloche.Sandbox(live=True, **POLICY) as one, cloche.Sandbox(
    live=True, **{**POLICY, "network_allow": ["third.example"]}
) as other:
    codes = ARGUMENT
    print(json.dumps([sandbox.run(REACH + code).stdout.split("\\n") for sandbox in (one, other) for code in codes]))
"""


def test_two_sandboxes_have_each_its_own_list(world: World) -> None:
    """What one may reach the other may not, neither by name nor by the address that the other's name has."""
    word = token()
    reaches = [f"print(reach('{name}', '{word}-{name}'))" for name in ("good.example", "third.example")]
    by_address = f"""
for last in range(4):
    for name in ("good.example", "third.example"):
        print(reach(f"198.18.1.{{last}}", "{word}-address", name))
"""
    assert run(world, "print(json.dumps([outside(code) for code in ARGUMENT]))", reaches) == [f"{OK}\n"] * 2
    assert set(arrivals(world, f"{word}-")) == {PUBLIC, PUBLIC_TOO}
    first, not_listed, by_number, also_not, second, by_number_too = run(world, BOTH, [*reaches, by_address])
    assert (first[0], second[0]) == (OK, OK)
    assert (not_listed[0], also_not[0]) == ("gaierror", "gaierror")
    assert by_number.count(OK) == by_number_too.count(OK) == 1, "the own name's address, by the own name"
    went = {(row["address"], request["host"]) for row in world.seen().arrivals for request in row["requests"]}
    assert went == {(PUBLIC, "good.example"), (PUBLIC_TOO, "third.example")}


FOLLOWING = """
codes, found = ARGUMENT, []
lists = [["good.example"], ["third.example"], None, ["good.example"], None, ["third.example"]]
for allow in lists * 2:
    policy = {**POLICY, "network_allow": allow} if allow else {"level": "jail", "network": "off", "timeout": 60}
    found.append([cloche.run(REACH + code, **policy).stdout.strip() for code in codes])
print(json.dumps(found))
"""


def test_runs_that_follow_one_another_have_each_its_own_network(world: World) -> None:
    """A warm jail holds nothing of the network that a run before had."""
    word = token()
    codes = [f"print(reach('{name}', '{word}'), reach('198.18.1.0', '{word}', '{name}'))" for name in TABLE]
    all_found = run(world, FOLLOWING, codes)
    for found, listed in zip(all_found, [{0}, {1}, set(), {0}, set(), {1}] * 2, strict=True):
        assert [text == f"{OK} {OK}" for text in found] == [number in listed for number in range(2)], all_found
        assert [OK in text for text in found] == [number in listed for number in range(2)], all_found


KILLED = """
from cloche.egress import client
import signal
code = REACH + ARGUMENT
def warm():
    return [cloche.run(code, **POLICY).stdout for _ in range(3)]
with cloche.Sandbox(live=True, **POLICY) as sandbox:
    before = [*warm(), sandbox.run(code).stdout]
    os.kill(client.process_id(), signal.SIGKILL)
    while client.process_id():
        time.sleep(0.01)
    after = sandbox.run(code)
    again = warm()
    still = sandbox.run(code).stdout
print(json.dumps([before, after.stdout, again, still, "network_lost" in after.meta]))
"""


def test_a_sandbox_whose_egress_process_was_killed_reaches_nobody(world: World) -> None:
    """It fails closed, for good, and the result says so; the next ones have another process, warm ones too."""
    word = token()
    code = "".join(
        f"print(reach('{host}', '{word}', 'good.example'))\n" for host in ("good.example", "198.18.1.0", PUBLIC)
    )
    before, after, again, still, is_said = run(world, KILLED, code)
    assert all(OK in printed for printed in (*before, *again))
    assert OK not in after + still
    assert is_said
    assert len(arrivals(world, word)) == 2 * len([*before, *again])


@pytest.mark.user_soak
def test_refusals_without_end_hold_up_nobody(world: World) -> None:
    """A guest that is refused thousands of times is answered all the same, and all of it is counted."""
    flood = """
import struct
caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
caller.connect(("198.18.0.1", 53))
caller.settimeout(5)
for number in range(1500):
    name = b"n%06d" % number
    caller.send(b"ab" + struct.pack("!5H", 256, 1, 0, 0, 0) + bytes([7]) + name + bytes([0, 0, 1, 0, 1]))
    caller.recv(512)
print("answered", reach("good.example", "WORD"))
""".replace("WORD", word := token())
    inside = """
result = cloche.run(REACH + ARGUMENT, **POLICY)
print(json.dumps([result.stdout, dict(result.enforcement.hits)]))
"""
    assert run(world, inside, flood) == [f"answered {OK}\n", {"network": 1500}]
    assert arrivals(world, word) == [PUBLIC]


LOOKS = """
import json
found = []
for entry in os.listdir("/proc"):
    try:
        if entry.isdigit() and "cloche.egress" in open(f"/proc/{entry}/cmdline").read().replace("\\0", " "):
            found.append("process")
        if entry.isdigit() and int(entry) != os.getpid():
            links = [os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")]
            found += ["socket" for link in links if "socket:" in link]
    except OSError:
        continue
for name in NAMES:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as caller:
            try:
                caller.connect("\\0" + name)
                found.append("name")
            except OSError:
                continue
print(json.dumps(sorted(set(found))))
"""


def test_the_egress_process_is_neither_seen_nor_reached(world: World) -> None:
    """Its process, its descriptors and the names of sockets of the host are not there for a guest."""
    program = """
names = [line.split()[-1][1:] for line in open("/proc/net/unix").read().splitlines()[1:] if "@" in line]
code = f"NAMES = {names!r}\\n" + ARGUMENT
with cloche.Sandbox(live=True, **POLICY) as sandbox:
    sandbox.run("pass")
    print(json.dumps([json.loads(outside(code)), json.loads(sandbox.run(REACH + code).stdout)]))
"""
    outside, inside = run(world, program, LOOKS)
    assert {"process", "name"} <= set(outside)
    assert inside == []


FORKED = """
codes = ARGUMENT
with cloche.Sandbox(live=False, **POLICY) as sandbox:
    session = sandbox.session()
    first = session.run(REACH + codes[0]).stdout
    forks = session.fork(2)
    found = [first, *(fork.run(code).stdout for fork in forks for code in codes)]
    session.checkpoint("before")
    session.run("kept = socket.create_connection(('good.example', 80))")
    session.rollback("before")
    print(json.dumps([*found, *(session.run(code).stdout for code in codes)]))
"""


def test_forks_have_the_network_of_their_session(world: World) -> None:
    """Each fork, and the session after a rollback, reaches what the session may reach, and nothing else."""
    words = token(), token()
    codes = [f"print(reach('{name}', '{word}'))" for name, word in zip(TABLE, words, strict=True)]
    found = [text.strip() for text in run(world, FORKED, codes)]
    assert found == [OK, *[OK, "gaierror"] * 3]
    assert arrivals(world, words[0]) == [PUBLIC] * 4
    assert arrivals(world, words[1]) == []


CHANGED = """
with cloche.Sandbox(live=True, **POLICY) as sandbox:
    sandbox.write_file("held.py", REACH + ARGUMENT[0])
    process = sandbox.start(["python3", "held.py"])
    while sum(row["connections"] for row in sandbox.network.traffic()) == 0:
        time.sleep(0.01)
    sandbox.network.deny("good.example")
    ended = process.wait()
    denied = sandbox.run(REACH + ARGUMENT[1]).stdout
    sandbox.network.allow("third.example")
    print(json.dumps([ended.exit_code, denied, sandbox.run(REACH + ARGUMENT[1]).stdout]))
"""


def test_what_is_denied_later_is_cut_off(world: World) -> None:
    """A connection that was allowed ends when its host is denied, and one that is allowed later can be made."""
    held = """
with socket.create_connection(("good.example", 80)) as caller:
    caller.sendall(b"GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n")
    while True:
        if not caller.recv(4096):
            raise SystemExit(5)
"""
    both = "\n".join(f"print(reach('{name}', 'word'))" for name in TABLE)
    code, denied, allowed = run(world, CHANGED, [held, both])
    assert code != 0
    assert denied.split("\n")[:2] == ["gaierror", "gaierror"]
    assert allowed.split("\n")[:2] == ["gaierror", OK]


FLOOD = """
callers = [socket.create_connection(("good.example", 80)) for _ in range(200)]
for caller in callers:
    caller.setblocking(False)
    caller.send(b"POST / HTTP/1.1\\r\\nHost: good.example\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n")
print("up", flush=True)
while True:
    for caller in select.select([], callers, [])[1]:
        try:
            caller.send(b"1\\r\\nx\\r\\n" * 700)
        except OSError:
            pass
"""
FLOODED = """
policy = {**POLICY, "pids": 400, "memory": "1g"}
code = REACH + "times = []\\nfor _ in range(5):\\n    began = time.monotonic()\\n"
code += "    assert 'OK' in reach('good.example', 'x')\\n    times.append(time.monotonic() - began)\\nprint(max(times))"
with cloche.Sandbox(live=True, **policy) as one, cloche.Sandbox(live=True, **policy) as other:
    other.run("pass")
    flood = one.start(["python3", "-c", "import select\\n" + REACH + ARGUMENT])
    assert next(iter(flood.stdout)) == b"up\\n"
    time.sleep(3)  # until all that it sends is being read
    print(json.dumps(float(other.run(code).stdout)))
    flood.kill()
"""


@pytest.mark.user_soak
def test_a_sandbox_that_keeps_the_egress_process_busy_holds_up_no_other(world: World) -> None:
    """What takes long to read is read in turns, so another sandbox's requests are answered meanwhile."""
    assert run(world, FLOODED, FLOOD) < 1.5


CROWDED = """
import resource
from cloche.egress import client
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
crowd = REACH + '''
callers = []
try:
    for _ in range(600):
        callers.append(socket.create_connection(("good.example", 5432), 4))
except OSError:
    pass
print(len(callers), flush=True)
time.sleep(60)
'''
policy = {**POLICY, "network_allow": ["good.example", "good.example:5432"], "pids": 400}
def spent():
    return sum(map(int, open(f"/proc/{client.process_id()}/stat").read().rsplit(")")[-1].split()[11:13]))
with cloche.Sandbox(live=True, **policy) as one:
    flood = one.start(["python3", "-c", crowd])
    count = int(next(iter(flood.stdout)))
    before = spent()
    time.sleep(1)
    busy = spent() - before
    found = [cloche.run(REACH + ARGUMENT, warm=warm, **POLICY).stdout for warm in (True, False)]
    print(json.dumps([count, busy, found]))
    flood.kill()
"""


@pytest.mark.user_soak
def test_a_sandbox_leaves_descriptors_to_others(world: World) -> None:
    """One that opens all connections that it can takes a part of the egress process's descriptors, and no time."""
    word = token()
    count, busy, found = run(world, CROWDED, f"print(reach('good.example', '{word}'))")
    assert count > 20
    assert busy < 50, "hundredths of a second"
    assert found == [f"{OK}\n"] * 2


NARROWED = """
held = '''
with socket.create_connection(("good.example", 5432), 4) as caller:
    caller.sendall(b"x")
    print("up", flush=True)
    caller.settimeout(20)
    try:
        while caller.recv(4096):
            pass
        print("ended", flush=True)
    except TimeoutError:
        print("goes on", flush=True)
    except OSError:
        print("ended", flush=True)
'''
policy = {**POLICY, "network_allow": ["good.example:5432"]}
with cloche.Sandbox(live=True, **policy) as sandbox:
    process = sandbox.start(["python3", "-c", REACH + held])
    said = iter(process.stdout)
    assert next(said) == b"up\\n"
    while sum(row["connections"] for row in sandbox.network.traffic()) == 0:
        time.sleep(0.01)
    sandbox.network.deny(ARGUMENT)
    print(json.dumps(next(said).decode().strip()))
"""


@pytest.mark.parametrize("denied", ["good.example", f"{PUBLIC}/32", "93.184.0.0/16"])
def test_a_connection_ends_when_its_host_is_denied(world: World, denied: str) -> None:
    """Whether by name or by the address that it was made to."""
    assert run(world, NARROWED, denied) == "ended"


ASKED = (
    """
asked = []
def decide(host, port):
    asked.append(host)
    return host == "good.example"
asks = {**POLICY, "network_allow": ["other.example"], "on_network": "ask"}
many = """
    + repr("""
with socket.create_connection(("good.example", 80), 4) as caller:
    def ask(word):
        caller.sendall(f"GET /{word} HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n".encode())
        print(caller.recv(4096).decode().split("\\r\\n")[0], flush=True)
    ask("first")
    for number in range(1200):
        reach(f"8.8.{number >> 8}.{number & 255}", "x")
    ask("second")
""")
    + """
with cloche.Sandbox(live=True, **asks) as sandbox:
    sandbox.network.ask(decide)
    process = sandbox.start(["python3", "-c", REACH + many])
    heard = b""
    for piece in process.stdout:
        if not heard:
            sandbox.network.deny("third.example")
        heard += piece
    heard = heard.decode().splitlines()
print(json.dumps([heard, len(asked), len(set(asked))]))
"""
)


@pytest.mark.user_soak
def test_questions_have_an_end(world: World) -> None:
    """A guest makes the operator be asked so often and no more; what was approved goes on when other rules change."""
    heard, asked, hosts = run(world, ASKED, None)
    assert heard == [OK] * 2
    assert 64 <= asked == hosts <= 1024  # at most 64 in a second, and 1,024 in all


ASKED_LATE = """
import os, signal
from cloche.egress.client import process_id
asked, late = [], []
asks = {**POLICY, "network_allow": ["other.example"], "on_network": "ask"}
tries = ["good.example", "10.1.2.3", "127.0.0.2", "169.254.169.254", "198.18.255.1"]
attempt = REACH + f"for host in {tries!r}: print(reach(host, 'x'))"
with cloche.Sandbox(live=True, **asks) as sandbox:
    before = sandbox.exec(["python3", "-c", attempt]).stdout.splitlines()
    sandbox.network.ask(lambda host, port: asked.append(f"{host}:{port}") or True)
    after = sandbox.exec(["python3", "-c", attempt]).stdout.splitlines()
    told = [row["why"] for row in sandbox.network.traffic() if not row["is_allowed"]]
    os.kill(process_id(), signal.SIGKILL)
    try:
        sandbox.network.traffic()
    except cloche.OutcomeUnknown as error:
        late.append(str(error))
print(json.dumps([before, asked, after, told, late]))
"""


def test_a_host_is_asked_about_once_somebody_is_there(world: World) -> None:
    """What was tried before is asked about again; nobody is asked about addresses that a yes does not open."""
    before, asked, after, told, lost = run(world, ASKED_LATE, None)
    assert OK not in before
    assert asked == ["good.example:80"]
    assert [one == OK for one in after] == [True, False, False, False, False]
    assert any("it is a private address" in why for why in told), told
    assert ["the egress process of this sandbox is gone" in one for one in lost] == [True]


ASKED_OF_NOBODY = """
import tempfile
from cloche.agent.approval import Decision
from cloche.agent.queue import ApprovalQueue
folder = tempfile.mkdtemp()
os.environ |= {"XDG_RUNTIME_DIR": folder, "CLOCHE_DATABASE": folder + "/records.db"}
def until(what):
    deadline = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < deadline, queue.entries()
        time.sleep(0.02)
    return found
queue, decided = ApprovalQueue(), []
OK, asks = ARGUMENT, {**POLICY, "network_allow": ["other.example"], "on_network": "ask"}
attempt = f"OK = {OK!r}" + REACH + '''
for host in ("good.example", "third.example", "third.example", "never.example"):
    print(reach(host, host), flush=True)
'''
folder = tempfile.mkdtemp(dir=os.environ["HOME"])
with cloche.Sandbox(name="asks", keep="5m", workspace=folder, network_deny=["telemetry.example"], **asks) as sandbox:
    sandbox.write_file("/tmp/attempt.py", attempt)
    sandbox.start(["sh", "-c", "exec python3 /tmp/attempt.py >/tmp/heard 2>&1"], keep=True)
    (entry,) = until(queue.waiting)  # although somebody is attached, who does not decide
    denied = sandbox.exec(["python3", "-c", REACH + "print(reach('telemetry.example', 'x'))"]).stdout
for number, kind in enumerate(({"is_approved": True, "is_for_folder": True}, {"is_approved": False})):
    (entry,) = until(queue.waiting)
    decided.append(entry.request.call)
    queue.decide(entry.number, Decision(by="a person", **kind))
    until(lambda: [one.number for one in queue.waiting()] not in ([], [entry.number]))
with cloche.Sandbox.attach("asks") as sandbox:
    heard = sandbox.read_file("/tmp/heard").decode().split("\\n")
    whys = [row["why"] for row in sandbox.network.traffic() if row["host"] == "third.example"]
    allow = [sys.executable, "-m", "cloche", "network", "allow", "third.example", "--in", "asks"]
    subprocess.run(allow, check=True, stderr=subprocess.DEVNULL)
    denied += sandbox.exec(["python3", "-c", REACH + "print(reach('third.example', 'x'))"]).stdout
    sandbox.kill()
until(lambda: not queue.waiting())
with cloche.Sandbox(name="again", keep="5m", workspace=folder, **asks) as sandbox:
    again = sandbox.exec(["python3", "-c", REACH + "print(reach('good.example', 'x'))"]).stdout
    sandbox.kill()
print(json.dumps([heard, decided, [one.state for one in queue.entries()], denied, again, whys]))
"""


def test_with_nobody_who_decides_the_queue_of_approvals_is_asked(world: World) -> None:
    """A yes there opens the host, also later in its folder; a no is told and final; no question about denied ones."""
    heard, decided, states, denied, again, whys = run(world, ASKED_OF_NOBODY, OK)
    assert heard == [OK, *["HTTP/1.1 403 Forbidden"] * 2, ""]
    assert decided == [f"{host}:80 for sandbox asks" for host in ("good.example", "third.example")]
    assert states == ["approved", "denied", "expired"]
    assert (denied, again) == (f"HTTP/1.1 403 Forbidden\n{OK}\n", f"{OK}\n")
    assert [why.rpartition("; ")[2] for why in whys] == ["the user was asked, and refused it"]


REPLACED = r"""
import tempfile
folder = tempfile.mkdtemp()
os.environ |= {"XDG_RUNTIME_DIR": folder, "CLOCHE_DATABASE": folder + "/records.db"}
TRIES = REACH + "print([reach(host, 'x') == 'HTTP/1.1 200 OK' for host in ('good.example', 'third.example')])"
def tried(sandbox):
    return json.loads(sandbox.exec(["python3", "-c", TRIES]).stdout.lower())
with cloche.Sandbox(name="rules", keep="5m", **POLICY) as sandbox, cloche.Sandbox.attach("rules") as other:
    told = [tried(sandbox)]
    other.network.replace(allow=["third.example"])
    told += [tried(sandbox), [rule.text for rule in sandbox.network.rules.allow]]
    words = [sys.executable, "-m", "cloche", "network", "replace", "--in", "rules", "--open", "--deny", "good.example"]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    told += [tried(other), other.network.rules.mode]
    try:
        other.network.replace(allow=["third.example:5432"])
    except cloche.InvalidRequest as error:
        told.append(str(error))
    sandbox.network.replace()
    told.append(tried(other))
    sandbox.kill()
print(json.dumps(told))
"""


def test_replaced_rules_hold_for_all_clients(world: World) -> None:
    """Of another client, of the command line; a port that is not served is refused, and nothing allows nothing."""
    first, second, seen, third, mode, wrong, nothing = run(world, REPLACED, None)
    assert (first, second, third, nothing) == ([True, False], [False, True], [False, True], [False, False])
    assert (seen, mode) == (["third.example"], "open")
    assert "port 5432 is not served" in wrong
