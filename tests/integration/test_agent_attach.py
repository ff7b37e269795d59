"""An agent's life on the command line: started, detached, looked at, attached, killed with its keeper, resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloche.coding_agents import archives
from cloche.coding_agents.places import AgentPlace
from cloche.coding_agents.watch import is_watched, read_watched
from cloche.keeper import registry
from cloche.keeper.attach import visit
from tests.harness.terminals import Terminal

pytestmark = [pytest.mark.both_users, pytest.mark.usefixtures("settings_of_nobody_at_a_terminal")]
PATIENCE_S = 60
AGENT = """#!/usr/bin/env python3
import sys
print("started with", sys.argv[1:])
for line in sys.stdin:
    if line.startswith("write "):
        open("work", "a").write(line[6:])
    elif line == "quit\\n":
        sys.exit(3)
    print("read", open("work").read().split())
"""
CONFIG = """
agents:
  talker:
    program: talker
    to_resume: [--continue]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentPlace:
    """Give a home of this test's own with an agent, and a project in which it starts."""
    for name in ("home/.config/cloche", "bin", "run", "project/.git"):
        (tmp_path / name).mkdir(parents=True, mode=0o700)
    (tmp_path / "home/.config/cloche/config.yaml").write_text(CONFIG)
    (tmp_path / "bin/talker").write_text(AGENT)
    (tmp_path / "bin/talker").chmod(0o755)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "CLOCHE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "project")
    return AgentPlace(agent="talker", folder=str(tmp_path / "project"))


def until(what: object) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


def cloche(*words: str) -> str:
    """Run a subcommand of `cloche agent`."""
    words = (sys.executable, "-m", "cloche", "agent", *words)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.soak
def test_an_agent_outlives_its_terminal_and_a_reboot(place: AgentPlace) -> None:
    """It is detached, described and attached; after SIGKILL for everything it goes on with its work and its talk."""
    first = Terminal("talker", verb="agent")
    first.see("started with []")
    first.type("write one\r")
    first.see("read ['one']")
    status = json.loads(cloche("status", "talker", "--json"))
    assert {name: status[name] for name in ("state", "is_attached", "files", "dangers")} == {
        "state": "working", "is_attached": True, "files": 1, "dangers": 0,
    }  # fmt: skip
    assert cloche("detach") == f"{place.sandbox}\n"
    first.see("from another terminal")
    assert first.leave() == 0

    second = Terminal("attach", verb="agent")
    second.type("write two\r")
    second.see("read ['one', 'two']")
    watched = read_watched(place)
    assert watched is not None
    os.kill(watched.pid, signal.SIGTERM)  # which saves, as a minute of rest would
    until(lambda: not is_watched(place))
    assert archives.pending_archive(place) is not None
    assert "its watcher has ended" in cloche("status")

    keeper = int(visit(registry.find(place.sandbox), "info")["pid"])
    for pid in (second.pid, keeper):
        os.kill(pid, signal.SIGKILL)
    second.leave()
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"])
    os.mkdir(os.environ["XDG_RUNTIME_DIR"], 0o700)

    third = Terminal("talker", verb="agent")
    told = third.see("started with ['--continue']")
    assert re.search(r"going on from 1 changed path, saved less than a minute ago", told)
    third.type("x\r")
    third.see("read ['one', 'two']")
    third.type("quit\r")
    third.see("talker has ended after")
    third.see("discard, [?]")
    third.type("k\r")
    assert third.leave() == 3

    third = Terminal("talker", verb="agent")
    third.see("started with []")  # it had ended by itself
    assert "1 changed path is saved" in cloche("stop", "talker")
    third.see("from another terminal")
    third.leave()
    assert "no agent is open" in cloche("status")
    assert archives.pending_archive(place) is not None
    until(lambda: not is_watched(place))
