"""What `cloche agent doctor` tries: each attempt works where nothing is enforced, and is refused in an agent's sandbox.

All of it runs on a host of the world (tests/harness/world.py): every address has a server there, and no packet leaves.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.coding_agents import boundaries
from cloche.core.errors import StartFailed
from cloche.execution.sandbox import AsyncSandbox
from tests.harness.world import World, open_world

pytestmark = pytest.mark.both_users

KEY = "sk-ant-api03-0123456789abcdef0123456789abcdef"
HEAD = """
import asyncio, os, subprocess, sys
from pathlib import Path
from cloche.coding_agents import boundaries
from cloche.core.errors import StartFailed
from cloche.execution.sandbox import AsyncSandbox
from cloche.core.policy import Policy
from cloche.execution.sandbox import AsyncSandbox

home = Path.home()
os.environ["ANTHROPIC_API_KEY"] = ARGUMENT
for name in ("project/.git", ".ssh", "bin", ".claude/skills"):
    (home / name).mkdir(parents=True, exist_ok=True)
for name in (".ssh/id_ed25519", "notes", ".claude/CLAUDE.md", "project/.env"):
    (home / name).write_text("of the user")
(home / "bin/claude").write_text("#!/bin/sh\\n")
(home / "bin/claude").chmod(0o755)
os.environ["PATH"] = f"{home}/bin:{os.environ['PATH']}"
os.chdir(home / "project")
"""
DOCTOR = (
    HEAD
    + """
words = [sys.executable, "-m", "cloche", "agent", "doctor", "claude", "--json"]
done = subprocess.run(words, capture_output=True, text=True)
left = [str(path) for path in (home / ".local/state").rglob("doctor-*")]
print(json.dumps({"code": done.returncode, "said": done.stdout, "complained": done.stderr, "left": left}))
"""
)
# A place with a namespace of processes, which is what tells a socket of the host's, and with no other boundary.
NOTHING_ENFORCED = (
    HEAD
    + """
