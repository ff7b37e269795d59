"""The network at level confined: a guest holds no socket of it but what is connected to the egress process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.world import World, open_world

SOURCE = (Path(__file__).parents[1] / "harness/programs/confined_network.py").read_text()
# What root alone may do, or not every kernel has, and what only a stand-in might do; the rest is done by anybody.
NOT_BY_ALL = {"packet", "raw", "vsock", "alg", "mptcp", "io_uring", "path, as TCP", "path, as UDP"}


# Eight threads with two requests each, asyncio, curl and the sandbox's own names; then what is refused.
CLIENTS = r"""
import asyncio, concurrent.futures, os, socket, subprocess, urllib.error, urllib.request
def get(url):
    try:
        return urllib.request.urlopen(url, timeout=60).read().decode().split("\n")[0]
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError as error:
        return str(error)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(sorted(pool.map(get, ["http://good.example/", "https://good.example/"] * 8)))
async def ask():
    reader, writer = await asyncio.open_connection("good.example", 80)
    writer.write(b"GET / HTTP/1.0\r\nHost: good.example\r\n\r\n")
    return (await reader.read()).split(b"\r\n")[-1]
print(asyncio.run(ask()))
print(subprocess.run(["curl", "-sS", "https://good.example/"], capture_output=True, text=True))
print(socket.gethostbyname("localhost"))
for url in ("http://other.example/", "http://169.254.169.254/", "http://10.1.2.3/", "https://93.184.216.35/"):
    print(get(url))
"""
BOTH = """
import cloche
def run(level):
    result = cloche.run(
        ARGUMENT, level=level, network="allowlist", network_allow=["good.example"], timeout=200, memory="1g", cpus=2
    )
    rows = [(row["host"], row["port"], row["is_allowed"], row["why"]) for row in result.meta["network"]]
    return [str(result.status), result.stdout, result.stderr, sorted(rows), result.enforcement["network"].state]
print(json.dumps([run("jail"), run("confined")], default=str))
"""

IN_ONE_THAT_LIVES = """
import cloche
def seen(level):
    with cloche.Sandbox(
        live=True, level=level, network="allowlist", network_allow=["good.example"], timeout=200, memory="1g", cpus=2
    ) as sandbox, sandbox.session() as session:
        done = [sandbox.exec(["python3", "-c", ARGUMENT]), sandbox.run(ARGUMENT), session.run(ARGUMENT)]
        rows = [sorted((row["host"], row["port"], row["is_allowed"], row["why"]) for row in one.meta["network"])
                for one in done]
    return [[(str(one.status), one.stdout, one.stderr) for one in done], rows]
print(json.dumps([seen("jail"), seen("confined")], default=str))
"""

# Many numbers of few files: a registration lasts for as long as the file, whatever becomes of the number.
LARGE = r"""
import ctypes, os, select, socket, struct, time
address = struct.pack("=H", 2) + struct.pack("!H", 80) + socket.inet_aton("198.18.1.0") + bytes(8)
large, small = select.epoll(), select.epoll()
for file in [os.pipe()[0] for _ in range(300)]:
    for number in range(650, 990):
        os.dup2(file, number)
        large.register(number, select.EPOLLIN)
libc = ctypes.CDLL(None, use_errno=True)
def took(one):
    begun = time.perf_counter()
    assert libc.connect(one.fileno(), address, 16) == -1 and ctypes.get_errno() == 106, ctypes.get_errno()
    return time.perf_counter() - begun
print(min(took(large) for _ in range(5)) / min(took(small) for _ in range(5)))
"""
ASKED = """
import cloche
result = cloche.run(ARGUMENT, level="confined", network="allowlist", network_allow=["good.example"], timeout=200)
print(json.dumps(result.stdout or [result.stderr, result.message]))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world, in whose host the attempts are made."""
    with open_world() as world:
        yield world


def told(world: World, call: str, user: str) -> Any:
    """Run one function of the program on the world's host."""
    return world.run(f"{SOURCE}\nprint(json.dumps({call}))", user=user)


@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_clients_and_rows_are_those_of_a_jail(world: World, user: str) -> None:
    """What clients read, what is refused and why, and what the result says of it, are the same at both levels."""
    jail, confined = world.run(BOTH, CLIENTS, user=user)
    assert jail[0] == "ok", jail
    assert confined == jail
    assert jail[1].count("for good.example") == 18, jail


@pytest.mark.parametrize("user", [pytest.param("root", marks=pytest.mark.soak), "ordinary"])
def test_commands_runs_and_sessions_of_one_that_lives_have_it(world: World, user: str) -> None:
    """In a live sandbox at level confined all that runs has the network of one that lives at level jail."""
    jail, confined = world.run(IN_ONE_THAT_LIVES, CLIENTS, user=user)
    assert [row[0] for row in jail[0]] == ["ok"] * 3, jail
    assert confined == jail


@pytest.mark.root
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_no_other_way_out_is_taken(world: World, user: str, is_live: bool) -> None:
    """By no call, address, family or option is another peer reached; without a sandbox each is done."""
    came = told(world, f"attempts(is_live={is_live})", user)
    undone = {name for name, what in came["outside"].items() if what != "done"}
    assert undone <= NOT_BY_ALL, came
    assert came["seen_outside"] >= 15
    assert [name for name, what in came["inside"].items() if what == "done"] == []
    assert came["seen_inside"] == 0


@pytest.mark.root
@pytest.mark.parametrize(
    ("user", "count", "is_live"),
    [
        ("ordinary", 200, False),
        *(
            pytest.param(user, 2000, is_live, marks=pytest.mark.soak)
            for user in ("root", "ordinary")
            for is_live in (False, True)
        ),
    ],
)
def test_an_address_that_changes_reaches_nobody_else(world: World, user: str, count: int, is_live: bool) -> None:
    """What is decided on is what is connected to: with calls that go on, a victim is reached, here never."""
    came = told(world, f"race({count}, is_live={is_live})", user)
    assert came["gone_on"] > 0, came
    assert came["connected"] > 0, came
    assert came["inside"] == 0, came


def test_what_a_guest_has_made_large_is_not_read(world: World) -> None:
    """Who connects something else than a socket is refused at once, however much the kernel had to say of it."""
    assert float(world.run(ASKED, LARGE, user="ordinary")) < 100
