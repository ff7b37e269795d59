"""Claims about the world of network tests: that it sees what arrives, leads nowhere else, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import children, wait_for_end
from tests.harness.world import METADATA, OWN, PUBLIC, RESOLVER, World, open_world

pytestmark = pytest.mark.user_soak


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world."""
    with open_world() as world:
        yield world


LOOKS = """
import os, socket
print(json.dumps([
    os.geteuid(),
    sorted(name for _, name in socket.if_nameindex()),
    int(open("/proc/self/status").read().partition("CapEff:")[2].split()[0], 16),
]))
"""


def test_a_program_on_the_host_has_one_way_out(world: World) -> None:
    """It runs as who called, and sees loopback and the interface that leads to the internet."""
    uid, devices, capabilities = world.run(LOOKS)
    assert (uid, devices) == (os.geteuid(), ["lo", "toinet"])
    assert bool(capabilities) is (uid == 0)
    assert world.run(LOOKS, has_powers=True)[2]


@pytest.mark.root
def test_root_has_programs_run_by_an_ordinary_user(world: World) -> None:
    """That one has no capabilities, and the same way out."""
    uid, devices, capabilities = world.run(LOOKS, user="ordinary")
    assert (uid > 0, devices, capabilities) == (True, ["lo", "toinet"], 0)


SENDS = """
import socket, ssl, urllib.request
answers = [urllib.request.urlopen(f"{scheme}://good.example/said").read().decode() for scheme in ("http", "https")]
for kind, port in ((socket.SOCK_DGRAM, 123), (socket.SOCK_STREAM, 22)):
    with socket.socket(socket.AF_INET, kind) as caller:
        caller.settimeout(10)
        caller.connect((ARGUMENT, port))
        caller.send(b"said")
        answers.append(caller.recv(100).decode())
print(json.dumps(answers))
"""


def test_what_arrives_is_seen(world: World) -> None:
    """By name and by address, below TLS and without, and the questions that went before."""
    world.forget()
    answers = world.run(SENDS, METADATA)
    seen = world.seen()
    assert [answer.split()[:3] for answer in answers[:2]] == [["HELLO", "from", f"{PUBLIC}:{n}"] for n in (80, 443)]
    assert [answer.partition(": ")[0].split()[2] for answer in answers[2:]] == [f"{METADATA}:123", f"{METADATA}:22"]
    assert {(row["address"], row["port"]) for row in seen.holding("said")} >= {
        (PUBLIC, 80), (PUBLIC, 443), (METADATA, 123), (METADATA, 22),
    }  # fmt: skip
    assert {row["server_name"] for row in seen.holding("said")} == {"", "good.example"}
    assert seen.names == {"good.example"}
    assert seen.endpoints == {
        ("udp", RESOLVER, 53), ("tcp", PUBLIC, 80), ("tcp", PUBLIC, 443), ("udp", METADATA, 123), ("tcp", METADATA, 22),
    }  # fmt: skip


def test_names_take_turns(world: World) -> None:
    """The first question gets the first answer, and later ones the last; a new record begins anew."""
    world.name({"turns.example": [[PUBLIC], [METADATA]]})
    asks = "import socket\nprint(json.dumps([socket.gethostbyname('turns.example') for _ in range(3)]))"
    for _ in range(2):
        world.forget()
        assert world.run(asks) == [PUBLIC, METADATA, METADATA]


def test_the_host_has_listeners_of_its_own(world: World) -> None:
    """On its own addresses and on loopback, whose arrivals are seen as the host's."""
    world.forget()
    calls = "import socket\nfor host in ARGUMENT: socket.create_connection((host, 8080)).sendall(b'told')\nprint(0)"
    world.run(calls, [OWN, "127.0.0.1"])
    assert {row["address"] for row in world.seen().holding("told")} == {OWN, "127.0.0.1"}
    assert world.seen().endpoints == set()


def test_nothing_is_left_of_one_that_is_killed() -> None:
    """Its processes and its namespaces are gone with it, a program that runs there too."""
    opened = open_world()
    world = opened.__enter__()
    namespace = Path(f"/proc/{world.pid}/ns/net").stat().st_ino
    below = children(world.pid)
    os.kill(world.pid, signal.SIGKILL)
    wait_for_end([world.pid, *below])
    with pytest.raises((RuntimeError, OSError)):
        world.seen()
    opened.__exit__(None, None, None)
    assert namespace not in namespaces()


def namespaces() -> set[Any]:
    """Return the network namespaces of this user's processes."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            found.add((entry / "ns/net").stat().st_ino if entry.name.isdigit() else 0)
        except OSError:
            continue
    return found
