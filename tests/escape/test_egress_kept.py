"""Attempts of sandboxes with names at one another's network, which one egress process serves for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.escape.test_egress_sandboxes import HOST, OK, arrivals, token
from tests.harness.world import PUBLIC, PUBLIC_TOO, World, open_world

pytestmark = pytest.mark.both_users

TABLE = {
    "good.example": [[PUBLIC]], "third.example": [[PUBLIC_TOO]],
}  # fmt: skip
# The folder of names is the test's own, so that each program finds the sandboxes of the one before, and no others.
KEPT = (
    HOST
    + """
import signal
os.environ["XDG_RUNTIME_DIR"] = ARGUMENT[0]
NAMES, POLICY["keep"] = ("good.example", "third.example"), "1m"
from cloche.egress import client
from cloche.keeper import registry
def stat(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]
def egress_pids():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if stat(pid)[1] == str(os.getpid()):
            with open(f"/proc/{pid}/cmdline") as command:
                found += [int(pid)] if "cloche.egress" in command.read() and is_alive(pid) else []
    return found
def is_alive(pid):
    return stat(pid)[0] not in "ZX"
def until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
"""
)
OPENS = """
_, good, third, flood, timed = ARGUMENT
one = cloche.Sandbox(name="one", pids=400, memory="1g", **POLICY).__enter__()
other = cloche.Sandbox(name="other", **{**POLICY, "network_allow": ["third.example"]}).__enter__()
(pid,) = egress_pids()
found = {"pid": pid}
def both():
    return [[sandbox.run(REACH + code).stdout.strip() for code in (good, third)] for sandbox in (one, other)]
def hosts(sandbox):
    return sorted({row["host"] for row in sandbox.network.traffic() if row["is_allowed"]})
found["own"] = both()
found["traffic"] = [hosts(one), hosts(other)]
one.network.allow("third.example")
found["allowed"] = both()
found["rules"] = [[name in str(sandbox.network.rules) for name in NAMES] for sandbox in (one, other)]
floods = one.start(["python3", "-c", REACH + flood])
assert next(iter(floods.stdout)) == b"up\\n"
found["slowest"] = float(other.run(REACH + timed).stdout)
floods.kill()
print(json.dumps(found), flush=True)
os._exit(0)  # as if it was killed
"""
CUTS = """
_, good, third, pid = ARGUMENT
one, other = (cloche.Sandbox.attach(name).__enter__() for name in ("one", "other"))
def reached(*sandboxes):
    return [sandbox.run(REACH + code).stdout.strip() for sandbox, code in sandboxes]
found = {"outlived": reached((one, good), (other, third))}
os.kill(pid, signal.SIGKILL)
until(lambda: not is_alive(pid))
found["killed"] = reached((one, good), (other, third))
def told(sandbox):
    try:
        return sandbox.network.traffic()
    except cloche.ClocheError as error:
        return type(error).__name__
found["told"] = [told(one), told(other)]
with cloche.Sandbox(name="next", **POLICY) as following:
    found["new"] = reached((following, good), (one, good))
    found["processes"] = len(egress_pids())
    following.kill()
one.kill()
other.kill()
client.end_process()
until(lambda: not egress_pids())
print(json.dumps(found))
"""
# Questions and connections as fast as it can, from many threads.
FLOOD = """
import struct, threading
def asks():
    caller = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    caller.connect(("198.18.0.1", 53))
    while True:
        try:
            caller.send(b"ab" + struct.pack("!5H", 256, 1, 0, 0, 0) + b"\\1x" + bytes([0, 0, 1, 0, 1]))
        except OSError:
            pass
def connects():
    held = []
    while True:
        try:
            held.append(socket.create_connection(("good.example", 80), 4))
        except OSError:
            held.clear()
for work in [asks] * 4 + [connects] * 4:
    threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
time.sleep(1000)
"""
TIMED = """
times = []
for _ in range(10):
    began = time.monotonic()
    assert "OK" in reach("third.example", "x")
    times.append(time.monotonic() - began)
print(max(times))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with two names, each with an address of its own."""
    with open_world(TABLE) as world:
        yield world


def run(world: World, program: str, *argument: object) -> Any:
    """Run a program on the host, with a new record."""
    world.forget()
    return world.run(KEPT + program, list(argument))


def test_sandboxes_with_names_have_each_its_own_network_in_one_process(world: World, tmp_path: Path) -> None:
    """Rules, changes, traffic and floods of one are not the other's; the process outlives its opener and ends last."""
    tmp_path.chmod(0o700)
    word = token()
    good, third = (f"print(reach('{name}', '{word}'))" for name in TABLE)
    found = run(world, OPENS, str(tmp_path), good, third, FLOOD, TIMED)
    pid = found["pid"]  # of the one process
    assert found["own"] == [[OK, "gaierror"], ["gaierror", OK]]
    assert found["traffic"] == [["good.example"], ["third.example"]]
    assert found["allowed"] == [[OK, OK], ["gaierror", OK]]
    assert found["rules"] == [[True, True], [False, True]]
    assert found["slowest"] < 1.5, "a bound of the neighbour's, while one floods"
    assert sorted(arrivals(world, word)) == sorted([PUBLIC, PUBLIC_TOO, PUBLIC, PUBLIC_TOO, PUBLIC_TOO])
    found = run(world, CUTS, str(tmp_path), good, third, pid)
    assert found["outlived"] == [OK, OK]
    assert not any(OK in text for text in found["killed"])
    assert found["told"] == ["OutcomeUnknown"] * 2
    assert (found["new"][0], OK in found["new"][1], found["processes"]) == (OK, False, 1)