class Place:
    policy = Policy(network="allowlist")

    async def exec(self, command, *, stdin, cwd, timeout):
        words = ["unshare", "--pid", "--fork", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
        env = {**os.environ, "HELD": ARGUMENT}
        process = await asyncio.create_subprocess_exec(
            *words, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=cwd
        )
        stdout, _ = await process.communicate(stdin.encode())
        return type("Done", (), {"stdout": stdout.decode(), "stderr": "", "status": "ok"})

boundaries._FOLDERS = (str(home),)
tried = asyncio.run(boundaries.try_boundaries(
    Place(), home=str(home), values={"ANTHROPIC_API_KEY": ARGUMENT}, outside=True, asks_egress=True
))
print(json.dumps({row.name: [row.state, row.how] for row in tried.rows}))
"""
)
# Where the egress process allows whatever is public, on the ports that the attempts would take.
QUICK = """
import asyncio
from cloche.coding_agents import boundaries
from cloche.execution.sandbox import AsyncSandbox

async def main():
    async with AsyncSandbox(live=True, network="open", network_ports=[9, 10]) as sandbox:
        tried = await boundaries.require_boundaries(sandbox, home="/mnt/home")
        return {"failed": [row.name for row in tried.failed], "traffic": list(await sandbox.network.traffic())}

print(json.dumps(asyncio.run(main())))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world."""
    with open_world() as world:
        yield world


@pytest.fixture(scope="module")
def examined(world: World) -> dict[str, Any]:
    """Run the command on its host."""
    world.forget()
    done: dict[str, Any] = world.run(DOCTOR, KEY)
    return {**done, "seen": world.seen()}


def test_every_attempt_works_where_nothing_is_enforced(world: World) -> None:
    """An attempt that could not succeed would show nothing: each kind does, in a place without boundaries."""
    rows = world.run(NOTHING_ENFORCED, KEY)
    kinds = (
        boundaries.SOCKETS, boundaries.ABSTRACT, boundaries.LOOPBACK, boundaries.METADATA, boundaries.DNS,
        boundaries.PRIVATE, boundaries.DIRECT, boundaries.CREDENTIALS, boundaries.HOME, boundaries.FILES,
        boundaries.WRITING, boundaries.PROCESSES, boundaries.KEY,
    )  # fmt: skip
    assert {name: rows[name] for name in kinds if rows[name][0] != "reached"} == {}


def test_every_boundary_of_an_agents_sandbox_holds_and_no_packet_leaves(examined: dict[str, Any]) -> None:
    """All rows are refused, by attempts of which those outside worked; nothing arrives anywhere, nothing is left."""
    found = json.loads(examined["said"])
    rows = {row["name"]: row for row in found["boundaries"]}
    assert set(rows) == set(boundaries.ROWS)
    assert {name: row["how"] for name, row in rows.items() if row["state"] != "refused"} == {}
    for name in (boundaries.SOCKETS, boundaries.ABSTRACT, boundaries.LOOPBACK, boundaries.HOME, boundaries.PROCESSES):
        assert rows[name]["outside"][0] > 0, rows[name]
    seen = examined["seen"]
    assert (seen.questions, seen.packets) == ([], [])
    assert [row["protocol"] for row in seen.arrivals] == ["unix"]  # at the host's own listener, from outside
    assert "403" in rows[boundaries.METADATA]["how"]
    assert examined["left"] == []


def test_what_is_said_of_an_agent_names_secrets_and_folders_but_no_value(examined: dict[str, Any]) -> None:
    """The key is named with its hosts; the project's hidden files, the shown folder and the copy are named."""
    found = json.loads(examined["said"])
    assert KEY not in examined["said"]
    assert found["reach"]["secrets"] == {"ANTHROPIC_API_KEY": ["api.anthropic.com"]}
    assert found["view"]["project"].endswith("/project")
    assert ".env" in found["view"]["hidden"]
    assert found["view"]["shown"] == ["~/.claude/skills"]
    assert found["view"]["copied"] == ["~/.claude/CLAUDE.md"]
    missing = [one["name"] for one in found["requirements"] if one["is_needed"] and not one["is_met"]]
    assert (examined["code"], found["sound"]) == ((0, True) if not missing else (1, False)), missing


def test_attempts_at_a_start_do_not_depend_on_the_egress_process(world: World) -> None:
    """One that allowed everything would not learn of them: the sandbox's own kernel answers, and no packet leaves."""
    world.forget()
    assert world.run(QUICK) == {"failed": [], "traffic": []}
    seen = world.seen()
    assert (seen.arrivals, seen.questions, seen.packets) == ([], [], [])


OWN_SOCKETS = """
import os, socket, sys, time
stream, datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
stream.bind(sys.argv[1])
stream.listen()
datagram.bind(sys.argv[2])
print("ready", flush=True)
time.sleep(600)
"""


def test_a_start_takes_no_socket_of_the_sandbox_for_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest that listens where the host does is no finding, while a key in its environment stops the start."""
    paths = [str(tmp_path / "stream"), str(tmp_path / "datagram")]

    async def main() -> tuple[boundaries.Boundaries, str]:
        async with AsyncSandbox(env={"LEAKED": KEY}, live=True, network="off") as sandbox:
            process = await sandbox.start(["python3", "-c", OWN_SOCKETS, *paths])
            await process.stdout.read()
            tried = await boundaries.require_boundaries(sandbox, home=str(tmp_path))
            with pytest.raises(StartFailed) as raised:
                await boundaries.require_boundaries(sandbox, home=str(tmp_path), values={"THE_KEY": KEY})
        return tried, str(raised.value)

    with socket.socket(socket.AF_UNIX) as stream, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        stream.bind(paths[0])
        stream.listen()
        datagram.bind(paths[1])
        monkeypatch.setenv("NVIM", paths[0])
        monkeypatch.setenv("TMUX", f"{paths[1]},1,0")
        tried, told = asyncio.run(main())
    assert tried.failed == ()
    assert "the keys: THE_KEY" in told
    assert KEY not in told
